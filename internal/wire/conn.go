package wire

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
)

const (
	// MaxQueued is how many bytes of control may wait for a peer that does not read.
	MaxQueued = 4 << 20
	// batch is how much is handed to the kernel in one write: small enough that control is never far behind data.
	batch = 64 << 10
	// keepCap is the largest queue buffer kept for reuse.
	keepCap = 64 << 10
)

// Errors of a connection that ended on this side.
var (
	ErrClosed = errors.New("connection closed")
	ErrSlow   = errors.New("peer does not read")
)

// A Source has data to send on one channel of one stream. It belongs to one Conn.
type Source struct {
	Stream  uint32
	Channel uint8
	// Fill appends at most max bytes to b and returns the offset of the first, flags, and whether it has more right now.
	// Appending nothing without flags sends no frame. It is called by one goroutine at a time, which holds no lock of the
	// Conn: it may call Post.
	Fill func(b []byte, max int) (out []byte, offset uint64, flags Flags, more bool)

	queued bool // guarded by Conn.mu
}

// Options of a Conn.
type Options struct {
	MaxMessage int           // longest message taken, in bytes; 0 = MaxControl
	Timeout    time.Duration // longest time that one write may wait for the peer; 0 = for ever
	// Contain makes a panic of the Handler or of a Source the connection's end, as a violation: for who serves thousands of
	// hostile peers, and must not fall with a mistake that one of them found.
	Contain bool
}

// A Conn sends and receives frames on a net.Conn, which it owns.
type Conn struct {
	nc      net.Conn
	raw     syscall.RawConn // nil if the connection has no descriptor
	reader  *reader
	timeout time.Duration
	contain bool

	done    chan struct{}
	writers sync.WaitGroup // the goroutine that writes what the kernel did not take

	mu      sync.Mutex
	control []byte    // encoded frames, before all data
	sources []*Source // in turn
	writing bool      // someone is in write
	err     error     // why it ended; set once, before done is closed
	room    chan struct{}
}

// NewConn makes a Conn. Serve must be called for it to receive.
func NewConn(nc net.Conn, o Options) *Conn {
	if o.MaxMessage == 0 {
		o.MaxMessage = MaxControl
	}
	c := &Conn{nc: nc, reader: newReader(nc, o.MaxMessage), timeout: o.Timeout, contain: o.Contain, done: make(chan struct{})}
	if sc, ok := nc.(syscall.Conn); ok {
		c.raw, _ = sc.SyscallConn()
	}
	return c
}

// SetMaxMessage changes the longest message taken. Call it from a Handler, or before Serve.
func (c *Conn) SetMaxMessage(n int) { c.reader.maxMessage = n }

// SetReadDeadline bounds Serve's wait for the next frame.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.nc.SetReadDeadline(t) }

// Serve reads frames until the connection ends and says why: io.EOF if the peer closed it. It flushes what handlers
// posted each time it has read all that had arrived.
func (c *Conn) Serve(h Handler) error {
	c.fail(c.read(h))
	c.writers.Wait()
	return c.Err()
}

func (c *Conn) read(h Handler) (err error) {
	defer c.contained()
	for err == nil {
		if c.reader.idle() {
			c.Flush()
		}
		err = c.reader.next(h)
	}
	return err
}

// contained is deferred where code of the Handler or of a Source runs. See Options.Contain.
func (c *Conn) contained() {
	if !c.contain {
		return
	}
	if p := recover(); p != nil {
		c.fail(violation("handling it panicked: %v\n%s", p, debug.Stack()))
	}
}

// Post queues a message. It is sent by the next Flush, which Serve makes after each batch of frames.
func (c *Conn) Post(t Type, stream uint32, payload []byte) error {
	return c.post(func(b []byte) []byte { return appendMessage(b, t, stream, payload) })
}

// PostAck queues an acknowledgement: everything below offset has been kept; with broken, nothing more is taken.
func (c *Conn) PostAck(stream uint32, channel uint8, offset uint64, broken bool) error {
	return c.post(func(b []byte) []byte { return appendAck(b, stream, channel, offset, broken) })
}

func (c *Conn) post(add func([]byte) []byte) error {
	c.mu.Lock()
	if c.err != nil {
		err := c.err
		c.mu.Unlock()
		return err
	}
	// A queue may hold one message beyond the limit: a script is longer than it.
	tooMuch := len(c.control) > MaxQueued
	if !tooMuch {
		c.control = add(c.control)
	}
	c.mu.Unlock()
	if tooMuch {
		c.fail(ErrSlow)
		return ErrSlow
	}
	return nil
}

// Send waits until the queue is short, posts and flushes.
func (c *Conn) Send(ctx context.Context, t Type, stream uint32, payload []byte) error {
	if err := c.waitRoom(ctx); err != nil {
		return err
	}
	if err := c.Post(t, stream, payload); err != nil {
		return err
	}
	c.Flush()
	return nil
}

func (c *Conn) waitRoom(ctx context.Context) error {
	for {
		c.mu.Lock()
		if c.err != nil || len(c.control) < MaxQueued/4 {
			err := c.err
			c.mu.Unlock()
			return err
		}
		if c.room == nil {
			c.room = make(chan struct{})
		}
		room := c.room
		c.mu.Unlock()
		select {
		case <-room:
		case <-c.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Ready says that s has data. It is asked in its turn; calling Ready again before that changes nothing.
func (c *Conn) Ready(s *Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil && !s.queued {
		s.queued = true
		c.sources = append(c.sources, s)
	}
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err is why the connection ended, or nil.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection. What is queued may be lost. It does not wait for Serve.
func (c *Conn) Close() error {
	c.fail(ErrClosed)
	return nil
}

// Fail ends the connection for a reason that Serve returns.
func (c *Conn) Fail(err error) { c.fail(err) }

func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	if err == nil {
		err = io.EOF
	}
	c.err = err
	c.control, c.sources = nil, nil
	close(c.done)
	c.mu.Unlock()
	_ = c.nc.Close() // the reason is err; ends Serve's read and the writer's write
}
