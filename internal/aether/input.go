package aether

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"dsec/internal/wire"
)

// An input is the write end of a command's stdin or of its script: bytes that came from the edge and are not yet in the
// pipe, at most wire.Window. Its command's lock guards it.
type input struct {
	c       *command
	channel uint8
	tty     bool // fd is the master of a terminal

	fd      int // -1 before the command is started, once closed, or owned by file
	file    *os.File
	wake    chan struct{}
	buf     wire.Queue
	written uint64 // in the pipe
	end     bool   // nothing follows buf
	broken  bool   // nobody reads any more
	closed  bool
	inner   bool // what it holds came with the request: the edge wants no acknowledgement

	last byte   // that was written
	eof  []byte // what tells a terminal of the end; nil before that is known
}

// data takes bytes from the edge. It reports false if the edge broke the rules.
func (in *input) data(offset uint64, b []byte, end bool) bool {
	next := in.written + uint64(in.buf.Len())
	if in.closed { // late data for an ended command is no fault
		in.ack()
		return true
	}
	if offset > next {
		return false
	}
	b = b[min(uint64(len(b)), next-offset):] // sent again after a reconnect
	if in.buf.Len()+len(b) > wire.Window || (in.end && len(b) > 0) {
		return false
	}
	in.buf.Append(b)
	in.end = in.end || end
	in.advance()
	return true
}

// advance writes what the pipe takes; once it takes no more, a goroutine does so from then on.
func (in *input) advance() {
	if in.file != nil {
		if len(in.pending()) == 0 { // an end alone: there is nothing that the pump would write before it looks
			in.settle(in.written)
			return
		}
		in.wakeUp()
		return
	}
	if in.fd < 0 {
		return
	}
	before := in.written
	for len(in.pending()) > 0 && !in.broken {
		n, err := unix.Write(in.fd, in.pending())
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			in.poll()
			return
		case err != nil:
			in.breakOff()
		default:
			in.wrote(n)
		}
	}
	in.settle(before)
}

// pending is what is to be written next: input, and behind it what tells a terminal that it has ended.
func (in *input) pending() []byte {
	if in.buf.Len() > 0 || !in.end || !in.tty {
		return in.buf.From(0)
	}
	if in.eof == nil {
		in.c.out[0].control(func(fd int) { in.eof = endOfInput(fd, in.last) })
	}
	return in.eof
}

func (in *input) wrote(n int) {
	if n <= 0 {
		return
	}
	if in.buf.Len() == 0 {
		in.eof = in.eof[n:]
		return
	}
	in.written += uint64(n)
	in.last = in.buf.From(0)[n-1]
	in.buf.Discard(n)
}

// settle acknowledges and closes, as far as it goes.
func (in *input) settle(before uint64) {
	if in.end && len(in.pending()) == 0 {
		in.close()
	}
	if in.broken || in.buf.Len() == 0 || in.written-before >= wire.Window/4 {
		in.ack()
	}
}

func (in *input) ack() {
	if in.c.sess != nil && !in.inner {
		_ = in.c.sess.conn.PostAck(in.c.stream, in.channel, in.written, in.broken) // fails only with the connection
	}
}

func (in *input) breakOff() {
	in.broken = true
	in.buf.Drop()
	in.close()
}

func (in *input) close() {
	if in.closed {
		return
	}
	in.closed = true
	if in.buf.Len() > 0 {
		in.broken = true
		in.buf.Drop()
	}
	switch {
	case in.file != nil:
		_ = in.file.Close() // also ends the pump's write
		in.wakeUp()
	case in.fd >= 0:
		unix.Close(in.fd)
	}
	in.fd = -1
}

func (in *input) wakeUp() {
	select {
	case in.wake <- struct{}{}:
	default:
	}
}

func (in *input) poll() {
	in.file = os.NewFile(uintptr(in.fd), "input")
	in.fd = -1
	in.wake = make(chan struct{}, 1)
	in.wakeUp()
	in.c.srv.pump(in.file, in.pump)
}

// pump writes as the command reads, until everything is written or the pipe broke.
func (in *input) pump() {
	c := in.c
	for range in.wake {
		for {
			c.mu.Lock()
			chunk, closed := in.pending(), in.closed
			c.mu.Unlock()
			if closed {
				return
			}
			if len(chunk) == 0 {
				break
			}
			// data may append to buf meanwhile, which leaves these bytes as they are.
			n, err := in.file.Write(chunk[:min(len(chunk), moveSize)])
			c.mu.Lock()
			before := in.written
			if before < busyBytes && before+uint64(n) >= busyBytes {
				widen(in.file)
			}
			if !in.closed {
				in.wrote(n)
				if err != nil {
					in.breakOff()
				}
				in.settle(before)
				if in.written/(wire.Window/4) != before/(wire.Window/4) {
					in.ack()
				}
			}
			sess := c.sess
			c.mu.Unlock()
			sess.flush()
		}
	}
}
