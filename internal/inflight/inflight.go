// Package inflight bounds what is under way at a time: calls and streams of each project, and connections of a process. The
// apiserver and the edge both link it: each is safe from a flood by itself.
//
// What surprises:
//
//   - Nothing waits for a place. Who is refused is told so at once, and nothing of the request was begun: it may be sent again.
//   - However high the bound of a project is, its streams take at most half of the places that the process has for streams, so
//     that other projects go on.
//   - A process without descriptors still answers: see Listener.
package inflight

import (
	"strconv"
	"sync"

	"dsec/sandbox"
)

// Reason is that of every refusal for there being too much under way. RetryAfter is the header's value that goes with it, in
// seconds.
const (
	Reason     = "too_many_requests"
	RetryAfter = "1"
)

// A Kind is what a request takes.
type Kind uint8

const (
	Call   Kind = iota // one message each way
	End                // a call that ends something: there is room for some where there is none for other calls
	Stream             // may last, and takes descriptors: bytes, connections to ports, watches
)

// Limits of what is under way. Zero means the default in parentheses, but for AllStreams, where it means that there is none.
type Limits struct {
	Calls      int   // of one project (20,000)
	Streams    int   // of one project (10,000)
	Bytes      int64 // of the messages of one project's requests (512 MiB)
	AllStreams int   // of all projects together
}

// Defaults of a project.
const (
	DefaultCalls   = 20_000
	DefaultStreams = 10_000
	DefaultBytes   = 512 << 20
)

// A Counter counts what is under way. It is safe for concurrent use.
type Counter struct {
	limits Limits

	mu       sync.Mutex
	projects map[string]*project // that have something under way
	streams  int
}

type project struct {
	calls, streams int
	bytes          int64
}

// New makes a counter.
func New(l Limits) *Counter {
	if l.Calls == 0 {
		l.Calls = DefaultCalls
	}
	if l.Streams == 0 {
		l.Streams = DefaultStreams
	}
	if l.Bytes == 0 {
		l.Bytes = DefaultBytes
	}
	if l.AllStreams > 0 {
		l.Streams = min(l.Streams, max(1, l.AllStreams/2))
	}
	return &Counter{limits: l, projects: make(map[string]*project)}
}

// A Place is held by one request until Leave.
type Place struct {
	c       *Counter
	project string
	kind    Kind
	bytes   int64
	left    bool
}

// Enter takes a place for a request of a project, or says that there is none.
func (c *Counter) Enter(name string, k Kind) (*Place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.projects[name]
	if p == nil {
		p = new(project)
	}
	calls := c.limits.Calls
	if k == End {
		calls += max(8, calls/16)
	}
	switch {
	case k != Stream && p.calls >= calls:
		return nil, refuse("calls", int64(calls), "the project has %d calls under way, which is the most it may have", p.calls)
	case k == Stream && p.streams >= c.limits.Streams:
		return nil, refuse("streams", int64(c.limits.Streams), "the project has %d streams under way, which is the most it may have", p.streams)
	case k == Stream && c.limits.AllStreams > 0 && c.streams >= c.limits.AllStreams:
		return nil, refuse("all_streams", int64(c.limits.AllStreams), "the platform has %d streams under way, which is the most that its descriptors allow", c.streams)
	}
	if k == Stream {
		p.streams++
		c.streams++
	} else {
		p.calls++
	}
	c.projects[name] = p
	return &Place{c: c, project: name, kind: k}, nil
}

// Hold counts n bytes more that the request keeps in memory, or says that there are too many.
func (h *Place) Hold(n int64) error {
	h.c.mu.Lock()
	defer h.c.mu.Unlock()
	p := h.c.projects[h.project]
	if h.left || p == nil {
		return nil // nobody waits for its answer any more
	}
	if most := h.c.limits.Bytes; p.bytes+n > most {
		return refuse("bytes", most, "the messages of the project's requests under way are %d bytes together, and may be %d", p.bytes, most)
	}
	p.bytes += n
	h.bytes += n
	return nil
}

// Leave gives the place back. Leaving again does nothing.
func (h *Place) Leave() {
	h.c.mu.Lock()
	defer h.c.mu.Unlock()
	if h.left {
		return
	}
	h.left = true
	p := h.c.projects[h.project]
	p.bytes -= h.bytes
	if h.kind == Stream {
		p.streams--
		h.c.streams--
	} else {
		p.calls--
	}
	if *p == (project{}) {
		delete(h.c.projects, h.project)
	}
}

func refuse(what string, most int64, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.ResourceExhausted, Reason, format+"; try again in a moment, or end some: nothing was begun", args...).
		WithFact("what", what).WithFact("limit", strconv.FormatInt(most, 10))
}
