// Package watcher polls the edges and keeps the last status and health of each.
//
// What surprises: a slow answer alone changes nothing but the time of the status. An edge is unhealthy after FailAfter
// polls in a row have failed, healthy again after one that worked, and nobody's sandbox is touched by either: health
// decides only where new sandboxes go. A failing edge is polled sooner than a healthy one, so that a restart is seen at once.
package watcher

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

// Defaults.
const (
	DefaultInterval = time.Second
	DefaultTimeout  = 3 * time.Second
	// FailAfter is how many polls must fail in a row before an edge counts as unhealthy.
	FailAfter  = 3
	firstRetry = 50 * time.Millisecond
)

// A Poller asks one edge for its status.
type Poller interface {
	GetStatus(ctx context.Context) (*edgev1.Status, error)
}

// Options of a Watcher. OnEvent is called for one edge at a time, in order, and must not block: the edge's next poll waits.
type Options struct {
	Interval time.Duration                     // between polls of an edge; 0 = DefaultInterval
	Timeout  time.Duration                     // of one poll; 0 = DefaultTimeout
	Jitter   func(time.Duration) time.Duration // of the interval; nil = none
	OnEvent  func(Event)
	Log      *slog.Logger
}

// A Kind says what an Event is about.
type Kind uint8

// Kinds of events.
const (
	Up     Kind = iota + 1 // the first status, or the first after it was unhealthy
	Down                   // unhealthy
	Polled                 // a further status
)

// An Event is a change of what is known about an edge.
type Event struct {
	Kind Kind
	Edge sandbox.EdgeCode
	Last Observation
}

// An Observation is what is known about an edge. Status is nil before the first poll that worked; do not change it.
type Observation struct {
	Edge     sandbox.EdgeCode
	Status   *edgev1.Status
	Asked    time.Time // when that status was asked for
	Healthy  bool
	Failures int   // in a row
	Err      error // of the last poll, if it failed
}

// A Watcher polls edges. It is safe for concurrent use.
type Watcher struct {
	o     Options
	edges map[sandbox.EdgeCode]Poller

	mu   sync.RWMutex
	last map[sandbox.EdgeCode]Observation
}

// New makes a watcher of these edges. Nothing is polled before Run.
func New(o Options, edges map[sandbox.EdgeCode]Poller) *Watcher {
	if o.Interval <= 0 {
		o.Interval = DefaultInterval
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Jitter == nil {
		o.Jitter = func(d time.Duration) time.Duration { return d }
	}
	if o.OnEvent == nil {
		o.OnEvent = func(Event) {}
	}
	w := &Watcher{o: o, edges: maps.Clone(edges), last: make(map[sandbox.EdgeCode]Observation)}
	for code := range edges {
		w.last[code] = Observation{Edge: code}
	}
	return w
}

// Run polls until ctx ends, each edge on its own: one that hangs delays no other.
func (w *Watcher) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for code, p := range w.edges {
		wg.Go(func() { w.watch(ctx, code, p) })
	}
	wg.Wait()
}

func (w *Watcher) watch(ctx context.Context, code sandbox.EdgeCode, p Poller) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		failures := w.poll(ctx, code, p)
		timer.Reset(w.pause(failures))
	}
}

// pause grows from firstRetry to the interval while polls fail.
func (w *Watcher) pause(failures int) time.Duration {
	d := w.o.Interval
	if failures > 0 && failures < 16 {
		d = min(d, firstRetry<<(failures-1))
	}
	return w.o.Jitter(d)
}

func (w *Watcher) poll(ctx context.Context, code sandbox.EdgeCode, p Poller) (failures int) {
	asked := time.Now()
	pctx, cancel := context.WithTimeout(ctx, w.o.Timeout)
	status, err := p.GetStatus(pctx)
	cancel()
	if ctx.Err() != nil { // we are ending: the failure says nothing of the edge
		return 0
	}
	if err == nil && sandbox.EdgeCode(status.GetEdge()) != code {
		err = sandbox.Errorf(sandbox.FailedPrecondition, "wrong_edge", "the node at this address is %q instead of %q", status.GetEdge(), code)
	}
	w.mu.Lock()
	o := w.last[code]
	before := o.Healthy
	if err == nil {
		o = Observation{Edge: code, Status: status, Asked: asked, Healthy: true}
	} else {
		o.Failures, o.Err = o.Failures+1, err
		o.Healthy = o.Healthy && o.Failures < FailAfter
	}
	w.last[code] = o
	w.mu.Unlock()
	w.tell(before, o)
	return o.Failures
}

func (w *Watcher) tell(before bool, o Observation) {
	switch {
	case o.Healthy && !before:
		w.o.Log.Info("edge is up", "edge", o.Edge, "sandboxes", o.Status.GetSandboxes())
		w.o.OnEvent(Event{Up, o.Edge, o})
	case !o.Healthy && before:
		w.o.Log.Warn("edge is down", "edge", o.Edge, "failures", o.Failures, "error", o.Err)
		w.o.OnEvent(Event{Down, o.Edge, o})
	case o.Healthy && o.Failures == 0:
		w.o.OnEvent(Event{Polled, o.Edge, o})
	}
}

// All is what is known about every edge, by code.
func (w *Watcher) All() []Observation {
	w.mu.RLock()
	defer w.mu.RUnlock()
	list := make([]Observation, 0, len(w.last))
	for _, code := range slices.Sorted(maps.Keys(w.last)) {
		list = append(list, w.last[code])
	}
	return list
}
