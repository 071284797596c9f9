package aether

import (
	"errors"
	"path"
	"strconv"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// Paths of requests lead through what the sandbox made of its tree. Ordinary links are followed, as everywhere. The kernel's
// own (/proc/<pid>/fd, cwd, root and exe) are not: aether would follow those of /proc/self as itself, to what it has
// open, and so would a command between its fork and its exec.

// openat2 opens a path from the root with flags. A link of the kernel in it is ELOOP.
func openat2(p string, flags int, mode uint32) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC, Mode: uint64(mode), Resolve: unix.RESOLVE_NO_MAGICLINKS}
	for {
		fd, err := unix.Openat2(unix.AT_FDCWD, p, &how)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// openRef refers to what p names without opening it: that can have effects, or never return.
func openRef(p string, flags int) (int, error) { return openat2(p, flags|unix.O_PATH, 0) }

// refPath is a path to what one of our own descriptors refers to.
func refPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// openCwd refers to the working directory of a command, if its user can work there.
func openCwd(cwd string, acc account) (int, *failure) {
	fd := -1
	err := asUser(acc, func() (err error) {
		if fd, err = openRef(cwd, unix.O_DIRECTORY); err != nil {
			return err
		}
		if err = unix.Faccessat2(fd, "", unix.X_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH); err != nil {
			unix.Close(fd)
		}
		return err
	})
	if err == nil {
		return fd, nil
	}
	f := asFailure("enter it", err)
	return -1, &failure{aetherv1.Code_CODE_NO_CWD, "working directory " + clip(cwd, 256) + ": " + f.errno.Error(), f.errno}
}

// makeParents makes a directory and those above it.
func makeParents(dir string) error {
	ref, err := openRef(dir, unix.O_DIRECTORY)
	if err == nil {
		return unix.Close(ref)
	}
	if !errors.Is(err, unix.ENOENT) || dir == "/" {
		return err
	}
	above := path.Dir(dir)
	if err := makeParents(above); err != nil {
		return err
	}
	if ref, err = openRef(above, unix.O_DIRECTORY); err != nil {
		return err
	}
	defer unix.Close(ref)
	if err := unix.Mkdirat(ref, path.Base(dir), 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}
