// Package launchbench measures the launcher alone: how many sandboxes a second are created, started, ended and removed, with
// all of the hardening, by this driver and by crun, from the same spec.
//
// One operation of either makes an upper directory and control groups with limits, mounts an overlay over the same layers,
// starts a static program that ends at once, waits for it and removes everything. Both use network namespaces made
// ahead, and both have launched a few times before anything is measured. The program is stage, which ends with status 2 when it is not started by an edge. With Options.Await the driver
// starts aether instead, waits until it answers, and kills it.
//
// What is not the same, since it belongs to how either works:
//
//   - crun runs in a mount namespace without the v2 hierarchy, since it refuses a hybrid one; so it makes no v2 twin, no
//     idmapped layers and no check of the root, which the driver does.
//   - The driver takes a user namespace that was made ahead, and a clone of the /dev tree that it made at its start. crun
//     makes a user namespace and a /dev with its nodes for each container.
//   - crun is a process of its own that reads its specification from a file; the driver is called.
package launchbench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// Options of a measurement. Dir is on disk; RunDir is a private tmpfs.
type Options struct {
	Dir, RunDir  string
	Stage        string // the program stage
	Lowers       []string
	Ops, Workers int
	Log          *slog.Logger
	// Uppers makes the upper directories; nil is plain directories in Dir, without a quota.
	Uppers Uppers
	// Await waits until aether, started by the driver with key, answers. Nil is that stage is started in its place.
	Await  func(ctx context.Context, id sandbox.ID, key []byte, dial func(context.Context) (net.Conn, error)) error
	Aether string // its program
}

// Uppers makes writable directories with a quota.
type Uppers interface {
	Create(ctx context.Context, id sandbox.ID, bytes int64) (rootfs.Upper, error)
	Remove(ctx context.Context, id sandbox.ID) error
}

// A Result is what was measured. CPU is user and system time of this process and its children per operation. With one
// worker it is also told by step: what happened in these processes meanwhile.
type Result struct {
	PerSecond     float64
	EdgeCPU       time.Duration // this process
	ChildrenCPU   time.Duration // what it started: stage and the program, or crun
	WallByStep    map[string]time.Duration
	CPUByStep     map[string]time.Duration
	Failed, Total int
}

// rig is what both need.
type rig struct {
	o     Options
	tree  *cgroup.Tree
	slots *network.Slots
	mu    sync.Mutex
	wall  map[string]time.Duration
	cpu   map[string]time.Duration
}

const edge sandbox.EdgeCode = "bench"

func newRig(ctx context.Context, o Options) (*rig, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &rig{o: o, wall: map[string]time.Duration{}, cpu: map[string]time.Duration{}}
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
func (r *rig) upper(ctx context.Context, id sandbox.ID) (rootfs.Upper, error) {
	if r.o.Uppers != nil {
		return r.o.Uppers.Create(ctx, id, upperBytes)
	}
	dir := filepath.Join(r.o.Dir, string(id))
	for _, name := range []string{"", "u", "w", "etc"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			return rootfs.Upper{}, fmt.Errorf("make upper: %w", err)
		}
	}
	return rootfs.Upper{Dir: dir}, nil
}

// upperBytes is the quota of an upper.
const upperBytes = 1 << 30

func (r *rig) removeUpper(ctx context.Context, id sandbox.ID) error {
	if r.o.Uppers != nil {
		return r.o.Uppers.Remove(ctx, id)
	}
	return os.RemoveAll(filepath.Join(r.o.Dir, string(id)))
}

// A clock is when the last step ended, and how much CPU time had passed then.
type clock struct {
	at   time.Time
	used time.Duration
}

func (r *rig) clock() clock {
	c := clock{at: time.Now()}
	if r.o.Workers == 1 {
		c.used = cpu(syscall.RUSAGE_SELF) + cpu(syscall.RUSAGE_CHILDREN)
	}
	return c
}

// lap adds what passed since the last lap to a step.
func (r *rig) lap(step string, since *clock) {
	now := r.clock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wall[step] += now.at.Sub(since.at)
	r.cpu[step] += now.used - since.used
	*since = now
}

// warmUps are the operations of each worker before those that are measured: for what is made once, and for caches.
const warmUps = 4

// measure runs op with all workers, each, with prepare, on a thread of its own that it has set up. Each worker has one network
// slot for all its operations. What is measured begins when all have warmed up.
func (r *rig) measure(ctx context.Context, prepare func() error, op func(ctx context.Context, net driver.Network) error) (Result, error) {
	nets := make([]driver.Network, r.o.Workers)
	for i := range nets {
		id := sandbox.NewID(edge)
		n, err := r.slots.Acquire(ctx, id, network.Policy{})
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
	var warm, wg sync.WaitGroup
	warm.Add(len(nets))
	begin := make(chan struct{})
	for _, net := range nets {
		wg.Go(func() {
			err := r.warmUp(ctx, prepare, op, net)
			warm.Done()
			if err != nil {
				fail(err)
				return
			}
			<-begin
			for left.Add(-1) >= 0 && ctx.Err() == nil {
				if err := op(ctx, net); err != nil {
					fail(err)
					return
				}
			}
		})
	}
	warm.Wait()
	clear(r.wall)
	clear(r.cpu)
	self, children, start := cpu(syscall.RUSAGE_SELF), cpu(syscall.RUSAGE_CHILDREN), time.Now()
	close(begin)
	wg.Wait()
	took, n := time.Since(start), time.Duration(r.o.Ops)
	res := Result{
		PerSecond: float64(r.o.Ops) / took.Seconds(), Total: r.o.Ops, Failed: int(failed.Load()), WallByStep: map[string]time.Duration{},
		EdgeCPU: (cpu(syscall.RUSAGE_SELF) - self) / n, ChildrenCPU: (cpu(syscall.RUSAGE_CHILDREN) - children) / n,
	}
	for step, d := range r.wall {
		res.WallByStep[step] = d / n
	}
	if r.o.Workers == 1 {
		res.CPUByStep = map[string]time.Duration{}
		for step, d := range r.cpu {
			res.CPUByStep[step] = d / n
		}
	}
	return res, errors.Join(first, ctx.Err())
}

// warmUp makes this thread what op needs, and calls op a few times.
func (r *rig) warmUp(ctx context.Context, prepare func() error, op func(context.Context, driver.Network) error, net driver.Network) error {
	if prepare != nil {
		runtime.LockOSThread() // never unlocked: the thread ends with the worker
		if err := prepare(); err != nil {
			return err
		}
	}
	for range warmUps {
		if err := op(ctx, net); err != nil {
			return err
		}
	}
	return nil
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
	program := o.Stage
	if o.Await != nil {
		program = o.Aether
	}
	d, err := container.Open(ctx, container.Options{RunDir: o.RunDir, Stage: o.Stage, Aether: program, Log: r.o.Log})
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, d.Close(context.WithoutCancel(ctx))) }()
	return r.measure(ctx, nil, func(ctx context.Context, net driver.Network) error { return r.launch(ctx, d, net) })
}

func (r *rig) launch(ctx context.Context, d *container.Driver, net driver.Network) error {
	id, clock := sandbox.NewID(edge), r.clock()
	groups, err := r.tree.Create(ctx, id, limits())
	if err != nil {
		return err
	}
	r.lap("groups", &clock)
	spec := driver.Spec{ID: id, Hostname: "bench", Limits: limits(), Network: net, Cgroups: groups, GuestKey: make([]byte, 32)}
	spec.Rootfs.Lowers = r.o.Lowers
	if spec.Rootfs.Upper, err = r.upper(ctx, id); err != nil {
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
	if err := r.await(ctx, d, h, spec.GuestKey); err != nil {
		return err
	}
	r.lap("wait", &clock)
	if err := d.Stop(ctx, h); err != nil {
		return err
	}
	r.lap("stop", &clock)
	if err := d.Destroy(ctx, h); err != nil {
		return err
	}
	r.lap("destroy", &clock)
	err = r.tree.Remove(ctx, id)
	r.lap("remove_groups", &clock)
	err = errors.Join(err, r.removeUpper(ctx, id))
	r.lap("remove_upper", &clock)
	return err
}

// await waits for what was started: the end of the program, or the first answer of aether.
func (r *rig) await(ctx context.Context, d *container.Driver, h driver.Handle, key []byte) error {
	if r.o.Await == nil {
		_, err := d.Wait(ctx, h)
		return err
	}
	return r.o.Await(ctx, h.ID, key, func(ctx context.Context) (net.Conn, error) { return d.DialGuest(ctx, h) })
}
