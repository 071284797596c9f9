package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	restCommands  = 100
	restSandboxes = 5
	idleSandboxes = 300
	mib           = 1 << 20
	settleLimit   = 30 * time.Second
	settleStep    = time.Second
)

// benchMemory measures what aether and idle sandboxes hold.
func benchMemory(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	if s.wants("aether") {
		if err := p.aetherAtRest(ctx, r); err != nil {
			return err
		}
	}
	if s.wants("idle") {
		return p.idleSandboxes(ctx, r)
	}
	return nil
}

// aetherAtRest is aether's private memory some seconds after its last of many commands.
func (p *platform) aetherAtRest(ctx context.Context, r *report) (err error) {
	ids, err := p.createMany(ctx, restSandboxes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.destroyMany(context.WithoutCancel(ctx), ids)) }()
	for _, id := range ids {
		for range restCommands {
			if err := p.exec(ctx, id); err != nil {
				return err
			}
		}
	}
	pids, err := childrenOf(p.edge)
	if err != nil {
		return err
	}
	if len(pids) != len(ids) {
		return fmt.Errorf("%d sandboxes, but the edge has %d children", len(ids), len(pids))
	}
	if _, err := settled(ctx, mib/4, func() (int64, error) { return sumPrivate(pids) }); err != nil {
		return err
	}
	var private samples
	for _, pid := range pids {
		n, err := privateMemory(pid)
		if err != nil {
			return err
		}
		private = append(private, float64(n)/mib)
	}
	r.add(figure{Name: "aether_private", Value: private.median(), Unit: "MiB", Samples: len(private), Spread: private.spread(), Target: "<= 1.5 MiB"}, true)
	return nil
}

// idleSandboxes is by how much less memory is available with many sandboxes.
func (p *platform) idleSandboxes(ctx context.Context, r *report) error {
	if ids, err := p.createMany(ctx, 2*clients); err != nil { // caches, pools
		return err
	} else if err := p.destroyMany(ctx, ids); err != nil {
		return err
	}
	var each samples
	var parts map[string]float64
	for range min(p.s.rounds, 3) {
		one, by, err := p.idleRound(ctx)
		if err != nil {
			return err
		}
		each, parts = append(each, one), by
	}
	r.add(figure{Name: "idle_sandbox", Value: each.median(), Unit: "MiB", Samples: len(each), Spread: each.spread(), Target: "<= 3 MiB",
		Parts: parts, PartUnit: "MiB per sandbox"}, true)
	return nil
}

func (p *platform) idleRound(ctx context.Context) (each float64, parts map[string]float64, err error) {
	before, err := p.memory(ctx)
	if err != nil {
		return 0, nil, err
	}
	ids, err := p.createMany(ctx, idleSandboxes)
	if err == nil {
		var after map[string]int64
		if after, err = p.memory(ctx); err == nil {
			parts = map[string]float64{}
			for name := range after {
				parts[name] = float64(after[name]-before[name]) / mib / idleSandboxes
			}
			each = -parts["MemAvailable"]
			delete(parts, "MemAvailable")
		}
	}
	made := ids[:0]
	for _, id := range ids {
		if id != "" {
			made = append(made, id)
		}
	}
	return each, parts, errors.Join(err, p.destroyMany(context.WithoutCancel(ctx), made))
}

// memory is the machine's, once it stays the same, and how much of it is known to be whose.
func (p *platform) memory(ctx context.Context) (map[string]int64, error) {
	if _, err := settled(ctx, 2*mib, func() (int64, error) { return memInfo("MemAvailable"), nil }); err != nil {
		return nil, err
	}
	out := map[string]int64{}
	for _, name := range []string{"MemAvailable", "SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "Percpu"} {
		out[name] = memInfo(name)
	}
	pids, err := childrenOf(p.edge)
	if err != nil {
		return nil, err
	}
	if out["aether"], err = sumPrivate(pids); err != nil {
		return nil, err
	}
	for name, pid := range map[string]int{"apiserver": p.up, "edge": p.edge} {
		if out[name], err = privateMemory(pid); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// settled waits until f's value has hardly changed for a while. On a machine with other users it may never; then what was
// measured last counts.
func settled(ctx context.Context, slack int64, f func() (int64, error)) (int64, error) {
	last, err := f()
	if err != nil {
		return 0, err
	}
	const quiet = 3 // steps
	tick := time.NewTicker(settleStep)
	defer tick.Stop()
	for end, same := time.Now().Add(settleLimit), 0; same < quiet && time.Now().Before(end); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
		now, err := f()
		if err != nil {
			return 0, err
		}
		if same++; max(now-last, last-now) > slack {
			same = 0
		}
		last = now
	}
	return last, nil
}

// privateMemory is what a process alone has mapped, in bytes.
func privateMemory(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	return kilobytes(b, "Private_Clean") + kilobytes(b, "Private_Dirty"), nil
}

func sumPrivate(pids []int) (int64, error) {
	var sum int64
	for _, pid := range pids {
		n, err := privateMemory(pid)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// memInfo is one line of /proc/meminfo, in bytes.
func memInfo(name string) int64 {
	b, _ := os.ReadFile("/proc/meminfo") // it is there; 0 would show
	return kilobytes(b, name)
}

// kilobytes finds the line "name: N kB", in bytes.
func kilobytes(b []byte, name string) int64 {
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && k == name {
			n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64) // the kernel writes numbers
			return n << 10
		}
	}
	return 0
}
