package aether

import (
	"errors"
	"io"
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

const (
	maxPath = 4096
	block   = 64 << 10
)

var errCanceled = errors.New("canceled")

// A readTransfer sends a regular file. Its goroutine reads one block ahead of what the edge gave credit for; the disk
// is never waited for on the connection's path.
type readTransfer struct {
	*wire.Duplex
	s      *session
	stream uint32
	req    *aetherv1.ReadFile
}

func newReadTransfer(s *session, stream uint32, req *aetherv1.ReadFile) *readTransfer {
	return &readTransfer{s: s, stream: stream, req: req, Duplex: wire.NewDuplex(s.conn, stream, wire.Stdin, wire.Stdin, 0)}
}

// Data is a violation: content goes one way.
func (t *readTransfer) Data(uint8, uint64, []byte, wire.Flags) error { return wire.ErrProtocol }

func (t *readTransfer) cancel() { t.Fail(errCanceled) }

func (t *readTransfer) run() *failure {
	f, err := openForRead(t.s.srv.accts, t.req)
	if err != nil {
		return asFailure("open "+clip(string(t.req.Path), 256), err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return asFailure("read "+clip(string(t.req.Path), 256), err)
	}
	st := info.Sys().(*syscall.Stat_t)
	size := uint64(info.Size())
	length := size - min(size, t.req.Offset)
	if t.req.Length > 0 {
		length = min(length, t.req.Length)
	}
	t.s.post(wire.MsgFileInfo, t.stream, &aetherv1.FileInfo{
		Size: size, Mode: st.Mode & 0o7777, MtimeNs: info.ModTime().UnixNano(), Uid: st.Uid, Gid: st.Gid, Length: length,
	})
	if err := t.copy(f, t.req.Offset, length); err != nil && !errors.Is(err, errCanceled) {
		return asFailure("read "+clip(string(t.req.Path), 256), err)
	}
	return nil
}

// copy sends length bytes. A file that became shorter meanwhile ends early, which the edge sees from the length.
func (t *readTransfer) copy(f *os.File, offset, length uint64) error {
	buf := make([]byte, block)
	var sent uint64
	for sent < length {
		n, err := f.ReadAt(buf[:min(uint64(len(buf)), length-sent)], int64(offset+sent))
		if n == 0 {
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			break
		}
		if _, err := t.Write(buf[:n]); err != nil {
			return err
		}
		sent += uint64(n)
	}
	return t.Drain()
}

// openForRead opens a regular file with the user's rights. What is no such file is not even opened. O_NONBLOCK keeps the
// open from waiting for who has a lease on it.
func openForRead(accts *accounts, req *aetherv1.ReadFile) (*os.File, error) {
	p, err := checkPath(string(req.Path))
	if err != nil {
		return nil, err
	}
	acc, err := accts.lookup(req.User)
	if err != nil {
		return nil, err
	}
	var fd int
	err = asUser(acc, func() (err error) {
		fd, err = openRegular(p)
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), p), nil
}

// openRegular opens what is a regular file, and only that.
func openRegular(p string) (int, error) {
	p, err := checkPath(p)
	if err != nil {
		return -1, err
	}
	ref, err := openRef(p, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(ref)
	var st unix.Stat_t
	if err := unix.Fstat(ref, &st); err != nil {
		return -1, err
	}
	if err := errors.Join(checkRegular(&st), checkStored(ref)); err != nil {
		return -1, err
	}
	return unix.Open(refPath(ref), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
}

func checkRegular(st *unix.Stat_t) error {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return failf(aetherv1.Code_CODE_IS_DIRECTORY, "it is a directory")
	}
	return failf(aetherv1.Code_CODE_INVALID, "it is not a regular file; read devices, FIFOs and sockets by a command")
}

// checkStored refuses files that the kernel makes up while they are read: they have no size, and /proc/self would be
// aether's own.
func checkStored(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return err
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.CGROUP_SUPER_MAGIC:
		return failf(aetherv1.Code_CODE_INVALID, "it is made up by the kernel; read it by a command, such as cat")
	}
	return nil
}

// checkPath makes p absolute.
func checkPath(p string) (string, error) {
	for i := range len(p) {
		if p[i] == 0 {
			return "", failf(aetherv1.Code_CODE_INVALID, "the path holds a NUL byte")
		}
	}
	if p == "" || len(p) >= maxPath {
		return "", failf(aetherv1.Code_CODE_INVALID, "a path has 1 to %d bytes", maxPath-1)
	}
	if !path.IsAbs(p) {
		p = "/" + p
	}
	return p, nil
}
