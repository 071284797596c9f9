//go:build unix

package store

import (
	"errors"
	"os"
	"syscall"
)

const canLock = true

// tryLock takes the lock without waiting. It ends with the file, so a killed process loses it.
func tryLock(f *os.File) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var lockErr error
	err = c.Control(func(fd uintptr) {
		for {
			if lockErr = syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB); !errors.Is(lockErr, syscall.EINTR) {
				return
			}
		}
	})
	if errors.Is(lockErr, syscall.EWOULDBLOCK) {
		return errLockTaken
	}
	return errors.Join(err, lockErr)
}
