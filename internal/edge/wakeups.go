package edge

import (
	"container/heap"
	"time"

	"dsec/sandbox"
)

// wakeups is one heap of what must be looked at when: at most one time for each sandbox. A sandbox that is used moves
// its idle time with every request, and the heap is not told: it wakes at the old time, looks, and is set again. So a
// request costs nothing here. Not safe for concurrent use.
type wakeups struct {
	heap  wakeHeap
	entry map[sandbox.ID]*wakeup
}

type wakeup struct {
	id    sandbox.ID
	at    time.Time
	index int
}

// set moves id's time; a zero time removes it. It reports whether the earliest time changed.
func (w *wakeups) set(id sandbox.ID, at time.Time) bool {
	before := w.next()
	e := w.entry[id]
	switch {
	case e == nil && at.IsZero():
	case e == nil:
		if w.entry == nil {
			w.entry = make(map[sandbox.ID]*wakeup)
		}
		e = &wakeup{id: id, at: at}
		w.entry[id] = e
		heap.Push(&w.heap, e)
	case at.IsZero():
		heap.Remove(&w.heap, e.index)
		delete(w.entry, id)
	default:
		e.at = at
		heap.Fix(&w.heap, e.index)
	}
	return !w.next().Equal(before)
}

// next is the earliest time, zero if there is none.
func (w *wakeups) next() time.Time {
	if len(w.heap) == 0 {
		return time.Time{}
	}
	return w.heap[0].at
}

// due removes and returns what is due, at most limit of them.
func (w *wakeups) due(now time.Time, limit int) []sandbox.ID {
	var ids []sandbox.ID
	for len(w.heap) > 0 && len(ids) < limit && !w.heap[0].at.After(now) {
		e := heap.Pop(&w.heap).(*wakeup)
		delete(w.entry, e.id)
		ids = append(ids, e.id)
	}
	return ids
}

type wakeHeap []*wakeup

func (h wakeHeap) Len() int           { return len(h) }
func (h wakeHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h wakeHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *wakeHeap) Push(x any) {
	e := x.(*wakeup)
	e.index = len(*h)
	*h = append(*h, e)
}
func (h *wakeHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return e
}
