package aether

import (
	"errors"
	"path"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/pax"
)

// file packs a regular file. One that grows is cut to what it was, one that shrinks is filled up with zeros, and both are
// told at the end.
func (p *packer) file(dir int, name, base string) error {
	fd, err := openFile(dir, base)
	if err != nil {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ELOOP) { // it was replaced
			p.problem(name, err)
		}
		return nil
	}
	return p.regular(fd, name)
}

// regular packs the file that fd, which it closes, is.
func (p *packer) regular(fd int, name string) error {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		p.problem(name, err)
		return nil
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG { // it was replaced
		p.done.Skipped++
		return nil
	}
	if checkStored(fd) != nil { // a single file of /proc, mounted elsewhere
		p.done.Skipped++
		return nil
	}
	if first := p.earlier(&st, name); first != "" {
		return p.header(headerOf(&st, name, pax.Link, first))
	}
	h := headerOf(&st, name, pax.File, "")
	h.Size = st.Size
	h.Xattrs = p.xattrs(fd, name)
	if st.Size > pax.MaxSize {
		p.problem(name, failf(aetherv1.Code_CODE_INVALID, "it is larger than %d bytes", int64(pax.MaxSize)))
		return nil
	}
	if st.Blocks*512 < st.Size {
		h.Data = pax.Runs(st.Size, func(off int64, whence int) (int64, error) { return unix.Seek(fd, off, whence) })
	}
	if err := p.header(h); err != nil {
		return err
	}
	if st.Size == 0 {
		return nil
	}
	return p.content(fd, h, &st)
}

// named packs regular files by their names.
func (p *packer) named(dir string, names [][]byte) error {
	for _, b := range names {
		name := string(b)
		full := name
		if !path.IsAbs(full) {
			full = dir + "/" + full
		}
		fd, err := openRegular(full)
		if err != nil {
			p.problem(name, err)
			continue
		}
		if err := p.regular(fd, name); err != nil {
			return err
		}
	}
	return nil
}

// openFile opens without effects on what may have taken the file's place.
func openFile(dir int, base string) (int, error) {
	for {
		fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// content sends what is stored of a file.
func (p *packer) content(fd int, h *pax.Header, st *unix.Stat_t) error {
	all := [1]pax.Segment{{Off: 0, Len: h.Size}}
	segments := all[:]
	if h.Data != nil {
		segments = h.Data
	}
	var failed error
	for _, s := range segments {
		for off, end := s.Off, s.Off+s.Len; off < end; {
			if p.ctx.Err() != nil {
				return errCanceled
			}
			space := p.w.Space()
			space = space[:min(int64(len(space)), end-off)]
			n := 0
			if failed == nil {
				n, failed = readAt(fd, space, off)
			}
			if failed != nil {
				clear(space)
				n = len(space)
			}
			if err := p.w.Advance(n); err != nil {
				return err
			}
			off += int64(n)
		}
	}
	var now unix.Stat_t
	switch err := unix.Fstat(fd, &now); {
	case failed != nil || err != nil:
		p.problem(h.Name, errors.Join(failed, err))
	case now.Size < st.Size:
		p.problem(h.Name, errShrunk)
	case now.Size != st.Size || now.Mtim != st.Mtim:
		p.done.Changed++
	}
	return nil
}

var errShrunk = failf(aetherv1.Code_CODE_CHANGED, "the file became shorter while it was read; try again when nothing writes to it")

// readAt reads some of a file that should have it.
func readAt(fd int, b []byte, off int64) (int, error) {
	for {
		n, err := unix.Pread(fd, b, off)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n == 0:
			return 0, errShrunk
		default:
			return n, nil
		}
	}
}
