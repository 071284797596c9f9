package ports

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// A Stream is bytes both ways. CloseWrite says that nothing follows; Close before both directions have ended says that the
// stream broke.
type Stream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

const copyBuffer = 64 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}

// Buffers is the pool of them for a reverse proxy.
type Buffers struct{}

// Get takes a buffer.
func (Buffers) Get() []byte { return *buffers.Get().(*[]byte) }

// Put gives it back.
func (Buffers) Put(b []byte) { buffers.Put(&b) }

// Join copies both ways until both directions have ended, and closes both streams. An error means that one of them broke:
// then the other is told. A side that takes no more may still have something to say: it is heard to its end.
func Join(a, b Stream) error {
	results := make(chan error, 2)
	pass := func(dst, src Stream) {
		read, wrote := pour(dst, src)
		if read != nil { // the other direction ends with it
			reset(a)
			reset(b)
			_, _ = a.Close(), b.Close()
		}
		results <- errors.Join(read, wrote)
	}
	go pass(b, a)
	pass(a, b)
	err := errors.Join(<-results, <-results)
	if err != nil {
		reset(a)
		reset(b)
	}
	_, _ = a.Close(), b.Close() // both are done with
	return err
}

// pour copies src's bytes and its end to dst.
func pour(dst, src Stream) (read, wrote error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for {
		n, err := src.Read(*buf)
		if n > 0 {
			if _, werr := dst.Write((*buf)[:n]); werr != nil {
				return nil, werr
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil, dst.CloseWrite()
		case err != nil:
			return err, nil
		}
	}
}

// reset makes a TCP connection's Close tell the peer that it broke.
func reset(s Stream) {
	switch c := s.(type) {
	case interface{ SetLinger(int) error }:
		_ = c.SetLinger(0) // fails on one that is closed
	case interface{ Reset() }:
		c.Reset()
	}
}

// Hijacked is a connection that was taken from an HTTP server.
type Hijacked struct {
	net.Conn
	ahead []byte // what the server has read already
}

// NewHijacked makes one of what Hijack gives. The server's reader is not read from: at the client's end, which may be
// that of one direction alone, it would cancel the request.
func NewHijacked(c net.Conn, rw *bufio.ReadWriter) *Hijacked {
	ahead, _ := rw.Reader.Peek(rw.Reader.Buffered()) // it has as many
	return &Hijacked{Conn: c, ahead: bytes.Clone(ahead)}
}

// Read reads what the server has read, then the connection.
func (h *Hijacked) Read(p []byte) (int, error) {
	if len(h.ahead) > 0 {
		n := copy(p, h.ahead)
		h.ahead = h.ahead[n:]
		return n, nil
	}
	return h.Conn.Read(p)
}

// CloseWrite says that nothing follows.
func (h *Hijacked) CloseWrite() error {
	if c, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("a connection of type %T has no half-close", h.Conn)
}

// Reset makes Close tell the peer that the stream broke.
func (h *Hijacked) Reset() {
	if c, ok := h.Conn.(interface{ SetLinger(int) error }); ok {
		_ = c.SetLinger(0)
	}
}

// maxFrame bounds one frame's bytes.
const maxFrame = 64 << 10

// Frames is a Stream within a connection that cannot tell its end from a cut: four bytes of length, big-endian, and as many
// bytes; a length of 0 is the end of that direction. A connection that ends without it has broken.
type Frames struct {
	rwc io.ReadWriteCloser
	in  *bufio.Reader

	left  int // of the frame that is being read
	ended bool

	wmu sync.Mutex
	out []byte
}

// NewFrames makes one of a connection, which it owns.
func NewFrames(rwc io.ReadWriteCloser) *Frames { return &Frames{rwc: rwc, in: bufio.NewReader(rwc)} }

// Read gives the bytes of frames. It is called by one goroutine at a time.
func (f *Frames) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for f.left == 0 {
		if f.ended {
			return 0, io.EOF
		}
		var head [4]byte
		if _, err := io.ReadFull(f.in, head[:]); err != nil {
			return 0, cut(err)
		}
		n := binary.BigEndian.Uint32(head[:])
		if n > maxFrame {
			return 0, fmt.Errorf("frame of %d bytes", n)
		}
		f.left, f.ended = int(n), n == 0
	}
	n, err := f.in.Read(p[:min(len(p), f.left)])
	f.left -= n
	if err != nil && n > 0 {
		return n, nil // it comes again
	}
	return n, cut(err)
}

func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Write sends p in frames.
func (f *Frames) Write(p []byte) (int, error) {
	f.wmu.Lock()
	defer f.wmu.Unlock()
	total := 0
	for len(p) > 0 {
		n := min(len(p), maxFrame)
		f.out = binary.BigEndian.AppendUint32(f.out[:0], uint32(n))
		f.out = append(f.out, p[:n]...)
		if _, err := f.rwc.Write(f.out); err != nil {
			return total, err
		}
		total += n
		p = p[n:]
	}
	return total, nil
}

// CloseWrite sends the end of this direction.
func (f *Frames) CloseWrite() error {
	f.wmu.Lock()
	defer f.wmu.Unlock()
	_, err := f.rwc.Write(make([]byte, 4))
	return err
}

// Close closes the connection.
func (f *Frames) Close() error { return f.rwc.Close() }
