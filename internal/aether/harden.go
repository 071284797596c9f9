package aether

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	gcPercent   = 100
	memoryLimit = 12 << 20 // bytes; soft: the runtime collects harder near it
	maxSignal   = 64
)

// Harden makes this process an init that hostile root beside it can neither trace, read nor mislead. It must run before
// anything else, in a process without cgo.
//
//   - Not dumpable: its /proc entries belong to the host's root.
//   - CAP_SYS_RESOURCE and a group are kept from commands by the spawner (Options.Guarded): who lacks a capability of a
//     process may not trace it, and who lacks one of its ids may not set its limits.
//   - All signals get their default action, which the kernel ignores for an init unless the sender is outside. Handlers of
//     the Go runtime would take a SIGSEGV sent by sigqueue for a fault of ours.
func Harden() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("set not dumpable: %w", err)
	}
	if os.Getpid() == 1 {
		if err := defaultSignals(); err != nil {
			return err
		}
	}
	unix.Umask(0o022)
	return nil
}

// Tune keeps the heap small: a sandbox is one of thousands.
func Tune() {
	runtime.GOMAXPROCS(restProcs)
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
}

// kernelSigaction is struct sigaction of the kernel, not of libc.
type kernelSigaction struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

// defaultSignals leaves only SIGURG to the Go runtime, which preempts with it; one that is forged preempts in vain.
func defaultSignals() error {
	for s := 1; s <= maxSignal; s++ {
		switch unix.Signal(s) {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGURG:
			continue
		}
		var act kernelSigaction
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(&act)), 0, unsafe.Sizeof(act.mask), 0, 0)
		if errno != 0 && !errors.Is(errno, unix.EINVAL) {
			return fmt.Errorf("reset signal %d: %w", s, errno)
		}
	}
	return nil
}

// guardGID is a group that no command has together with root's. Keep in step with stage.c.
const guardGID = 65534

// guard makes the calling thread one whose children cannot get what protects this process. To change all threads would
// cost a tenth of aether's start, and only this one forks.
//
// The launcher gave all threads guardGID as their real group: who has all ids of a process may set its limits (prlimit). A
// command must not inherit that, so that here it becomes the saved group, which an exec replaces.
func guard() error {
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil {
		return fmt.Errorf("drop CAP_SYS_RESOURCE from the bounding set: %w", err)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, 0, 0, guardGID); errno != 0 { // package unix would change all threads
		return fmt.Errorf("set the saved group: %w", errno)
	}
	return nil
}
