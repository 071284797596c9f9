package guest

import (
	"os"
	"time"
)

const (
	maxMarks = 128
	markSpan = time.Second
)

// A mark says when output arrived that begins at its offset and goes on to the next one's: at last, or before. A span of time
// has one: a second at first, doubled as often as there are maxMarks. So what is found by its time may begin up to a second
// too early, or 1/64 of the time in which the command has written, whichever is longer; it never begins too late.
type mark struct {
	offset int64
	last   int64 // ms since 1970
}

// marks are those of one stream.
type marks struct {
	list  []mark
	began int64         // of the last one
	span  time.Duration // 0 = markSpan
}

// add says that output from offset on arrives now.
func (k *marks) add(offset, now int64) {
	if n := len(k.list); n > 0 {
		last := &k.list[n-1]
		now = max(now, last.last) // the clock may have been set back
		if now-k.began < max(k.span, markSpan).Milliseconds() {
			last.last = now
			return
		}
		if n >= maxMarks {
			k.merge()
		}
	}
	k.list = append(k.list, mark{offset, now})
	k.began = now
}

// merge makes one of every two.
func (k *marks) merge() {
	half := len(k.list) / 2
	for i := range half {
		k.list[i] = mark{k.list[2*i].offset, k.list[2*i+1].last}
	}
	k.list = k.list[:half]
	k.span = 2 * max(k.span, markSpan)
}

// since is where output begins that arrived at a time or later; end, if none did.
func (k *marks) since(t, end int64) int64 {
	for _, m := range k.list {
		if m.last >= t {
			return m.offset
		}
	}
	return end
}

func (b *body) since(t int64) int64 { return b.marks.since(t, b.size) }

// recoverMarks knows of what an earlier edge stored only when that was last.
func (b *body) recoverMarks() {
	for _, suffix := range []string{".tail", ".head"} {
		if info, err := os.Lstat(b.spool.path(b.name + suffix)); err == nil {
			b.marks = marks{list: []mark{{0, info.ModTime().UnixMilli()}}, began: info.ModTime().UnixMilli()}
			return
		}
	}
}
