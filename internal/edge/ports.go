package edge

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/internal/inflight"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// Requests to servers inside a sandbox. What answers there is hostile: its heads are bounded, and what is the platform's in
// them is removed.

const (
	dialTimeout = 10 * time.Second
	// continueWait is how long a body that waits for leave is held back. The apiserver's own wait is longer.
	continueWait = time.Second
	tlsTimeout   = 10 * time.Second
	// Connections that are kept for the next request: each costs aether a little.
	keptConns        = 8
	keptConnsPerPort = 4
	keptConnTime     = 20 * time.Second
	// maxInformational bounds the 1xx answers before an answer: they are passed on, and there is no end to them.
	maxInformational = 32

	// loopbackHost stands for the sandbox's loopback, which is not looked up.
	loopbackHost = "loopback.dsec.invalid"
)

// inward is how an instance's servers are spoken HTTP to. Connections are kept by instance: what another one listens on is
// never reached through a connection of this.
type inward struct {
	mu    sync.Mutex
	plain *http.Transport // with verified TLS
	trust *http.Transport // with TLS that is not verified
}

// transport gives the instance's, making it when it is first needed.
func (e *Edge) transport(in *instance, unverified bool) *http.Transport {
	in.inward.mu.Lock()
	defer in.inward.mu.Unlock()
	p := &in.inward.plain
	if unverified {
		p = &in.inward.trust
	}
	if *p == nil {
		*p = &http.Transport{
			DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
				host, port, err := net.SplitHostPort(addr)
				if err != nil {
					return nil, err
				}
				n := ports.ParsePort(port)
				if n == 0 {
					return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_port", "port %q is not 1 to 65535", clip(port))
				}
				if host == loopbackHost {
					host = ""
				}
				return e.dialInside(ctx, in, host, n)
			},
			TLSClientConfig:        &tls.Config{InsecureSkipVerify: unverified, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    tlsTimeout,
			DisableCompression:     true,
			MaxIdleConns:           keptConns,
			MaxIdleConnsPerHost:    keptConnsPerPort,
			IdleConnTimeout:        keptConnTime,
			MaxResponseHeaderBytes: ports.MaxHead,
			ExpectContinueTimeout:  continueWait,
			WriteBufferSize:        32 << 10,
			ReadBufferSize:         32 << 10,
		}
	}
	return *p
}

// closeInward lets kept connections go: the instance has ended, and no new ones can be made.
func (in *instance) closeInward() {
	in.inward.mu.Lock()
	defer in.inward.mu.Unlock()
	for _, t := range []*http.Transport{in.inward.plain, in.inward.trust} {
		if t != nil {
			t.CloseIdleConnections()
		}
	}
}

// A GuestConn is a TCP connection to a port inside, with half-close. Reset makes Close tell the port that it was cut.
type GuestConn interface {
	net.Conn
	CloseWrite() error
	Reset()
}

// dialInside connects to a port of a ready sandbox. Bytes over the connection are activity; the connection itself is none.
func (e *Edge) dialInside(ctx context.Context, in *instance, host string, port int) (GuestConn, error) {
	g, err := in.live()
	if err != nil {
		return nil, err
	}
	c, err := g.Dial(ctx, host, port, dialTimeout)
	if err != nil {
		return nil, err
	}
	return &activeConn{GuestConn: c, touch: func() { e.touch(in) }}, nil
}

// An activeConn keeps its sandbox from being idle while bytes flow.
type activeConn struct {
	GuestConn
	touch func()
}

func (c *activeConn) Read(p []byte) (int, error) {
	n, err := c.GuestConn.Read(p)
	if n > 0 {
		c.touch()
	}
	return n, err
}

func (c *activeConn) Write(p []byte) (int, error) {
	n, err := c.GuestConn.Write(p)
	if n > 0 {
		c.touch()
	}
	return n, err
}

// servePort is the handler of what ports.Parse knows.
func (e *Edge) servePort(w http.ResponseWriter, r *http.Request, rt ports.Route) {
	g, err := e.authorize(r.Header.Get(grant.Header), grant.RoleUser)
	if err != nil {
		writeError(w, err)
		return
	}
	in, err := e.index.lookup(sandbox.ID(rt.Sandbox), g.Project)
	if err != nil {
		writeError(w, about(sandbox.ID(rt.Sandbox), err))
		return
	}
	if _, err := in.live(); err != nil {
		writeError(w, about(sandbox.ID(rt.Sandbox), err))
		return
	}
	place, err := e.under.Enter(g.Project, inflight.Stream)
	if err != nil {
		writeError(w, err)
		return
	}
	defer place.Leave()
	e.touch(in)
	if rt.Kind == ports.TCP {
		e.serveTCP(w, r, in, rt.Port)
		return
	}
	c := inwardCall{url: &url.URL{Scheme: "http", Host: net.JoinHostPort(loopbackHost, strconv.Itoa(rt.Port)), RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery}}
	if rt.Kind == ports.HTTP {
		c.host = r.Header.Get(ports.Host)
		err = ports.SetPath(c.url, rt.Path)
		c.transport = e.transport(in, false)
	} else {
		var unverified bool
		if c.url, unverified, err = fetchURL(r.URL.Query()); err == nil {
			c.transport = e.transport(in, unverified)
		}
	}
	if err != nil {
		writeError(w, about(sandbox.ID(rt.Sandbox), err))
		return
	}
	_ = http.NewResponseController(w).EnableFullDuplex() // it can
	ctx := httptrace.WithClientTrace(context.WithValue(r.Context(), inwardKey{}, c), c.trace())
	inwardProxy.ServeHTTP(finalAnswer{w}, r.WithContext(ctx))
}

// fetchURL is what a request from the sandbox's position is for.
func fetchURL(q url.Values) (u *url.URL, unverified bool, err error) {
	bad := func(format string, args ...any) (*url.URL, bool, error) {
		return nil, false, sandbox.Errorf(sandbox.InvalidArgument, "invalid_url", format, args...)
	}
	raw := q.Get("url")
	u, perr := url.Parse(raw)
	switch {
	case perr != nil || len(raw) > 16<<10:
		return bad("%q is not a URL", clip(raw))
	case u.Scheme != "http" && u.Scheme != "https":
		return bad("the URL %q begins neither with http:// nor with https://", clip(raw))
	case u.Hostname() == "" || u.User != nil:
		return bad("the URL %q must name a host, and no user", clip(raw))
	case u.Port() != "" && ports.ParsePort(u.Port()) == 0:
		return bad("%q is not a port", clip(u.Port()))
	}
	u.Fragment, u.RawFragment = "", ""
	switch q.Get("verify") {
	case "", "1":
	case "0":
		unverified = true
	default:
		return bad("verify is 0 or 1")
	}
	return u, unverified, nil
}

// An inwardCall is one request on its way to a server inside.
type inwardCall struct {
	url       *url.URL
	host      string
	transport *http.Transport
}

type inwardKey struct{}

func (inwardCall) trace() *httptrace.ClientTrace {
	n := 0
	return &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
		if n++; n > maxInformational {
			return errors.New("too many informational answers")
		}
		return nil
	}}
}

// finalAnswer passes no informational answer on but the leave to send a body: their heads would go out unseen.
type finalAnswer struct{ http.ResponseWriter }

func (f finalAnswer) WriteHeader(code int) {
	if code >= 100 && code < 200 && code != http.StatusSwitchingProtocols {
		clear(f.Header())
		if code != http.StatusContinue {
			return
		}
	}
	f.ResponseWriter.WriteHeader(code)
}

// Unwrap is for http.ResponseController.
func (f finalAnswer) Unwrap() http.ResponseWriter { return f.ResponseWriter }

// byCall is the transport of the request's own instance.
type byCall struct{}

func (byCall) RoundTrip(r *http.Request) (*http.Response, error) {
	return r.Context().Value(inwardKey{}).(inwardCall).transport.RoundTrip(r)
}

var inwardProxy = &httputil.ReverseProxy{
	Rewrite: func(r *httputil.ProxyRequest) {
		c := r.In.Context().Value(inwardKey{}).(inwardCall)
		r.Out.URL, r.Out.Host = c.url, c.host
		r.Out.Trailer = r.In.Trailer              // the same map: it is filled when the body has been read
		ports.ToInside(r.Out.Header, r.In.Header) // the apiserver's word
	},
	Transport:      byCall{},
	FlushInterval:  -1,
	BufferPool:     ports.Buffers{},
	ErrorLog:       log.New(io.Discard, "", 0),
	ModifyResponse: fromInside,
	ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
		se := portError(r.Context(), err)
		writeErrorStatus(w, portStatus(se), se)
	},
}

// fromInside sees to it that an answer is one, and that nothing in it looks as the platform's.
func fromInside(r *http.Response) error {
	if r.StatusCode < 100 || r.StatusCode > 999 { // net/http panics when it has to send such a one
		return fmt.Errorf("status %d", r.StatusCode)
	}
	ports.DropReserved(r.Header)
	if r.StatusCode != http.StatusSwitchingProtocols { // else the body is written to as well
		ports.DropReserved(r.Trailer)
		r.Body = &innerBody{r.Body, r}
	}
	return nil
}

// An innerBody cleans the trailers, which are known at its end.
type innerBody struct {
	io.ReadCloser
	r *http.Response
}

func (b *innerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		ports.DropReserved(b.r.Trailer)
	}
	return n, err
}

// portError is what a caller is told of a request that a server inside did not answer.
func portError(ctx context.Context, err error) *sandbox.Error {
	var known *sandbox.Error
	switch {
	case errors.As(err, &known):
		return known
	case ctx.Err() != nil:
		return sandbox.AsError(ctx.Err())
	}
	return sandbox.Errorf(sandbox.Unavailable, "port_bad_response", "what listens there gave no valid HTTP answer: %s", clip(strings.ToValidUTF8(err.Error(), "\uFFFD"))).WithCause(err)
}

// portStatus is the class's, but for what HTTP has words of a gateway for.
func portStatus(se *sandbox.Error) int {
	switch se.Reason {
	case "port_refused", "port_bad_response", "host_unreachable", "host_not_found", "connection_reset":
		return http.StatusBadGateway
	case "port_timeout":
		return http.StatusGatewayTimeout
	}
	return grpcerr.HTTPStatus(se.Class)
}

// serveTCP changes the protocol to the bytes of a connection, in frames.
func (e *Edge) serveTCP(w http.ResponseWriter, r *http.Request, in *instance, port int) {
	if ports.Upgrade(r.Header) != ports.UpgradeFrames {
		writeErrorStatus(w, http.StatusUpgradeRequired, sandbox.Errorf(sandbox.InvalidArgument, "upgrade_required", "this route changes to the protocol %s", ports.UpgradeFrames))
		return
	}
	inside, err := e.dialInside(r.Context(), in, "", port)
	if err != nil {
		se := sandbox.AsError(err)
		writeErrorStatus(w, portStatus(se), se)
		return
	}
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		_ = inside.Close()
		writeError(w, err)
		return
	}
	defer context.AfterFunc(e.ctx, func() { _ = conn.Close() })()
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+ports.UpgradeFrames+"\r\n\r\n"); err != nil {
		_, _ = inside.Close(), conn.Close() // the apiserver is gone
		return
	}
	_ = ports.Join(ports.NewFrames(ports.NewHijacked(conn, buffered)), inside) // both sides know
}
