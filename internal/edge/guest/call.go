package guest

import (
	"context"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

// A call waits for the answer to one request.
type call struct {
	notFound string
	answer   chan callAnswer
}

type callAnswer struct {
	reply *aetherv1.Reply
	err   error
}

func (c *call) end(a callAnswer) error {
	select {
	case c.answer <- a:
		return nil
	default:
		return violation("two answers to one request")
	}
}

func (c *call) message(t wire.Type, payload []byte) error {
	switch t {
	case wire.MsgError:
		m := new(aetherv1.Error)
		if err := decode(payload, m); err != nil {
			return err
		}
		return c.end(callAnswer{err: fromAether(m, c.notFound)})
	case wire.MsgReply:
		m := new(aetherv1.Reply)
		if err := decode(payload, m); err != nil {
			return err
		}
		return c.end(callAnswer{reply: m})
	}
	return violation("a message that does not fit a call")
}

func (c *call) data(uint8, uint64, []byte, wire.Flags) error { return violation("data for a call") }
func (c *call) ack(uint8, uint64, bool) error                { return violation("credit for a call") }
func (c *call) lost(*link)                                   { _ = c.end(callAnswer{err: errBroken}) } // unless it was answered

// call asks aether for one thing and waits for the answer: until ctx ends, or timeout has passed (0 = until ctx ends: for
// what takes long by nature). notFound is the reason of the error where a thing does not exist. The reply is never nil, but
// nothing in it has been checked.
func (c *Client) call(ctx context.Context, req *aetherv1.Call, notFound string, timeout time.Duration) (*aetherv1.Reply, error) {
	l, err := c.current(ctx)
	if err != nil {
		return nil, err
	}
	w := &call{notFound: notFound, answer: make(chan callAnswer, 1)}
	id, err := l.open(w)
	if err != nil {
		return nil, errBroken
	}
	defer l.forget(id)
	if err := l.ask(wire.MsgCall, id, req); err != nil {
		return nil, err
	}
	l.conn.Flush()
	var late <-chan time.Time
	if timeout > 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		late = t.C
	}
	select {
	case a := <-w.answer:
		return a.reply, a.err
	case <-ctx.Done():
		err = sandbox.AsError(context.Cause(ctx))
	case <-late:
		err = unresponsive("answer")
	}
	_ = l.conn.Post(wire.MsgCancel, id, nil) // the connection's error
	l.conn.Flush()
	return nil, err
}
