//go:build rootful

package container

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"unsafe"

	"dsec/internal/linux"
)

// A group that cannot be marked is killed all the same: what runs in it is worse than what a mark is for.
func TestRootKillsWhatItCannotMark(t *testing.T) {
	b := newBench(t)
	group := filepath.Join(b.tree.Root(), "unmarked")
	must(t, os.Mkdir(group, 0o755))
	cmd := exec.Command("sleep", "100")
	must(t, cmd.Start())
	must(t, linux.WriteControl(filepath.Join(group, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid)))
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and ends with it
		dropSysAdmin()
		done <- killGroup(t.Context(), group)
	}()
	if err := <-done; !errors.Is(err, syscall.EPERM) {
		t.Errorf("that it could not be marked is not told: %v", err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the process in it: %v", err)
	}
	must(t, os.Remove(group))
}

// dropSysAdmin takes from this thread the right to write trusted attributes.
func dropSysAdmin() {
	const version3, capSysAdmin = 0x20080522, 21
	header := struct {
		version uint32
		pid     int32
	}{version3, 0}
	var data [2]struct{ effective, permitted, inheritable uint32 }
	syscall.Syscall(syscall.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0)
	data[0].effective &^= 1 << capSysAdmin
	syscall.Syscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0)
}
