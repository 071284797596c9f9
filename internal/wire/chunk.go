package wire

import (
	"errors"
	"io"
	"slices"
	"sync"
)

// chunks hold what has arrived and was not read. A stream at rest holds none.
var chunks = sync.Pool{New: func() any { return &chunk{data: make([]byte, MaxData)} }}

type chunk struct {
	data       []byte
	start, end int
}

// chunk is room for what arrives: little where little may arrive.
func (d *Duplex) chunk() *chunk {
	if d.window < MaxData {
		return &chunk{data: make([]byte, d.window)}
	}
	c := chunks.Get().(*chunk)
	c.start, c.end = 0, 0
	return c
}

func (d *Duplex) put(c *chunk) {
	if len(c.data) == MaxData {
		chunks.Put(c)
	}
}

// Place is room for the bytes of a data frame, if that fills a chunk: what came before may leave another half empty, so that what is
// buffered takes twice the window at most. See Placer.
func (d *Duplex) Place(n int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n != MaxData || d.window < MaxData || d.err != nil || d.deaf {
		return nil
	}
	d.placed = d.chunk()
	return d.placed.data
}

// arrive takes what was read into place, and reports whether b is that.
func (d *Duplex) arrive(b []byte) bool {
	c := d.placed
	if c == nil {
		return false
	}
	d.placed = nil
	if d.err != nil || d.deaf {
		d.put(c)
		return false
	}
	c.end = len(b)
	d.queue = append(d.queue, c)
	return true
}

// Gather gives all until the other side's end to f, in few steps: a quarter of the window each time, but at the end. f may not
// keep what it gets.
func (d *Duplex) Gather(f func(pieces [][]byte) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.enough = d.window / 4
	defer func() { d.enough = 0 }()
	var pieces [][]byte
	for {
		taken, err := d.awaitEnough()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		size := 0
		pieces = pieces[:0]
		for _, c := range taken {
			pieces = append(pieces, c.data[c.start:c.end])
			size += c.end - c.start
		}
		d.mu.Unlock()
		err = f(pieces)
		for _, c := range taken {
			d.put(c)
		}
		d.mu.Lock()
		if err != nil {
			return err
		}
		d.consumed(size)
	}
}

// awaitEnough takes the first chunks, with enough bytes or all that follow.
func (d *Duplex) awaitEnough() ([]*chunk, error) {
	for d.err == nil && !d.deaf && !d.ended && d.arrived-d.read < d.enough {
		if err := d.wait(d.readLimit); err != nil {
			return nil, err
		}
	}
	if _, err := d.await(); err != nil {
		return nil, err
	}
	n, size := 0, 0
	for ; n < len(d.queue) && uint64(size) < d.enough; n++ {
		size += d.queue[n].end - d.queue[n].start
	}
	taken := slices.Clone(d.queue[:n])
	d.queue = append(d.queue[:0], d.queue[n:]...)
	return taken, nil
}
