package client

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"connectrpc.com/connect"

	"dsec/sandbox"
)

const (
	firstDelay = 100 * time.Millisecond
	longDelay  = 2 * time.Second
	quiet      = time.Second / 2 // an outage up to this long is nobody's business
)

// An outage counts the failures in a row of one call, or of one stream that makes no progress.
type outage struct {
	slept time.Duration
	delay time.Duration
	said  bool
}

// over is called when the call works again.
func (o *outage) over() { *o = outage{} }

// wait sleeps before another attempt after err. It returns err, as a user should read it, where there must be none.
func (c *Client) wait(ctx context.Context, o *outage, err error) error {
	e := c.explain(ctx, err)
	if ctx.Err() != nil || !passes(e) || !c.answered.Load() || o.slept >= c.o.Patience {
		return e
	}
	if o.delay == 0 {
		o.delay = firstDelay
	}
	if o.slept >= quiet && !o.said {
		o.said = true
		if c.o.Notice != nil {
			c.o.Notice(fmt.Sprintf("%s; trying again for %v", sandbox.AsError(e).Message, c.o.Patience))
		}
	}
	d := o.delay/2 + rand.N(o.delay) // spread, since many clients lose one platform together
	if serr := c.o.Sleep(ctx, d); serr != nil {
		return e
	}
	o.slept += d
	o.delay = min(2*o.delay, longDelay)
	return nil
}

// passes reports whether err may be over a little later.
func passes(err error) bool {
	switch e := sandbox.AsError(err); e.Class {
	case sandbox.Unavailable:
		return true
	case sandbox.ResourceExhausted:
		return e.Reason == "too_many_requests" || e.Reason == sandbox.ReasonNoDescriptors
	}
	return false
}

// call makes one request, again while the platform is away. do must be safe to repeat.
func call[T any](ctx context.Context, c *Client, do func(context.Context) (T, error)) (T, error) {
	var o outage
	for {
		v, err := do(ctx)
		if err == nil {
			c.answered.Store(true)
			return v, nil
		}
		if werr := c.wait(ctx, &o, err); werr != nil {
			var zero T
			return zero, werr
		}
	}
}

// A method is one of the API's unary calls.
type method[Req, Res any] func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error)

// invoke calls a method of the API, again while the platform is away. A nil answer's getters are safe to use.
func invoke[Req, Res any](ctx context.Context, c *Client, m method[Req, Res], req *Req) (*Res, error) {
	return call(ctx, c, func(ctx context.Context) (*Res, error) { return m.send(ctx, req) })
}

// invokeOnce calls a method of the API a single time: what is not safe to repeat, or not worth waiting for.
func invokeOnce[Req, Res any](ctx context.Context, c *Client, m method[Req, Res], req *Req) (*Res, error) {
	res, err := m.send(ctx, req)
	if err != nil {
		return nil, c.explain(ctx, err)
	}
	c.answered.Store(true)
	return res, nil
}

func (m method[Req, Res]) send(ctx context.Context, req *Req) (*Res, error) {
	res, err := m(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// A streaming is one of the API's server streams.
type streaming[Req, Res any] func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error)

// receive opens a stream, again while the platform is away, and gives its messages. Once it has given one, a failure ends it:
// what follows depends on the call. silence, if not 0, is how long it may be without a message.
func receive[Req, Res any](ctx context.Context, c *Client, m streaming[Req, Res], req *Req, silence time.Duration) iter.Seq2[*Res, error] {
	return func(yield func(*Res, error) bool) {
		var o outage
		for {
			got, err := receiveOnce(ctx, c, m, req, silence, func(r *Res) bool { return yield(r, nil) })
			if err == nil {
				return
			}
			if !got {
				if err = c.wait(ctx, &o, err); err == nil {
					continue
				}
			}
			yield(nil, c.explain(ctx, err))
			return
		}
	}
}

// receiveOnce gives the messages of one stream until give returns false. got says whether there was any.
func receiveOnce[Req, Res any](ctx context.Context, c *Client, m streaming[Req, Res], req *Req, silence time.Duration, give func(*Res) bool) (got bool, err error) {
	sctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(time.Hour, func() { cancel(errSilent) })
	defer watchdog.Stop()
	alive := func() {
		if silence > 0 {
			watchdog.Reset(silence)
		} else {
			watchdog.Stop()
		}
	}
	alive()
	s, err := m(sctx, connect.NewRequest(req))
	if err != nil {
		return false, silentOr(ctx, sctx, err)
	}
	defer s.Close() // of no interest: what is wanted has been received
	for s.Receive() {
		alive()
		c.answered.Store(true)
		got = true
		msg := s.Msg()
		watchdog.Stop() // the consumer may take its time
		if !give(msg) {
			return true, nil
		}
		alive()
	}
	return got, silentOr(ctx, sctx, s.Err())
}

// errSilent ends a stream that should not be silent for so long.
var errSilent = sandbox.Errorf(sandbox.Unavailable, "platform_silent", "the platform has not sent anything for too long, although the connection is open")

func silentOr(ctx, sctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil && context.Cause(sctx) == errSilent {
		return errSilent
	}
	return err
}
