package linux

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrStopped says that somebody asked for an end before it was done.
var ErrStopped = errors.New("stopped")

const removeBatch = 1024

// RemoveFile removes a file; that it is not there is no error.
func RemoveFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// RemoveAllFlat removes a tree that hostile code made: of any depth, with three descriptors and without recursion, because
// directories in directories are moved up first. It follows no link, and must be the only one that changes the tree. stop is
// asked now and then.
func RemoveAllFlat(path string, stop func() bool) error {
	root, err := openDir(unix.AT_FDCWD, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer root.Close()
	r := flatRemoval{root: root, stop: stop}
	for {
		n, err := r.empty(root, true)
		if err != nil {
			return fmt.Errorf("remove what is in %s: %w", path, err)
		}
		if n == 0 {
			return RemoveDir(path)
		}
	}
}

type flatRemoval struct {
	root *os.File
	stop func() bool
	next int
}

func openDir(at int, name string) (*os.File, error) {
	fd, err := OpenAt(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// empty removes the files of a directory, and its directories: those of the root with what they hold, after one more level was
// moved up, others by moving them to the root. It returns how many entries it found.
func (r *flatRemoval) empty(dir *os.File, isRoot bool) (found int, err error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	for {
		if r.stop() {
			return found, ErrStopped
		}
		names, err := dir.Readdirnames(removeBatch)
		for _, name := range names {
			found++
			if err := r.entry(dir, name, isRoot); err != nil {
				return found, err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return found, err
		}
	}
}

func (r *flatRemoval) entry(dir *os.File, name string, ofRoot bool) error {
	at := int(dir.Fd())
	err := retryEINTR(func() error { return unix.Unlinkat(at, name, 0) })
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	switch err := r.rmdir(at, name); {
	case err != unix.ENOTEMPTY:
		return err
	case !ofRoot:
		return r.moveUp(at, name)
	}
	child, err := openDir(at, name)
	if err != nil {
		return err
	}
	defer child.Close()
	for {
		n, err := r.empty(child, false)
		if err != nil {
			return err
		}
		if n == 0 {
			return r.rmdir(at, name)
		}
	}
}

func (r *flatRemoval) rmdir(at int, name string) error {
	return retryEINTR(func() error { return unix.Unlinkat(at, name, unix.AT_REMOVEDIR) })
}

func (r *flatRemoval) moveUp(at int, name string) error {
	for {
		r.next++
		err := unix.Renameat2(at, name, int(r.root.Fd()), fmt.Sprintf(".moved-%d", r.next), unix.RENAME_NOREPLACE)
		if err != unix.EEXIST {
			return err
		}
	}
}

// LockFile makes and locks a file, for as long as it is open. EWOULDBLOCK says that somebody else has it.
func LockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := retryEINTR(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }); err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "lock", Path: path, Err: err}
	}
	return f, nil
}
