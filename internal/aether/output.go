package aether

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dsec/internal/wire"
)

const (
	readSize = 32 << 10
	moveSize = 128 << 10 // of a stream that is busy, at once
	// A stream that has moved busyBytes gets a pipe of pipeSize: each side is woken a quarter as often. Not all do, since what a user
	// of the host may have in pipes is bounded.
	busyBytes = 1 << 20
	pipeSize  = 256 << 10
	// Past budget bytes of output in memory, a stream may hold only scarce bytes and asks the edge to acknowledge them:
	// thousands of commands with full windows would be hundreds of MiB.
	budget = 6 << 20
	scarce = 4 << 10
)

var readBuffers = sync.Pool{New: func() any { b := make([]byte, readSize); return &b }}

// An output is one of stdout and stderr of a command: the read end of its pipe, and what the edge has not acknowledged.
// Its command's lock guards it.
type output struct {
	c       *command
	channel uint8
	tty     bool // fd is the master of a terminal

	fd   int      // -1 once closed or owned by file
	file *os.File // polled; nil in a command's first moments
	wake chan struct{}

	base     uint64 // offset of buf[0]: everything before is acknowledged
	buf      wire.Queue
	sent     uint64 // to the connected edge
	closed   bool   // nothing more for the caller: end of file, or detached
	detached bool   // the command ended while others hold the pipe: count and drop what they write
	dropped  uint64
	// owed is what was in the pipe when the command ended, less what was read since: it is the command's own, however long
	// the edge takes to make room for it. late: the drain is over, the stream ends once nothing is owed.
	owed int
	late bool
	push bool // ask for an acknowledgement
	src  *wire.Source
}

func (o *output) total() uint64 { return o.base + uint64(o.buf.Len()) }

// room is how much may be read now.
func (o *output) room() int {
	limit := wire.Window
	if o.c.srv.buffered.Load() > budget {
		limit = scarce
	}
	return max(0, limit-o.buf.Len())
}

// readNow takes what is in the pipe without waiting. Nothing polls it yet.
func (o *output) readNow() {
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	for !o.closed {
		room := o.room()
		if room == 0 {
			return
		}
		n, err := unix.Read(o.fd, (*buf)[:min(room, readSize)])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return
		case err != nil || n == 0:
			o.closed = true
			unix.Close(o.fd)
			o.fd = -1
		default:
			o.append((*buf)[:n])
		}
	}
}

func (o *output) append(b []byte) {
	o.buf.Append(b)
	o.grew(len(b))
}

func (o *output) grew(n int) {
	o.c.srv.buffered.Add(int64(n))
	if o.c.quiet.timer != nil {
		o.c.quiet.last = time.Now()
	}
}

// control calls f with the descriptor, unless it is closed.
func (o *output) control(f func(fd int)) {
	switch {
	case o.file != nil:
		if rc, err := o.file.SyscallConn(); err == nil {
			_ = rc.Control(func(fd uintptr) { f(int(fd)) }) // fails if it was closed
		}
	case o.fd >= 0:
		f(o.fd)
	}
}

// poll hands the pipe to a goroutine that waits for it.
func (o *output) poll() {
	if o.closed || o.file != nil {
		return
	}
	o.file = os.NewFile(uintptr(o.fd), "output")
	o.fd = -1
	o.wake = make(chan struct{}, 1)
	o.c.srv.pump(o.file, o.pump)
}

// pump reads until the end of the pipe, also long after the command.
func (o *output) pump() {
	rc, err := o.file.SyscallConn()
	for err == nil {
		n := o.waitRoom()
		eof := false
		rerr := rc.Read(func(fd uintptr) bool {
			var again bool
			eof, again = o.readOnce(int(fd), n)
			return !again
		})
		if eof || rerr != nil {
			break
		}
	}
	_ = o.file.Close() // a pipe that was only read
	o.c.outputEnded(o)
}

// waitRoom waits until something may be read, and says how much.
func (o *output) waitRoom() int {
	for {
		o.c.mu.Lock()
		n, detached := o.room(), o.detached
		if n == 0 && !detached && o.buf.Len() < wire.Window {
			o.push = true
			o.ready()
		}
		sess := o.c.sess
		o.c.mu.Unlock()
		if detached {
			return readSize
		}
		if n > 0 {
			return min(n, moveSize)
		}
		sess.flush()
		<-o.wake
	}
}

func (o *output) readOnce(fd, limit int) (eof, again bool) {
	o.c.mu.Lock() // also over the read, so that owed is exact; it does not block
	var b []byte
	var used *[]byte
	if o.base >= busyBytes && !o.detached {
		b = o.buf.Space(limit)
	} else { // most streams are short
		used = readBuffers.Get().(*[]byte)
		defer readBuffers.Put(used)
		b = (*used)[:min(limit, readSize)]
	}
	n, err := unix.Read(fd, b)
	if err != nil || n == 0 {
		if o.buf.Len() == 0 {
			o.buf.Discard(0) // the room
		}
		again = errors.Is(err, unix.EAGAIN) && !(o.tty && o.late) // late, it is all that there was
		o.c.mu.Unlock()
		return !again && !errors.Is(err, unix.EINTR), again
	}
	if o.detached {
		o.dropped += uint64(n)
		o.c.mu.Unlock()
		return false, false
	}
	before := o.total()
	if used == nil {
		o.buf.Extend(n)
		o.grew(n)
	} else {
		o.append(b[:n])
	}
	if before < busyBytes && o.total() >= busyBytes {
		widenFD(fd)
	}
	o.owed -= n
	if o.late && o.owed <= 0 {
		o.detach()
	}
	o.c.finishAndUnlock()
	return false, false
}

// widen gives a pipe more room, if the kernel allows it.
func widen(f *os.File) {
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { widenFD(int(fd)) }) // fails only once it is closed
	}
}

func widenFD(fd int) { _, _ = unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, pipeSize) }

// owe notes what is in the pipe at the end of the command. Of a terminal the kernel tells only a part.
func (o *output) owe() {
	if o.closed {
		return
	}
	o.control(func(fd int) {
		if n, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err == nil {
			o.owed = n
		}
		if o.tty {
			o.owed = ptyHeld
		}
	})
}

// readRest takes what a terminal still has, and sees whether that is all: what was owed was only a bound.
func (o *output) readRest() {
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	o.control(func(fd int) {
		for o.owed > 0 && o.room() > 0 {
			n, err := unix.Read(fd, (*buf)[:min(o.room(), readSize)])
			switch {
			case errors.Is(err, unix.EINTR):
			case err != nil || n <= 0:
				o.owed = 0
			default:
				o.append((*buf)[:n])
				o.owed -= n
			}
		}
	})
}

// ready tells the connection that there is something to send.
func (o *output) ready() {
	if o.c.sess == nil {
		return
	}
	if o.src == nil {
		o.src = &wire.Source{Stream: o.c.stream, Channel: o.channel, Fill: o.fill(o.c.sess)}
	}
	o.c.sess.conn.Ready(o.src)
}

// fill gives data to the connection of one session.
func (o *output) fill(sess *session) func([]byte, int) ([]byte, uint64, wire.Flags, bool) {
	return func(b []byte, limit int) ([]byte, uint64, wire.Flags, bool) {
		o.c.mu.Lock()
		defer o.c.mu.Unlock()
		if o.c.sess != sess { // it was attached elsewhere meanwhile
			return b, 0, 0, false
		}
		offset := o.sent
		n := min(int(o.total()-offset), limit)
		o.sent += uint64(n)
		var flags wire.Flags
		if o.push || o.c.srv.buffered.Load() > budget {
			flags = wire.Push
			o.push = false
		}
		if n == 0 && o.buf.Len() == 0 {
			flags = 0
		}
		b = o.buf.AppendTo(b, int(offset-o.base), n)
		o.c.postExit()
		return b, offset, flags, o.sent < o.total()
	}
}

// ack forgets what the edge has kept.
func (o *output) ack(offset uint64) bool {
	if offset > o.sent {
		return false
	}
	if offset > o.base {
		n := offset - o.base
		o.base = offset
		o.buf.Discard(int(n))
		o.c.srv.buffered.Add(-int64(n))
		o.wakeUp()
	}
	return true
}

func (o *output) wakeUp() {
	if o.wake != nil {
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// drained ends the stream, or lets it end once what is owed has been read.
func (o *output) drained() {
	o.late = true
	if o.tty && !o.closed {
		o.readRest()
	}
	if o.owed <= 0 {
		o.detach()
	}
}

// detach ends the stream for the caller; the pipe stays open for those who write to it, as long as there are not too many.
// A terminal hangs up.
func (o *output) detach() {
	if o.closed {
		return
	}
	o.closed, o.detached = true, true
	o.wakeUp()
	switch {
	case o.file == nil:
	case o.tty:
		_ = o.file.Close() // also ends the pump's wait
	default:
		o.c.srv.hold(o.file)
	}
}

// forget drops everything that is kept.
func (o *output) forget() {
	o.c.srv.buffered.Add(-int64(o.buf.Len()))
	o.base += uint64(o.buf.Len())
	o.buf.Drop()
	o.sent = o.base
	o.detach()
}
