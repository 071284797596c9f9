package aether

import (
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sameRights reports whether acc's rights are those that this process has anyway.
func (acc account) sameRights() bool {
	if acc.uid != uint32(os.Geteuid()) || acc.gid != uint32(os.Getegid()) {
		return false
	}
	// Root overrides permissions whatever its groups are; an ordinary user cannot change them anyway.
	return true
}

// asUser runs f with acc's file system rights. Errors of taking them are returned; f is not run then.
func asUser(acc account, f func() error) error {
	if acc.sameRights() {
		return f()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: a thread with foreign rights ends with its goroutine
		if err := takeRights(acc); err != nil {
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

// takeRights changes the calling thread only. Setting fsuid to other than 0 drops the capabilities that override
// file permissions.
func takeRights(acc account) error {
	if err := setThreadGroups(acc.groups); err != nil {
		return err
	}
	if err := setFS(unix.SYS_SETFSGID, acc.gid); err != nil {
		return err
	}
	return setFS(unix.SYS_SETFSUID, acc.uid)
}

// setThreadGroups is the system call and nothing more: the one of package syscall changes all threads.
func setThreadGroups(groups []uint32) error {
	groups = slices.Clip(groups)
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(unsafe.SliceData(groups))), 0)
	if errno != 0 {
		return os.NewSyscallError("setgroups", errno)
	}
	return nil
}

// setFS calls setfsuid or setfsgid, which report no errors: the second call returns what the first one reached.
func setFS(call uintptr, id uint32) error {
	_, _, _ = unix.RawSyscall(call, uintptr(id), 0, 0)
	now, _, _ := unix.RawSyscall(call, uintptr(id), 0, 0)
	if uint32(now) != id {
		return os.NewSyscallError("setfsid", unix.EPERM)
	}
	return nil
}
