package aether

import (
	"errors"
	"io"
	"unsafe"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/pax"
)

func (u *unpacker) dir() int { return u.dirs[len(u.dirs)-1].fd }

// file makes or replaces a regular file: under a temporary name until it is complete.
func (u *unpacker) file(base string, h *pax.Header, r *pax.Reader) (err error) {
	temp := place{u.dir(), base}.beside().name
	fd, err := unix.Openat(u.dir(), temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if fd >= 0 {
			unix.Close(fd)
		}
		if err != nil {
			_ = unix.Unlinkat(u.dir(), temp, 0)
		}
	}()
	if err := u.content(fd, h, r); err != nil {
		return err
	}
	if err := u.attributes(fd, h); err != nil {
		return err
	}
	err = unix.Close(fd)
	if fd = -1; err != nil {
		return err
	}
	return u.publish(temp, base)
}

// content writes what is stored of a file, each piece to its place.
func (u *unpacker) content(fd int, h *pax.Header, r *pax.Reader) error {
	if h.Data == nil {
		_, err := u.copy(fd, 0, h.Size, r)
		return err
	}
	end := int64(0)
	for _, s := range h.Data {
		if _, err := u.copy(fd, s.Off, s.Len, r); err != nil {
			return err
		}
		end = s.Off + s.Len
	}
	if end < h.Size { // a hole is at its end
		return unix.Ftruncate(fd, h.Size)
	}
	return nil
}

func (u *unpacker) copy(fd int, off, length int64, r *pax.Reader) (int64, error) {
	for length > 0 {
		n, err := r.Read(u.buf[:min(int64(len(u.buf)), length)])
		if errors.Is(err, io.EOF) {
			err = pax.ErrTruncated
		}
		if err != nil {
			return off, err
		}
		for b := u.buf[:n]; len(b) > 0; {
			w, err := unix.Pwrite(fd, b, off)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return off, err
			}
			off += int64(w)
			b = b[w:]
		}
		length -= int64(n)
	}
	return off, nil
}

// attributes sets those of a file. The owner goes first: changing it clears set-user-id bits and capabilities. Then the extended
// attributes, which ask for the right to write to the file.
func (u *unpacker) attributes(fd int, h *pax.Header) error {
	if u.keepOwners {
		if err := unix.Fchown(fd, int(h.UID), int(h.GID)); err != nil {
			return err
		}
	}
	if err := setXattrs(h, func(name string, value []byte) error { return unix.Fsetxattr(fd, name, value, 0) }); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, h.Mode); err != nil {
		return err
	}
	if u.now {
		return nil
	}
	t := times(h)
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&t[0])), 0, 0, 0) // futimens
	if errno != 0 {
		return errno
	}
	return nil
}

// publish gives a complete entry its name.
func (u *unpacker) publish(temp, base string) error {
	err := unix.Renameat(u.dir(), temp, u.dir(), base)
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	if u.noReplace {
		return failf(aetherv1.Code_CODE_IS_DIRECTORY, "it would replace a directory")
	}
	err = unix.Unlinkat(u.dir(), base, unix.AT_REMOVEDIR)
	switch {
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return failf(aetherv1.Code_CODE_NOT_EMPTY, "it would replace a directory that is not empty")
	case err != nil && !errors.Is(err, unix.ENOENT):
		return err
	}
	return unix.Renameat(u.dir(), temp, u.dir(), base)
}

// place makes an entry that is complete at once, in the place of what may be there.
func (u *unpacker) place(base string, make func(name string) error) error {
	err := make(base)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	temp := temporaryName(true)
	if err := make(temp); err != nil {
		return err
	}
	err = u.publish(temp, base)
	// It is gone after a rename, unless both were names of one file already.
	if uerr := unix.Unlinkat(u.dir(), temp, 0); err == nil && !errors.Is(uerr, unix.ENOENT) {
		err = uerr
	}
	return err
}

func (u *unpacker) symlink(base string, h *pax.Header) error {
	if h.Link == "" {
		return failf(aetherv1.Code_CODE_BAD_ARCHIVE, "it is a symbolic link to nothing")
	}
	return u.place(base, func(name string) error {
		err := unix.Symlinkat(h.Link, u.dir(), name)
		if err == nil {
			err = u.made(name)
		}
		if err != nil {
			return err
		}
		return u.plainAttributes(name, h, false)
	})
}

func (u *unpacker) fifo(base string, h *pax.Header) error {
	return u.place(base, func(name string) error {
		if err := unix.Mknodat(u.dir(), name, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
		return u.plainAttributes(name, h, true)
	})
}

// plainAttributes sets owner, mode and times of what is not opened.
func (u *unpacker) plainAttributes(name string, h *pax.Header, mode bool) error {
	if u.keepOwners {
		if err := unix.Fchownat(u.dir(), name, int(h.UID), int(h.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if mode {
		if err := changeMode(place{u.dir(), name}, h.Mode); err != nil {
			return err
		}
	}
	if u.now {
		return nil
	}
	return unix.UtimesNanoAt(u.dir(), name, times(h), unix.AT_SYMLINK_NOFOLLOW)
}

// link makes another name of an earlier entry.
func (u *unpacker) link(base string, h *pax.Header) error {
	parts, err := split(h.Link)
	if err != nil {
		return unsafef("it links to %s, which is not in the archive", quoted(h.Link))
	}
	if len(parts) == 0 {
		return failf(aetherv1.Code_CODE_BAD_ARCHIVE, "it is a link to nothing")
	}
	at, _, err := u.follow(parts[:len(parts)-1])
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EXDEV):
		return unsafef("what it links to is reached by way of what is no directory, nor a link to one within the directory that is unpacked into")
	case errors.Is(err, unix.ENOENT):
		return failf(aetherv1.Code_CODE_BAD_ARCHIVE, "what it links to is not there")
	case err != nil:
		return err
	}
	defer unix.Close(at)
	target := parts[len(parts)-1]
	return u.place(base, func(name string) error {
		err := unix.Linkat(at, target, u.dir(), name, 0)
		if errors.Is(err, unix.ENOENT) {
			return failf(aetherv1.Code_CODE_BAD_ARCHIVE, "it links to %s, which is not there", quoted(h.Link))
		}
		if err == nil {
			err = u.made(name) // another name of a link that was there
		}
		return err
	})
}
