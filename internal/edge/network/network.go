// Package network gives each sandbox a network slot: a network namespace that is made ahead of need and kept by a bind mount.
// A slot of this package has the loopback interface and nothing else.
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
//     when it is adopted after a restart.
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
	Log    *slog.Logger
}

// Slots are the network slots of one edge.
type Slots struct {
	dir, sysfs string
	ready      int
	log        *slog.Logger

	fresh counters // of a slot in which nothing happened

	mu     sync.Mutex
	free   []int              // as new, without owner
	owned  map[sandbox.ID]int // what owners/ says
	next   int                // the lowest number never used
	closed bool

	wanted chan struct{} // holds one token while the pool may be short
	stop   context.CancelFunc
	done   chan struct{} // closed when the refilling goroutine has ended
}

// Open finds the slots of an earlier run in o.RunDir, destroys those that nobody owns and that are not as new, makes the shared
// /sys, and begins to fill the pool. The goroutine that fills it ends with Close or Detach.
func Open(ctx context.Context, o Options) (*Slots, error) {
	dir, err := prepareDir(o.RunDir)
	if err != nil {
		return nil, err
	}
	s := &Slots{dir: dir, sysfs: filepath.Join(dir, "sysfs"), ready: o.Ready, log: o.Log,
		owned: make(map[sandbox.ID]int), wanted: make(chan struct{}, 1), done: make(chan struct{})}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if err := s.openSysfs(); err != nil {
		return nil, err
	}
	if s.fresh, err = readCounters(s.sysfsNamespace()); err != nil {
		return nil, err
	}
	if err := s.adopt(ctx); err != nil {
		return nil, err
	}
	refillCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = stop
	go s.refill(refillCtx)
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
func (s *Slots) network(n int) driver.Network {
	return driver.Network{Namespace: s.path(n), Sysfs: s.sysfs}
}
func parseNumber(name string) (n int, err error) {
	if n, err = strconv.Atoi(name); err == nil && (n < 0 || strconv.Itoa(n) != name) {
		err = strconv.ErrSyntax
	}
	return n, err
}

// Acquire gives id a slot, the one it has if it has one already.
func (s *Slots) Acquire(ctx context.Context, id sandbox.ID, p Policy) (driver.Network, error) {
	if len(p.Open) > 0 {
		return driver.Network{}, errNoLinks
	}
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return driver.Network{}, err
	}
	for {
		if err := ctx.Err(); err != nil {
			return driver.Network{}, err
		}
		n, have, err := s.take(id)
		if err != nil || have {
			return s.network(n), err
		}
		// Nothing ready: make one here, which is what the pool would do as well.
		if n, err = s.make(); err != nil {
			return driver.Network{}, fmt.Errorf("make a network slot: %w", err)
		}
		s.mu.Lock()
		s.free = append(s.free, n)
		s.mu.Unlock()
	}
}

// take gives id a free slot. The link is made under the lock: it is what says whose slot it is.
func (s *Slots) take(id sandbox.ID) (n int, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, false, sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the edge is shutting down")
	}
	if n, ok := s.owned[id]; ok {
		return n, true, nil
	}
	if len(s.free) == 0 {
		return 0, false, nil
	}
	n = s.free[len(s.free)-1]
	if err := os.Symlink(strconv.Itoa(n), s.owner(id)); err != nil {
		return 0, false, fmt.Errorf("record the owner of a network slot: %w", err)
	}
	s.free = s.free[:len(s.free)-1]
	s.owned[id] = n
	s.wakeLocked()
	return n, true, nil
}

// errNoLinks is of policies that open something.
var errNoLinks = sandbox.Errorf(sandbox.Unsupported, "network_unavailable", "this version has no links to the outside")

// SetPolicy replaces the policy of id.
func (s *Slots) SetPolicy(_ context.Context, id sandbox.ID, p Policy) error {
	if len(p.Open) > 0 {
		return errNoLinks
	}
	return nil
}

// Refused is what was refused to id.
func (s *Slots) Refused(sandbox.ID) (Refusals, error) { return Refusals{}, nil }

// Release takes the slot of id back. It goes to the pool if it is as new and is destroyed otherwise. Call it once no process
// of the sandbox is left. Without a slot it does nothing.
func (s *Slots) Release(ctx context.Context, id sandbox.ID) error {
	s.mu.Lock()
	n, ok := s.owned[id]
	s.mu.Unlock()
	if !ok {
		return nil
	}
	clean := s.asNew(n)
	if !clean {
		if err := linux.RemoveNetns(s.path(n)); err != nil {
			return fmt.Errorf("destroy the network slot of %s: %w", id, err)
		}
	}
	// The link goes last: until then a restart finds the slot in use and does not trust it.
	if err := os.Remove(s.owner(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the owner of a network slot: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owned[id] != n {
		return nil // a concurrent Release was faster
	}
	delete(s.owned, id)
	switch {
	case clean && len(s.free) < max(2*s.ready, 1):
		s.free = append(s.free, n)
	case clean: // more than the pool wants
		if err := linux.RemoveNetns(s.path(n)); err != nil {
			s.log.Warn("cannot destroy a surplus network slot", "slot", n, "error", err)
		}
	}
	s.wakeLocked()
	return nil
}

// asNew reports whether nothing of a former user is left in a slot.
func (s *Slots) asNew(n int) bool {
	c, err := readCounters(s.path(n))
	if err != nil {
		s.log.Warn("cannot inspect a network slot, it will not be used again", "slot", n, "error", err)
		return false
	}
	return c.quiescent() && c == s.fresh
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
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.owned[id]
	if !ok {
		return nil
	}
	if err := linux.RemoveNetns(s.path(n)); err != nil {
		return fmt.Errorf("destroy the network slot of %s: %w", id, err)
	}
	if err := os.Remove(s.owner(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	delete(s.owned, id)
	return nil
}

// Detach ends the background work and leaves every slot as it is, for the next Open.
func (s *Slots) Detach() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop()
	<-s.done
}

// Close destroys every slot, also those in use, and everything else that Open made.
func (s *Slots) Close(ctx context.Context) error {
	s.Detach()
	_, err := s.Sweep(ctx, nil)
	errs := []error{err}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.free {
		errs = append(errs, linux.RemoveNetns(s.path(n)))
	}
	s.free = nil
	errs = append(errs, s.closeSysfs())
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
