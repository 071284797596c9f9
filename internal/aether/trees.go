package aether

import (
	"context"
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// maxTries is how often a directory is emptied that others fill meanwhile.
const maxTries = 8

func (c *changer) remove(ch *aetherv1.Change) error {
	p, err := openPlace(string(ch.Path))
	if err != nil {
		if ch.MissingOk && errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	defer p.close()
	if ch.Recursive {
		err = c.removeTree(c.ctx, p)
	} else {
		err = removeOne(p)
	}
	if ch.MissingOk && errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// removeOne removes a file, or a directory that is empty.
func removeOne(p place) error {
	err := unix.Unlinkat(p.dir, p.name, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(p.dir, p.name, unix.AT_REMOVEDIR)
	}
	if errors.Is(err, unix.EEXIST) {
		err = unix.ENOTEMPTY
	}
	return err
}

// removeTree removes p and, if it is a directory, all below it. It stays on p's file system.
func (c *changer) removeTree(ctx context.Context, p place) error {
	err := unix.Unlinkat(p.dir, p.name, 0)
	if !errors.Is(err, unix.EISDIR) {
		return err
	}
	fd, err := openDirAt(p.dir, p.name)
	if err != nil {
		return emptied(p, err)
	}
	w := &walker{
		ctx: ctx, held: share{of: c.names},
		visit: func(dir *treeDir, name string) (bool, error) {
			err := unix.Unlinkat(dir.fd, name, 0)
			switch {
			case errors.Is(err, unix.EISDIR):
				return true, nil
			case errors.Is(err, unix.ENOENT):
				return false, nil
			}
			return false, err
		},
		entered: func(parent, dir *treeDir, _ string) error {
			if parent != nil && parent.id.dev != dir.id.dev {
				return failf(aetherv1.Code_CODE_INVALID, "another file system is mounted below it")
			}
			return nil
		},
		unopened: func(dir *treeDir, name string, err error) error { return emptied(place{dir.fd, name}, err) },
		leave: func(parent, dir *treeDir, name string) error {
			at := p
			if parent != nil {
				at = place{parent.fd, name}
			}
			err := unix.Unlinkat(at.dir, at.name, unix.AT_REMOVEDIR)
			switch {
			case errors.Is(err, unix.ENOENT) && parent != nil:
				return nil
			case (errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST)) && dir.tries < maxTries:
				return errAgain
			}
			return err
		},
	}
	return w.run(fd)
}

// emptied is about a directory that cannot be opened: an empty one can be removed all the same, and by now it may be gone or
// another thing.
func emptied(p place, err error) error {
	switch e := removeOne(p); {
	case e == nil, errors.Is(e, unix.ENOENT):
		return nil
	case errors.Is(e, unix.ENOTEMPTY):
		return err
	default:
		return e
	}
}

func (c *changer) setMode(ch *aetherv1.Change) error {
	if ch.Mode > 0o7777 {
		return failf(aetherv1.Code_CODE_INVALID, "mode %o is not one of permissions", ch.Mode)
	}
	fd, err := refTo(string(ch.Path), ch.Recursive)
	if err != nil {
		return err
	}
	set := func(fd int) error { return unix.Chmod(refPath(fd), ch.Mode) }
	if !ch.Recursive {
		defer unix.Close(fd)
		return set(fd)
	}
	// Without these bits a user can no longer enter what is theirs: then the content goes first.
	last := c.acc.uid != 0 && ch.Mode&0o500 != 0o500
	return c.eachFile(fd, last, func(fd int, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT == unix.S_IFLNK { // a link has no mode
			return nil
		}
		return set(fd)
	})
}

func (c *changer) setOwner(ch *aetherv1.Change) error {
	owner, err := c.accts.lookup(ch.Owner)
	if err == nil && ch.Owner == "" {
		err = failf(aetherv1.Code_CODE_INVALID, "no owner is given")
	}
	if err != nil {
		return err
	}
	uid, gid := int(owner.uid), -1
	if strings.Contains(ch.Owner, ":") {
		gid = int(owner.gid)
	}
	fd, err := refTo(string(ch.Path), ch.Recursive)
	if err != nil {
		return err
	}
	set := func(fd int) error {
		err := unix.Fchownat(fd, "", uid, gid, unix.AT_EMPTY_PATH)
		if errors.Is(err, unix.EINVAL) {
			return failf(aetherv1.Code_CODE_INVALID, "the sandbox has no such id as %s; see its /proc/self/uid_map", clip(ch.Owner, 64))
		}
		return err
	}
	if !ch.Recursive {
		defer unix.Close(fd)
		return set(fd)
	}
	return c.eachFile(fd, false, func(fd int, _ *unix.Stat_t) error { return set(fd) })
}

// eachFile calls f with a reference to the file of fd, which it closes, and to each below it: to a directory before its
// content or, with last, after it.
func (c *changer) eachFile(fd int, last bool, f func(fd int, st *unix.Stat_t) error) error {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if !isDir || !last {
		if err := f(fd, &st); err != nil {
			return err
		}
	}
	if !isDir {
		return nil
	}
	top, err := openDirAt(fd, ".")
	if err != nil {
		return err
	}
	w := &walker{ctx: c.ctx, held: share{of: c.names}, visit: func(dir *treeDir, name string) (bool, error) { return c.visitFile(dir, name, last, f) }}
	if last {
		w.leave = func(_, dir *treeDir, _ string) error {
			var st unix.Stat_t
			if err := unix.Fstat(dir.fd, &st); err != nil {
				return err
			}
			return f(dir.fd, &st)
		}
	}
	return w.run(top)
}

func (c *changer) visitFile(dir *treeDir, name string, last bool, f func(fd int, st *unix.Stat_t) error) (bool, error) {
	fd, err := refAt(dir.fd, name)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if last {
			return true, nil
		}
		return true, f(fd, &st)
	}
	return false, f(fd, &st)
}
