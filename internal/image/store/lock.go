package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const lockSuffix = ".lock"

// errLockTaken says that another process holds or removed the lock.
var errLockTaken = errors.New("lock is taken")

// createLocked makes a new lock file and locks it. Between the two a sweep may have removed it.
func createLocked(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := checkLocked(f, path); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// checkLocked locks f and checks that path still is f.
func checkLocked(f *os.File, path string) error {
	if err := tryLock(f); err != nil {
		return err
	}
	mine, err := f.Stat()
	if err != nil {
		return err
	}
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(mine, there) {
		return errLockTaken
	}
	return err
}

// sweepTemp removes what dead writers left: everything beside a lock that can be had, and directories without a lock.
func sweepTemp(dir string) error {
	if !canLock {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasSuffix(e.Name(), lockSuffix) {
			err = sweepWriter(path)
		} else if _, lerr := os.Lstat(path + lockSuffix); errors.Is(lerr, fs.ErrNotExist) {
			err = os.RemoveAll(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func sweepWriter(lock string) error {
	f, err := os.OpenFile(lock, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err := checkLocked(f, lock); errors.Is(err, errLockTaken) {
		return nil // alive, or swept by another
	} else if err != nil {
		return err
	}
	if err := os.RemoveAll(strings.TrimSuffix(lock, lockSuffix)); err != nil {
		return err
	}
	return os.Remove(lock)
}
