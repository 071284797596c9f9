package aether

import (
	"bytes"
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	copyPiece   = 8 << 20 // bytes that one call may copy: between two the caller may leave
	copyBuffer  = 128 << 10
	maxXattrs   = 64 << 10 // bytes, what the kernel's interface takes
	aclXattrs   = "system.posix_acl_"
	userXattrs  = "user."
	extraXattrs = "security."
)

// content copies size bytes: by sharing them where the file system can, else in the kernel, else by hand; holes stay holes.
func (cp *copier) content(from, to int, size int64) error {
	if size == 0 {
		return nil
	}
	if cp.charged {
		var st unix.Stat_t
		if err := unix.Fstat(to, &st); err != nil {
			return err
		}
		if err := cp.checkDev(to, st.Dev); err != nil {
			return err
		}
	}
	if unix.IoctlFileClone(to, from) == nil {
		return nil
	}
	for at := int64(0); at < size; {
		data, err := unix.Seek(from, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // nothing but a hole is left
			break
		}
		hole := size
		switch {
		case errors.Is(err, unix.EINVAL): // the file system does not tell
			data = at
		case err != nil:
			return err
		default:
			if hole, err = unix.Seek(from, data, unix.SEEK_HOLE); err != nil {
				return err
			}
		}
		if hole = min(hole, size); data >= hole {
			break
		}
		done, err := cp.span(from, to, data, hole)
		if err != nil {
			return err
		}
		if done < hole { // the file became shorter
			break
		}
		at = hole
	}
	return unix.Ftruncate(to, size)
}

// span copies from an offset to an end, and says how far it came.
func (cp *copier) span(from, to int, at, end int64) (int64, error) {
	for byHand := false; at < end; {
		if cp.ctx.Err() != nil {
			return at, errCanceled
		}
		in, out := at, at
		var n int
		var err error
		if !byHand {
			n, err = unix.CopyFileRange(from, &in, to, &out, int(min(end-at, copyPiece)), 0)
			switch {
			case errors.Is(err, unix.EXDEV), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM):
				byHand = true
				continue
			}
		} else {
			n, err = cp.byHand(from, to, at, end)
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return at, err
		}
		at += int64(n)
	}
	return at, nil
}

func (cp *copier) buffer() []byte {
	if cp.buf == nil {
		cp.buf = make([]byte, copyBuffer)
	}
	return cp.buf
}

func (cp *copier) byHand(from, to int, at, end int64) (int, error) {
	buf := cp.buffer()
	n, err := unix.Pread(from, buf[:min(int64(len(buf)), end-at)], at)
	if err != nil || n <= 0 {
		return 0, err
	}
	for done := 0; done < n; {
		m, err := unix.Pwrite(to, buf[done:n], at+int64(done))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return done, err
		}
		done += m
	}
	return n, nil
}

// describe gives the file at to the owner, mode, extended attributes and times of that at from. The owner goes first: changing
// it clears set-user-id bits and capabilities.
func (cp *copier) describe(from int, st *unix.Stat_t, to int) error {
	root := cp.acc.uid == 0
	if root {
		err := unix.Fchownat(to, "", int(st.Uid), int(st.Gid), unix.AT_EMPTY_PATH)
		if err != nil && !errors.Is(err, unix.EINVAL) { // an owner whom the sandbox cannot name
			return err
		}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return setTimes(to, st, true)
	}
	mode := st.Mode & 0o7777
	if !root && (st.Uid != cp.acc.uid || st.Gid != cp.acc.gid) {
		mode &^= unix.S_ISUID | unix.S_ISGID // they would be another's
	}
	if err := unix.Chmod(refPath(to), mode); err != nil {
		return err
	}
	if err := cp.xattrs(from, to); err != nil {
		return err
	}
	return setTimes(to, st, false)
}

// setTimes goes by a path to what fd refers to: a link has no other way than by its descriptor itself.
func setTimes(fd int, st *unix.Stat_t, link bool) error {
	times := []unix.Timespec{st.Atim, st.Mtim}
	if link {
		return unix.UtimesNanoAt(fd, "", times, unix.AT_EMPTY_PATH)
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, refPath(fd), times, 0)
}

// xattrs copies what belongs to a file: not what the kernel or a layer of the file system keeps for itself. Who is not root
// keeps what such a user may set.
func (cp *copier) xattrs(from, to int) error {
	names, err := xattrNames(from)
	if err != nil {
		return err
	}
	for raw := range bytes.SplitSeq(names, []byte{0}) {
		name := string(raw)
		if !strings.HasPrefix(name, userXattrs) && !strings.HasPrefix(name, aclXattrs) && !strings.HasPrefix(name, extraXattrs) {
			continue
		}
		if err := cp.xattr(from, to, name); err != nil {
			return err
		}
	}
	return nil
}

func xattrNames(fd int) ([]byte, error) {
	n, err := unix.Listxattr(refPath(fd), nil)
	if errors.Is(err, unix.EOPNOTSUPP) || (err == nil && n == 0) {
		return nil, nil
	}
	for size := 2*n + 256; err == nil; size = maxXattrs { // others may add some meanwhile
		names := make([]byte, size)
		if n, err = unix.Listxattr(refPath(fd), names); err == nil {
			return names[:n], nil
		}
		if errors.Is(err, unix.ERANGE) && size < maxXattrs {
			err = nil
		}
	}
	return nil, err
}

func (cp *copier) xattr(from, to int, name string) error {
	value := cp.buffer()
	n, err := unix.Getxattr(refPath(from), name, value)
	if errors.Is(err, unix.ENODATA) {
		return nil
	}
	if err == nil {
		err = unix.Setxattr(refPath(to), name, value[:n], 0)
	}
	if errors.Is(err, unix.EOPNOTSUPP) || (errors.Is(err, unix.EPERM) && strings.HasPrefix(name, extraXattrs)) {
		return nil
	}
	return err
}
