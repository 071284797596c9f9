package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// WriteControl writes value to a control file, which must exist. It is three system calls: os.WriteFile makes five, because
// control files can be polled and the runtime registers them.
func WriteControl(path, value string) error {
	fd, err := openControl(path, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = retryEINTR(func() error {
		_, err := unix.Write(fd, []byte(value))
		return err
	})
	if err != nil {
		return &fs.PathError{Op: "write " + value + " to", Path: path, Err: err}
	}
	return nil
}

// ReadControl reads a control file of up to len(buf) bytes into buf. A longer one is an error.
func ReadControl(path string, buf []byte) ([]byte, error) {
	fd, err := openControl(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n := 0
	for {
		if n == len(buf) {
			return nil, &fs.PathError{Op: "read", Path: path, Err: unix.EFBIG}
		}
		m, err := unix.Read(fd, buf[n:])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		case m == 0:
			return buf[:n], nil
		default:
			n += m
		}
	}
}

func openControl(path string, flags int) (fd int, err error) {
	err = retryEINTR(func() error {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		return err
	})
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// RemoveDir removes an empty directory. That it is not there is no error.
func RemoveDir(path string) error {
	err := retryEINTR(func() error { return unix.Rmdir(path) })
	if err != nil && err != unix.ENOENT {
		return &fs.PathError{Op: "rmdir", Path: path, Err: err}
	}
	return nil
}

// IsGone reports whether an operation failed because its cgroup or process is not there any more: a control file of a removed
// cgroup that is still open answers ENODEV.
func IsGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ESRCH)
}

// IsBusy reports whether a directory could not be removed because it is in use: a cgroup that has children or tasks.
func IsBusy(err error) bool { return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) }

// CgroupDelegated reports whether systemd has handed the cgroup at dir over to the processes in it (Delegate=yes).
func CgroupDelegated(dir string) bool {
	for _, name := range []string{"user.delegate", "trusted.delegate"} {
		var buf [8]byte
		if n, err := unix.Getxattr(dir, name, buf[:]); err == nil && string(buf[:n]) == "1" {
			return true
		}
	}
	return false
}

// KillIf sends SIGKILL to pid if still reports true once the process is pinned: a pid that was reused between listing and
// killing is somebody else's. That the process is gone is no error.
func KillIf(pid int, still func() bool) error {
	if pid <= 1 || pid == os.Getpid() {
		return fmt.Errorf("refusing to kill pid %d: %w", pid, unix.EINVAL)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return nil
	} else if err != nil {
		return fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if !still() {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
		return fmt.Errorf("kill %d: %w", pid, err)
	}
	return nil
}

// Bounds of the pauses between two looks at a cgroup whose processes are dying. Notifications of cgroup.events would come up
// to 10 ms late: the kernel limits their rate.
const (
	minKillPause = 200 * time.Microsecond
	maxKillPause = 10 * time.Millisecond
)

// KillCgroup kills every process in the v2 group dir and below, which no fork outruns, and waits until none is left. That
// there is no such group is no error.
func KillCgroup(ctx context.Context, dir string) error {
	for pause := minKillPause; ; pause = min(2*pause, maxKillPause) {
		// Every time: a process may just have been on its way in.
		err := WriteControl(filepath.Join(dir, "cgroup.kill"), "1")
		if err == nil {
			var populated bool
			if populated, err = cgroupPopulated(dir); err == nil && !populated {
				return nil
			}
		}
		if IsGone(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kill control group: %w", err)
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("kill control group: processes are still dying: %w", ctx.Err())
		case <-timer.C:
		}
	}
}

func cgroupPopulated(dir string) (bool, error) {
	var buf [256]byte
	events, err := ReadControl(filepath.Join(dir, "cgroup.events"), buf[:])
	return !bytes.Contains(events, []byte("populated 0\n")), err
}
