package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
)

const (
	denseCreates = 100  // measured one by one
	denseWarm    = 64   // made and removed before: caches, pools
	denseEnders  = 64   // deletes under way at once
	denseKept    = "5s" // for which the platform remembers sandboxes that have ended: with their records it is not as before
	backLimit    = 20 * time.Second
)

// benchDensity fills the node with idle sandboxes: what each costs, what a create then takes, how long the edge takes to find all
// again, and whether their end gives everything back.
func benchDensity(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx, "--keep-ended", denseKept)
	if err != nil {
		return err
	}
	if err := p.churn(ctx, denseWarm); err != nil {
		return err
	}
	return s.runParts(ctx,
		part{"dense", func(ctx context.Context) error { return p.dense(ctx, r, s.many) }},
		part{"more", func(ctx context.Context) error { return p.crowd(ctx, r, s.many*3/2) }},
	)
}

// churn makes and removes n sandboxes.
func (p *platform) churn(ctx context.Context, n int) error {
	ids, err := p.createMany(ctx, n)
	return errors.Join(err, p.endMany(context.WithoutCancel(ctx), ids))
}

// dense is one filling of the node with n sandboxes, a tenth of them with a session.
func (p *platform) dense(ctx context.Context, r *report, n int) (err error) {
	empty, err := p.timeCreates(ctx)
	if err != nil {
		return err
	}
	before, err := p.state(ctx)
	if err != nil {
		return err
	}
	start := time.Now()
	ids, err := p.createMany(ctx, n)
	defer func() { err = errors.Join(err, p.endMany(context.WithoutCancel(ctx), ids)) }()
	if err == nil {
		err = p.openSessions(ctx, ids[:n/10])
	}
	if err != nil {
		return err
	}
	r.add(figure{Name: "fill", Value: float64(n) / time.Since(start).Seconds(), Unit: "sandboxes/s", Samples: n}, false)
	after, err := p.state(ctx)
	if err != nil {
		return err
	}
	parts := grown(before, after, n)
	r.add(figure{Name: "idle_sandbox", Value: -parts["MemAvailable"], Unit: "MiB", Samples: n, Target: "<= 3 MiB", Parts: parts,
		PartUnit: "MiB (or number) per sandbox"}, true)
	full, err := p.timeCreates(ctx)
	if err != nil {
		return err
	}
	r.add(figure{Name: "create_at_many", Value: full.median(), Unit: "ms", Samples: len(full), Spread: full.spread(), Against: "create at none",
		Baseline: empty.median(), Others: empty.spread(), Target: "<= 2x"}, true)
	if err := p.timeRecovery(ctx, r, n); err != nil {
		return err
	}
	all := ids
	ids = nil
	return p.timeEnd(ctx, r, all, before)
}

// crowd tries to make n.
func (p *platform) crowd(ctx context.Context, r *report, n int) (err error) {
	before, err := p.state(ctx)
	if err != nil {
		return err
	}
	start := time.Now()
	ids, failed := p.createMany(ctx, n)
	ids = made(ids)
	took := time.Since(start)
	after, err := p.state(ctx)
	r.add(figure{Name: "crowd", Value: float64(len(ids)), Unit: "sandboxes", Samples: n, Target: fmt.Sprintf("%d tried", n),
		Parts: map[string]float64{"seconds": took.Seconds(), "MiB each": -grown(before, after, max(1, len(ids)))["MemAvailable"]}}, false)
	if failed != nil {
		fmt.Fprintf(os.Stderr, "    the first that was refused: %v\n", failed)
	}
	return errors.Join(err, p.endMany(context.WithoutCancel(ctx), ids))
}

// timeCreates measures creates alone; each sandbox is removed before the next is made.
func (p *platform) timeCreates(ctx context.Context) (samples, error) {
	var out samples
	for range denseCreates {
		start := time.Now()
		id, err := p.create(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, float64(time.Since(start))/1e6)
		if err := p.destroy(ctx, id); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (p *platform) openSessions(ctx context.Context, ids []string) error {
	return spread(ctx, clients, len(ids), func(ctx context.Context, i int) error {
		s, err := p.client.Sandbox(ids[i]).CreateSession(ctx, &dsecv1.CreateSessionRequest{})
		if err != nil {
			return fmt.Errorf("session: %w", err)
		}
		_, err = s.Run(ctx, "cd /tmp")
		return err
	})
}

// timeRecovery kills the edge with all its sandboxes and waits until a command runs in one.
func (p *platform) timeRecovery(ctx context.Context, r *report, n int) error {
	id, err := p.create(ctx)
	if err != nil {
		return err
	}
	old, start := p.edge, time.Now()
	process, err := os.FindProcess(old)
	if err == nil {
		err = process.Kill()
	}
	if err != nil {
		return err
	}
	err = poll(ctx, time.Minute, "recovery of a killed edge", func() bool {
		next := edgeOf(p.up)
		if next == 0 || next == old {
			return false
		}
		p.edge = next
		return p.exec(ctx, id) == nil
	})
	if err != nil {
		return err
	}
	r.add(figure{Name: "recovery", Value: time.Since(start).Seconds(), Unit: "s", Samples: n}, true)
	return p.destroy(ctx, id)
}

// edgeOf finds the edge among the children of `dsec up`: it adopts the sandboxes of one that died.
func edgeOf(up int) int {
	children, _ := childrenOf(up)
	for _, pid := range children {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may have ended
		if args := strings.Split(string(line), "\x00"); len(args) > 1 && args[1] == "edge" {
			return pid
		}
	}
	return 0
}

// timeEnd removes all and waits until the machine is as it was before.
func (p *platform) timeEnd(ctx context.Context, r *report, ids []string, before map[string]int64) error {
	start := time.Now()
	if err := p.endMany(ctx, ids); err != nil {
		return err
	}
	took := time.Since(start)
	back := func() bool { return before["MemAvailable"]-memInfo("MemAvailable") < int64(len(ids))*mib/64 }
	_ = poll(ctx, backLimit, "memory", back) // how far it is from there is told
	after, err := p.state(ctx)
	if err != nil {
		return err
	}
	parts := grown(before, after, 1)
	parts["seconds until memory was back"] = time.Since(start).Seconds()
	r.add(figure{Name: "end", Value: took.Seconds(), Unit: "s", Samples: len(ids), Target: "<= 6 s for 2000; memory back to the start",
		Parts: parts, PartUnit: "MiB (or number) left in all"}, true)
	return nil
}

// endMany deletes what was made of these.
func (p *platform) endMany(ctx context.Context, ids []string) error {
	ids = made(ids)
	return spread(ctx, denseEnders, len(ids), func(ctx context.Context, i int) error { return p.destroy(ctx, ids[i]) })
}

func made(ids []string) []string {
	var out []string
	for _, id := range ids {
		if id != "" {
			out = append(out, id)
		}
	}
	return out
}

// state is the machine's memory and what else a sandbox could leave, counted.
func (p *platform) state(ctx context.Context) (map[string]int64, error) {
	out, err := p.memory(ctx)
	if err != nil {
		return nil, err
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.edge))
	if err != nil {
		return nil, err
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", p.edge))
	if err != nil {
		return nil, err
	}
	out["edge's descriptors"] = int64(len(fds))
	out["edge's mounts"] = int64(strings.Count(string(mounts), "\n"))
	out["memory cgroups"] = memoryCgroups()
	return out, nil
}

// counted are the entries of a state that are no bytes.
var counted = map[string]bool{"edge's descriptors": true, "edge's mounts": true, "memory cgroups": true}

func grown(before, after map[string]int64, n int) map[string]float64 {
	out := map[string]float64{}
	for name := range after {
		unit := float64(mib)
		if counted[name] {
			unit = 1
		}
		out[name] = digits(float64(after[name]-before[name]) / unit / float64(n))
	}
	return out
}

// memoryCgroups is how many the kernel has, those among them that were removed and are kept by what is charged to them.
func memoryCgroups() int64 {
	b, _ := os.ReadFile("/proc/cgroups") // 0 would show
	for line := range strings.Lines(string(b)) {
		var name string
		var hierarchy, n int64
		if _, err := fmt.Sscan(line, &name, &hierarchy, &n); err == nil && name == "memory" {
			return n
		}
	}
	return 0
}
