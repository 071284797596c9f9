package guest

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync"

	"dsec/internal/wire"
	"dsec/sandbox"
)

// An input is what goes to a command's stdin, or its script: bytes that aether has not put into the pipe yet are kept,
// so that they can be sent again. Its command's lock guards it.
type input struct {
	m       *Command
	channel uint8
	src     *wire.Source

	// unknown says that an earlier edge sent input, and how much is not known before aether's first Started. Nothing may be
	// queued until then: its offset would be wrong.
	unknown bool

	base   uint64     // written to the command
	buf    wire.Queue // from base on
	sent   uint64     // on this connection
	most   uint64     // on any
	end    bool       // nothing follows buf
	endOut bool       // and that was sent
	broken bool
}

func (in *input) next() uint64 { return in.base + uint64(in.buf.Len()) }

// complete reports whether everything was written or never will be.
func (in *input) complete() bool { return in.broken || (in.buf.Len() == 0 && (!in.end || in.endOut)) }

// ready asks the connection to send.
func (in *input) ready() {
	m := in.m
	if m.link == nil || in.broken || (in.sent == in.next() && (!in.end || in.endOut)) {
		return
	}
	if in.src == nil {
		in.src = &wire.Source{Stream: m.stream, Channel: in.channel, Fill: in.fill(m.link)}
	}
	m.link.conn.Ready(in.src)
}

func (in *input) fill(l *link) func([]byte, int) ([]byte, uint64, wire.Flags, bool) {
	return func(b []byte, limit int) ([]byte, uint64, wire.Flags, bool) {
		in.m.mu.Lock()
		defer in.m.mu.Unlock()
		if in.m.link != l || in.broken {
			return b, 0, 0, false
		}
		offset := in.sent
		n := min(uint64(limit), in.next()-offset, in.base+wire.Window-offset)
		b = in.buf.AppendTo(b, int(offset-in.base), int(n))
		in.sent += n
		in.most = max(in.most, in.sent)
		var flags wire.Flags
		if in.end && in.sent == in.next() && !in.endOut {
			in.endOut = true
			flags = wire.End
			in.m.notify()
		}
		return b, offset, flags, in.sent < min(in.next(), in.base+wire.Window)
	}
}

// ack takes note of what was written, and whether anybody still reads.
func (in *input) ack(offset uint64, broken bool) error {
	if offset > in.most {
		return violation("acknowledgement of input that was not sent")
	}
	in.sent = max(in.sent, offset) // what an earlier connection brought
	if offset > in.base {
		in.buf.Discard(int(offset - in.base))
		in.base = offset
	}
	if broken && !in.broken {
		in.breakOff()
	}
	in.ready()
	in.m.notify()
	return nil
}

func (in *input) breakOff() {
	in.broken = true
	in.buf.Drop()
	in.sent, in.most = in.base, in.base // an acknowledgement of what was dropped is a violation
}

// found takes note of how much an earlier edge sent.
func (in *input) found(offset uint64) error {
	if offset > maxOffset {
		return violation("an offset beyond any input")
	}
	if offset > in.base {
		in.base, in.sent, in.most = offset, offset, offset
	}
	return nil
}

// rewind prepares to send again, on a new connection, what was not acknowledged.
func (in *input) rewind() {
	in.src = nil
	in.sent = in.base
	in.endOut = false
}

var stdinBlocks = sync.Pool{New: func() any { b := make([]byte, 128<<10); return &b }}

// inputRoom is how much may wait for aether; a script is there as a whole.
const inputRoom = wire.Window

// WriteStdin sends r's bytes, the first of which has the given offset in the command's whole input; what arrived before
// is skipped. It returns, when all is in the command's pipe, the offset up to which it is. With close, the input ends
// after r. It fails with reason stdin_broken if the command reads no more, stdin_gap if offset is beyond what has arrived
// (fact "offset"), and no_stdin if the command was started without.
func (m *Command) WriteStdin(ctx context.Context, offset int64, r io.Reader, close bool) (int64, error) {
	return m.writeStdin(ctx, offset, false, r, close)
}

// WriteStdinExactly is WriteStdin that skips nothing: if more than offset has arrived, it is somebody else's, and none of r is
// taken (reason stdin_moved, fact "offset").
func (m *Command) WriteStdinExactly(ctx context.Context, offset int64, r io.Reader, close bool) (int64, error) {
	return m.writeStdin(ctx, offset, true, r, close)
}

func (m *Command) writeStdin(ctx context.Context, offset int64, exact bool, r io.Reader, close bool) (int64, error) {
	select {
	case m.stdinTurn <- struct{}{}:
		defer func() { <-m.stdinTurn }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	m.c.changed(true)
	if err := m.Known(ctx); err != nil {
		return 0, err
	}
	in, skip, err := m.stdinAt(offset)
	if err != nil {
		return 0, err
	}
	if exact && skip > 0 {
		at := offset + skip
		return 0, sandbox.Errorf(sandbox.FailedPrecondition, "stdin_moved", "input at offset %d, but %d bytes have arrived", offset, at).
			WithFact("offset", strconv.FormatInt(at, 10))
	}
	if skip > 0 {
		if _, err := io.CopyN(io.Discard, r, skip); errors.Is(err, io.EOF) {
			return m.stdinDone(ctx, in, close) // all of it has arrived before
		} else if err != nil {
			return 0, sandbox.Errorf(sandbox.Canceled, "stdin_interrupted", "reading the input failed").WithCause(err)
		}
	}
	block := stdinBlocks.Get().(*[]byte)
	defer stdinBlocks.Put(block)
	buf := *block
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			if err := m.pushStdin(ctx, in, buf[:n]); err != nil {
				return m.stdinOffset(in), err
			}
		}
		if errors.Is(rerr, io.EOF) {
			return m.stdinDone(ctx, in, close)
		}
		if rerr != nil {
			return m.stdinOffset(in), sandbox.Errorf(sandbox.Canceled, "stdin_interrupted", "reading the input failed").WithCause(rerr)
		}
	}
}

func (m *Command) stdinAt(offset int64) (in *input, skip int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	in = m.stdin
	switch {
	case in == nil:
		return nil, 0, sandbox.Errorf(sandbox.FailedPrecondition, "no_stdin", "the command was started without stdin_follows: its stdin is empty")
	case offset < 0 || uint64(offset) > in.next():
		return nil, 0, sandbox.Errorf(sandbox.FailedPrecondition, "stdin_gap", "input at offset %d, but only %d bytes have arrived", offset, in.next()).
			WithFact("offset", strconv.FormatUint(in.next(), 10))
	}
	return in, int64(in.next()) - offset, nil
}

func (m *Command) stdinOffset(in *input) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return int64(in.base)
}

func stdinBroken(offset uint64) *sandbox.Error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "stdin_broken", "the command ended or closed its stdin after %d bytes", offset).
		WithFact("offset", strconv.FormatUint(offset, 10))
}

// pushStdin queues b, waiting for room.
func (m *Command) pushStdin(ctx context.Context, in *input, b []byte) error {
	for len(b) > 0 {
		m.mu.Lock()
		switch {
		case in.broken || m.done:
			base := in.base
			m.mu.Unlock()
			return stdinBroken(base)
		case in.end:
			m.mu.Unlock()
			return sandbox.Errorf(sandbox.FailedPrecondition, "stdin_closed", "the command's input was closed before")
		}
		n := min(len(b), inputRoom-in.buf.Len())
		in.buf.Append(b[:n])
		in.ready()
		b = b[n:]
		err := m.flushAndWait(ctx, len(b) > 0)
		if err != nil {
			return err
		}
	}
	return nil
}

// flushAndWait sends what is ready and then, if asked, waits for a change. It unlocks m.
func (m *Command) flushAndWait(ctx context.Context, wait bool) error {
	changed := m.change()
	l := m.link
	m.mu.Unlock()
	if l != nil {
		l.conn.Flush()
	}
	if !wait {
		return nil
	}
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stdinDone ends the input, if close is set, and waits until the command has been given everything.
func (m *Command) stdinDone(ctx context.Context, in *input, close bool) (int64, error) {
	m.mu.Lock()
	if close && !in.broken {
		in.end = true
		in.ready()
	}
	for !in.complete() && !m.done {
		if err := m.flushAndWait(ctx, true); err != nil {
			return m.stdinOffset(in), err
		}
		m.mu.Lock()
	}
	base, broken := in.base, in.broken || in.buf.Len() > 0
	err := m.flushAndWait(ctx, false)
	if broken {
		err = stdinBroken(base)
	}
	return int64(base), err
}
