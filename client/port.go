package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// A Port is a TCP port on the sandbox's loopback.
type Port struct {
	Number int
	sb     *Sandbox
}

// Port is the port of that number. Nothing is asked of the platform.
func (s *Sandbox) Port(number int) *Port { return &Port{number, s} }

// Conn is a connection to a port inside. One that broke does not end: its Read fails with io.ErrUnexpectedEOF.
type Conn interface {
	net.Conn
	// CloseWrite tells the other side that no more comes.
	CloseWrite() error
}

// Dial connects. It is tried again while the platform is away; what the port refuses is an error at once.
func (p *Port) Dial(ctx context.Context) (Conn, error) {
	return call(ctx, p.sb.c, p.dialOnce)
}

func (p *Port) dialOnce(ctx context.Context) (Conn, error) {
	c := p.sb.c
	var mu sync.Mutex
	var under net.Conn
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		mu.Lock()
		defer mu.Unlock()
		under = i.Conn
	}})
	r, err := http.NewRequestWithContext(traced, http.MethodGet, c.base+sandboxPath(p.sb.ID)+"/ports/"+strconv.Itoa(p.Number)+"/tcp", nil)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", ports.UpgradeFrames)
	res, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		if res.StatusCode >= 200 && res.StatusCode < 300 {
			res.Body.Close()
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_upgrade", "something between here and the platform at %s does not pass the Upgrade header on", c.o.URL)
		}
		return nil, c.responseError(res)
	}
	stream, ok := res.Body.(io.ReadWriteCloser)
	mu.Lock()
	defer mu.Unlock()
	if !ok || under == nil {
		res.Body.Close()
		return nil, errors.New("the HTTP client gives no connection for an upgrade") // net/http promises it
	}
	conn := &portConn{Conn: under, stream: &rawStream{stream, under}, remote: portAddr{p.sb.ID, p.Number}}
	if res.Header.Get("Upgrade") == ports.UpgradeFrames {
		conn.stream = ports.NewFrames(stream)
	}
	return conn, nil
}

// A rawStream ends a direction by ending that of the connection.
type rawStream struct {
	io.ReadWriteCloser
	under net.Conn
}

func (s *rawStream) CloseWrite() error {
	half, ok := s.under.(interface{ CloseWrite() error })
	if !ok {
		return fmt.Errorf("closing one direction: %w", errors.ErrUnsupported)
	}
	return half.CloseWrite()
}

// A portConn has the deadlines of the connection to the platform. What it carries tells an end from a cut, if the platform can.
type portConn struct {
	net.Conn
	stream ports.Stream
	remote portAddr
}

func (c *portConn) Read(p []byte) (int, error)  { return c.stream.Read(p) }
func (c *portConn) Write(p []byte) (int, error) { return c.stream.Write(p) }
func (c *portConn) Close() error                { return c.stream.Close() }
func (c *portConn) RemoteAddr() net.Addr        { return c.remote }

func (c *portConn) CloseWrite() error { return c.stream.CloseWrite() }

// A portAddr is a port in a sandbox.
type portAddr struct {
	sandboxID string
	port      int
}

func (a portAddr) Network() string { return "tcp" }
func (a portAddr) String() string  { return a.sandboxID + ":" + strconv.Itoa(a.port) }

// URL makes a URL by which a browser reaches the port without a key, until it expires; 0 = 1 h.
func (p *Port) URL(ctx context.Context, expires time.Duration) (*dsecv1.CreatePortURLResponse, error) {
	req := &dsecv1.CreatePortURLRequest{SandboxId: p.sb.ID, Port: int32(p.Number), ExpiresSeconds: int64(expires.Seconds())}
	return invoke(ctx, p.sb.c, p.sb.c.sandboxes.CreatePortURL, req)
}

// Transport speaks HTTP to the port, whatever host a request's URL names. It keeps connections: CloseIdleConnections lets go
// of them.
func (p *Port) Transport() *http.Transport {
	return plainTransport(func(ctx context.Context, _, _ string) (net.Conn, error) { return p.Dial(ctx) })
}

// HTTP speaks HTTP to what listens on the sandbox's loopback: a URL's host must be localhost, 127.0.0.1 or ::1, and its port is
// the one inside.
func (s *Sandbox) HTTP() *http.Transport {
	return plainTransport(func(ctx context.Context, _, addr string) (net.Conn, error) {
		host, text, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		number, err := strconv.ParseUint(text, 10, 16)
		if err != nil || number == 0 {
			return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_port", "%q is no port", clip(text))
		}
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_host", "the host must be localhost, which is the sandbox, and not %q", clip(host))
		}
		return s.Port(int(number)).Dial(ctx)
	})
}

// plainTransport is one whose connections are made by dial, and by no proxy.
func plainTransport(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext:         dial,
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true,
	}
}
