package edgeclient

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"time"

	"dsec/internal/grant"
	"dsec/internal/ports"
)

const (
	copyBuffer     = 64 << 10
	maxIdleConns   = 128
	idleConnExpiry = 90 * time.Second
	dialTimeout    = 2 * time.Second
	maxHeaderBytes = 64 << 10
)

// passed are the request headers that concern the edge. All others stay here, first of all Authorization: the API key never
// leaves the control plane.
var passed = []string{"Range", "If-Range", "Content-Type", "Dsec-Sha256", "Te", "Trailer"}

var errDown = errors.New("the edge was found to be down")

type byteProxy struct {
	transport *http.Transport
	proxy     httputil.ReverseProxy

	portTransport *http.Transport
	ports         *httputil.ReverseProxy

	mu   sync.Mutex
	down context.Context // ends when the edge goes down
	end  context.CancelCauseFunc
}

type byteCall struct {
	signed  string
	onError func(http.ResponseWriter, *http.Request, error)
}

type byteCallKey struct{}

func newByteProxy(dial func(context.Context) (net.Conn, error)) *byteProxy {
	p := &byteProxy{transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			return dialWide(ctx, dial)
		},
		DisableCompression:     true, // bytes pass as they are
		MaxIdleConns:           maxIdleConns,
		MaxIdleConnsPerHost:    maxIdleConns,
		IdleConnTimeout:        idleConnExpiry,
		MaxResponseHeaderBytes: maxHeaderBytes,
		ReadBufferSize:         copyBuffer,
		WriteBufferSize:        copyBuffer,
	}}
	p.down, p.end = context.WithCancelCause(context.Background())
	p.ports = p.newPortProxy()
	p.proxy = httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     p.transport,
		FlushInterval: -1, // followers see output as it is written
		BufferPool:    ports.Buffers{},
		ErrorLog:      log.New(io.Discard, "", 0), // a client that goes away is no news
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			r.Context().Value(byteCallKey{}).(byteCall).onError(w, r, err)
		},
	}
	return p
}

// A wideConn moves bodies in large blocks.
type wideConn struct{ net.Conn }

// dialWide lets the kernel hold a block on the way to the edge: it goes as a whole while the one before is read.
func dialWide(ctx context.Context, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	c, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	if b, ok := c.(interface{ SetWriteBuffer(int) error }); ok {
		_ = b.SetWriteBuffer(2 * largeBlock) // what the kernel allows; a smaller one only costs time
	}
	return &wideConn{c}, nil
}

// ReadFrom is what the transport copies a body of known length with.
func (c *wideConn) ReadFrom(r io.Reader) (int64, error) {
	b := largeBlocks.Get().(*[]byte)
	defer largeBlocks.Put(b)
	return io.CopyBuffer(struct{ io.Writer }{c.Conn}, struct{ io.Reader }{r}, *b)
}

// A wideBody moves a body of unknown length in large blocks.
type wideBody struct{ io.ReadCloser }

// WriteTo is what the transport copies it with.
func (b wideBody) WriteTo(w io.Writer) (int64, error) {
	block := largeBlocks.Get().(*[]byte)
	defer largeBlocks.Put(block)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{b.ReadCloser}, *block)
}

func rewrite(r *httputil.ProxyRequest) {
	in := r.In.URL
	r.Out.URL = &url.URL{Scheme: "http", Host: "edge", Path: in.Path, RawPath: in.RawPath, RawQuery: in.RawQuery}
	r.Out.Host = ""
	h := make(http.Header, len(passed)+1)
	for _, name := range passed {
		if v := r.In.Header[name]; len(v) > 0 {
			h[name] = v
		}
	}
	h.Set(grant.Header, r.In.Context().Value(byteCallKey{}).(byteCall).signed)
	r.Out.Header = h
}

func (p *byteProxy) serve(w http.ResponseWriter, r *http.Request, c byteCall) {
	ctx, cancel := p.under(r.Context())
	defer cancel()
	// The proxy's error handler gets the outgoing request, whose context also ends with the edge; the caller's own does not.
	onError, own := c.onError, r
	c.onError = func(w http.ResponseWriter, _ *http.Request, err error) { onError(w, own, err) }
	r = r.WithContext(context.WithValue(ctx, byteCallKey{}, c))
	if (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Upgrade") == "" {
		p.get(w, r, c)
		return
	}
	if r.ContentLength < 0 {
		r.Body = wideBody{r.Body}
	}
	p.proxy.ServeHTTP(w, r)
}

func (p *byteProxy) setDown(down bool) {
	if !down {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end(errDown)
	p.down, p.end = context.WithCancelCause(context.Background())
	p.transport.CloseIdleConnections()
	p.portTransport.CloseIdleConnections()
}

func (p *byteProxy) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end(errDown)
	p.transport.CloseIdleConnections()
	p.portTransport.CloseIdleConnections()
}
