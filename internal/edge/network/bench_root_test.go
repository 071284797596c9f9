//go:build rootful

package network

import (
	"context"
	"testing"
	"time"

	"dsec/sandbox"
)

// BenchmarkSlot is what a network costs the edge for one sandbox that does not use it: a slot with its policy, handed out and taken back.
func BenchmarkSlot(b *testing.B) {
	for name, p := range map[string]Policy{"loopback": {}, "linked": {Open: []Destination{opened("10.0.0.0/8", 443, 443, TCP)}}} {
		b.Run(name, func(b *testing.B) {
			s := openLinked(b, privateDir(b), 16)
			b.Cleanup(func() { s.Close(context.Background()) })
			cycle := func() (took time.Duration) {
				id, began := sandbox.NewID(edge), time.Now()
				if _, err := s.Acquire(b.Context(), id, p); err != nil {
					b.Fatal(err)
				}
				took = time.Since(began)
				if err := s.Release(b.Context(), id); err != nil {
					b.Fatal(err)
				}
				return took
			}
			cycle() // makes router and relay
			time.Sleep(500 * time.Millisecond)
			var acquired time.Duration
			for b.Loop() {
				acquired += cycle()
			}
			b.ReportMetric(float64(acquired.Microseconds())/float64(b.N), "µs/acquire")
		})
	}
}

// BenchmarkSwap is a policy that another one replaces, in filter and relay.
func BenchmarkSwap(b *testing.B) {
	s := openLinked(b, privateDir(b), 1)
	b.Cleanup(func() { s.Close(context.Background()) })
	id := sandbox.NewID(edge)
	policies := []Policy{{Open: []Destination{opened("10.0.0.0/8", 443, 443, TCP)}}, {Open: []Destination{opened("10.1.0.0/16", 53, 53, UDP)}}}
	if _, err := s.Acquire(b.Context(), id, policies[0]); err != nil {
		b.Fatal(err)
	}
	for i := 0; b.Loop(); i++ {
		if err := s.SetPolicy(b.Context(), id, policies[i%2]); err != nil {
			b.Fatal(err)
		}
	}
}
