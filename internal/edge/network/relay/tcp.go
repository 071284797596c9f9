package relay

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"dsec/internal/edge/network/allow"
	"dsec/internal/linux"
)

const (
	dialTimeout = 10 * time.Second
	keepAlive   = 5 * time.Minute
)

// A connection is one of a sandbox to the outside.
type connection struct {
	to     netip.AddrPort
	inside *net.TCPConn
	cancel context.CancelFunc // of the dial
	ended  chan struct{}      // nothing waits any more
	once   sync.Once

	mu      sync.Mutex
	outside *net.TCPConn
	killed  bool
}

func (c *connection) destination() (netip.AddrPort, uint8) { return c.to, allow.TCP }

func (c *connection) kill() {
	c.cancel()
	c.once.Do(func() { close(c.ended) })
	c.mu.Lock()
	c.killed = true
	outside := c.outside
	c.mu.Unlock()
	reset(c.inside)
	if outside != nil {
		reset(outside)
	}
}

// reset closes a connection so that the other end sees that it is no orderly end.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// serve carries one connection to its end.
func (r *Relay) serve(ctx context.Context, inside *net.TCPConn) {
	from, okFrom := inside.RemoteAddr().(*net.TCPAddr)
	at, okAt := inside.LocalAddr().(*net.TCPAddr)
	if !okFrom || !okAt {
		reset(inside)
		return
	}
	b := r.awaitBox(unmap(from.AddrPort()).Addr())
	if b == nil {
		reset(inside)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c := &connection{to: unmap(at.AddrPort()), inside: inside, cancel: cancel, ended: make(chan struct{})}
	if !r.enter(b, c) {
		reset(inside)
		return
	}
	defer r.leave(b, c)
	if !c.dial(ctx) {
		if ctx.Err() != context.Canceled {
			b.refuse(c.to, allow.TCP, allow.Unreachable)
		}
		reset(inside)
		return
	}
	c.carry(b)
}

// dial connects to the outside, unless the connection is killed meanwhile.
func (c *connection) dial(ctx context.Context) bool {
	d := net.Dialer{KeepAlive: keepAlive}
	conn, err := d.DialContext(ctx, "tcp", c.to.String())
	if err != nil {
		return false
	}
	outside := conn.(*net.TCPConn)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed {
		reset(outside)
		return false
	}
	c.outside = outside
	// From here on the end of this process is a reset on both sides: half a download must not look like a whole one.
	_ = outside.SetLinger(0)
	_ = c.inside.SetLinger(0)
	return true
}

// carry moves bytes both ways until both directions have ended, or one is broken.
func (c *connection) carry(b *box) {
	_ = c.inside.SetKeepAlivePeriod(keepAlive)
	done := make(chan error, 1)
	go func() {
		err := c.move(c.outside, c.inside, &b.out)
		if err != nil { // the other direction must not wait for what never comes
			c.kill()
		}
		done <- err
	}()
	err := c.move(c.inside, c.outside, &b.in)
	if err != nil {
		c.kill()
	}
	if <-done == nil && err == nil {
		c.drain()
		for _, conn := range []*net.TCPConn{c.inside, c.outside} {
			_ = conn.SetLinger(-1) // what the other end has not yet got is still sent
			_ = conn.Close()
		}
	}
}

// drain waits until the sandbox has all that came for it, and ends what it does not read. What is closed before is in the kernel's memory
// still, for as long as the sandbox likes, and nobody counts it.
func (c *connection) drain() {
	last, since := 0, time.Now()
	for pause := drainLook; ; pause = min(2*pause, time.Second) {
		left, err := linux.Unsent(c.inside)
		if err != nil || left == 0 || !c.pause(pause) {
			return
		}
		if left != last {
			last, since = left, time.Now()
		}
		if time.Since(since) > keepAlive {
			c.kill()
			return
		}
	}
}

const drainLook = 5 * time.Millisecond

// pause waits, unless the connection ends.
func (c *connection) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-c.ended:
		return false
	}
}

// move copies until from's end, and then ends to's direction. Between sockets the kernel moves the bytes (splice).
func (c *connection) move(to, from *net.TCPConn, b *bucket) error {
	for {
		n, err := io.CopyN(to, from, b.share())
		if wait := b.pay(n, time.Now()); wait > 0 && !c.pause(wait) {
			return net.ErrClosed
		}
		switch err {
		case nil:
		case io.EOF:
			return to.CloseWrite()
		default:
			return err
		}
	}
}
