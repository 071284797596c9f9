package container

import (
	"encoding/binary"
	"fmt"
	"strings"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// stepNames are stage's steps in order; a failure is reported by number, from 1 on. A test compares with `stage steps`.
var stepNames = [...]string{
	"plan", "cgroup", "network_namespace", "mount_namespace", "user_namespace", "clone", "identity", "root", "etc",
	"dev", "sys", "proc", "pts", "mqueue", "shm", "mask", "pivot", "hostname", "limits", "session", "descriptors",
	"seccomp", "capabilities", "recorded", "exec",
}

func stepName(n int32) string {
	if n < 1 || int(n) > len(stepNames) {
		return "unknown"
	}
	return stepNames[n-1]
}

// A mask is one path below /proc and what is done to it: 'f' an empty file over it, 'd' an empty directory, 'r' read-only.
type mask struct {
	kind byte
	path string // without the leading slash
}

// A plan is what stage does for one sandbox, as far as it is not descriptors. See struct plan in stage.c.
type plan struct {
	failStep     uint32
	aetherTasks  int
	userTasks    int
	capabilities uint64
	nofile       uint64
	shmBytes     uint64
	etc          uint32
	cgroupNS     bool
	hostname     string
	masks        []mask
	filter       []byte
}

const (
	planMagic  = 0x31534432
	planHeader = 64
	maxPlan    = 64 << 10
	maxTasks   = 16
	sockFilter = 8 // bytes of one instruction
)

// encode lays the plan out as stage reads it: fixed fields, text padded to 8, filter.
func (p plan) encode() ([]byte, error) {
	text := []byte(p.hostname + "\x00")
	for _, m := range p.masks {
		text = append(text, m.kind)
		text = append(text, m.path...)
		text = append(text, 0)
	}
	text = append(text, 0) // the empty string that ends
	for len(text)%8 != 0 {
		text = append(text, 0)
	}
	total := planHeader + len(text) + len(p.filter)
	switch {
	case total > maxPlan:
		return nil, fmt.Errorf("plan of %d bytes, at most %d", total, maxPlan)
	case p.aetherTasks > maxTasks || p.userTasks > maxTasks:
		return nil, fmt.Errorf("plan with %d and %d control groups, at most %d", p.aetherTasks, p.userTasks, maxTasks)
	case strings.ContainsRune(p.hostname, 0):
		return nil, fmt.Errorf("host name holds a NUL byte")
	}
	var cgroupNS uint32
	if p.cgroupNS {
		cgroupNS = 1
	}
	e := binary.NativeEndian
	b := make([]byte, 0, total)
	for _, v := range []uint32{planMagic, p.failStep, uint32(p.aetherTasks), uint32(p.userTasks)} {
		b = e.AppendUint32(b, v)
	}
	for _, v := range []uint64{p.capabilities, p.nofile, p.shmBytes} {
		b = e.AppendUint64(b, v)
	}
	for _, v := range []uint32{p.etc, uint32(len(text)), uint32(len(p.filter) / sockFilter), uint32(total), cgroupNS, 0} {
		b = e.AppendUint32(b, v)
	}
	return append(append(b, text...), p.filter...), nil
}

// Kinds of stage's reports.
const (
	reportPid     = 1
	reportFailure = 2
	reportReady   = 3

	reportSize = 12
)

// A report is one message of stage.
type report struct {
	kind, value int32
	errno       linux.Errno
}

func parseReport(b []byte) (report, error) {
	if len(b) != reportSize {
		return report{}, fmt.Errorf("report of stage has %d bytes, want %d", len(b), reportSize)
	}
	e := binary.NativeEndian
	r := report{kind: int32(e.Uint32(b)), value: int32(e.Uint32(b[4:])), errno: linux.Errno(e.Uint32(b[8:]))}
	if r.kind < reportPid || r.kind > reportReady || r.kind == reportPid && r.value <= 0 {
		return report{}, fmt.Errorf("report of stage makes no sense: kind %d, value %d", r.kind, r.value)
	}
	return r, nil
}

// A StepError says which of stage's steps failed, and how. Unwrap gives the kernel's error.
type StepError struct {
	Step string
	Err  error
}

func (e *StepError) Error() string { return "stage: " + e.Step + ": " + e.Err.Error() }
func (e *StepError) Unwrap() error { return e.Err }

// imageFaults are steps that fail because of what is in the image: it has something else where a directory must be.
var imageFaults = map[string]string{"dev": "/dev", "sys": "/sys", "proc": "/proc"}

// failure makes an error of a report.
func (r report) failure() error {
	step := &StepError{Step: stepName(r.value), Err: r.errno}
	place, fromImage := imageFaults[step.Step]
	if fromImage && linux.IsNotDirectory(r.errno) {
		return sandbox.Errorf(sandbox.InvalidArgument, "image_unusable",
			"the environment has no directory at %s (it is a file, a link or deleted by a layer); make it a plain directory in the image", place).
			WithFact("path", place).WithCause(step)
	}
	return sandbox.Errorf(sandbox.Internal, "start_failed",
		"the sandbox could not be started: the node's step %q failed; the node's log has the details", step.Step).
		WithFact("step", step.Step).WithCause(step)
}
