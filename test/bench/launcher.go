package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"dsec/internal/edge/driver/container/launchbench"
	"dsec/internal/edge/guest"
	"dsec/internal/edge/upper"
	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	launchOps     = 200 // of a round, with 8 workers
	launchOpsOne  = 80  // with one
	launchWorkers = 8
)

// benchLauncher measures the container driver without the platform around it, against crun with the same specification.
// What is measured twice is the start of a program that ends at once, which both can do, and that of aether up to its
// first answer, which only the driver can: compared with crun that is more work on our side.
func benchLauncher(ctx context.Context, s *session, r *report) error {
	if err := s.installed(ctx); err != nil {
		return err
	}
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	id, err := p.create(ctx) // as long as it lives, the image is mounted
	if err != nil {
		return err
	}
	defer func() { _ = p.destroy(context.WithoutCancel(ctx), id) }() // it also ends with the platform
	lowers, err := filepath.Glob(filepath.Join(s.runDir, "r", "layers", "*"))
	if err != nil || len(lowers) != 1 {
		return fmt.Errorf("the image is mounted at %v, wanted one place: %w", lowers, err)
	}
	o, err := s.launchOptions(ctx, lowers)
	if err != nil {
		return err
	}
	for _, workers := range []int{launchWorkers, 1} {
		if err := s.launches(ctx, r, o, workers); err != nil {
			return err
		}
	}
	return nil
}

// launchOptions prepares a tmpfs and a pool of uppers.
func (s *session) launchOptions(ctx context.Context, lowers []string) (launchbench.Options, error) {
	o := launchbench.Options{
		Dir: filepath.Join(s.dir, "launch"), RunDir: filepath.Join(s.runDir, "l"), Stage: filepath.Join(s.bin, "stage"),
		Aether: filepath.Join(s.bin, "aether"), Lowers: lowers,
	}
	if err := os.Mkdir(o.Dir, 0o755); err != nil {
		return o, err
	}
	if err := linux.MountRunDir(o.RunDir); err != nil {
		return o, err
	}
	s.later(func() error { return linux.UnmountRunDir(o.RunDir) })
	pool, err := upper.Open(ctx, upper.Options{DataDir: o.Dir, Bytes: 8 << 30})
	if err != nil {
		return o, err
	}
	s.later(func() error { return pool.Close(context.WithoutCancel(ctx)) })
	o.Uppers = pool
	// crun prepares the root as the user that root inside is mapped to.
	return o, os.Chmod(filepath.Join(o.Dir, "uppers"), 0o711)
}

// launches compares the three kinds with so many workers.
func (s *session) launches(ctx context.Context, r *report, o launchbench.Options, workers int) error {
	o.Workers, o.Ops = workers, launchOps
	if workers == 1 {
		o.Ops = launchOpsOne
	}
	withAether := o
	withAether.Await = awaitAether
	kinds := []struct {
		name string
		run  func() (launchbench.Result, error)
		last launchbench.Result
		rate samples
	}{
		{name: "aether", run: func() (launchbench.Result, error) { return launchbench.Driver(ctx, withAether) }},
		{name: "program", run: func() (launchbench.Result, error) { return launchbench.Driver(ctx, o) }},
		{name: "crun", run: func() (launchbench.Result, error) { return launchbench.Crun(ctx, o) }},
	}
	for range s.rounds {
		for i := range kinds {
			k := &kinds[i]
			var err error
			if k.last, err = k.run(); err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			k.rate = append(k.rate, k.last.PerSecond)
		}
	}
	crun := kinds[2]
	for _, k := range kinds[:2] {
		f := figure{Name: fmt.Sprintf("%s_rate_%d", k.name, workers), Value: k.rate.median(), Unit: "1/s", Samples: len(k.rate), Spread: k.rate.spread(),
			Against: "crun, a program that ends at once", Baseline: crun.rate.median(), Others: crun.rate.spread(), Parts: stepsOf(k.last), PartUnit: "ms of CPU per launch"}
		if workers == launchWorkers {
			f.Target = ">= 250/s, >= 1.5x crun"
		}
		r.add(f, false)
	}
	r.add(figure{Name: fmt.Sprintf("crun_rate_%d", workers), Value: crun.rate.median(), Unit: "1/s", Samples: len(crun.rate), Spread: crun.rate.spread(),
		Parts: stepsOf(crun.last), PartUnit: "ms of CPU per launch"}, false)
	return nil
}

// stepsOf are the CPU times of a launch: of this process, of what it started and, with one worker, of all by step.
func stepsOf(r launchbench.Result) map[string]float64 {
	ms := func(d time.Duration) float64 { return float64(d) / 1e6 }
	out := map[string]float64{"this process": ms(r.EdgeCPU), "what it started": ms(r.ChildrenCPU)}
	for step, d := range r.CPUByStep {
		out["step "+step] = ms(d)
	}
	return out
}

func awaitAether(ctx context.Context, id sandbox.ID, key []byte, dial func(context.Context) (net.Conn, error)) error {
	c, err := guest.Connect(ctx, guest.Options{ID: id, Key: key, Dial: dial})
	if err != nil {
		return err
	}
	return c.Close()
}
