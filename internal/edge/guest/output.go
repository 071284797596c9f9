package guest

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"

	"dsec/sandbox"
)

// An OutputQuery says what of a stream is wanted. Of several places where it shall begin the last one counts.
type OutputQuery struct {
	Offset    int64
	Tail      *int64 // at most so many bytes from the end of what is there
	TailLines *int64 // the same in lines; one without its end counts
	Since     int64  // what arrived at that time or later, in ms since 1970, or shortly before: see mark
	Follow    bool   // go on to the command's end
	// Quiet ends a follower's reading after so long a silence: the connection to who reads may have died, and asking again at
	// the offset is how they know that it did not. 0 = never.
	Quiet time.Duration
}

// An OutputReader reads one stream. Close must be called: a follower that is not read or closed holds the command back.
type OutputReader interface {
	io.ReadCloser
	// Offset is where in the stream it began.
	Offset() int64
	// Final reports whether the stream ends where this reading ends: if not, more may come.
	Final() bool
	// Ready reports whether the next Read would return at once.
	Ready() bool
}

// An outputReader reads what is kept of one stream. While it follows a running command it holds back output that would
// push out what it has not read, and some of what it has: that may be lost on the way.
type outputReader struct {
	m      *Command
	stream int // index into Command.out
	follow bool
	quiet  time.Duration
	first  int64

	offset int64 // guarded by m.mu
	closed bool
	final  bool
	once   sync.Once
	quit   chan struct{}
}

// Output reads stream 1 (stdout) or 2 (stderr). Asked for or reading into a gap it fails with reason output_dropped (facts
// "offset" and "next_offset"); asked for what is beyond the end of an ended command, with offset_out_of_range.
func (m *Command) Output(stream int, q OutputQuery) (OutputReader, error) {
	if stream != 1 && stream != 2 || q.Offset < 0 || q.Offset > maxOffset || negative(q.Tail) || negative(q.TailLines) {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_request", "stream is 1 or 2, and offset and tail are not negative")
	}
	r := &outputReader{m: m, stream: stream - 1, follow: q.Follow, quiet: q.Quiet, quit: make(chan struct{})}
	lines := int64(-1)
	if q.TailLines != nil {
		lines = m.lineStart(r.stream, *q.TailLines)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b := &m.out[r.stream]
	if m.done && q.Offset > b.size {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "offset_out_of_range", "the output has %d bytes, none at offset %d", b.size, q.Offset).
			WithFact("size", strconv.FormatInt(b.size, 10))
	}
	at := lines
	if q.Tail != nil {
		at = max(at, b.size-*q.Tail)
	}
	if q.Since > 0 {
		at = max(at, b.since(q.Since))
	}
	headEnd, tailFrom := b.kept()
	if at > headEnd { // so far back as there is
		at = max(at, tailFrom)
	}
	r.first = max(at, q.Offset)
	if r.first >= headEnd && r.first < tailFrom {
		return nil, outputDropped(r.first, tailFrom)
	}
	r.offset, r.final = r.first, m.done
	if r.follow && !m.done {
		m.followers[r.stream].add(r)
	}
	return r, nil
}

func negative(n *int64) bool { return n != nil && *n < 0 }

// lineStart is where the last n lines begin, or what is kept without a gap.
func (m *Command) lineStart(i int, n int64) int64 {
	m.mu.Lock()
	end := m.out[i].size
	m.mu.Unlock()
	if n == 0 {
		return end
	}
	block := make([]byte, lineBlock)
	for at := end; ; {
		low, got := m.before(i, at, block)
		for j := len(got) - 1; j >= 0; j-- {
			if j = bytes.LastIndexByte(got[:j+1], '\n'); j < 0 {
				break
			}
			from := at - int64(len(got)) + int64(j) + 1
			if from == end {
				continue // it ends the last line
			}
			if n--; n == 0 {
				return from
			}
		}
		if at -= int64(len(got)); at <= low || len(got) == 0 {
			return max(at, low)
		}
	}
}

const lineBlock = 64 << 10

// before reads into p what is before offset at, as far as that is kept without a gap, which is as far as low.
func (m *Command) before(i int, at int64, p []byte) (low int64, got []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := &m.out[i]
	if headEnd, tailFrom := b.kept(); at > headEnd && headEnd < tailFrom {
		low = tailFrom
	}
	want := p[:max(0, min(int64(len(p)), at-low))]
	for n := 0; n < len(want); {
		k, err := b.readAt(want[n:], at-int64(len(want)-n))
		if n += k; err != nil {
			return at, nil
		}
	}
	return low, want
}

// Read blocks only while it follows a running command.
func (r *outputReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	var silence <-chan time.Time
	for {
		n, changed, err := r.readNow(p)
		if n > 0 || err != nil {
			return n, err
		}
		if silence == nil && r.quiet > 0 {
			timer := time.NewTimer(r.quiet)
			defer timer.Stop()
			silence = timer.C
		}
		select {
		case <-changed:
		case <-r.quit:
		case <-silence:
			return 0, io.EOF
		}
	}
}

// readNow reads what is there, or says what to wait for.
func (r *outputReader) readNow(p []byte) (n int, changed <-chan struct{}, err error) {
	m := r.m
	m.mu.Lock()
	if r.closed {
		m.mu.Unlock()
		return 0, nil, io.ErrClosedPipe
	}
	n, err = m.out[r.stream].readAt(p, r.offset)
	r.offset += int64(n)
	var l *link
	if n > 0 && r.follow {
		if m.acknowledge(r.stream, false) {
			l = m.link
		}
	}
	if errors.Is(err, io.EOF) {
		switch {
		case !r.follow:
			r.final = m.done
		case m.err != nil:
			err = m.err
		case m.done:
			r.final = true
		default:
			err, changed = nil, m.change()
		}
	}
	m.mu.Unlock()
	if l != nil {
		l.conn.Flush()
	}
	return n, changed, err
}

func (r *outputReader) Offset() int64 { return r.first }

func (r *outputReader) Final() bool {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	return r.final
}

func (r *outputReader) Ready() bool {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	return r.offset < r.m.out[r.stream].size || r.closed || r.m.done || r.m.err != nil
}

// Close lets the command go on without this reader, a little later if it may come again. It also ends a Read that waits.
func (r *outputReader) Close() error {
	r.once.Do(func() {
		close(r.quit)
		m := r.m
		m.mu.Lock()
		r.closed = true
		m.leave(r)
		m.acknowledge(r.stream, false)
		l := m.link
		m.mu.Unlock()
		if l != nil {
			l.conn.Flush()
		}
	})
	return nil
}

// Head is at most limit bytes from the start of stream 1 or 2, as far as they are kept.
func (m *Command) Head(stream, limit int) []byte {
	if stream != 1 && stream != 2 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b := &m.out[stream-1]
	headEnd, tailFrom := b.kept()
	if headEnd >= tailFrom {
		headEnd = b.size
	}
	out := make([]byte, min(int64(max(limit, 0)), headEnd))
	got := 0
	for got < len(out) {
		n, err := b.readAt(out[got:], int64(got))
		got += n
		if err != nil {
			break
		}
	}
	return out[:got]
}
