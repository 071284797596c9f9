package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

const maxHost = 253

// maxDials bounds the connections to one sandbox's ports, those that linger included. An honest aether takes fewer.
const maxDials = 2048

// A Conn is a TCP connection to a port inside. Its directions end by themselves: what a Read returns as io.EOF is the port's
// FIN, and CloseWrite is ours. Reset before Close tells the port that it was cut. It does not end with the context that it was
// dialled with.
type Conn struct {
	*ByteStream
	remote address
	closed func()
	once   sync.Once

	wroteEnd, readEnd, cut atomic.Bool
}

type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

// dialWindow is how much of what a port sends may wait in the edge, for the n-th connection at once to one sandbox.
func dialWindow(n int64) uint32 {
	switch {
	case n <= 16:
		return wire.Window
	case n <= 128:
		return 64 << 10
	}
	return 16 << 10
}

// Dial connects to a TCP port inside: on the loopback, or of host where that is given. ctx bounds the connecting, as timeout
// does.
func (c *Client) Dial(ctx context.Context, host string, port int, timeout time.Duration) (*Conn, error) {
	if len(host) > maxHost {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_host", "a host's name of %d bytes; at most %d", len(host), maxHost)
	}
	n := c.dials.Add(1)
	ended := func() { c.dials.Add(-1) }
	if n > maxDials {
		ended()
		return nil, sandbox.Errorf(sandbox.ResourceExhausted, "too_many_connections", "%d connections to ports of this sandbox; close some", maxDials)
	}
	life, stop := context.WithCancelCause(context.Background())
	unhook := context.AfterFunc(ctx, func() { stop(context.Cause(ctx)) })
	req := &aetherv1.Dial{Host: host, Port: uint32(port), TimeoutMs: uint64(timeout.Milliseconds())}
	s, err := c.openExplained(life, &aetherv1.Open{Open: &aetherv1.Open_Dial{Dial: req}, Window: dialWindow(n)}, explainDial, timeout+requestTimeout)
	if err == nil && !unhook() {
		_ = s.Close()
		err = sandbox.AsError(context.Cause(ctx))
	}
	if err != nil {
		unhook()
		ended()
		return nil, err
	}
	return &Conn{ByteStream: s, remote: address(net.JoinHostPort(host, strconv.Itoa(port))), closed: ended}, nil
}

var dialErrors = map[syscall.Errno]struct {
	class  sandbox.Class
	reason string
}{
	syscall.ECONNREFUSED: {sandbox.FailedPrecondition, "port_refused"},
	syscall.ETIMEDOUT:    {sandbox.DeadlineExceeded, "port_timeout"},
	syscall.EHOSTUNREACH: {sandbox.FailedPrecondition, "host_unreachable"},
	syscall.ENETUNREACH:  {sandbox.FailedPrecondition, "host_unreachable"},
	syscall.EACCES:       {sandbox.FailedPrecondition, "host_unreachable"},
	syscall.ECONNRESET:   {sandbox.Unavailable, "connection_reset"},
	syscall.EPIPE:        {sandbox.Unavailable, "connection_reset"},
}

// explainDial makes an Error of what aether says of a connection.
func explainDial(m *aetherv1.Error) *sandbox.Error {
	e := fromAether(m, "host_not_found")
	if known, ok := dialErrors[syscall.Errno(m.Errno)]; ok {
		e.Class, e.Reason = known.class, known.reason
	} else if m.Code == aetherv1.Code_CODE_RESOURCES {
		e.Reason = "too_many_connections"
	}
	return e
}

// Read returns io.EOF once the port has ended its direction.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Duplex.Read(p)
	if errors.Is(err, io.EOF) {
		c.readEnd.Store(true)
	}
	return n, err
}

// WriteTo likewise.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	n, err := c.Duplex.WriteTo(w)
	c.readEnd.Store(err == nil)
	return n, err
}

// CloseWrite sends our FIN after all that was written.
func (c *Conn) CloseWrite() error {
	err := c.Duplex.CloseWrite()
	c.wroteEnd.Store(err == nil)
	return err
}

// Write tells of a port that takes no more as the kernel does.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.Duplex.Write(p)
	if errors.Is(err, wire.ErrBroken) {
		err = sandbox.Errorf(sandbox.Unavailable, "connection_reset", "the port takes no more").WithCause(err)
	}
	return n, err
}

// Reset makes Close tell the port that the connection was cut.
func (c *Conn) Reset() {
	c.cut.Store(true)
	_ = c.CloseRead() // an error is the connection's
}

// lingerTime is how long the port may take to read what was sent before both directions ended.
const lingerTime = time.Minute

// Close ends the connection as close(2) does: after both directions have ended, what was sent still arrives.
func (c *Conn) Close() (err error) {
	c.once.Do(func() {
		if c.cut.Load() || !c.wroteEnd.Load() || !c.readEnd.Load() {
			err = c.finish()
			return
		}
		go func() { // ends with the connection to aether, too
			t := time.NewTimer(lingerTime)
			defer t.Stop()
			select {
			case <-c.done:
			case <-t.C:
			}
			_ = c.finish() // nothing is left to tell
		}()
	})
	return err
}

func (c *Conn) finish() error {
	defer c.closed()
	return c.ByteStream.Close()
}

// LocalAddr is nothing that could be dialled.
func (c *Conn) LocalAddr() net.Addr { return address("edge") }

// RemoteAddr names the port.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline bounds reads and writes.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

var _ net.Conn = (*Conn)(nil)
