package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
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
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	b := &streams{p: p, r: r, http: &http.Client{Transport: &bearer{p.key, &http.Transport{DisableCompression: true, ReadBufferSize: 256 << 10, MaxIdleConnsPerHost: 4}}}}
	if b.box, err = p.create(ctx); err != nil {
		return err
	}
	defer func() { _ = p.destroy(context.WithoutCancel(ctx), b.box) }() // the platform ends with everything in it
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
	res, err := b.p.sandboxes.Exec(ctx, connect.NewRequest(&dsecv1.ExecRequest{SandboxId: b.box, Command: &dsecv1.Command{Argv: []string{"cat"}, Terminal: &dsecv1.Terminal{}}}))
	if err != nil {
		return nil, fmt.Errorf("start a terminal: %w", err)
	}
	id := res.Msg.GetResult().GetCommandId()
	screen, err := b.request(ctx, http.MethodGet, id, "stdout?follow=1", nil)
	if err != nil {
		return nil, err
	}
	defer screen.Body.Close()
	var out samples
	one := make([]byte, 1)
	for n := range keys {
		start := time.Now()
		typed := make(chan error, 1)
		go func() { typed <- b.typeAt(ctx, id, n) }()
		if _, err := io.ReadFull(screen.Body, one); err != nil {
			return nil, fmt.Errorf("read the echo: %w", err)
		}
		out = append(out, float64(time.Since(start))/float64(time.Millisecond))
		if err := <-typed; err != nil {
			return nil, err
		}
		time.Sleep(keyPause)
	}
	_, err = b.p.sandboxes.KillCommand(ctx, connect.NewRequest(&dsecv1.KillCommandRequest{SandboxId: b.box, CommandId: id}))
	return out, err
}

func (b *streams) typeAt(ctx context.Context, id string, offset int) error {
	res, err := b.request(ctx, http.MethodPut, id, fmt.Sprintf("stdin?offset=%d", offset), strings.NewReader("x"))
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return err
}

// flood reads from a command that writes without end, until it is told to stop; then it says how many MB/s came.
func (b *streams) flood(ctx context.Context) (stop func() float64, err error) {
	id, err := b.start(ctx, []string{"cat", "/dev/zero"}, false)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	res, err := b.request(ctx, http.MethodGet, id, "stdout?follow=1", nil)
	if err != nil {
		cancel()
		return nil, err
	}
	var bytes atomic.Int64
	done := make(chan struct{})
	start := time.Now()
	go func() {
		defer close(done)
		buf := make([]byte, sinkSize)
		for {
			n, err := res.Body.Read(buf)
			bytes.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	time.Sleep(warmUp)
	return func() float64 {
		rate := float64(bytes.Load()) / 1e6 / time.Since(start).Seconds()
		_, _ = b.p.sandboxes.KillCommand(ctx, connect.NewRequest(&dsecv1.KillCommandRequest{SandboxId: b.box, CommandId: id})) // its sandbox ends soon
		cancel()
		<-done
		res.Body.Close()
		return rate
	}, nil
}
