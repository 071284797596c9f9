package aether

import (
	"context"
	"encoding/binary"
	"errors"
	"io"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
)

const (
	listBuffer   = 32 << 10
	maxEntryPath = 64 << 10 // bytes of a path in a listing: deeper than any path that a call takes
	maxStats     = 1024     // in one request
)

// statFiles tells about each path by itself. An answer has no path: it belongs to the path at its index.
func (s *Server) statFiles(ctx context.Context, req *aetherv1.StatFiles) (*aetherv1.StatResults, error) {
	if len(req.Paths) > maxStats {
		return nil, failf(aetherv1.Code_CODE_INVALID, "more than %d paths", maxStats)
	}
	acc, err := s.accts.lookup(req.User)
	if err != nil {
		return nil, err
	}
	out := &aetherv1.StatResults{Results: make([]*aetherv1.StatResult, 0, len(req.Paths))}
	err = asUser(acc, func() error {
		for _, p := range req.Paths {
			if ctx.Err() != nil {
				return errCanceled
			}
			r := new(aetherv1.StatResult)
			if entry, err := statOne(string(p), req.Follow); err != nil {
				r.Error = asFailure("stat "+clip(string(p), 256), err).proto()
			} else {
				r.File = entry
			}
			out.Results = append(out.Results, r)
		}
		return nil
	})
	return out, err
}

func statOne(p string, follow bool) (*aetherv1.FileEntry, error) {
	p, err := checkPath(p)
	if err != nil {
		return nil, err
	}
	flags := unix.O_NOFOLLOW
	if follow {
		flags = 0
	}
	ref, err := openRef(p, flags)
	if err != nil {
		return nil, err
	}
	defer unix.Close(ref)
	var st unix.Stat_t
	if err := unix.Fstat(ref, &st); err != nil {
		return nil, err
	}
	e := entryOf(&st)
	if st.Mode&unix.S_IFMT != unix.S_IFLNK || checkStored(ref) != nil { // the kernel's links lead to what somebody has open
		return e, nil
	}
	target, err := readLink(ref, "")
	e.LinkTarget = []byte(target)
	return e, err
}

func entryOf(st *unix.Stat_t) *aetherv1.FileEntry {
	return &aetherv1.FileEntry{
		Mode: st.Mode, Size: uint64(st.Size), Uid: st.Uid, Gid: st.Gid, MtimeNs: st.Mtim.Nano(),
		Blocks: uint64(st.Blocks), Links: uint32(st.Nlink), Inode: st.Ino,
	}
}

// records are messages, each after its length as a varint, on their way to the edge.
type records struct {
	w   io.Writer
	buf []byte
}

func (r *records) add(m proto.Message) error {
	n := proto.Size(m)
	r.buf = binary.AppendUvarint(r.buf, uint64(n))
	var err error
	if r.buf, err = (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend(r.buf, m); err != nil {
		return err
	}
	if len(r.buf) < listBuffer {
		return nil
	}
	return r.flush()
}

func (r *records) flush() error {
	_, err := r.w.Write(r.buf)
	r.buf = r.buf[:0]
	return err
}

// listFiles sends the entries of a directory, and of those below it down to req.Depth. What the kernel makes up is not listed,
// and not entered on the way: its entry is all there is. An entry that vanishes meanwhile may be missing; everything else that
// cannot be read is an error.
func (b *byteStream) listFiles(req *aetherv1.ListFiles) (*aetherv1.Done, error) {
	acc, err := b.s.srv.accts.lookup(req.User)
	if err != nil {
		return nil, err
	}
	l := &lister{out: records{w: b}, depth: int(max(req.Depth, -1))}
	if l.depth == 0 {
		l.depth = 1
	}
	if err := take(b.ctx, b.s.srv.lists); err != nil {
		return nil, err
	}
	defer func() { <-b.s.srv.lists }()
	err = asUser(acc, func() error { return l.run(b, string(req.Path)) })
	if err != nil && !errors.Is(err, errCanceled) {
		err = asFailure("list "+clip(string(req.Path), 256), err)
	}
	return &aetherv1.Done{Entries: l.sent}, err
}

type lister struct {
	w     *walker
	out   records
	depth int
	sent  uint64
	path  []byte
}

func (l *lister) run(b *byteStream, p string) error {
	p, err := checkPath(p)
	if err != nil {
		return err
	}
	ref, err := openRef(p, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	fd, err := openDirAt(ref, ".")
	_ = unix.Close(ref)
	if err != nil {
		return err
	}
	if err := checkStored(fd); err != nil {
		_ = unix.Close(fd)
		return err
	}
	b.accept()
	l.w = &walker{ctx: b.ctx, held: share{of: &b.s.srv.names}, visit: l.visit, madeUp: true}
	l.w.unopened = func(_ *treeDir, _ string, err error) error {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) { // gone, or another thing by now
			return nil
		}
		return err
	}
	if err := l.w.run(fd); err != nil {
		return err
	}
	return l.out.flush()
}

func (l *lister) visit(dir *treeDir, name string) (bool, error) {
	var st unix.Stat_t
	err := unix.Fstatat(dir.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	l.path = append(append(l.path[:0], l.w.prefix...), name...)
	if len(l.path) > maxEntryPath {
		return false, failf(aetherv1.Code_CODE_RESOURCES, "a path of more than %d bytes is in it; list it in parts", maxEntryPath)
	}
	e := entryOf(&st)
	e.Path = l.path
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		target, err := readLink(dir.fd, name)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL): // gone, or another thing by now
			return false, nil
		case err != nil:
			return false, err
		}
		e.LinkTarget = []byte(target)
	}
	if err := l.out.add(e); err != nil {
		return false, err
	}
	l.sent++
	deeper := l.depth < 0 || dir.depth+1 < l.depth
	return deeper && st.Mode&unix.S_IFMT == unix.S_IFDIR, nil
}
