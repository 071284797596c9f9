package aether

import (
	"errors"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// maxLinks bounds what is remembered of files with several names, in bytes.
const maxLinks = 8 << 20

// A copier copies one tree. The copy has the modes, times, extended attributes, symbolic links, hard links and holes of what
// it was made of and, made by root, its owners. FIFOs and sockets are made anew, devices refused.
type copier struct {
	*changer
	w     *walker
	merge bool   // what is at the destination may be replaced
	top   int    // the destination's top directory, for names of hard links
	topID fileID // what must not be met as a source
	dev   uint64 // a file system that was found to be on disk
	links map[fileID]string
	held  int // bytes of them
	buf   []byte
}

// copy copies ch.Path to ch.To. Without recursive a link is followed, as when a file is read; else it is copied. A file gets its
// new name when it is complete, a directory too, unless there is one by that name: then it is merged into that one.
func (c *changer) copy(ch *aetherv1.Change) error {
	from, err := refTo(string(ch.Path), ch.Recursive)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	to, err := openPlace(string(ch.To))
	if err != nil {
		return asFailure("copy to "+clip(string(ch.To), 256), err)
	}
	defer to.close()
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir && !ch.Recursive {
		return failf(aetherv1.Code_CODE_IS_DIRECTORY, "%s is a directory; ask for it to be copied recursively", clip(string(ch.Path), 256))
	}
	var flags uint
	there, err := to.stat()
	switch {
	case err == nil && ch.Exclusive:
		return unix.EEXIST
	case err == nil && isDir:
		if there.Mode&unix.S_IFMT != unix.S_IFDIR {
			return failf(aetherv1.Code_CODE_NOT_DIRECTORY, "%s is there and not a directory", clip(string(ch.To), 256))
		}
		return c.copyRef(from, &st, to, true)
	case err == nil && there.Mode&unix.S_IFMT == unix.S_IFDIR:
		return failf(aetherv1.Code_CODE_IS_DIRECTORY, "%s is a directory; give the whole new name", clip(string(ch.To), 256))
	case ch.Exclusive:
		flags = unix.RENAME_NOREPLACE
	}
	temp := to.beside()
	err = c.copyRef(from, &st, temp, false)
	if err == nil {
		err = unix.Renameat2(temp.dir, temp.name, to.dir, to.name, flags)
	}
	if err != nil {
		c.discard(temp)
	}
	return err
}

// copyTo copies what is at from, be it a link.
func (c *changer) copyTo(from, to place, merge bool) error {
	ref, err := from.ref()
	if err != nil {
		return err
	}
	defer unix.Close(ref)
	var st unix.Stat_t
	if err := unix.Fstat(ref, &st); err != nil {
		return err
	}
	return c.copyRef(ref, &st, to, merge)
}

func (c *changer) copyRef(from int, st *unix.Stat_t, to place, merge bool) error {
	cp := &copier{changer: c, merge: merge, top: -1, links: make(map[fileID]string)}
	defer func() {
		if cp.top >= 0 {
			_ = unix.Close(cp.top)
		}
	}()
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if err := checkStored(from); err != nil {
			return err
		}
		return cp.file(from, st, to, "")
	}
	if err := outside(to.dir, idOf(st)); err != nil {
		return err
	}
	fd, err := openDirAt(from, ".")
	if err != nil {
		return err
	}
	cp.w = &walker{ctx: c.ctx, held: share{of: c.names}, visit: cp.visit, leave: cp.leave}
	cp.w.entered = func(parent, dir *treeDir, name string) error {
		at := to
		if parent != nil {
			at = place{parent.out, name}
		}
		return cp.entered(parent == nil, dir, at)
	}
	return cp.w.run(fd)
}

// outside refuses a destination below the source.
func outside(dir int, source fileID) error {
	at, err := unix.Openat(dir, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	var last fileID
	for range maxTreeDepth {
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(at, &st)
		}
		if err != nil {
			break
		}
		id := idOf(&st)
		if id == source {
			_ = unix.Close(at)
			return failf(aetherv1.Code_CODE_INVALID, "a directory cannot be copied into itself")
		}
		if id == last { // the root
			break
		}
		last = id
		above, e := unix.Openat(at, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		_ = unix.Close(at)
		at, err = above, e
	}
	if at >= 0 {
		_ = unix.Close(at)
	}
	return nil // a directory that one may not look above is met again on the way, by topID
}

// entered makes or finds the directory that dir becomes.
func (cp *copier) entered(top bool, dir *treeDir, at place) error {
	if !top && dir.id == cp.topID {
		return failf(aetherv1.Code_CODE_INVALID, "a directory cannot be copied into itself")
	}
	err := unix.Mkdirat(at.dir, at.name, 0o700)
	if err != nil && (!cp.merge || !errors.Is(err, unix.EEXIST)) {
		return err
	}
	if dir.out, err = openDirAt(at.dir, at.name); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(dir.out, &st); err != nil {
		return err
	}
	dir.outID = idOf(&st)
	if err := cp.checkDev(dir.out, st.Dev); err != nil || !top {
		return err
	}
	cp.topID = dir.outID
	cp.top, err = unix.Openat(dir.out, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	return err
}

// checkDev looks whether things may be made in dir, once per file system.
func (cp *copier) checkDev(dir int, dev uint64) error {
	if cp.dev == dev {
		return nil
	}
	cp.dev = dev
	return cp.checkPlace(dir)
}

// leave gives a directory what it can have only now that its content is complete.
func (cp *copier) leave(_, dir *treeDir, _ string) error {
	var st unix.Stat_t
	if err := unix.Fstat(dir.fd, &st); err != nil {
		return err
	}
	return cp.describe(dir.fd, &st, dir.out)
}

func (cp *copier) visit(dir *treeDir, name string) (bool, error) {
	ref, err := refAt(dir.fd, name)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(ref)
	var st unix.Stat_t
	if err := unix.Fstat(ref, &st); err != nil {
		return false, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return true, nil
	}
	return false, cp.file(ref, &st, place{dir.out, name}, string(cp.w.prefix)+name)
}

// file copies what is not a directory. path is its name from the top.
func (cp *copier) file(ref int, st *unix.Stat_t, to place, path string) error {
	linked := st.Nlink > 1 && path != ""
	if linked {
		if first, ok := cp.links[idOf(st)]; ok {
			return cp.place(to, func(at place) error { return cp.link(first, at) })
		}
	}
	if err := cp.place(to, func(at place) error { return cp.one(ref, st, at) }); err != nil || !linked {
		return err
	}
	if cp.held += len(path) + linkEach; cp.held > maxLinks || !cp.w.held.take(len(path)+linkEach) {
		return failf(aetherv1.Code_CODE_RESOURCES, "too many files of the tree have several names; copy it by a command, such as cp -a")
	}
	cp.links[idOf(st)] = path
	return nil
}

// place makes a thing at to. One that is there already is replaced, where that is allowed, once the new one is complete.
func (cp *copier) place(to place, f func(place) error) error {
	err := f(to)
	if !cp.merge || !errors.Is(err, unix.EEXIST) {
		return err
	}
	temp := to.beside()
	if err = f(temp); err == nil {
		err = unix.Renameat(temp.dir, temp.name, to.dir, to.name)
	}
	// Also after success: a rename between two names of the same file does nothing.
	_ = unix.Unlinkat(temp.dir, temp.name, 0)
	return err
}

// link gives the file that was copied to first another name.
func (cp *copier) link(first string, to place) error {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS}
	dir, name := cp.top, first
	for i := len(first) - 1; i >= 0; i-- {
		if first[i] != '/' {
			continue
		}
		fd, err := unix.Openat2(cp.top, first[:i], &how)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		dir, name = fd, first[i+1:]
		break
	}
	return unix.Linkat(dir, name, to.dir, to.name, 0)
}

// one makes a copy of one file at to, where nothing may be. It leaves nothing if it fails, but for EEXIST.
func (cp *copier) one(ref int, st *unix.Stat_t, to place) error {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return cp.regular(ref, st, to)
	case unix.S_IFLNK:
		target, err := readLink(ref, "")
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(target, to.dir, to.name); err != nil {
			return err
		}
	case unix.S_IFIFO, unix.S_IFSOCK:
		if err := unix.Mknodat(to.dir, to.name, st.Mode&unix.S_IFMT|0o600, 0); err != nil {
			return err
		}
	default:
		return failf(aetherv1.Code_CODE_INVALID, "a device is in it, which cannot be copied")
	}
	if err := cp.describeAt(ref, st, to); err != nil {
		_ = unix.Unlinkat(to.dir, to.name, 0)
		return err
	}
	return nil
}

func (cp *copier) describeAt(ref int, st *unix.Stat_t, to place) error {
	fd, err := to.ref()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return cp.describe(ref, st, fd)
}

func (cp *copier) regular(ref int, st *unix.Stat_t, to place) error {
	from, err := unix.Open(refPath(ref), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	fd, err := unix.Openat(to.dir, to.name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = cp.content(from, fd, st.Size)
	if err == nil {
		err = cp.describe(from, st, fd)
	}
	if e := unix.Close(fd); err == nil {
		err = e // where a quota is told late
	}
	if err != nil {
		_ = unix.Unlinkat(to.dir, to.name, 0)
	}
	return err
}
