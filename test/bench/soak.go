package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"dsec/client"
)

const (
	manySandboxes = 100
	manyCommands  = 10 // at once in each

	soakRate      = 1000 // commands a second asked for
	soakTime      = time.Minute
	soakSandboxes = 8
	soakAtOnce    = 64 // commands: a machine that is too slow for the rate is not pressed further
)

// benchSoak runs commands at once in many sandboxes, and many commands one after the other, and measures what that leaves
// behind in each process.
func benchSoak(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	if s.wants("many") {
		if err := p.manyAtOnce(ctx, r); err != nil {
			return err
		}
	}
	if s.wants("soak") {
		return p.soak(ctx, r)
	}
	return nil
}

// manyAtOnce has every sandbox run its commands at the same time as all others. One error ends it.
func (p *platform) manyAtOnce(ctx context.Context, r *report) (err error) {
	ids, err := p.createMany(ctx, manySandboxes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.destroyMany(context.WithoutCancel(ctx), ids)) }()
	var took samples
	for range p.s.rounds {
		start := time.Now()
		n := len(ids) * manyCommands
		if err := spread(ctx, n, n, func(ctx context.Context, i int) error { return p.exec(ctx, ids[i%len(ids)]) }); err != nil {
			return err
		}
		took = append(took, float64(n)/time.Since(start).Seconds())
	}
	r.add(figure{Name: "many_at_once", Value: took.median(), Unit: "commands/s", Samples: len(took), Spread: took.spread(),
		Target: fmt.Sprintf("%d sandboxes x %d commands without error", manySandboxes, manyCommands)}, true)
	return nil
}

// soak starts commands at a steady rate, as far as the machine follows, and compares descriptors, memory and processes before
// and after. The commands are a program without a loader: glibc's asks the processor for its caches with CPUID, which traps on
// a virtual one and takes more than all of the platform does; /bin/true is measured beside it.
func (p *platform) soak(ctx context.Context, r *report) (err error) {
	ids, err := p.createMany(ctx, soakSandboxes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.destroyMany(context.WithoutCancel(ctx), ids)) }()
	if err := p.uploadStatic(ctx, ids); err != nil {
		return err
	}
	d := max(soakTime, p.s.hold)
	dynamic, err := p.steady(ctx, ids, "/bin/true", d) // it also fills caches, pools and histories
	if err != nil {
		return err
	}
	before, err := p.held(ctx)
	if err != nil {
		return err
	}
	reached, err := p.steady(ctx, ids, uploaded, d)
	if err != nil {
		return err
	}
	after, err := p.held(ctx)
	if err != nil {
		return err
	}
	grown := map[string]float64{}
	for name := range after {
		grown[name] = digits(after[name] - before[name])
	}
	r.add(figure{Name: "soak_rate_bin_true", Value: dynamic, Unit: "commands/s", Samples: int(dynamic * d.Seconds())}, true)
	r.add(figure{Name: "soak_rate", Value: reached, Unit: "commands/s", Samples: int(reached * d.Seconds()), Target: fmt.Sprintf(">= %d", soakRate),
		Parts: grown, PartUnit: "grown: MiB, descriptors, processes"}, true)
	return nil
}

// uploadStatic puts the program that does nothing into each sandbox.
func (p *platform) uploadStatic(ctx context.Context, ids []string) error {
	name, err := p.s.staticProgram(ctx)
	if err != nil {
		return err
	}
	program, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	for _, id := range ids {
		content := bytes.NewReader(program)
		err := p.client.Sandbox(id).Files("").Write(ctx, uploaded, content, content.Size(), client.WriteOptions{Mode: 0o755})
		if err != nil {
			return fmt.Errorf("the static program: %w", err)
		}
	}
	return nil
}

// steady starts commands at soakRate for a while and says how many have ended a second.
func (p *platform) steady(ctx context.Context, ids []string, program string, d time.Duration) (float64, error) {
	start := time.Now()
	due := func(i int) time.Time { return start.Add(time.Duration(i) * time.Second / soakRate) }
	n := int(d.Seconds() * soakRate)
	var mu sync.Mutex
	ended := 0
	end := start.Add(d)
	err := spread(ctx, soakAtOnce, n, func(ctx context.Context, i int) error {
		if time.Now().After(end) {
			return nil
		}
		time.Sleep(time.Until(due(i)))
		if err := p.execProgram(ctx, ids[i%len(ids)], program); err != nil {
			return err
		}
		mu.Lock()
		ended++
		mu.Unlock()
		return nil
	})
	return float64(ended) / time.Since(start).Seconds(), err
}

// held is what each process holds, once its memory has settled.
func (p *platform) held(ctx context.Context) (map[string]float64, error) {
	aethers, err := childrenOf(p.edge)
	if err != nil {
		return nil, err
	}
	if _, err := settled(ctx, mib/2, func() (int64, error) { return sumPrivate(append([]int{p.up, p.edge}, aethers...)) }); err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for name, pids := range map[string][]int{"apiserver": {p.up}, "edge": {p.edge}, "aether": aethers} {
		memory, err := sumPrivate(pids)
		if err != nil {
			return nil, err
		}
		out[name+"_memory"] = float64(memory) / mib
		for _, pid := range pids {
			fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
			if err != nil {
				return nil, err
			}
			children, err := childrenOf(pid)
			if err != nil {
				return nil, err
			}
			out[name+"_descriptors"] += float64(len(fds))
			out[name+"_children"] += float64(len(children))
		}
	}
	return out, nil
}
