package placement

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"dsec/sandbox"
)

func code(i int) sandbox.EdgeCode {
	const digits = "abcdefghijklmnop"
	return sandbox.EdgeCode([]byte{'e', digits[i>>12&15], digits[i>>8&15], digits[i>>4&15], digits[i&15]})
}

func none(sandbox.EdgeCode) int { return 0 }

var container = Request{Backend: "container"}

// random makes a set of edges in which everything that can vary does.
func random(r *rand.Rand) []Edge {
	edges := make([]Edge, r.IntN(12))
	for i := range edges {
		edges[i] = Edge{
			Code: code(i), Healthy: r.IntN(4) > 0, Accepting: r.IntN(4) > 0, Backends: [][]string{{"container"}, {"microvm", "container"}, {"microvm"}, nil}[r.IntN(4)],
			Sandboxes: r.Int64N(1000), Capacity: r.Int64N(3) * 1000, MemoryBytes: r.Int64N(3) << 34, MemoryAvailable: r.Int64N(1 << 34),
			CPUs: float64(r.IntN(3) * 8), CPUBusy: r.Float64(),
		}
	}
	return edges
}

func TestOnlyEligibleEdgesAreChosen(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		edges := random(r)
		req := Request{Backend: "container", Exclude: map[sandbox.EdgeCode]bool{code(r.IntN(12)): true}}
		got, err := Choose(edges, req, 1+r.IntN(4), none, r)
		ok := map[sandbox.EdgeCode]bool{}
		for _, e := range Eligible(edges, req) {
			if !e.Healthy || !e.Accepting || req.Exclude[e.Code] {
				t.Fatalf("eligible: %+v", e)
			}
			ok[e.Code] = true
		}
		switch {
		case len(ok) == 0 && err == nil:
			t.Fatalf("chose %s of none", got)
		case len(ok) > 0 && (err != nil || !ok[got]):
			t.Fatalf("chose %q of %v: %v", got, ok, err)
		}
	}
}

func TestAllChoicesGiveTheLeastLoaded(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		edges := random(r)
		got, err := Choose(edges, container, len(edges), none, r)
		if err != nil {
			continue
		}
		var load float64
		least := 1e9
		for _, e := range Eligible(edges, container) {
			if e.Code == got {
				load = Load(e, 0)
			}
			least = min(least, Load(e, 0))
		}
		if load != least {
			t.Fatalf("load %v; least %v", load, least)
		}
	}
}

func TestLoadGrows(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		e := Edge{Sandboxes: r.Int64N(100), Capacity: 1 + r.Int64N(1000), MemoryBytes: 1 << 34, MemoryAvailable: r.Int64N(1 << 34), CPUs: 8, CPUBusy: r.Float64()}
		p := r.IntN(100)
		if Load(e, p+1) < Load(e, p) {
			t.Fatalf("%+v: one more pending made it emptier", e)
		}
		more := e
		more.Sandboxes++
		less := e
		less.MemoryAvailable /= 2
		if Load(more, p) < Load(e, p) || Load(less, p) < Load(e, p) {
			t.Fatalf("%+v: less room made it emptier", e)
		}
	}
}

// Between two statuses all creates see the same numbers. With the overlay they spread; without it they would not.
func TestOverlaySpreadsABurst(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	edges := make([]Edge, 10)
	for i := range edges {
		edges[i] = Edge{Code: code(i), Healthy: true, Accepting: true, Backends: []string{"container"}, Capacity: 1000}
	}
	edges[0].Sandboxes = 0
	for i := 1; i < 10; i++ {
		edges[i].Sandboxes = 50
	}
	var o Overlay
	now := time.Unix(0, 0)
	for range 1000 {
		c, err := Choose(edges, container, K, o.Pending, r)
		if err != nil {
			t.Fatal(err)
		}
		o.Place(c, now)
	}
	for i := range edges {
		if n := edges[i].Sandboxes + int64(o.Pending(code(i))); n < 120 || n > 175 {
			t.Errorf("edge %d would have %d sandboxes; the mean is 145", i, n)
		}
	}
}

func TestOverlayExpiresByStatus(t *testing.T) {
	var o Overlay
	t0 := time.Unix(1000, 0)
	o.Observe("eaaaa", t0) // nothing there
	o.Place("eaaaa", t0)
	o.Place("eaaaa", t0.Add(time.Second))
	o.Place("ebbbb", t0)
	o.Observe("eaaaa", t0.Add(Settle-1)) // may have been asked before the create arrived
	if n := o.Pending("eaaaa"); n != 2 {
		t.Fatalf("%d pending", n)
	}
	o.Observe("eaaaa", t0.Add(Settle))
	if n := o.Pending("eaaaa"); n != 1 {
		t.Fatalf("%d pending", n)
	}
	o.Observe("eaaaa", t0.Add(time.Hour))
	if o.Pending("eaaaa") != 0 || o.Pending("ebbbb") != 1 {
		t.Fatalf("%d and %d pending", o.Pending("eaaaa"), o.Pending("ebbbb"))
	}
	o.Refused("ebbbb")
	o.Refused("ebbbb")
	if o.Pending("ebbbb") != 0 {
		t.Fatal("a refused placement counts")
	}
}

func TestWhyNoEdge(t *testing.T) {
	up := Edge{Code: "eaaaa", Healthy: true, Accepting: true, Backends: []string{"container"}}
	down, full, other := up, up, up
	down.Healthy = false
	full.Accepting, full.Refusing = false, "disk"
	other.Backends = nil
	for _, c := range []struct {
		edges  []Edge
		req    Request
		reason string
		class  sandbox.Class
	}{
		{nil, container, "no_healthy_node", sandbox.Unavailable},
		{[]Edge{down}, container, "no_healthy_node", sandbox.Unavailable},
		{[]Edge{other, down}, container, "no_node_with_backend", sandbox.Unsupported},
		{[]Edge{full, other}, container, "no_capacity", sandbox.ResourceExhausted},
		{[]Edge{up}, Request{Backend: "container", Exclude: map[sandbox.EdgeCode]bool{"eaaaa": true}}, "no_capacity", sandbox.ResourceExhausted},
	} {
		_, err := Choose(c.edges, c.req, K, none, rand.New(rand.NewPCG(1, 1)))
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Reason != c.reason || e.Class != c.class {
			t.Errorf("%+v: got %v", c.edges, err)
		}
		if c.reason == "no_capacity" && len(c.edges) == 2 && e.Facts["node_eaaaa"] != "disk" {
			t.Errorf("facts %v", e.Facts)
		}
	}
}

func BenchmarkChoose160(b *testing.B) {
	edges := make([]Edge, 160)
	for i := range edges {
		edges[i] = Edge{Code: code(i), Healthy: true, Accepting: true, Backends: []string{"container"}, Capacity: 4000, Sandboxes: int64(i)}
	}
	r := rand.New(rand.NewPCG(1, 1))
	for b.Loop() {
		if _, err := Choose(edges, container, K, none, r); err != nil {
			b.Fatal(err)
		}
	}
}
