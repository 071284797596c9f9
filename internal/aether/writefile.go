package aether

import (
	"errors"
	"os"
	"path"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

// A writeTransfer makes or replaces a regular file: content goes to a temporary name beside it, which becomes the
// file's only when everything has arrived and is right. Whatever happens before, the old file stays and the temporary
// one goes.
type writeTransfer struct {
	*wire.Duplex
	s      *session
	stream uint32
	req    *aetherv1.WriteFile
}

func newWriteTransfer(s *session, stream uint32, req *aetherv1.WriteFile) *writeTransfer {
	return &writeTransfer{s: s, stream: stream, req: req, Duplex: wire.NewDuplex(s.conn, stream, wire.Stdin, wire.Stdin, 0)}
}

// whole reports whether nobody sees the file before it is complete.
func (t *writeTransfer) whole() bool { return !t.req.Append && !t.req.InPlace }

// widen lets more content be under way. Call it before any can arrive.
func (t *writeTransfer) widen() {
	t.SetWindow(wire.WideWindow)
	t.s.post(wire.MsgOpened, t.stream, &aetherv1.Opened{Window: wire.WideWindow})
}

// Ack is a violation: content goes one way.
func (t *writeTransfer) Ack(uint8, uint64, bool) error { return wire.ErrProtocol }

func (t *writeTransfer) cancel() { t.Fail(errCanceled) }

func (t *writeTransfer) run() *failure {
	defer t.cancel() // what arrives late finds a stream that takes nothing
	size, err := t.write()
	if errors.Is(err, errCanceled) {
		return nil
	}
	if err != nil {
		return asDiskFailure("write "+clip(string(t.req.Path), 256), err, string(t.req.Path))
	}
	t.s.post(wire.MsgWriteDone, t.stream, &aetherv1.WriteDone{Size: size})
	return nil
}

func (t *writeTransfer) write() (size uint64, err error) {
	acc, err := t.s.srv.accts.lookup(t.req.User)
	if err != nil {
		return 0, err
	}
	n, err := prepare(t.req, acc)
	if err != nil {
		return 0, err
	}
	defer func() {
		_ = n.file.Close() // errors of writing have been seen by then
		if err != nil && n.temp != "" {
			_ = os.Remove(n.temp)
		}
	}()
	if t.s.srv.pool != nil { // else nothing is charged to anybody
		if err := checkDisk(n.file); err != nil {
			return 0, err
		}
	}
	in := &content{file: n.file, most: t.req.Size}
	if t.whole() {
		err = t.Gather(in.writeAll)
	} else {
		_, err = t.WriteTo(in) // what has arrived is in the file, however much it is
	}
	if err != nil {
		return 0, err
	}
	if t.req.Size >= 0 && in.size != uint64(t.req.Size) {
		return 0, failf(aetherv1.Code_CODE_DIGEST, "%d bytes arrived of the announced %d", in.size, t.req.Size)
	}
	return in.size, n.finish(t.req, acc, in.size)
}

// content takes what arrives of a file.
type content struct {
	file   *os.File
	direct bool // it is open with O_DIRECT
	size   uint64
	most   int64 // what was announced; -1 = nothing was
}

func (c *content) Write(b []byte) (int, error) {
	n, err := c.file.Write(b)
	if err != nil {
		return n, err
	}
	return n, c.add(n)
}

func (c *content) add(n int) error {
	if c.size += uint64(n); c.most >= 0 && c.size > uint64(c.most) {
		return failf(aetherv1.Code_CODE_DIGEST, "more content than the announced %d bytes", c.most)
	}
	return nil
}

// writeAll writes what makes a file as a whole.
func (c *content) writeAll(pieces [][]byte) error {
	c.pass(pieces)
	for len(pieces) > 0 {
		n, err := unix.Writev(int(c.file.Fd()), pieces)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil && c.direct:
			c.setDirect(false) // it refuses more at once than what is left of a quota, and what is not aligned
			continue
		case err != nil:
			return err
		}
		if err := c.add(n); err != nil {
			return err
		}
		for n > 0 {
			k := min(n, len(pieces[0]))
			if pieces[0] = pieces[0][k:]; len(pieces[0]) == 0 {
				pieces = pieces[1:]
			}
			n -= k
		}
	}
	return nil
}

// checkDisk refuses files in memory. Their pages stay charged to the group of who writes them, which is ours: small, and
// meant for this process alone. A link that leads to /dev/shm would be enough to have it killed.
func checkDisk(f *os.File) error { return checkDiskFD(int(f.Fd())) }

func checkDiskFD(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return err
	}
	if st.Type == unix.TMPFS_MAGIC {
		return failf(aetherv1.Code_CODE_INVALID, "it would be kept in memory (tmpfs), which only a command can be charged for; write it by a command, such as cat with stdin")
	}
	return nil
}

// A newFile is the temporary file and what it will become; or a file that is written in place.
type newFile struct {
	file     *os.File
	temp     string // "" in place
	replaces bool   // something was there
	target   string
	mode     uint32
	uid, gid int // -1 = as made
}

// prepare opens the temporary file with the user's rights.
func prepare(req *aetherv1.WriteFile, acc account) (*newFile, error) {
	p, err := checkPath(string(req.Path))
	if err != nil {
		return nil, err
	}
	if p[len(p)-1] == '/' {
		return nil, failf(aetherv1.Code_CODE_IS_DIRECTORY, "it is a directory")
	}
	n := &newFile{target: path.Clean(p), mode: req.Mode & 0o7777, uid: -1, gid: -1}
	if req.Append || req.InPlace {
		return n, n.openInPlace(req, acc)
	}
	err = asUser(acc, func() error {
		if req.MakeParents {
			if err := makeParents(path.Dir(n.target)); err != nil {
				return err
			}
		}
		if err := n.existing(req, acc); err != nil {
			return err
		}
		return n.create()
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}

// existing looks at what is to be replaced. A symbolic link is followed, as by every other way of writing a file; a file
// keeps its owner, and its mode unless one is given.
func (n *newFile) existing(req *aetherv1.WriteFile, acc account) error {
	fd, err := openRef(n.target, 0)
	if errors.Is(err, unix.ENOENT) {
		if n.mode == 0 {
			n.mode = 0o644
		}
		if !acc.sameRights() {
			n.uid, n.gid = int(acc.uid), int(acc.gid)
		}
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if req.Exclusive {
		return failf(aetherv1.Code_CODE_EXISTS, "it exists")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if err := checkRegular(&st); err != nil {
		return err
	}
	if err := unix.Faccessat2(fd, "", unix.W_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH); err != nil {
		return err
	}
	if n.mode == 0 {
		n.mode = st.Mode & 0o7777
	}
	if acc.uid == 0 {
		n.uid, n.gid = int(st.Uid), int(st.Gid)
	}
	n.replaces = true
	n.target, err = os.Readlink(refPath(fd))
	return err
}

func (n *newFile) create() error {
	n.temp = path.Join(path.Dir(n.target), temporaryName(n.replaces))
	fd, err := openat2(n.temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	n.file = os.NewFile(uintptr(fd), n.temp)
	return nil
}

func (n *newFile) finish(req *aetherv1.WriteFile, acc account, size uint64) error {
	switch {
	case n.temp != "":
		return n.publish(req, acc)
	case req.Truncate && !req.Append:
		return n.file.Truncate(int64(req.Offset + size))
	}
	return nil
}

// publish gives the file its owner, mode and name. The owner goes first: changing it clears set-user-id bits.
func (n *newFile) publish(req *aetherv1.WriteFile, acc account) error {
	fd := int(n.file.Fd())
	if n.uid >= 0 && os.Geteuid() == 0 {
		if err := unix.Fchown(fd, n.uid, n.gid); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, n.mode); err != nil {
		return err
	}
	var flags uint
	if req.Exclusive {
		flags = unix.RENAME_NOREPLACE
	}
	return asUser(acc, func() error {
		return unix.Renameat2(unix.AT_FDCWD, n.temp, unix.AT_FDCWD, n.target, flags)
	})
}
