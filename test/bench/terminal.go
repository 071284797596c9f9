package main

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

const (
	keys     = 300                    // of one measurement
	keyPause = 5 * time.Millisecond   // nobody types faster
	sinkSize = 256 << 10              // of one read of the flood
	warmUp   = 500 * time.Millisecond // of the flood
)

// benchTerminal measures how long a key takes to its echo: of a quiet sandbox, and while another command's output is read
// from the same sandbox as fast as it comes.
func benchTerminal(ctx context.Context, s *session, r *report) error {
	b, err := s.startStreams(ctx, r)
	if err != nil {
		return err
	}
	var quiet, busy samples
	var rate float64
	for range s.rounds {
		took, err := b.echoes(ctx)
		if err != nil {
			return err
		}
		quiet = append(quiet, took...)
		flood, err := b.flood(ctx)
		if err != nil {
			return err
		}
		if took, err = b.echoes(ctx); err != nil {
			return err
		}
		busy = append(busy, took...)
		rate = max(rate, flood())
	}
	r.add(figure{Name: "echo_quiet", Value: quiet.median(), Unit: "ms", Samples: len(quiet), Spread: quiet.spread()}, true)
	r.add(figure{Name: "echo", Value: busy.median(), Unit: "ms", Against: "quiet", Baseline: quiet.median(), Samples: len(busy),
		Spread: busy.spread(), Others: quiet.spread(), Target: "<= 5 ms", Parts: map[string]float64{"flood": rate}, PartUnit: "MB/s"}, true)
	return nil
}

// echoes types at a terminal and notes how long each key takes, each in a request of its own, as libdsec sends it.
func (b *streams) echoes(ctx context.Context) (samples, error) {
	k, err := b.box.Start(ctx, &dsecv1.Command{Argv: []string{"cat"}, Terminal: &dsecv1.Terminal{}})
	if err != nil {
		return nil, fmt.Errorf("start a terminal: %w", err)
	}
	screen, in := k.Output(ctx, client.Stdout, client.OutputOptions{Follow: true}), k.Stdin(ctx, 0)
	defer screen.Close()
	var out samples
	one := make([]byte, 1)
	for range keys {
		start := time.Now()
		typed := make(chan error, 1)
		go func() {
			_, err := in.Write([]byte("x"))
			typed <- err
		}()
		if _, err := io.ReadFull(screen, one); err != nil {
			return nil, fmt.Errorf("read the echo: %w", err)
		}
		out = append(out, float64(time.Since(start))/float64(time.Millisecond))
		if err := <-typed; err != nil {
			return nil, err
		}
		time.Sleep(keyPause)
	}
	return out, k.Kill(ctx, 0)
}

// flood reads from a command that writes without end, until it is told to stop; then it says how many MB/s came.
func (b *streams) flood(ctx context.Context) (stop func() float64, err error) {
	k, err := b.box.Start(ctx, &dsecv1.Command{Argv: []string{"cat", "/dev/zero"}})
	if err != nil {
		return nil, err
	}
	out := k.Output(ctx, client.Stdout, client.OutputOptions{Follow: true})
	var bytes atomic.Int64
	done := make(chan struct{})
	start := time.Now()
	go func() {
		defer close(done)
		buf := make([]byte, sinkSize)
		for {
			n, err := out.Read(buf)
			bytes.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	time.Sleep(warmUp)
	return func() float64 {
		rate := float64(bytes.Load()) / 1e6 / time.Since(start).Seconds()
		_ = k.Kill(ctx, 0) // its sandbox ends soon
		out.Close()
		<-done
		return rate
	}, nil
}
