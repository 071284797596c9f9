package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	dsecv1 "dsec/api/dsec/v1"
)

const (
	greedyEach  = 10 // sandboxes of each kind
	quietExecs  = 400
	greedyStart = 5 * time.Second // until all have met their limits
)

// greedy are the scripts of sandboxes that use up what they are given, and go on asking for more.
var greedy = map[string]string{
	"cpu":    "while :; do :; done & while :; do :; done",
	"memory": "head -c 100M /dev/zero >/big; while :; do cat /big >/dev/null; done", // more than its memory: each read is one from the disk
	"disk":   "while :; do head -c 1G /dev/zero >/full; rm /full; done 2>/dev/null",
	"forks":  "while :; do /bin/true & done 2>/dev/null",
	"output": "yes",
}

var greedyLimits = &dsecv1.Limits{MemoryBytes: 64 << 20, CpuCores: 1, Pids: 64, DiskBytes: 128 << 20}

// benchLimits measures what a quiet sandbox notices of 50 others at their limits.
func benchLimits(ctx context.Context, s *session, r *report) (err error) {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	quiet, err := p.create(ctx)
	if err != nil {
		return err
	}
	var ids []string
	defer func() {
		err = errors.Join(err, p.destroyMany(context.WithoutCancel(ctx), append(ids, quiet)))
	}()
	exec := func(ctx context.Context) error { return p.exec(ctx, quiet) }
	if _, err := oneByOne(ctx, quietExecs, exec); err != nil {
		return err
	}
	alone, err := oneByOne(ctx, quietExecs, exec)
	if err != nil {
		return err
	}
	for kind, script := range greedy {
		if !s.wants(kind) {
			continue
		}
		made, err := p.createGreedy(ctx, script)
		ids = append(ids, made...)
		if err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
	}
	time.Sleep(greedyStart)
	beside, err := oneByOne(ctx, quietExecs, exec)
	if err != nil {
		return err
	}
	r.add(figure{Name: "quiet_exec_p95", Value: digits(beside.quantile(0.95)), Unit: "ms", Against: "alone", Baseline: digits(alone.quantile(0.95)),
		Samples: len(beside), Spread: beside.spread(), Others: alone.spread(), Target: fmt.Sprintf("<= 3x, beside %d at their limits", len(ids))}, true)
	return nil
}

// createGreedy makes sandboxes of one kind; the script runs until they end.
func (p *platform) createGreedy(ctx context.Context, script string) ([]string, error) {
	ids := make([]string, greedyEach)
	err := spread(ctx, 2, greedyEach, func(ctx context.Context, i int) error {
		spec := p.spec()
		spec.Limits, spec.Start = greedyLimits, &dsecv1.Command{Shell: script}
		sb, err := p.client.Create(ctx, spec)
		if err == nil {
			ids[i] = sb.GetId()
		}
		return err
	})
	return made(ids), err
}
