package linux

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// MapUserNamespace gives ids 0 to count-1 of the new user namespace of process pid the host's ids from base on. It can be
// done once per namespace. Project ids are mapped as well, although nothing uses them: that map can be written by anybody
// inside, once, and would tell the next user of the namespace what the last one wrote.
func MapUserNamespace(pid int, base, count uint32) error {
	line := fmt.Appendf(nil, "0 %d %d", base, count)
	for _, name := range []string{"uid_map", "gid_map", "projid_map"} {
		if err := os.WriteFile("/proc/"+strconv.Itoa(pid)+"/"+name, line, 0); err != nil {
			return fmt.Errorf("map ids from %d: %w", base, err)
		}
	}
	return nil
}

// MakeCharDeviceAt makes a character device in dir that everybody may read and write.
func MakeCharDeviceAt(dir int, name string, major, minor uint32) error {
	err := unix.Mknodat(dir, name, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor)))
	if err == nil {
		err = unix.Fchmodat(dir, name, 0o666, 0) // the umask
	}
	if err != nil {
		return fmt.Errorf("make device %s: %w", name, err)
	}
	return nil
}

// SymlinkAt makes a symbolic link in dir.
func SymlinkAt(target string, dir int, name string) error {
	if err := unix.Symlinkat(target, dir, name); err != nil {
		return fmt.Errorf("make link %s: %w", name, err)
	}
	return nil
}

// MkdirAt makes a directory in dir.
func MkdirAt(dir int, name string) error {
	if err := unix.Mkdirat(dir, name, 0o755); err != nil {
		return fmt.Errorf("make directory %s: %w", name, err)
	}
	return nil
}

// IsQuotaFull reports whether err says that a disk or a quota is full.
func IsQuotaFull(err error) bool {
	return errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC)
}

// KeepsExitStatus reports whether this kernel tells the exit status of a process to others than its parent
// (PIDFD_INFO_EXIT, Linux 6.15). It goes by the version: a running process does not show it.
func KeepsExitStatus() bool { return kernelAtLeast(6, 15) }

func kernelAtLeast(major, minor int) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	var a, b int
	if n, _ := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a > major || a == major && b >= minor
}

// An Errno is the kernel's number of an error.
type Errno = unix.Errno

// IsNotDirectory reports whether a path could not be used as a directory: it is missing, a file, or a link.
func IsNotDirectory(err error) bool {
	return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP)
}

// OpenNamespace opens a namespace of a process: "mnt", "user", ... It lives while the descriptor does.
func OpenNamespace(pid int, kind string) (int, error) {
	return OpenRead("/proc/" + strconv.Itoa(pid) + "/ns/" + kind)
}

// OpenRead opens a file or directory for reading as a raw descriptor, close-on-exec.
func OpenRead(path string) (int, error) {
	return retryFD("open "+path, func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
}

// OpenWrite opens an existing file for writing as a raw descriptor, close-on-exec.
func OpenWrite(path string) (int, error) {
	return retryFD("open "+path, func() (int, error) { return unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0) })
}

// IsBrokenPipe reports whether the other end of a pipe or socket was closed.
func IsBrokenPipe(err error) bool {
	return errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// IsInvalid reports whether the kernel does not know what it was asked for, or not in that form.
func IsInvalid(err error) bool { return errors.Is(err, unix.EINVAL) }
