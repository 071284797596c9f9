// Package launchbench measures the launcher alone: how many sandboxes a second are created, started, ended and removed, with
// all of the hardening, by this driver and by crun, from the same spec.
//
// One operation of either makes an upper directory and control groups with limits, mounts an overlay over the same layers,
// starts a static program that ends at once, waits for it and removes everything. Both use network namespaces made
// ahead. The program is stage, which ends with status 2 when it is not started by an edge.
//
// crun runs in a mount namespace without the v2 hierarchy, since it refuses a hybrid one; so it makes no v2 twin, no idmapped
// layers and no check of the root, which the driver does.
package launchbench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/container"
	"dsec/internal/edge/network"
	"dsec/internal/edge/policy"
	"dsec/sandbox"
)

// Options of a measurement. Dir is on disk; RunDir is a private tmpfs.
type Options struct {
	Dir, RunDir  string
	Stage        string // the program stage
	Lowers       []string
	Ops, Workers int
	Log          *slog.Logger
}

// A Result is what was measured. CPU is user and system time of this process and its children per operation.
type Result struct {
	PerSecond     float64
	EdgeCPU       time.Duration // this process
	ChildrenCPU   time.Duration // what it started: stage and the program, or crun
	WallByStep    map[string]time.Duration
	Failed, Total int
}

// rig is what both need.
type rig struct {
	o     Options
	tree  *cgroup.Tree
	slots *network.Slots
	mu    sync.Mutex
	wall  map[string]time.Duration
}

const edge sandbox.EdgeCode = "bench"

func newRig(ctx context.Context, o Options) (*rig, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &rig{o: o, wall: map[string]time.Duration{}}
	var err error
	if r.tree, err = cgroup.Open(ctx, cgroup.Options{Name: fmt.Sprintf("dsec-bench%d", os.Getpid()), Log: o.Log}); err != nil {
		return nil, err
	}
	r.slots, err = network.Open(ctx, network.Options{RunDir: filepath.Join(o.RunDir, "net"), Ready: o.Workers, Log: o.Log})
	if err == nil {
		err = policy.AttachDevices(r.tree.Root())
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (r *rig) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var errs []error
	if r.slots != nil {
		errs = append(errs, r.slots.Close(ctx))
	}
	return errors.Join(append(errs, r.tree.Close(ctx))...)
}

// limits are those of a small sandbox.
func limits() sandbox.Limits {
	l := sandbox.Spec{}.WithDefaults().Limits
	l.Memory, l.PIDs = 512<<20, 256
	return l
}

// upper makes the writable directory of one operation.
func (r *rig) upper(id sandbox.ID) (string, error) {
	dir := filepath.Join(r.o.Dir, string(id))
	for _, name := range []string{"", "u", "w", "etc"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			return "", fmt.Errorf("make upper: %w", err)
		}
	}
	return dir, nil
}

// lap adds the time since the last lap to a step.
func (r *rig) lap(step string, since *time.Time) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wall[step] += now.Sub(*since)
	*since = now
}

// measure runs op with all workers, each, with prepare, on a thread of its own that it has set up. Each worker has one network slot for all
// its operations.
func (r *rig) measure(ctx context.Context, prepare func() error, op func(ctx context.Context, net driver.Network) error) (Result, error) {
	nets := make([]driver.Network, r.o.Workers)
	for i := range nets {
		id := sandbox.NewID(edge)
		n, err := r.slots.Acquire(ctx, id)
		if err != nil {
			return Result{}, err
		}
		nets[i] = n
	}
	var left, failed atomic.Int64
	left.Store(int64(r.o.Ops))
	var first error
	fail := func(err error) {
		failed.Add(1)
		r.mu.Lock()
		defer r.mu.Unlock()
		first = errors.Join(first, err)
	}
	self, children, start := cpu(syscall.RUSAGE_SELF), cpu(syscall.RUSAGE_CHILDREN), time.Now()
	var wg sync.WaitGroup
	for _, net := range nets {
		wg.Go(func() {
			if prepare != nil {
				runtime.LockOSThread() // never unlocked: the thread ends with the worker
				if err := prepare(); err != nil {
					fail(err)
					return
				}
			}
			for left.Add(-1) >= 0 && ctx.Err() == nil {
				if err := op(ctx, net); err != nil {
					fail(err)
					return
				}
			}
		})
	}
	wg.Wait()
	took, n := time.Since(start), time.Duration(r.o.Ops)
	res := Result{
		PerSecond: float64(r.o.Ops) / took.Seconds(), Total: r.o.Ops, Failed: int(failed.Load()), WallByStep: map[string]time.Duration{},
		EdgeCPU: (cpu(syscall.RUSAGE_SELF) - self) / n, ChildrenCPU: (cpu(syscall.RUSAGE_CHILDREN) - children) / n,
	}
	for step, d := range r.wall {
		res.WallByStep[step] = d / n
	}
	return res, errors.Join(first, ctx.Err())
}

func cpu(who int) time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(who, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Driver measures this driver.
func Driver(ctx context.Context, o Options) (_ Result, err error) {
	r, err := newRig(ctx, o)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	d, err := container.Open(ctx, container.Options{RunDir: o.RunDir, Stage: o.Stage, Aether: o.Stage, Log: r.o.Log})
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, d.Close(context.WithoutCancel(ctx))) }()
	if err := r.warm(ctx, d); err != nil {
		return Result{}, err
	}
	return r.measure(ctx, nil, func(ctx context.Context, net driver.Network) error { return r.launch(ctx, d, net) })
}

// warm makes what is made once: user namespaces, caches.
func (r *rig) warm(ctx context.Context, d *container.Driver) error {
	net, err := r.slots.Acquire(ctx, sandbox.NewID(edge))
	if err != nil {
		return err
	}
	for range 4 * r.o.Workers {
		if err := r.launch(ctx, d, net); err != nil {
			return err
		}
	}
	clear(r.wall)
	return nil
}

func (r *rig) launch(ctx context.Context, d *container.Driver, net driver.Network) error {
	id, clock := sandbox.NewID(edge), time.Now()
	groups, err := r.tree.Create(ctx, id, limits())
	if err != nil {
		return err
	}
	r.lap("groups", &clock)
	spec := driver.Spec{ID: id, Hostname: "bench", Limits: limits(), Network: net, Cgroups: groups, GuestKey: make([]byte, 32)}
	spec.Rootfs.Lowers = r.o.Lowers
	if spec.Rootfs.Upper.Dir, err = r.upper(id); err != nil {
		return err
	}
	r.lap("upper", &clock)
	h, err := d.Create(ctx, spec)
	if err != nil {
		return err
	}
	r.lap("create", &clock)
	if h, err = d.Start(ctx, h); err != nil {
		return err
	}
	r.lap("start", &clock)
	if _, err = d.Wait(ctx, h); err != nil {
		return err
	}
	r.lap("wait", &clock)
	if err := errors.Join(d.Stop(ctx, h), d.Destroy(ctx, h)); err != nil {
		return err
	}
	r.lap("stop_destroy", &clock)
	err = errors.Join(r.tree.Remove(ctx, id), os.RemoveAll(spec.Rootfs.Upper.Dir))
	r.lap("remove", &clock)
	return err
}
