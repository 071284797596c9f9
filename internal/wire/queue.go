package wire

import (
	"math/bits"
	"sync"
)

const (
	minRing  = 512
	keepRing = 4 << 10 // what an empty Queue keeps
)

// A Queue holds bytes of a stream that are on their way: a ring that grows as it needs. The zero value is empty.
type Queue struct {
	ring  []byte // its length is a power of two
	at, n int
}

// rings are used ones, by the logarithm of their length.
var rings [bits.UintSize]sync.Pool

// Len is how many bytes there are.
func (q *Queue) Len() int { return q.n }

// Append adds p.
func (q *Queue) Append(p []byte) {
	q.reserve(len(p))
	for len(p) > 0 {
		n := copy(q.free(), p)
		q.n += n
		p = p[n:]
	}
}

// Space is room behind what is there, of at most want bytes and at least one. What is written into it counts once Extend says so.
func (q *Queue) Space(want int) []byte {
	q.reserve(1)
	if len(q.ring) < want {
		q.reserve(want)
	}
	b := q.free()
	return b[:min(len(b), want)]
}

// Extend takes note of n bytes in what Space returned.
func (q *Queue) Extend(n int) { q.n += n }

// reserve makes room for n more bytes.
func (q *Queue) reserve(n int) {
	if q.n+n <= len(q.ring) {
		return
	}
	size := max(minRing, 1<<bits.Len(uint(q.n+n-1)))
	var ring []byte
	if used, ok := rings[bits.Len(uint(size))].Get().(*[]byte); ok {
		ring = *used
	} else {
		ring = make([]byte, size)
	}
	for i := 0; i < q.n; {
		i += copy(ring[i:], q.From(i))
	}
	q.ring, q.at = ring, 0 // the old one may still be read
}

// free is the first part of the ring that holds nothing.
func (q *Queue) free() []byte {
	from := (q.at + q.n) & (len(q.ring) - 1)
	return q.ring[from:min(len(q.ring), from+len(q.ring)-q.n)]
}

// From are bytes from the i-th on: all of them, or those up to the ring's end. They stay as they are until they are discarded,
// also while others are appended.
func (q *Queue) From(i int) []byte {
	if i >= q.n {
		return nil
	}
	from := (q.at + i) & (len(q.ring) - 1)
	return q.ring[from:min(len(q.ring), from+q.n-i)]
}

// AppendTo adds up to limit bytes from the i-th on to b.
func (q *Queue) AppendTo(b []byte, i, limit int) []byte {
	for end := min(q.n, i+limit); i < end; {
		p := q.From(i)
		p = p[:min(len(p), end-i)]
		b = append(b, p...)
		i += len(p)
	}
	return b
}

// Discard drops the first n bytes.
func (q *Queue) Discard(n int) {
	q.n -= n
	if q.n > 0 {
		q.at = (q.at + n) & (len(q.ring) - 1)
		return
	}
	q.at = 0
	if len(q.ring) > keepRing {
		ring := q.ring
		q.ring = nil
		if len(ring) <= Window { // a longer one is a rare script
			rings[bits.Len(uint(len(ring)))].Put(&ring)
		}
	}
}

// Drop drops everything. Somebody may still read what From returned.
func (q *Queue) Drop() { *q = Queue{} }
