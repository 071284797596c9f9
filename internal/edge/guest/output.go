package guest

import (
	"errors"
	"io"
	"sync"

	"dsec/sandbox"
)

// An outputReader reads what is kept of one stream. While it follows a running command it holds back output that would
// push out what it has not read.
type outputReader struct {
	m      *Command
	stream int // index into Command.out
	follow bool

	offset int64 // guarded by m.mu
	closed bool
	once   sync.Once
	quit   chan struct{}
	err    error
}

// Output reads stream 1 (stdout) or 2 (stderr) from offset: to the end of what is there, or with follow to the end of the
// command. Reading into a gap fails with reason output_dropped (facts "offset" and "next_offset"). Close must be called:
// a follower that is not read or closed holds the command back.
func (m *Command) Output(stream int, offset int64, follow bool) io.ReadCloser {
	r := &outputReader{m: m, stream: stream - 1, follow: follow, offset: offset, quit: make(chan struct{})}
	if stream != 1 && stream != 2 || offset < 0 {
		r.stream = 0
		r.err = sandbox.Errorf(sandbox.InvalidArgument, "invalid_request", "stream is 1 or 2 and the offset not negative")
		return r
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if follow && !m.done {
		if m.followers == nil {
			m.followers = make(map[*outputReader]struct{})
		}
		m.followers[r] = struct{}{}
	}
	return r
}

// Read blocks only while it follows a running command.
func (r *outputReader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	for {
		r.m.mu.Lock()
		if r.closed {
			r.m.mu.Unlock()
			return 0, io.ErrClosedPipe
		}
		n, err := r.m.out[r.stream].readAt(p, r.offset)
		r.offset += int64(n)
		if n > 0 && r.follow {
			r.m.acknowledge(r.stream, false)
		}
		over := r.m.done || r.m.err != nil || !r.follow
		lost := r.m.err
		changed := r.m.change()
		l := r.m.link
		r.m.mu.Unlock()
		if l != nil && r.follow {
			l.conn.Flush()
		}
		if !errors.Is(err, io.EOF) {
			return n, err
		}
		if over {
			if lost != nil && r.follow {
				return 0, lost
			}
			return 0, io.EOF
		}
		select {
		case <-changed:
		case <-r.quit:
		}
	}
}

// Close lets the command go on without this reader. It also ends a Read that waits.
func (r *outputReader) Close() error {
	r.once.Do(func() {
		close(r.quit)
		r.m.mu.Lock()
		r.closed = true
		delete(r.m.followers, r)
		r.m.acknowledge(r.stream, false)
		l := r.m.link
		r.m.mu.Unlock()
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
