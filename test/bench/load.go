package main

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// samples are measurements of one thing, in the order in which they were made.
type samples []float64

// quantile is the value below which the share q of the samples lies.
func (s samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (sorted[high]-sorted[low])*(at-float64(low))
}

func (s samples) median() float64 { return s.quantile(0.5) }

// spread calls f for 0 to n-1 from some workers. The first error ends it.
func spread(ctx context.Context, workers, n int, f func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(workers, n) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// oneByOne measures n calls in milliseconds each.
func oneByOne(ctx context.Context, n int, f func(ctx context.Context) error) (samples, error) {
	out := make(samples, 0, n)
	for range n {
		start := time.Now()
		if err := f(ctx); err != nil {
			return nil, err
		}
		out = append(out, float64(time.Since(start))/1e6)
	}
	return out, nil
}

// A rate is what a load reached.
type rate struct {
	PerSecond float64
	Ran       int     // with those under way at the end: all that took CPU time
	Latency   samples // ms
}

// sustain has each of some workers call f again and again, and measures what all do in the given time; what is under way at
// its end is not counted, nor is what was begun before its start. Where nothing has ended by then, the time goes on until what is
// under way has.
func sustain(ctx context.Context, workers int, d time.Duration, f func(ctx context.Context, worker int) error) (rate, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begin := time.Now()
	end := begin.Add(d)
	var mu sync.Mutex
	var all, late samples
	ran := 0
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			var own, after samples
			calls := 0
			for ctx.Err() == nil {
				start := time.Now()
				if !start.Before(end) {
					break
				}
				calls++
				if err := f(ctx, w); err != nil {
					cancel(err)
					return
				}
				now := time.Now()
				took := float64(now.Sub(start)) / 1e6
				if now.Before(end) {
					own = append(own, took)
				} else {
					after = append(after, took)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all, late, ran = append(all, own...), append(late, after...), ran+calls
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return rate{}, err
	}
	if len(all) == 0 {
		all, d = late, time.Since(begin)
	}
	if len(all) == 0 {
		return rate{}, errors.New("no worker was given time for a call")
	}
	return rate{PerSecond: float64(len(all)) / d.Seconds(), Ran: ran, Latency: all}, nil
}
