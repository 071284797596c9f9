package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/internal/config"
	"dsec/sandbox"
)

// A client is the public API of one platform. Every call that it makes may be made twice: creates and commands carry a key
// of ours, output is read from an offset. So a lost connection is answered by calling again.
type client struct {
	sandboxes    dsecv1connect.SandboxServiceClient
	environments dsecv1connect.EnvironmentServiceClient
	system       dsecv1connect.SystemServiceClient
	http         *http.Client
	base         string // URL without a slash at the end
	target       config.Target
	notice       func(format string, args ...any) // says a line to the user

	// answered is set once the platform has answered anything. Before that a refused connection is no outage to sit out:
	// the URL is wrong or nothing runs there.
	answered atomic.Bool
	patience time.Duration // how long an outage may last
	sleep    func(context.Context, time.Duration) error
}

const (
	patience    = 30 * time.Second
	dialTimeout = 10 * time.Second
	firstDelay  = 100 * time.Millisecond
	longDelay   = 2 * time.Second
	quiet       = time.Second / 2 // an outage up to this long is nobody's business
)

// contextFlag adds --context to a command that talks to a platform.
func contextFlag(f *flagSet) *string {
	return f.String("context", "", "`NAME` of a context in the config file, instead of the current one")
}

// dial prepares a client of the platform that flags, environment and config file name. It does not connect yet.
func (c *console) dial(contextName string) (*client, error) {
	target, err := config.Resolve(c.getenv, contextName)
	if err != nil {
		return nil, err
	}
	return newClient(target, c)
}

func newClient(target config.Target, c *console) (*client, error) {
	u, err := url.Parse(target.URL)
	if err != nil {
		return nil, fmt.Errorf("parsing the platform's URL: %w", err)
	}
	dialer := &net.Dialer{Timeout: dialTimeout}
	transport := &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true, // bytes are passed on as they are
		// A body goes off after this time also without the platform's consent.
		ExpectContinueTimeout: 5 * time.Second,
	}
	base := strings.TrimRight(target.URL, "/")
	if u.Scheme == "unix" {
		transport.Proxy = nil
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", u.Path)
		}
		base = "http://localhost"
	}
	httpClient := &http.Client{
		Transport: &authorized{key: target.APIKey, next: transport},
		// A redirect could carry the key to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return &client{
		sandboxes:    dsecv1connect.NewSandboxServiceClient(httpClient, base),
		environments: dsecv1connect.NewEnvironmentServiceClient(httpClient, base),
		system:       dsecv1connect.NewSystemServiceClient(httpClient, base),
		http:         httpClient,
		base:         base,
		target:       target,
		notice:       c.say,
		patience:     patience,
		sleep:        c.sleep,
	}, nil
}

// authorized adds the key to every request.
type authorized struct {
	key  string
	next http.RoundTripper
}

func (a *authorized) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+a.key)
	r.Header.Set("User-Agent", "dsec/"+version)
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

// An outage counts the failures in a row of one call, or of one stream that makes no progress.
type outage struct {
	slept time.Duration
	delay time.Duration
	said  bool
}

// over is called when the call works again.
func (o *outage) over() { *o = outage{} }

// wait sleeps before another attempt after err. It returns err, as a user should read it, where there must be none.
func (cl *client) wait(ctx context.Context, o *outage, err error) error {
	e := cl.explain(ctx, err)
	if ctx.Err() != nil || sandbox.ClassOf(e) != sandbox.Unavailable || !cl.answered.Load() || o.slept >= cl.patience {
		return e
	}
	if o.delay == 0 {
		o.delay = firstDelay
	}
	if o.slept >= quiet && !o.said {
		o.said = true
		cl.notice("%s; trying again for %v", userMessage(e), cl.patience)
	}
	d := o.delay/2 + rand.N(o.delay) // spread, since many clients lose one platform together
	if serr := cl.sleep(ctx, d); serr != nil {
		return e
	}
	o.slept += d
	o.delay = min(2*o.delay, longDelay)
	return nil
}

// call makes one request, again while the platform is away. do must be safe to repeat.
func call[T any](ctx context.Context, cl *client, do func(context.Context) (T, error)) (T, error) {
	var o outage
	for {
		v, err := do(ctx)
		if err == nil {
			cl.answered.Store(true)
			return v, nil
		}
		if werr := cl.wait(ctx, &o, err); werr != nil {
			var zero T
			return zero, werr
		}
	}
}

// A method is one of the API's unary calls.
type method[Req, Res any] func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error)

// invoke calls a method of the API, again while the platform is away. A nil answer's getters are safe to use.
func invoke[Req, Res any](ctx context.Context, cl *client, m method[Req, Res], req *Req) (*Res, error) {
	return call(ctx, cl, func(ctx context.Context) (*Res, error) { return m.send(ctx, req) })
}

// invokeOnce calls a method of the API a single time.
func invokeOnce[Req, Res any](ctx context.Context, cl *client, m method[Req, Res], req *Req) (*Res, error) {
	res, err := m.send(ctx, req)
	if err != nil {
		return nil, cl.explain(ctx, err)
	}
	cl.answered.Store(true)
	return res, nil
}

func (m method[Req, Res]) send(ctx context.Context, req *Req) (*Res, error) {
	res, err := m(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}
