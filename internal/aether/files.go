package aether

import (
	"errors"
	"os"
	"path"
	"sync"
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
	s      *session
	stream uint32
	req    *aetherv1.ReadFile

	mu       sync.Mutex
	changed  sync.Cond
	pending  []byte // read and not yet sent
	start    uint64 // offset of pending[0], from the start of what is sent
	acked    uint64
	end      bool
	endSent  bool
	canceled bool
	src      *wire.Source
}

func newReadTransfer(s *session, stream uint32, req *aetherv1.ReadFile) *readTransfer {
	t := &readTransfer{s: s, stream: stream, req: req}
	t.changed.L = &t.mu
	t.src = &wire.Source{Stream: stream, Channel: wire.Stdin, Fill: t.fill}
	return t
}

func (t *readTransfer) data(uint8, uint64, []byte, wire.Flags) error { return wire.ErrProtocol }

func (t *readTransfer) ack(_ uint8, offset uint64, _ bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if offset > t.start {
		return wire.ErrProtocol
	}
	t.acked = max(t.acked, offset)
	t.s.conn.Ready(t.src) // here, not by the goroutine, which may be just about to wait
	t.changed.Broadcast()
	return nil
}

func (t *readTransfer) cancel() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.canceled = true
	t.changed.Broadcast()
}

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
			if err != nil && !errors.Is(err, os.ErrClosed) && !isEOF(err) {
				return err
			}
			break
		}
		if err := t.offer(buf[:n]); err != nil {
			return err
		}
		sent += uint64(n)
	}
	return t.finish()
}

// offer waits until b has been taken by the connection, within the edge's credit.
func (t *readTransfer) offer(b []byte) error {
	t.mu.Lock()
	t.pending = b
	for {
		if t.canceled {
			t.mu.Unlock()
			return errCanceled
		}
		if len(t.pending) == 0 {
			t.mu.Unlock()
			return nil
		}
		if t.credit() > 0 {
			t.mu.Unlock()
			t.s.conn.Ready(t.src)
			t.s.conn.Flush()
			t.mu.Lock()
			if len(t.pending) == 0 || t.canceled {
				continue
			}
		}
		t.changed.Wait()
	}
}

func (t *readTransfer) credit() int { return int(t.acked + wire.Window - t.start) }

// finish sends the end.
func (t *readTransfer) finish() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = true
	for !t.endSent && !t.canceled {
		t.mu.Unlock()
		t.s.conn.Ready(t.src)
		t.s.conn.Flush()
		t.mu.Lock()
		if !t.endSent && !t.canceled {
			t.changed.Wait()
		}
	}
	return nil
}

func (t *readTransfer) fill(b []byte, limit int) ([]byte, uint64, wire.Flags, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	offset := t.start
	n := min(len(t.pending), limit, t.credit())
	b = append(b, t.pending[:n]...)
	t.pending = t.pending[n:]
	t.start += uint64(n)
	var flags wire.Flags
	if t.end && len(t.pending) == 0 && !t.endSent {
		t.endSent = true
		flags = wire.End
	}
	t.changed.Broadcast()
	return b, offset, flags, len(t.pending) > 0 && t.credit() > 0
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
