// Package network gives each sandbox a network slot: a network namespace that is made ahead of need and kept by a bind mount.
// A slot has the loopback interface and, if its policy opens something, a link to the router: a namespace of the edge's own, in
// which every address is local. A packet filter on the router's end of each link lets pass what the policy opens, and the relay, a
// process of its own (package relay), carries the connections on.
//
// What surprises:
//
//   - A slot belongs to the initial user namespace, not to the sandbox's. Root inside can bind port 80 and ping, because the
//     slot's sysctls say so, but cannot change links, routes, packet filters or net sysctls, nor open raw sockets.
//   - A slot goes to another sandbox only if it is as new: no socket, no connection in TIME_WAIT, no flow label, and every
//     counter that can be read inside (of interfaces and protocols) equal to a fresh slot's. A sandbox that used the network gets its
//     slot destroyed; most do not. That no process is left inside is for the caller: Release comes after the sandbox's
//     control groups are gone, which cannot be removed while a process is in them.
//   - The directory is the state. <run>/<n> is a slot, <run>/owners/<id> is a link to the number that a sandbox has. A
//     slot without an owner was never handed out, or was checked before the link was removed; it is checked again
//     when it is adopted after a restart. <run>/links/<number> says which slot a link leads to (with .new while it is made),
//     <run>/policies/<number> which policy it has; <run>/router and <run>/bpf are the router and the maps of its filter.
//   - The number of a link is its interface's index in the router, and gives its addresses and MAC: the filter needs no table of slots.
//   - Nobody asks who has an address: neighbours are permanent on both ends. What speaks ARP, or anything but TCP and UDP, is
//     not understood.
//   - Router and relay are made when first a policy opens something.
package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

// refillRetry is the pause after a slot could not be made, for example because the kernel is short of memory.
const refillRetry = time.Second

// Options of Open.
type Options struct {
	RunDir string // on a private mount, so that namespaces kept here are not copied into other mount namespaces
	Ready  int    // slots made ahead; up to twice as many are kept of those that come back; 0 makes each when it is asked for
	Range  string // of the sandboxes' addresses, a prefix of IPv4; "" = DefaultRange
	// Relay is the command that runs relay.Main with what relay.ParseArgs makes of the arguments behind it; without, no policy can
	// open anything.
	Relay    []string
	RelayUID int // the user that it is, of its own
	Log      *slog.Logger
}

// Slots are the network slots of one edge.
type Slots struct {
	dir, sysfs string
	ready      int
	ranged     addressRange
	log        *slog.Logger

	fresh counters // of a slot in which nothing happened

	mu         sync.Mutex
	free       []*slot              // as new, without owner or link
	freeLinked []*slot              // as new, without owner, with a link
	owned      map[sandbox.ID]*slot // what owners/ says
	next       int                  // the lowest number never used
	closed     bool
	wantLinks  bool // a policy opened something, so that slots with links are made ahead, too

	routerMu    sync.Mutex
	router      atomic.Pointer[router] // nil before it is needed
	freshLinked atomic.Pointer[counters]
	relay       relayProcess

	wanted chan struct{} // holds one token while the pool may be short
	stop   context.CancelFunc
	tasks  sync.WaitGroup // that end with stop
}

// A slot is one network namespace.
type slot struct {
	n int

	change sync.Mutex // one change of the policy at a time
	link   uint32     // its number; 0 = none. Set once, under change and Slots.mu
	policy Policy     // under Slots.mu
	active uint32     // the policy's number in the filter, under the router's mu
}

// Open finds the slots of an earlier run in o.RunDir, destroys those that nobody owns and that are not as new, makes the shared
// /sys, and begins to fill the pool. The goroutines that it starts end with Close or Detach.
func Open(ctx context.Context, o Options) (*Slots, error) {
	ranged, err := parseRange(o.Range)
	if err != nil {
		return nil, err
	}
	dir, err := prepareDir(o.RunDir)
	if err != nil {
		return nil, err
	}
	s := &Slots{dir: dir, sysfs: filepath.Join(dir, "sysfs"), ready: o.Ready, ranged: ranged, log: o.Log,
		owned: make(map[sandbox.ID]*slot), wanted: make(chan struct{}, 1)}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.relay = relayProcess{command: o.Relay, uid: o.RelayUID, slots: s}
	if err := s.openSysfs(); err != nil {
		return nil, err
	}
	if s.fresh, err = readCounters(s.sysfsNamespace()); err != nil {
		return nil, err
	}
	if len(o.Relay) > 0 {
		if err := s.ranged.overlaps(); err != nil {
			return nil, err
		}
	}
	if err := s.adopt(ctx); err != nil {
		s.relay.detach()
		if r := s.router.Load(); r != nil {
			r.detach()
		}
		return nil, err
	}
	tasks, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = stop
	s.tasks.Go(func() { s.refill(tasks) })
	s.tasks.Go(func() { s.watchHost(tasks) })
	s.wake()
	return s, nil
}

func prepareDir(dir string) (string, error) {
	if err := os.MkdirAll(filepath.Join(dir, "owners"), 0o700); err != nil {
		return "", fmt.Errorf("make the directory of network slots: %w", err)
	}
	return filepath.EvalSymlinks(dir) // as the table of mounts names it
}

func (s *Slots) path(n int) string          { return filepath.Join(s.dir, strconv.Itoa(n)) }
func (s *Slots) owner(id sandbox.ID) string { return filepath.Join(s.dir, "owners", string(id)) }
func (s *Slots) sysfsNamespace() string     { return filepath.Join(s.dir, "sysfs.ns") }
func (s *Slots) network(x *slot) driver.Network {
	n := driver.Network{Namespace: s.path(x.n), Sysfs: s.sysfs}
	if x.link != 0 {
		n.Addresses = s.ranged.addresses(x.link)
	}
	return n
}

func parseNumber(name string) (n int, err error) {
	if n, err = strconv.Atoi(name); err == nil && (n < 0 || strconv.Itoa(n) != name) {
		err = strconv.ErrSyntax
	}
	return n, err
}

// Acquire gives id a slot whose policy is p, or the slot that it has, as it is now.
func (s *Slots) Acquire(ctx context.Context, id sandbox.ID, p Policy) (driver.Network, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return driver.Network{}, err
	}
	linked := len(p.Open) > 0
	if linked {
		if err := s.needLinks(); err != nil {
			return driver.Network{}, err
		}
	}
	x, had, err := s.acquire(ctx, id, linked)
	if err != nil {
		return driver.Network{}, err
	}
	if !had && linked {
		if err := s.setPolicy(ctx, id, p, true); err != nil {
			return driver.Network{}, errors.Join(err, s.Release(context.WithoutCancel(ctx), id))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.network(x), nil
}

func (s *Slots) acquire(ctx context.Context, id sandbox.ID, linked bool) (x *slot, had bool, err error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, false, err
		}
		x, had, err := s.take(id, linked)
		if err != nil || x != nil {
			return x, had, err
		}
		// Nothing ready: make one here, which is what the pool would do as well.
		if x, err = s.make(linked); err != nil {
			return nil, false, fmt.Errorf("make a network slot: %w", err)
		}
		s.mu.Lock()
		s.keepLocked(x)
		s.mu.Unlock()
	}
}

func (s *Slots) keepLocked(x *slot) {
	if x.link != 0 {
		s.freeLinked = append(s.freeLinked, x)
	} else {
		s.free = append(s.free, x)
	}
}

// take gives id a free slot, or the one that it has. The link is made under the lock: it is what says whose slot it is.
func (s *Slots) take(id sandbox.ID, linked bool) (x *slot, had bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, false, sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the edge is shutting down")
	}
	if x, ok := s.owned[id]; ok {
		return x, true, nil
	}
	from := &s.free
	if linked {
		from = &s.freeLinked
	}
	if len(*from) == 0 {
		return nil, false, nil
	}
	x = (*from)[len(*from)-1]
	if err := os.Symlink(strconv.Itoa(x.n), s.owner(id)); err != nil {
		return nil, false, fmt.Errorf("record the owner of a network slot: %w", err)
	}
	*from = (*from)[:len(*from)-1]
	s.owned[id] = x
	s.wakeLocked()
	return x, false, nil
}

// Release takes the slot of id back. It goes to the pool if it is as new and is destroyed otherwise. Call it once no process
// of the sandbox is left. Without a slot it does nothing.
func (s *Slots) Release(ctx context.Context, id sandbox.ID) error {
	x := s.ofID(id)
	if x == nil {
		return nil
	}
	x.change.Lock()
	defer x.change.Unlock()
	if s.ofID(id) != x {
		return nil // a concurrent Release was faster
	}
	if err := s.closeLink(x); err != nil { // first: what ends there changes the counters
		return err
	}
	clean := s.asNew(x)
	if !clean {
		if err := s.remove(x); err != nil {
			return fmt.Errorf("destroy the network slot of %s: %w", id, err)
		}
	}
	// The link goes last: until then a restart finds the slot in use and does not trust it.
	if err := os.Remove(s.owner(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the owner of a network slot: %w", err)
	}
	if s.giveBack(id, x, clean) {
		return nil
	}
	if err := s.remove(x); err != nil {
		s.log.Warn("cannot destroy a surplus network slot", "slot", x.n, "error", err)
	}
	return nil
}

// giveBack ends id's hold of a slot, which goes to the pool if that wants it. False means that the slot is still there and nobody's.
func (s *Slots) giveBack(id sandbox.ID, x *slot, clean bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.owned, id)
	s.wakeLocked()
	free := len(s.free)
	if x.link != 0 {
		free = len(s.freeLinked)
	}
	if clean && free < max(2*s.ready, 1) {
		s.keepLocked(x)
		return true
	}
	return !clean
}

func (s *Slots) ofID(id sandbox.ID) *slot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owned[id]
}

// remove destroys a slot, and its link with it.
func (s *Slots) remove(x *slot) error {
	if err := linux.RemoveNetns(s.path(x.n)); err != nil {
		return err
	}
	return s.forgetLink(x)
}

// asNew reports whether nothing of a former user is left in a slot.
func (s *Slots) asNew(x *slot) bool {
	want := &s.fresh
	if x.link != 0 {
		want = s.freshLinked.Load()
	}
	c, err := readCounters(s.path(x.n))
	if err != nil {
		s.log.Warn("cannot inspect a network slot, it will not be used again", "slot", x.n, "error", err)
		return false
	}
	return want != nil && c.quiescent() && c == *want
}

// Sweep releases the slots of every id that is not in keep, and destroys them: after a crash nobody knows whether processes
// are left inside. It returns the ids.
func (s *Slots) Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error) {
	s.mu.Lock()
	var gone []sandbox.ID
	for id := range s.owned {
		if !keep[id] {
			gone = append(gone, id)
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, id := range gone {
		if err := ctx.Err(); err != nil {
			return gone, errors.Join(append(errs, err)...)
		}
		errs = append(errs, s.destroy(id))
	}
	return gone, errors.Join(errs...)
}

func (s *Slots) destroy(id sandbox.ID) error {
	x := s.ofID(id)
	if x == nil {
		return nil
	}
	x.change.Lock()
	defer x.change.Unlock()
	if s.ofID(id) != x {
		return nil
	}
	if err := s.closeLink(x); err != nil {
		return err
	}
	if err := s.remove(x); err != nil {
		return fmt.Errorf("destroy the network slot of %s: %w", id, err)
	}
	if err := os.Remove(s.owner(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.owned, id)
	return nil
}

// Detach ends the background work and leaves every slot as it is, for the next Open.
func (s *Slots) Detach() {
	s.quit()
	s.relay.detach()
	if r := s.router.Load(); r != nil {
		r.detach()
	}
}

// quit ends the background work.
func (s *Slots) quit() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop()
	s.tasks.Wait()
}

// Close destroys every slot, also those in use, and everything else that Open made.
func (s *Slots) Close(ctx context.Context) error {
	s.quit()
	_, err := s.Sweep(ctx, nil)
	errs := []error{err}
	s.mu.Lock()
	free := append(s.free, s.freeLinked...)
	s.free, s.freeLinked = nil, nil
	s.mu.Unlock()
	for _, x := range free {
		errs = append(errs, linux.RemoveNetns(s.path(x.n)))
	}
	errs = append(errs, s.closeRouter(ctx), s.closeSysfs())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove network slots: %w", err)
	}
	return os.RemoveAll(s.dir) // empty directories by now
}

// openSysfs makes the /sys that all slots share, unless a complete one is there.
func (s *Slots) openSysfs() error {
	mounts, err := mountinfo.Self()
	if err != nil {
		return err
	}
	top, ok := mountinfo.At(mounts, s.sysfs)
	_, kept := mountinfo.At(mounts, s.sysfsNamespace())
	if ok && kept && top.ReadOnly() && len(mountinfo.Under(mounts, s.sysfs)) == 2 {
		return nil
	}
	// Half made by a process that was killed. A sandbox has a copy of its own, so this takes nothing from anybody.
	if err := s.closeSysfs(); err != nil {
		return err
	}
	if err := os.MkdirAll(s.sysfs, 0o555); err != nil {
		return err
	}
	if err := linux.CreateNetns(s.sysfsNamespace(), setUp); err != nil {
		return err
	}
	return linux.InNetns(s.sysfsNamespace(), func() error { return linux.MountMaskedSysfs(s.sysfs) })
}

func (s *Slots) closeSysfs() error {
	for range 4 { // a process killed in the middle of making it may have left more than one mount
		if err := linux.UnmountPath(s.sysfs, true); err != nil {
			return err
		}
	}
	if err := os.Remove(s.sysfs); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return linux.RemoveNetns(s.sysfsNamespace())
}
