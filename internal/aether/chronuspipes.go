package aether

import (
	"bytes"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

// idleKept is how much of what background jobs write to a stream while no command runs is kept for the next one.
const idleKept = 16 << 10

// maxPipe is how much a pipe may hold in a sandbox, whose root lacks CAP_SYS_RESOURCE.
const maxPipe = 1 << 20

// shellPipes are the descriptors of a session's shell, and our ends of them. -1 is closed.
type shellPipes struct {
	ours   [3]int // stdout, stderr, statuses; non-blocking
	theirs [3]int
	tell   int // our end of lines; non-blocking
	lines  int
	script int  // read end; the shell has another of the same
	stdin  int  // a file in memory; the same
	null   int  // the shell's stdin
	sink   int  // where the shell's own messages go
	owned  bool // null is to be closed
	filled bool // stdin has something in it
}

// openShellPipes makes them. null is the null device, or -1.
func openShellPipes(null int, acc account) (*shellPipes, error) {
	p := &shellPipes{ours: [3]int{-1, -1, -1}, theirs: [3]int{-1, -1, -1}, tell: -1, lines: -1, script: -1, stdin: -1, null: null, sink: null}
	if err := p.open(acc); err != nil {
		p.closeTheirs()
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *shellPipes) open(acc account) error {
	own := func(fd int) error {
		if acc.sameRights() {
			return nil
		}
		return unix.Fchown(fd, int(acc.uid), int(acc.gid))
	}
	var fds [2]int
	pipe := func() error { return unix.Pipe2(fds[:], unix.O_CLOEXEC) }
	for i := range p.ours {
		if err := pipe(); err != nil {
			return err
		}
		p.ours[i], p.theirs[i] = fds[0], fds[1]
		if err := errors.Join(unix.SetNonblock(fds[0], true), own(fds[1])); err != nil {
			return err
		}
	}
	if err := pipe(); err != nil {
		return err
	}
	p.lines, p.tell = fds[0], fds[1]
	if err := errors.Join(unix.SetNonblock(p.tell, true), own(p.lines)); err != nil {
		return err
	}
	if err := pipe(); err != nil {
		return err
	}
	p.script = fds[0]
	unix.Close(fds[1]) // opened again for each script
	if err := errors.Join(unix.SetNonblock(p.script, true), own(p.script)); err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("stdin", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	p.stdin = fd
	if err := own(fd); err != nil {
		return err
	}
	if p.null < 0 { // an image without /dev/null: what is read from a pipe that nobody writes ends at once, too
		if err := pipe(); err != nil {
			return err
		}
		unix.Close(fds[1])
		p.null, p.sink, p.owned = fds[0], p.stdin, true
	}
	return nil
}

func closeAll(fds ...*int) {
	for _, fd := range fds {
		if *fd >= 0 {
			unix.Close(*fd)
		}
		*fd = -1
	}
}

// closeTheirs closes what only the shell needs.
func (p *shellPipes) closeTheirs() {
	closeAll(&p.theirs[0], &p.theirs[1], &p.theirs[2], &p.lines)
	if p.owned {
		closeAll(&p.null)
		p.owned = false
	}
}

// close closes what is left, but for what the pumps own.
func (p *shellPipes) close() {
	closeAll(&p.ours[0], &p.ours[1], &p.ours[2], &p.tell, &p.script, &p.stdin)
}

// openScript is a new write end of the pipe of scripts. What an earlier script left there is dropped: a shell may end a script
// without having read all of it.
func (p *shellPipes) openScript() (int, error) {
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	for tries := 0; ; tries++ {
		if n, err := unix.Read(p.script, *buf); n <= 0 && !errors.Is(err, unix.EINTR) {
			break
		}
		if tries > maxPipe/readSize { // somebody inside writes there, and need never stop
			return -1, failf(aetherv1.Code_CODE_RESOURCES, "something in the sandbox writes into the pipe of the session's scripts; delete the session and create it anew")
		}
	}
	return unix.Open(refPath(p.script), unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}

// clearStdin drops it.
func (p *shellPipes) clearStdin() error {
	if !p.filled {
		return nil
	}
	p.filled = false
	return unix.Ftruncate(p.stdin, 0)
}

// setStdin makes b the input of the next command that has one.
func (p *shellPipes) setStdin(b []byte) error {
	p.filled = true
	for at := 0; at < len(b); {
		n, err := unix.Pwrite(p.stdin, b[at:], int64(at))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		at += max(n, 0)
	}
	return nil
}

// An outlet is our end of one of the shell's output pipes. What it reads belongs to the command that runs. Its session's lock
// guards it.
type outlet struct {
	x    *chronus
	n    int // 0 = stdout
	fd   int // file's; -1 once closed
	file *os.File
	wake chan struct{}
	idle []byte // what came while no command ran, of which cut bytes are missing
	cut  bool
	owed int // what was in the pipe when the running command ended, and was not read yet
}

func newOutlet(x *chronus, n, fd int) *outlet {
	return &outlet{x: x, n: n, fd: fd, file: os.NewFile(uintptr(fd), "output"), wake: make(chan struct{}, 1)}
}

func (o *outlet) wakeUp() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// pump reads until the end of the pipe, also long after the session.
func (o *outlet) pump() {
	rc, err := o.file.SyscallConn()
	for err == nil && o.wait() {
		err = rc.Read(func(uintptr) bool {
			o.x.mu.Lock()
			defer o.x.mu.Unlock()
			return o.readOnce(readSize) != unix.EAGAIN
		})
	}
	_ = o.file.Close() // a pipe that was only read
	o.x.mu.Lock()
	o.end()
	o.x.mu.Unlock()
}

// end says that nothing more is read. The pump, which may wait for the lock, closes the file. x.mu is held.
func (o *outlet) end() {
	o.fd, o.owed = -1, 0
	o.x.settleUp()
}

// wait returns when something may be read, or false at the end of the pipe.
func (o *outlet) wait() bool {
	for {
		o.x.mu.Lock()
		open, may := o.fd >= 0, o.room() > 0
		c := o.x.running
		o.x.mu.Unlock()
		if !open || may {
			return open
		}
		if c != nil {
			c.flush()
		}
		<-o.wake
	}
}

// room is how much may be read now. A command that has just begun is left alone: see settleTime. x.mu is held.
func (o *outlet) room() int {
	c := o.x.running
	switch {
	case o.fd < 0:
		return 0
	case c == nil:
		return readSize
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.settled && !o.x.over {
		return 0
	}
	out := &c.out[o.n]
	n := out.room()
	if n == 0 && out.buf.Len() < wire.Window {
		out.push = true
		out.ready()
	}
	if o.x.over {
		n = min(n, o.owed)
	}
	return n
}

// readOnce reads at most limit bytes for whom they belong to. x.mu is held. It returns EAGAIN if there is nothing.
func (o *outlet) readOnce(limit int) error {
	limit = min(limit, o.room(), readSize)
	if limit <= 0 {
		return nil
	}
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	n, err := unix.Read(o.fd, (*buf)[:limit])
	switch {
	case errors.Is(err, unix.EAGAIN):
		return unix.EAGAIN
	case errors.Is(err, unix.EINTR):
		return nil
	case err != nil || n == 0:
		o.end()
		return nil
	}
	o.take((*buf)[:n])
	return nil
}

func (o *outlet) take(b []byte) {
	c := o.x.running
	if c == nil {
		if !o.x.ended {
			o.keep(b)
		}
		return
	}
	c.mu.Lock()
	c.out[o.n].append(b)
	c.out[o.n].ready()
	sess := c.sess
	c.mu.Unlock()
	if o.x.over {
		o.owed -= len(b)
		o.x.settleUp()
		return
	}
	sess.flush()
}

// keep stores output for the next command; the oldest goes first, and by whole lines.
func (o *outlet) keep(b []byte) {
	o.idle = append(o.idle, b...)
	if over := len(o.idle) - idleKept; over > 0 {
		o.cut = true
		o.idle = append(o.idle[:0], o.idle[over:]...)
	}
}

// give hands what was kept to the command that begins. c.mu is held.
func (o *outlet) give(c *command) {
	if len(o.idle) == 0 {
		return
	}
	if at := bytes.IndexByte(o.idle, '\n'); o.cut && at >= 0 {
		o.idle = o.idle[at+1:]
	}
	c.out[o.n].append(o.idle)
	o.idle, o.cut = nil, false
}

// owe notes what is in the pipe. x.mu is held.
func (o *outlet) owe() {
	o.owed = 0
	if o.fd < 0 {
		return
	}
	if n, err := unix.IoctlGetInt(o.fd, unix.TIOCINQ); err == nil {
		o.owed = n
	}
}
