package edgeclient

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"dsec/internal/grant"
	"dsec/internal/ports"
)

const (
	// continueWait is how long a body that waits for leave is held back; the edge's own wait is shorter.
	continueWait = 5 * time.Second
	// headRoom is what the edge adds to a head from inside.
	headRoom = 8 << 10
)

type portCall struct {
	ports.Request
	byteCall
}

type portCallKey struct{}

// newPortProxy passes requests to servers inside. It has connections of its own: what is kept in the byte proxy's pool has
// no part in it.
func (p *byteProxy) newPortProxy() *httputil.ReverseProxy {
	t := p.transport.Clone()
	t.ExpectContinueTimeout = continueWait
	t.MaxResponseHeaderBytes = ports.MaxHead + headRoom
	p.portTransport = t
	return &httputil.ReverseProxy{
		Rewrite:       rewritePort,
		Transport:     t,
		FlushInterval: -1,
		BufferPool:    ports.Buffers{},
		ErrorLog:      log.New(io.Discard, "", 0),
		ModifyResponse: func(r *http.Response) error {
			f := r.Request.Context().Value(portCallKey{}).(portCall).Answer
			if f != nil && r.Header.Get(ports.Error) == "" { // the edge's own answers are ours
				f(r.Header)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			r.Context().Value(portCallKey{}).(portCall).onError(w, r, err)
		},
	}
}

func rewritePort(r *httputil.ProxyRequest) {
	c := r.In.Context().Value(portCallKey{}).(portCall)
	r.Out.URL = targetURL(c.Target)
	r.Out.Host = ""
	r.Out.Trailer = r.In.Trailer // the same map: it is filled when the body has been read
	c.dress(r.Out.Header)
}

// dress completes the headers for the edge.
func (c portCall) dress(h http.Header) {
	ports.ToInside(h, c.Forwarded)
	if c.Host != "" {
		h.Set(ports.Host, c.Host)
	}
	h.Set(grant.Header, c.signed)
}

func targetURL(target string) *url.URL {
	u := &url.URL{Scheme: "http", Host: "edge"}
	path, query, _ := strings.Cut(target, "?")
	if err := ports.SetPath(u, path); err != nil {
		u.Path = "/" // it came out of a parsed request: there is no such
	}
	u.RawQuery = query
	return u
}

// under is a context that ends with the caller's, and when the edge goes down.
func (p *byteProxy) under(ctx context.Context) (context.Context, context.CancelFunc) {
	p.mu.Lock()
	down := p.down
	p.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(down, func() { cancel(errDown) })
	return ctx, func() { stop(); cancel(nil) }
}

// ServePort passes a request to a server inside a sandbox, upgrades included.
func (c *Client) ServePort(w http.ResponseWriter, r *http.Request, signed string, req ports.Request, onError func(http.ResponseWriter, *http.Request, error)) {
	if err := c.ready(r.Context()); err != nil {
		onError(w, r, err)
		return
	}
	ctx, cancel := c.bytes.under(r.Context())
	defer cancel()
	call := portCall{Request: req, byteCall: byteCall{signed: signed, onError: func(w http.ResponseWriter, _ *http.Request, err error) {
		if r.Context().Err() == nil {
			err = c.away(err)
		}
		onError(w, r, err)
	}}}
	c.bytes.ports.ServeHTTP(w, r.WithContext(context.WithValue(ctx, portCallKey{}, call)))
}

// DialPort opens a TCP connection to a port inside. The error may be a ports.Answer, to be passed on. The stream ends when the
// edge goes down.
func (c *Client) DialPort(ctx context.Context, signed, target string) (ports.Stream, error) {
	if err := c.ready(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := c.bytes.under(ctx)
	r := &http.Request{Method: http.MethodGet, URL: targetURL(target), Header: http.Header{
		grant.Header: {signed}, "Connection": {"Upgrade"}, "Upgrade": {ports.UpgradeFrames},
	}}
	res, err := c.bytes.portTransport.RoundTrip(r.WithContext(ctx))
	if err != nil {
		defer cancel()
		if ctx.Err() != nil && !errors.Is(context.Cause(ctx), errDown) {
			return nil, ctx.Err()
		}
		return nil, c.away(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		res.Body = closeAfter{res.Body, cancel}
		return nil, ports.Answer{Response: res}
	}
	rwc, ok := res.Body.(io.ReadWriteCloser)
	if !ok {
		cancel()
		return nil, c.away(errors.New("a changed protocol without a way to write"))
	}
	return &portStream{Frames: ports.NewFrames(rwc), stop: context.AfterFunc(ctx, func() { _ = rwc.Close() }), cancel: cancel}, nil
}

type closeAfter struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (c closeAfter) Close() error {
	defer c.cancel()
	return c.ReadCloser.Close()
}

// A portStream lives as long as the edge does.
type portStream struct {
	*ports.Frames
	stop   func() bool
	cancel context.CancelFunc
}

func (s *portStream) Close() error {
	s.stop()
	defer s.cancel()
	return s.Frames.Close()
}
