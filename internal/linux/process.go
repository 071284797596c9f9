package linux

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An Exit says how a process ended. Code is -1 if it was killed, or if the kernel no longer tells.
type Exit struct {
	Code   int
	Signal int
}

// A Spawn is a program to start with exactly the given descriptors: Files[i] becomes i.
type Spawn struct {
	Path   string
	Args   []string
	Files  []int
	Cgroup int // descriptor of a v2 directory to be born in, or -1
}

// Start starts it with an empty environment, and returns its process id. The caller reaps it.
func (s Spawn) Start() (int, error) {
	pid, err := theSpawner.forkExec(s.Path, s.Args, s.Files, s.Cgroup)
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", s.Path, err)
	}
	return pid, nil
}

// Reap waits for a child and forgets it.
func Reap(pid int) (Exit, error) {
	var ws unix.WaitStatus
	if err := retryEINTR(func() error { _, err := unix.Wait4(pid, &ws, 0, nil); return err }); err != nil {
		return Exit{Code: -1}, fmt.Errorf("wait for process %d: %w", pid, err)
	}
	return exitOf(ws), nil
}

func exitOf(ws unix.WaitStatus) Exit {
	if ws.Signaled() {
		return Exit{Code: -1, Signal: int(ws.Signal())}
	}
	return Exit{Code: ws.ExitStatus()}
}

// Kill sends SIGKILL to a child that has not been reaped. One that is gone is no error.
func Kill(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return nil
}

// A Process is a stable reference to a process, own child or not: its number cannot come to mean another one. Waiting
// takes no thread. It holds one descriptor.
type Process struct {
	Pid    int
	file   *os.File
	closed atomic.Bool
}

// OpenProcess refers to the process with this number. The caller makes sure that it is the one it means, by StartTime read
// after this, or by being its parent. os.ErrNotExist if there is none.
func OpenProcess(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil, fmt.Errorf("process %d: %w", pid, os.ErrNotExist)
	case err != nil:
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	return &Process{Pid: pid, file: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// Close ends all waiting. The process lives on.
func (p *Process) Close() error {
	p.closed.Store(true)
	return p.file.Close()
}

// Wait blocks until the process has ended. A child is reaped; the status of another one that its parent has reaped in the
// meantime is known only where the kernel keeps it (PIDFD_INFO_EXIT, Linux 6.15), else Code is -1. It fails with os.ErrClosed after Close.
func (p *Process) Wait() (Exit, error) {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return Exit{Code: -1}, fmt.Errorf("wait for process %d: %w", p.Pid, err)
	}
	exit := Exit{Code: -1}
	var failure error
	err = raw.Read(func(fd uintptr) bool {
		var done bool
		exit, done, failure = tryWait(int(fd), p.Pid)
		return done || failure != nil
	})
	if err != nil && p.closed.Load() { // a raw connection does not say so itself
		err = os.ErrClosed
	}
	if err = errors.Join(err, failure); err != nil {
		return Exit{Code: -1}, fmt.Errorf("wait for process %d: %w", p.Pid, err)
	}
	return exit, nil
}

// siginfoChild is struct siginfo as waitid fills it.
type siginfoChild struct {
	signo, errno, code int32
	_                  int32
	pid                int32
	uid                uint32
	status             int32
	_                  [100]byte
}

func tryWait(fd, pid int) (Exit, bool, error) {
	var info siginfoChild
	err := retryEINTR(func() error {
		return unix.Waitid(unix.P_PIDFD, fd, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOHANG|unix.WALL, nil)
	})
	switch {
	case errors.Is(err, unix.ECHILD):
		return tryWaitStranger(fd, pid)
	case errors.Is(err, unix.EAGAIN): // PIDFD_NONBLOCK, still running
		return Exit{}, false, nil
	case err != nil:
		return Exit{}, false, err
	case info.pid == 0: // still running
		return Exit{}, false, nil
	}
	const exited = 1 // CLD_EXITED
	if info.code == exited {
		return Exit{Code: int(info.status)}, true, nil
	}
	return Exit{Code: -1, Signal: int(info.status)}, true, nil
}

// tryWaitStranger asks about a process that is not our child. Until its parent has reaped it, /proc tells; from then on
// PIDFD_GET_INFO does, where there is one.
func tryWaitStranger(fd, pid int) (Exit, bool, error) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return Exit{}, false, err
	}
	if n <= 0 {
		return Exit{}, false, nil
	}
	if exit, ok := zombieExit(fd, pid); ok {
		return exit, true, nil
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if unix.IoctlPidfdInfo(fd, &info) == nil && info.Mask&unix.PIDFD_INFO_EXIT != 0 {
		return exitOf(unix.WaitStatus(info.Exit_code)), true, nil
	}
	return Exit{Code: -1}, true, nil
}

// zombieExit reads the status of a process that has ended and not been reaped. The number is its own if the process can
// still be sent a signal afterwards.
func zombieExit(fd, pid int) (Exit, bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil || unix.PidfdSendSignal(fd, 0, nil, 0) != nil {
		return Exit{}, false
	}
	fields, err := statFields(data)
	if err != nil || len(fields) < statExit+1 || string(fields[statState]) != "Z" {
		return Exit{}, false
	}
	status, err := strconv.ParseUint(string(fields[statExit]), 10, 16)
	if err != nil {
		return Exit{}, false
	}
	return exitOf(unix.WaitStatus(status)), true
}

// StartTime is when a process started, in clock ticks since boot: together with its number it names one process for ever.
// os.ErrNotExist if there is none.
func StartTime(pid int) (uint64, error) {
	data, err := readStat(pid)
	if err != nil {
		return 0, err
	}
	stat, err := ParseProcessStat(data)
	return stat.Start, err
}

// IsHeld reports whether a process that started so long ago, to some 10 ms, is stopped, traced or in a sleep that a signal
// ends: not whether it waits for a CPU, a disk or a lock of the kernel. os.ErrNotExist if there is none.
func IsHeld(pid int, age time.Duration) (bool, error) {
	data, err := readStat(pid)
	if err != nil {
		return false, err
	}
	return isHeld(data, age)
}

func isHeld(data []byte, age time.Duration) (bool, error) {
	stat, err := ParseProcessStat(data)
	if err != nil || stat.State != 'S' && stat.State != 'T' && stat.State != 't' {
		return false, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return false, fmt.Errorf("read clock: %w", err)
	}
	return time.Duration(now.Nano())-time.Duration(stat.Start)*(time.Second/ticksPerSecond) >= age, nil
}

func readStat(pid int) ([]byte, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, unix.ESRCH) {
		err = os.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("read state of process %d: %w", pid, err)
	}
	return data, nil
}

// ticksPerSecond is the kernel's USER_HZ, the same on every machine.
const ticksPerSecond = 100

// A ProcessStat is what /proc/<pid>/stat says of a process.
type ProcessStat struct {
	Name   string
	State  byte
	Parent int
	Kernel bool   // it is a thread of the kernel
	Start  uint64 // clock ticks since boot
}

// Fields of /proc/<pid>/stat, counted behind the name.
const (
	statState  = 3 - 3
	statParent = 4 - 3
	statFlags  = 9 - 3
	statStart  = 22 - 3
	statExit   = 52 - 3

	flagKernelThread = 0x00200000
)

// ParseProcessStat parses /proc/<pid>/stat. The name is in brackets and may hold anything, so the last bracket counts.
func ParseProcessStat(stat []byte) (ProcessStat, error) {
	fields, err := statFields(stat)
	if err != nil {
		return ProcessStat{}, err
	}
	if len(fields) <= statStart {
		return ProcessStat{}, errors.New("process stat is too short")
	}
	parent, err1 := strconv.ParseInt(string(fields[statParent]), 10, 32)
	flags, err2 := strconv.ParseUint(string(fields[statFlags]), 10, 64)
	start, err3 := strconv.ParseUint(string(fields[statStart]), 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return ProcessStat{}, fmt.Errorf("process stat: %w", err)
	}
	name := stat[bytes.IndexByte(stat, '(')+1 : bytes.LastIndexByte(stat, ')')]
	return ProcessStat{
		Name: string(name), State: fields[statState][0], Parent: int(parent), Kernel: flags&flagKernelThread != 0, Start: start,
	}, nil
}

// statFields splits what is behind the program's name.
func statFields(stat []byte) ([][]byte, error) {
	begin, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if begin < 0 || end < begin {
		return nil, errors.New("process stat without a name")
	}
	return bytes.Fields(stat[end+1:]), nil
}

// HardNofile is the most descriptors that this process may allow another one.
func HardNofile() (uint64, error) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 0, fmt.Errorf("read limit of open files: %w", err)
	}
	return r.Max, nil
}

// Kill sends SIGKILL. One that is gone is no error.
func (p *Process) Kill() error {
	conn, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = conn.Control(func(fd uintptr) { failed = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	if errors.Is(failed, unix.ESRCH) {
		failed = nil
	}
	return errors.Join(err, failed)
}
