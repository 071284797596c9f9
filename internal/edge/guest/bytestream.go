package guest

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

// A ByteStream is bytes both ways between the edge and aether. What comes from it is untrusted. It must be closed.
//
// Read returns io.EOF only once aether has said that all went well (see Done); a stream that broke is an error.
type ByteStream struct {
	*wire.Duplex
	link    *link
	id      uint32
	explain func(*aetherv1.Error) *sandbox.Error
	release func() bool // stops looking after the context

	opened chan struct{} // closed by Opened, or by a failure
	done   chan struct{} // closed by Done, or by a failure

	mu     sync.Mutex
	isOpen bool
	result *aetherv1.Done
	failed bool // opened and done are closed, Err says why
	over   bool // aether is done with it

	readLimit time.Time // of SetReadDeadline; it bounds the wait for the last word as well
}

// open asks aether for a stream and waits until it is open, at most timeout. It ends with ctx. notFound is the reason of the
// error where a thing does not exist.
func (c *Client) open(ctx context.Context, req *aetherv1.Open, notFound string, timeout time.Duration) (*ByteStream, error) {
	return c.openExplained(ctx, req, func(m *aetherv1.Error) *sandbox.Error { return fromAether(m, notFound) }, timeout)
}

func (c *Client) openExplained(ctx context.Context, req *aetherv1.Open, explain func(*aetherv1.Error) *sandbox.Error, timeout time.Duration) (*ByteStream, error) {
	l, err := c.current(ctx)
	if err != nil {
		return nil, err
	}
	b := &ByteStream{link: l, explain: explain, opened: make(chan struct{}), done: make(chan struct{})}
	b.mu.Lock() // frames may come before it is complete: its number can be guessed
	if b.id, err = l.open(b); err != nil {
		b.mu.Unlock()
		return nil, errBroken
	}
	b.Duplex = wire.NewDuplex(l.conn, b.id, wire.Stdout, wire.Stdin, uint64(req.Window))
	b.mu.Unlock()
	b.release = context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.fail(sandbox.AsError(context.Cause(ctx)))
	})
	if err := l.ask(wire.MsgOpen, b.id, req); err != nil {
		_ = b.Close()
		return nil, err
	}
	l.conn.Flush()
	if err := b.awaitOpen(ctx, timeout); err != nil {
		_ = b.Close()
		return nil, err
	}
	return b, nil
}

func (b *ByteStream) awaitOpen(ctx context.Context, timeout time.Duration) error {
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case <-b.opened:
		return b.Err()
	case <-ctx.Done():
		return sandbox.AsError(context.Cause(ctx))
	case <-t.C:
		return unresponsive("answer")
	}
}

func (b *ByteStream) message(t wire.Type, payload []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case t == wire.MsgError && !b.over:
		m := new(aetherv1.Error)
		if err := decode(payload, m); err != nil {
			return err
		}
		b.over = true
		b.fail(b.explain(m))
	case t == wire.MsgOpened && !b.isOpen && !b.over:
		m := new(aetherv1.Opened)
		if err := decode(payload, m); err != nil {
			return err
		}
		b.isOpen = true
		if m.Window > 0 {
			b.SetCredit(min(uint64(m.Window), wire.Window))
		}
		if !b.failed {
			close(b.opened)
		}
	case t == wire.MsgDone && b.isOpen && !b.over:
		m := new(aetherv1.Done)
		if err := decode(payload, m); err != nil {
			return err
		}
		b.over = true
		if !b.failed {
			b.result = m
			close(b.done)
		}
	default:
		return violation("a message that does not fit a byte stream")
	}
	return nil
}

// fail ends the stream by an error, unless it has ended well. b.mu is held.
func (b *ByteStream) fail(err error) {
	b.Fail(err)
	if b.failed || b.result != nil {
		return
	}
	b.failed = true
	if !b.isOpen {
		close(b.opened)
	}
	close(b.done)
}

func (b *ByteStream) data(channel uint8, offset uint64, p []byte, flags wire.Flags) error {
	b.mu.Lock()
	early := !b.isOpen
	b.mu.Unlock()
	if early {
		return violation("bytes before the stream is open")
	}
	return b.Data(channel, offset, p, flags)
}

func (b *ByteStream) ack(channel uint8, offset uint64, broken bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Ack(channel, offset, broken)
}

func (b *ByteStream) lost(*link) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	b.fail(errBroken)
}

// SetReadDeadline bounds reads that begin from now on, and those that wait for bytes.
func (b *ByteStream) SetReadDeadline(t time.Time) error {
	b.mu.Lock()
	b.readLimit = t
	b.mu.Unlock()
	return b.Duplex.SetReadDeadline(t)
}

// Read reads what aether sends. See ByteStream.
func (b *ByteStream) Read(p []byte) (int, error) {
	n, err := b.Duplex.Read(p)
	if errors.Is(err, io.EOF) {
		if err = b.lastWord(); err == nil {
			err = io.EOF
		}
	}
	return n, err
}

// lastWord is Done until the deadline of reads: an aether that has sent its end may never say how it went.
func (b *ByteStream) lastWord() error {
	b.mu.Lock()
	limit := b.readLimit
	b.mu.Unlock()
	if !limit.IsZero() {
		t := time.NewTimer(time.Until(limit))
		defer t.Stop()
		select {
		case <-b.done:
		case <-t.C:
			return os.ErrDeadlineExceeded
		}
	}
	_, err := b.Done()
	return err
}

// WriteTo writes all that aether sends to w.
func (b *ByteStream) WriteTo(w io.Writer) (int64, error) {
	n, err := b.Duplex.WriteTo(w)
	if err == nil {
		_, err = b.Done()
	}
	return n, err
}

// Done waits for aether's last word: how it went. The caller bounds the wait by the stream's context. It needs no reading
// of what is left.
func (b *ByteStream) Done() (*aetherv1.Done, error) {
	<-b.done
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.result != nil {
		return b.result, nil
	}
	return nil, b.Err()
}

// Close ends the stream, in the middle if need be: aether is told.
func (b *ByteStream) Close() error {
	b.release()
	b.mu.Lock()
	over := b.over
	b.over = true
	b.fail(io.ErrClosedPipe)
	b.mu.Unlock()
	if !over {
		_ = b.link.conn.Post(wire.MsgCancel, b.id, nil) // the connection's error
		b.link.conn.Flush()
	}
	b.link.forget(b.id)
	return nil
}
