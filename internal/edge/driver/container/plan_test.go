package container

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"dsec/internal/linux"
	"dsec/sandbox"
)

func TestPlanEncode(t *testing.T) {
	p := plan{
		failStep: 3, aetherTasks: 2, userTasks: 3, capabilities: 0x1122334455667788, nofile: 1024, shmBytes: 1 << 30, etc: 5,
		hostname: "box", masks: []mask{{'f', "proc/kcore"}, {'r', "proc/sys"}}, filter: bytes.Repeat([]byte{9}, 16),
	}
	b, err := p.encode()
	if err != nil {
		t.Fatal(err)
	}
	e := binary.NativeEndian
	text := "box\x00fproc/kcore\x00rproc/sys\x00\x00"
	padded := (len(text) + 7) / 8 * 8
	for off, want := range map[int]uint32{0: planMagic, 4: 3, 8: 2, 12: 3, 40: 5, 44: uint32(padded), 48: 2, 52: uint32(len(b))} {
		if got := e.Uint32(b[off:]); got != want {
			t.Errorf("field at %d is %d, want %d", off, got, want)
		}
	}
	if got := e.Uint64(b[16:]); got != p.capabilities {
		t.Errorf("capabilities %#x", got)
	}
	if got := string(b[planHeader : planHeader+len(text)]); got != text {
		t.Errorf("text %q, want %q", got, text)
	}
	if len(b) != planHeader+padded+16 {
		t.Errorf("%d bytes", len(b))
	}
}

func TestPlanThatStageCannotTake(t *testing.T) {
	for name, p := range map[string]plan{
		"long filter":    {filter: make([]byte, maxPlan)},
		"many groups":    {aetherTasks: maxTasks + 1},
		"many groups 2":  {userTasks: maxTasks + 1},
		"NUL in name":    {hostname: "a\x00b"},
		"very long name": {hostname: strings.Repeat("x", maxPlan)},
	} {
		if _, err := p.encode(); err == nil {
			t.Errorf("%s: encoded", name)
		}
	}
}

func rawReport(kind, value, errno int32) []byte {
	e := binary.NativeEndian
	b := e.AppendUint32(nil, uint32(kind))
	b = e.AppendUint32(b, uint32(value))
	return e.AppendUint32(b, uint32(errno))
}

func TestReports(t *testing.T) {
	for name, b := range map[string][]byte{
		"short": rawReport(1, 2, 3)[:11], "long": append(rawReport(1, 2, 3), 0), "empty": nil,
		"kind 0": rawReport(0, 1, 0), "kind 9": rawReport(9, 1, 0), "pid 0": rawReport(reportPid, 0, 0), "pid -1": rawReport(reportPid, -1, 0),
	} {
		if r, err := parseReport(b); err == nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
	r, err := parseReport(rawReport(reportFailure, 10, 20)) // dev, ENOTDIR
	if err != nil {
		t.Fatal(err)
	}
	err = r.failure()
	var step *StepError
	if !errors.As(err, &step) || step.Step != "dev" || !errors.Is(err, linux.Errno(20)) {
		t.Errorf("failure %v", err)
	}
	if sandbox.ReasonOf(err) != "image_unusable" || sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("failure %v", err)
	}
	r.value = 99
	if err := r.failure(); sandbox.ClassOf(err) != sandbox.Internal || sandbox.AsError(err).Facts["step"] != "unknown" {
		t.Errorf("failure of an unknown step: %v", err)
	}
}

func FuzzReport(f *testing.F) {
	f.Add(rawReport(1, 2, 0))
	f.Add(rawReport(2, 5, 22))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseReport(b)
		if err != nil {
			return
		}
		if r.kind == reportPid && r.value <= 0 {
			t.Errorf("pid %d accepted", r.value)
		}
		_ = r.failure().Error()
	})
}

func TestV1Order(t *testing.T) {
	got := v1Order(map[string]string{"pids": "p", "freezer": "f", "cpu": "c", "blkio": "b", "memory": "m"})
	if want := "memory cpu pids blkio freezer"; strings.Join(got, " ") != want {
		t.Errorf("%v, want %s", got, want)
	}
}
