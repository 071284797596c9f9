//go:build rootful

package container

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/internal/edge/driver"
)

func cpu(t testing.TB, who int) time.Duration {
	var u syscall.Rusage
	must(t, syscall.Getrusage(who, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRootLaunch is the driver alone, with groups and slots made ahead: create, start, stop, destroy.
func BenchmarkRootLaunch(b *testing.B) {
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) { benchLaunch(b, workers, 0) })
	}
}

// BenchmarkRootLaunchUpTo cuts the start at each step of stage: the differences are what the steps cost.
func BenchmarkRootLaunchUpTo(b *testing.B) {
	for i, name := range stepNames {
		b.Run(name, func(b *testing.B) { benchLaunch(b, 1, uint32(i+1)) })
	}
}

func benchLaunch(tb *testing.B, workers int, failStep uint32) {
	b := newBench(tb)
	b.driver.Detach()
	b.opts.Aether = b.opts.Stage // a static program that ends at once
	b.open()
	b.settle()
	b.driver.failStep = failStep
	specs := make([]driver.Spec, workers)
	for i := range specs {
		specs[i] = b.spec()
	}
	var left atomic.Int64
	left.Store(int64(tb.N))
	self, kids := cpu(tb, syscall.RUSAGE_SELF), cpu(tb, syscall.RUSAGE_CHILDREN)
	var phases [4]atomic.Int64
	tb.ResetTimer()
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				b.launchOnce(specs[i], failStep != 0, &phases)
			}
		})
	}
	wg.Wait()
	tb.StopTimer()
	n := float64(tb.N)
	tb.ReportMetric(n/tb.Elapsed().Seconds(), "launches/s")
	tb.ReportMetric(float64(cpu(tb, syscall.RUSAGE_SELF)-self)/n/1e6, "edge-cpu-ms/op")
	tb.ReportMetric(float64(cpu(tb, syscall.RUSAGE_CHILDREN)-kids)/n/1e6, "stage-cpu-ms/op")
	for i, name := range []string{"create", "start", "stop", "destroy"} {
		tb.ReportMetric(float64(phases[i].Load())/n/1e6, name+"-ms/op")
	}
	for _, s := range specs {
		b.cleanup(s.ID)
	}
}

func (b *bench) launchOnce(spec driver.Spec, fails bool, phases *[4]atomic.Int64) {
	ctx := context.Background()
	for _, name := range []string{"u", "w", "etc"} {
		dir := filepath.Join(spec.Rootfs.Upper.Dir, name)
		must(b.t, os.RemoveAll(dir))
		must(b.t, os.Mkdir(dir, 0o755))
	}
	// New groups as well: the way into one in which everything was killed is slower.
	must(b.t, b.tree.Remove(ctx, spec.ID))
	_, err := b.tree.Create(ctx, spec.ID, spec.Limits)
	must(b.t, err)
	clock := time.Now()
	lap := func(i int) {
		now := time.Now()
		phases[i].Add(int64(now.Sub(clock)))
		clock = now
	}
	h, err := b.driver.Create(ctx, spec)
	must(b.t, err)
	lap(0)
	if h, err = b.driver.Start(ctx, h); (err != nil) != fails {
		b.t.Error(err)
	}
	lap(1)
	must(b.t, b.driver.Stop(ctx, h))
	lap(2)
	must(b.t, b.driver.Destroy(ctx, h))
	lap(3)
}
