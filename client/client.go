// Package client is the Go client of a dsec platform: sandboxes, their commands, terminals, files and ports. The command line
// is built on it, and so are tests and benchmarks.
//
// # What surprises
//
//   - A lost connection is sat out: calls are made again, output goes on at the byte where it broke, for as long as
//     Options.Patience says. Only what may be made twice is: creates carry a key, commands an id, input and output an offset.
//     A platform that has never answered is not waited for: its URL is wrong, or nothing runs there.
//   - There is no time limit but the context's. A command may run for as long as its sandbox lives: the client asks again and
//     again, each time for a bounded while, so that a vanished connection is noticed.
//   - Errors are *sandbox.Error, with a class, and a reason that is stable. Failures to write what was fetched or to read what
//     is to be sent are *WriteError and *ReadError.
//   - Messages are those of the API (dsec/api/dsec/v1); this package adds no second set of types.
//   - A Client is safe for concurrent use, and so is all that it gives, but readers and writers, which are one goroutine's.
package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"dsec/api/dsec/v1/dsecv1connect"
)

// Options say which platform, and how patient to be with it.
type Options struct {
	URL string // http://, https:// or unix:///path
	Key string // the API key

	// Origin says where the URL comes from, for error messages: "context local of the config file". "" = nothing is said.
	Origin string
	// UserAgent is sent with each request; "" = dsec-go.
	UserAgent string
	// Patience is how long an outage may last before it is an error; 0 = 30 s, less = none is sat out.
	Patience time.Duration
	// Notice, if set, is told once of each outage that lasts.
	Notice func(message string)
	// Cleanup, if set, makes the context for undoing what a cancelled call has begun; its deadline is at most limit away. nil =
	// one that only the deadline ends.
	Cleanup func(limit time.Duration) (context.Context, context.CancelFunc)
	// Sleep, if set, is used instead of a timer; for tests.
	Sleep func(context.Context, time.Duration) error
}

const (
	patience    = 30 * time.Second
	dialTimeout = 10 * time.Second
	bufferSize  = 64 << 10 // of a connection, each way
)

// A Client is the public API of one platform.
type Client struct {
	o            Options
	sandboxes    dsecv1connect.SandboxServiceClient
	environments dsecv1connect.EnvironmentServiceClient
	networks     dsecv1connect.NetworkServiceClient
	system       dsecv1connect.SystemServiceClient
	http         *http.Client
	transport    *http.Transport
	base         string // URL without a slash at the end

	// answered is set once the platform has answered anything. Before that a refused connection is no outage to sit out.
	answered atomic.Bool
}

// New prepares a client. It does not connect yet.
func New(o Options) (*Client, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, fmt.Errorf("parsing the platform's URL: %w", err)
	}
	if o.Patience == 0 {
		o.Patience = patience
	}
	if o.UserAgent == "" {
		o.UserAgent = "dsec-go"
	}
	if o.Sleep == nil {
		o.Sleep = sleep
	}
	if o.Cleanup == nil {
		o.Cleanup = func(limit time.Duration) (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), limit)
		}
	}
	c := &Client{o: o, transport: newTransport(u), base: strings.TrimRight(o.URL, "/")}
	if u.Scheme == "unix" {
		c.base = "http://localhost"
	}
	c.http = &http.Client{
		Transport: &authorized{key: o.Key, agent: o.UserAgent, next: c.transport},
		// A redirect could carry the key to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	c.sandboxes = dsecv1connect.NewSandboxServiceClient(c.http, c.base)
	c.environments = dsecv1connect.NewEnvironmentServiceClient(c.http, c.base)
	c.networks = dsecv1connect.NewNetworkServiceClient(c.http, c.base)
	c.system = dsecv1connect.NewSystemServiceClient(c.http, c.base)
	return c, nil
}

// newTransport speaks HTTP/1.1: each stream of bytes has a connection of its own and cannot hold up another.
func newTransport(u *url.URL) *http.Transport {
	dialer := &net.Dialer{Timeout: dialTimeout}
	t := &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     time.Minute,
		ReadBufferSize:      bufferSize,
		WriteBufferSize:     bufferSize,
		DisableCompression:  true, // bytes are passed on as they are
		// A body goes off after this time also without the platform's consent.
		ExpectContinueTimeout: 5 * time.Second,
	}
	if u.Scheme == "unix" {
		t.Proxy = nil
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", u.Path)
		}
	}
	return t
}

// URL is where the platform is.
func (c *Client) URL() string { return c.o.URL }

// Describe is where the platform is and, in brackets, who said so.
func (c *Client) Describe() string { return c.o.URL + c.from("") }

// Answered reports whether the platform has answered anything yet.
func (c *Client) Answered() bool { return c.answered.Load() }

// Close lets go of idle connections. What is under way goes on.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// NewKey makes an idempotency key or a command's id: a retry finds what the first attempt made.
func NewKey() string {
	var b [16]byte
	rand.Read(b[:]) // never fails, crypto/rand ends the process instead
	return hex.EncodeToString(b[:])
}

// authorized adds the key to every request.
type authorized struct {
	key, agent string
	next       http.RoundTripper
}

func (a *authorized) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+a.key)
	r.Header.Set("User-Agent", a.agent)
	return a.next.RoundTrip(r)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
