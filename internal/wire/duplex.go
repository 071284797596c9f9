package wire

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// ErrBroken is what a Write gets once the other side takes nothing more.
var ErrBroken = errors.New("the other side reads no more")

// A Duplex is a stream of bytes in each direction on one stream id, with credit of its own in each, like a TCP connection:
// each side ends its direction alone. Whoever handles the Conn's frames gives it those of its stream (Data, Ack), and fails it
// when the connection or the request ends. Nothing is buffered for sending: a Write waits until all has gone to the
// connection. At most the window is buffered of what arrives.
//
// Reading and writing may go on at the same time, each by one goroutine.
type Duplex struct {
	conn    *Conn
	in      uint8  // the channel that we read
	window  uint64 // how far the sender may be beyond what we acknowledged
	src     *Source
	stream  uint32
	writing sync.Mutex // one Write at a time

	mu      sync.Mutex
	changed chan struct{} // closed at the next change; nil while nobody waits
	err     error         // it is over, in both directions

	placed    *chunk   // what is being read into
	queue     []*chunk // what arrived and was not read
	arrived   uint64
	read      uint64
	acked     uint64
	enough    uint64 // bytes that whoever reads waits for, if not any
	ended     bool   // by the other side
	deaf      bool   // by us
	readLimit time.Time

	pending    []byte // of the Write that waits
	sent       uint64
	credit     uint64 // how far the other side lets us go beyond what it acknowledged
	taken      uint64 // what it acknowledged
	end        bool   // we end
	endSent    bool
	broken     bool
	writeLimit time.Time
}

// NewDuplex makes a stream that reads channel in and writes channel out. The other side may be window bytes beyond what was
// read here; 0 means Window.
func NewDuplex(c *Conn, stream uint32, in, out uint8, window uint64) *Duplex {
	if window == 0 {
		window = Window
	}
	d := &Duplex{conn: c, stream: stream, in: in, window: window, credit: Window}
	d.src = &Source{Stream: stream, Channel: out, Fill: d.fill}
	return d
}

// SetCredit says how far the other side lets us go beyond what it acknowledged, if not Window. Call it before the first Write.
func (d *Duplex) SetCredit(n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.credit = n
}

// SetWindow says how far the other side may be beyond what was read here. Call it before anything arrives, and tell it.
func (d *Duplex) SetWindow(n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.window = n
}

// Data takes a data frame of the stream. An error is a violation.
func (d *Duplex) Data(channel uint8, offset uint64, b []byte, flags Flags) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case channel != d.in:
		return violation("data on channel %d", channel)
	case offset != d.arrived || d.ended:
		return violation("data that does not continue")
	case offset+uint64(len(b)) > d.acked+d.window:
		return violation("data beyond its credit")
	}
	d.arrived += uint64(len(b))
	d.ended = flags&End != 0
	placed := d.arrive(b)
	if d.err != nil || d.deaf {
		d.acked = d.arrived
		return nil
	}
	if placed {
		b = nil
	}
	for len(b) > 0 {
		var c *chunk
		if n := len(d.queue); n > 0 {
			c = d.queue[n-1]
		}
		if c == nil || c.end == len(c.data) {
			c = d.chunk()
			d.queue = append(d.queue, c)
		}
		n := copy(c.data[c.end:], b)
		c.end += n
		b = b[n:]
	}
	if d.ended || d.arrived-d.read >= d.enough {
		d.notify()
	}
	return nil
}

// Ack takes an acknowledgement. An error is a violation.
func (d *Duplex) Ack(channel uint8, offset uint64, broken bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if channel != d.src.Channel || offset > d.sent {
		return violation("credit for data that was not sent")
	}
	d.taken = max(d.taken, offset)
	d.broken = d.broken || broken
	if len(d.pending) > 0 {
		d.conn.Ready(d.src) // whoever reads frames flushes after each batch
	}
	d.notify()
	return nil
}

// Fail ends both directions. What was not read is lost.
func (d *Duplex) Fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.err = err
		d.drop()
		d.notify()
	}
}

// Broken reports whether the other side reads no more.
func (d *Duplex) Broken() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.broken
}

// Err is what Fail got, or nil.
func (d *Duplex) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

func (d *Duplex) drop() {
	for _, c := range d.queue {
		d.put(c)
	}
	d.queue = nil
}

func (d *Duplex) notify() {
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
}

// wait waits for a change, with d.mu unlocked meanwhile, until limit.
func (d *Duplex) wait(limit time.Time) error {
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	changed := d.changed
	d.mu.Unlock()
	defer d.mu.Lock()
	var over <-chan time.Time
	if !limit.IsZero() {
		t := time.NewTimer(time.Until(limit))
		defer t.Stop()
		over = t.C
	}
	select {
	case <-changed:
		return nil
	case <-over:
		return os.ErrDeadlineExceeded
	}
}

// SetReadDeadline bounds reads from now on, also one that waits; the zero time means no bound.
func (d *Duplex) SetReadDeadline(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.readLimit = t
	d.notify()
	return nil
}

// SetWriteDeadline likewise.
func (d *Duplex) SetWriteDeadline(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writeLimit = t
	d.notify()
	return nil
}

// await waits until there is something to read. The chunk is the queue's first.
func (d *Duplex) await() (*chunk, error) {
	for {
		switch {
		case d.err != nil:
			return nil, d.err
		case d.deaf:
			return nil, io.ErrClosedPipe
		case len(d.queue) > 0:
			return d.queue[0], nil
		case d.ended:
			return nil, io.EOF
		}
		if err := d.wait(d.readLimit); err != nil {
			return nil, err
		}
	}
}

// consumed takes n bytes of the first chunk off and gives credit for them.
func (d *Duplex) consumed(n int) {
	d.read += uint64(n)
	if d.deaf || d.err != nil { // all counts as read
		return
	}
	if !d.ended && d.read-d.acked >= d.window/4 {
		d.acked = d.read
		_ = d.conn.PostAck(d.stream, d.in, d.read, false) // the connection's error comes by Fail
		d.mu.Unlock()
		d.conn.Flush()
		d.mu.Lock()
	}
}

// Read reads what has arrived, or waits. It returns io.EOF after the other side's end.
func (d *Duplex) Read(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, err := d.await()
	if err != nil || len(p) == 0 {
		return 0, err
	}
	n := copy(p, c.data[c.start:c.end])
	c.start += n
	if c.start == c.end {
		d.queue = append(d.queue[:0], d.queue[1:]...)
		d.put(c)
	}
	d.consumed(n)
	return n, nil
}

// WriteTo writes all until the other side's end to w, without a copy of its own.
func (d *Duplex) WriteTo(w io.Writer) (total int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		c, err := d.await()
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		d.queue = append(d.queue[:0], d.queue[1:]...)
		d.mu.Unlock()
		n, err := w.Write(c.data[c.start:c.end])
		d.put(c)
		d.mu.Lock()
		total += int64(n)
		if err != nil {
			return total, err
		}
		d.consumed(n)
	}
}

// CloseRead tells the other side that nothing more is read; its writes fail with ErrBroken.
func (d *Duplex) CloseRead() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.deaf || d.err != nil {
		return nil
	}
	d.deaf = true
	d.drop()
	d.acked = d.arrived
	_ = d.conn.PostAck(d.stream, d.in, d.arrived, true) // as in consumed
	d.notify()
	d.mu.Unlock()
	d.conn.Flush()
	d.mu.Lock()
	return nil
}

// Write waits until all of p has been given to the connection, within the other side's credit.
func (d *Duplex) Write(p []byte) (int, error) {
	d.writing.Lock()
	defer d.writing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending = p
	err := d.push(func() bool { return len(d.pending) == 0 })
	n := len(p) - len(d.pending)
	d.pending = nil
	if err != nil && d.end && !d.endSent && d.err == nil { // the end waited behind what is given up
		d.mu.Unlock()
		d.conn.Ready(d.src)
		d.conn.Flush()
		d.mu.Lock()
	}
	return n, err
}

// CloseWrite ends our direction. It does not wait.
func (d *Duplex) CloseWrite() error {
	d.mu.Lock()
	if d.end || d.err != nil {
		err := d.err
		d.mu.Unlock()
		return err
	}
	d.end = true
	d.mu.Unlock()
	d.conn.Ready(d.src)
	d.conn.Flush()
	return nil
}

// Drain ends our direction and waits until the end has gone to the connection: a message posted after that comes after all
// data.
func (d *Duplex) Drain() error {
	if err := d.CloseWrite(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for !d.endSent {
		if d.err != nil {
			return d.err
		}
		if err := d.wait(d.writeLimit); err != nil {
			return err
		}
	}
	return nil
}

func (d *Duplex) push(done func() bool) error {
	for !done() {
		switch {
		case d.err != nil:
			return d.err
		case d.broken:
			return ErrBroken
		case d.end:
			return io.ErrClosedPipe
		}
		if d.room() > 0 {
			d.mu.Unlock()
			d.conn.Ready(d.src)
			d.conn.Flush()
			d.mu.Lock()
			if done() {
				return nil
			}
		}
		if d.err != nil || d.broken {
			continue
		}
		if err := d.wait(d.writeLimit); err != nil {
			return err
		}
	}
	return nil
}

func (d *Duplex) room() uint64 { return d.taken + d.credit - min(d.sent, d.taken+d.credit) }

func (d *Duplex) fill(b []byte, limit int) ([]byte, uint64, Flags, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil || d.endSent {
		return b, 0, 0, false
	}
	offset := d.sent
	n := min(uint64(len(d.pending)), uint64(limit), d.room())
	b = append(b, d.pending[:n]...)
	d.pending = d.pending[n:]
	d.sent += n
	var flags Flags
	if d.end && len(d.pending) == 0 {
		d.endSent = true
		flags = End
	}
	if len(d.pending) == 0 {
		d.notify()
	}
	return b, offset, flags, len(d.pending) > 0 && d.room() > 0
}
