// Package placement chooses the edge of a new sandbox: filter, k random choices, least loaded by prediction. It is pure:
// no I/O, no clock; time and chance are arguments.
//
// What surprises: load is predicted, not measured. The last status of an edge is up to a poll old, and within that time
// thousands of creates may be decided. An Overlay adds what was placed since, until a status shows it. Without it all
// creates of a second would go to the edge that was emptiest at its start.
package placement

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"dsec/sandbox"
)

// K is the number of random choices: two already make the most loaded edge exponentially less loaded than one would, and
// more of them make every apiserver pick the same edge.
const K = 2

// Costs of a placement that no status shows yet, where nothing better is known.
const (
	startingCPU    = 0.01     // cores
	braking        = 1        // more load than any that is measured
	startingMemory = 16 << 20 // bytes; the limit of a sandbox says what it may use, not what it does
)

// An Edge is what is known of a candidate.
type Edge struct {
	Code      sandbox.EdgeCode
	Healthy   bool
	Accepting bool
	Refusing  string // why it does not accept
	Braking   bool   // it holds creates back: any other is better
	Backends  []string

	Sandboxes       int64
	Capacity        int64 // 0: unknown
	MemoryBytes     int64 // 0: unknown
	MemoryAvailable int64
	CPUs            float64 // 0: unknown
	CPUBusy         float64 // share of all CPUs, 0..1
}

// A Request is what a sandbox needs.
type Request struct {
	Backend string
	Exclude map[sandbox.EdgeCode]bool // edges that refused it
}

// Rand is the chance: *math/rand/v2.Rand.
type Rand interface{ IntN(n int) int }

// Eligible is the edges that may take the request, in their order.
func Eligible(edges []Edge, r Request) []Edge {
	var ok []Edge
	for _, e := range edges {
		if e.Healthy && e.Accepting && !r.Exclude[e.Code] && slices.Contains(e.Backends, r.Backend) {
			ok = append(ok, e)
		}
	}
	return ok
}

// Choose picks the least loaded of k random edges. pending says how many placements on an edge its status does not show.
// It fails with ResourceExhausted (no_capacity) or Unavailable (no_healthy_node) and facts if no edge may take it.
func Choose(edges []Edge, r Request, k int, pending func(sandbox.EdgeCode) int, rnd Rand) (sandbox.EdgeCode, error) {
	ok := Eligible(edges, r)
	if len(ok) == 0 {
		return "", explain(edges, r)
	}
	// The first k steps of a Fisher-Yates shuffle are k choices without repetition.
	k = max(1, min(k, len(ok)))
	best, least := sandbox.EdgeCode(""), math.Inf(1)
	for i := range k {
		j := i + rnd.IntN(len(ok)-i)
		ok[i], ok[j] = ok[j], ok[i]
		if load := Load(ok[i], pending(ok[i].Code)); load < least || best == "" {
			best, least = ok[i].Code, load
		}
	}
	return best, nil
}

// Load predicts how full the edge would be with one more sandbox, by what is shortest there: 0 is empty, 1 is full.
func Load(e Edge, pending int) float64 {
	n := float64(pending + 1)
	var load float64
	if e.Capacity > 0 {
		load = (float64(e.Sandboxes) + n) / float64(e.Capacity)
	}
	if e.MemoryBytes > 0 {
		load = max(load, 1-(float64(e.MemoryAvailable)-n*startingMemory)/float64(e.MemoryBytes))
	}
	if e.CPUs > 0 {
		load = max(load, e.CPUBusy+n*startingCPU/e.CPUs)
	}
	if e.Braking {
		load += braking
	}
	return load
}

// explain says why no edge may take the request.
func explain(edges []Edge, r Request) error {
	var healthy, backend, accepting int
	reasons := map[string]string{}
	for _, e := range edges {
		if !e.Healthy {
			continue
		}
		healthy++
		if !slices.Contains(e.Backends, r.Backend) {
			continue
		}
		backend++
		switch {
		case !e.Accepting:
			reasons[string(e.Code)] = e.Refusing
		default:
			accepting++
		}
	}
	var err *sandbox.Error
	switch {
	case healthy == 0:
		err = sandbox.Errorf(sandbox.Unavailable, "no_healthy_node", "none of %d nodes answers; try again, or look at `dsec doctor` on the node", len(edges))
	case backend == 0:
		err = sandbox.Errorf(sandbox.Unsupported, "no_node_with_backend", "no node has the backend %q", r.Backend)
	default:
		err = sandbox.Errorf(sandbox.ResourceExhausted, "no_capacity", "no node can take another sandbox now; delete some, or try again later")
	}
	err = err.WithFact("nodes", strconv.Itoa(len(edges))).WithFact("healthy", strconv.Itoa(healthy)).WithFact("refused_this", strconv.Itoa(accepting))
	for _, code := range slices.Sorted(maps.Keys(reasons)) {
		if len(err.Facts) > 10 { // enough to see why
			break
		}
		err = err.WithFact("node_"+code, reasons[code])
	}
	return err
}

// Settle is how long after a placement a status may still not show it: the create travels in a batch and waits for
// admission.
const Settle = 50 * time.Millisecond

// An Overlay counts own placements that no status shows yet. It is not safe for concurrent use.
type Overlay struct {
	edges map[sandbox.EdgeCode][]time.Time // in order
}

// Place notes a placement at that time.
func (o *Overlay) Place(e sandbox.EdgeCode, at time.Time) {
	if o.edges == nil {
		o.edges = make(map[sandbox.EdgeCode][]time.Time)
	}
	o.edges[e] = append(o.edges[e], at)
}

// Refused takes back the youngest placement on e: nothing was made there.
func (o *Overlay) Refused(e sandbox.EdgeCode) {
	if list := o.edges[e]; len(list) > 0 {
		o.edges[e] = list[:len(list)-1]
	}
}

// Observe drops what a status shows that was asked for at that time, by the clock of Place.
func (o *Overlay) Observe(e sandbox.EdgeCode, asked time.Time) {
	list := o.edges[e]
	n, _ := slices.BinarySearchFunc(list, asked.Add(-Settle), func(at, limit time.Time) int {
		if at.After(limit) {
			return 1
		}
		return -1
	})
	switch {
	case n == len(list):
		delete(o.edges, e)
	case n > 0:
		o.edges[e] = slices.Delete(list, 0, n)
	}
}

// Pending is the number of placements on e that no status shows.
func (o *Overlay) Pending(e sandbox.EdgeCode) int { return len(o.edges[e]) }
