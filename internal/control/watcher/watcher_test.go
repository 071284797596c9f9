package watcher

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

// node is an edge that answers as told.
type node struct {
	mu    sync.Mutex
	code  string
	err   error
	hang  bool
	polls []time.Time
}

func (n *node) set(err error, hang bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err, n.hang = err, hang
}

func (n *node) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.polls)
}

func (n *node) GetStatus(ctx context.Context) (*edgev1.Status, error) {
	n.mu.Lock()
	n.polls = append(n.polls, time.Now())
	hang, err := n.hang, n.err
	n.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &edgev1.Status{Edge: n.code}, err
}

type recorder struct {
	mu     sync.Mutex
	events []Event
}

func (r *recorder) add(e Event) {
	if e.Kind == Polled {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) kinds() []Kind {
	r.mu.Lock()
	defer r.mu.Unlock()
	var k []Kind
	for _, e := range r.events {
		k = append(k, e.Kind)
	}
	return k
}

func run(t *testing.T, o Options, edges map[sandbox.EdgeCode]Poller) *Watcher {
	o.Log = slog.New(slog.DiscardHandler)
	w := New(o, edges)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { w.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
	return w
}

func TestHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, r := &node{code: "eaaaa"}, &recorder{}
		w := run(t, Options{OnEvent: r.add}, map[sandbox.EdgeCode]Poller{"eaaaa": n})
		if o, ok := last(w, "eaaaa"); !ok || !o.Healthy || o.Status == nil {
			t.Fatalf("after the first poll: %+v", o)
		}
		time.Sleep(10500 * time.Millisecond)
		if c := n.count(); c < 10 || c > 12 {
			t.Errorf("%d polls in 10 s", c)
		}

		n.set(errors.New("away"), false)
		time.Sleep(DefaultInterval / 2)
		synctest.Wait()
		if o, _ := last(w, "eaaaa"); !o.Healthy || o.Failures == 0 {
			t.Fatalf("one failure decides nothing: %+v", o)
		}
		time.Sleep(2 * time.Second)
		if o, _ := last(w, "eaaaa"); o.Healthy || o.Status == nil || o.Err == nil {
			t.Fatalf("after %d failures: %+v", o.Failures, o)
		}
		n.set(nil, false)
		time.Sleep(DefaultInterval)
		synctest.Wait()
		if o, _ := last(w, "eaaaa"); !o.Healthy || o.Err != nil || o.Failures != 0 {
			t.Fatalf("after it came back: %+v", o)
		}
		if k := r.kinds(); len(k) != 3 || k[0] != Up || k[1] != Down || k[2] != Up {
			t.Errorf("events %v", k)
		}
	})
}

// last is what w knows about one edge.
func last(w *Watcher, code sandbox.EdgeCode) (Observation, bool) {
	for _, o := range w.All() {
		if o.Edge == code {
			return o, true
		}
	}
	return Observation{}, false
}

func TestAHangingEdgeDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad, good := &node{code: "eaaaa", hang: true}, &node{code: "ebbbb"}
		w := run(t, Options{}, map[sandbox.EdgeCode]Poller{"eaaaa": bad, "ebbbb": good})
		time.Sleep(20 * time.Second)
		if c := good.count(); c < 20 {
			t.Errorf("%d polls of the good edge in 20 s", c)
		}
		if o, _ := last(w, "eaaaa"); o.Healthy || !errors.Is(o.Err, context.DeadlineExceeded) {
			t.Errorf("%+v", o)
		}
		if all := w.All(); len(all) != 2 || all[0].Edge != "eaaaa" || !all[1].Healthy {
			t.Errorf("%+v", all)
		}
	})
}

func TestAStartingEdgeIsFoundSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{code: "eaaaa", err: errors.New("not yet")}
		w := run(t, Options{}, map[sandbox.EdgeCode]Poller{"eaaaa": n})
		time.Sleep(120 * time.Millisecond)
		n.set(nil, false)
		time.Sleep(300 * time.Millisecond)
		if o, _ := last(w, "eaaaa"); !o.Healthy {
			t.Fatalf("%d polls, %+v", n.count(), o)
		}
	})
}

func TestWrongEdgeIsNotHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := run(t, Options{}, map[sandbox.EdgeCode]Poller{"eaaaa": &node{code: "ebbbb"}})
		if o, _ := last(w, "eaaaa"); o.Healthy || sandbox.ReasonOf(o.Err) != "wrong_edge" {
			t.Fatalf("%+v", o)
		}
	})
}

func TestJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{code: "eaaaa"}
		run(t, Options{Interval: time.Second, Jitter: func(d time.Duration) time.Duration { return 2 * d }}, map[sandbox.EdgeCode]Poller{"eaaaa": n})
		time.Sleep(10 * time.Second)
		if c := n.count(); c > 6 {
			t.Errorf("%d polls", c)
		}
	})
}

func TestNoFailureIsCountedWhenEnding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, r := &node{code: "eaaaa"}, &recorder{}
		w := New(Options{OnEvent: r.add, Log: slog.New(slog.DiscardHandler)}, map[sandbox.EdgeCode]Poller{"eaaaa": n})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { w.Run(ctx); close(done) }()
		synctest.Wait()
		n.set(nil, true)
		time.Sleep(1500 * time.Millisecond) // within a poll
		cancel()
		<-done
		if o, _ := last(w, "eaaaa"); !o.Healthy || o.Failures != 0 {
			t.Fatalf("%+v", o)
		}
	})
}
