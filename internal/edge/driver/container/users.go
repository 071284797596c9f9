package container

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	idsPerRange = 1 << 16
	noSlot      = -1
	readyRanges = 16  // user namespaces that are kept ready ahead
	mostRanges  = 128 // that are kept when their sandboxes have ended: each costs the kernel memory, and every look at the mounts time

	defaultIDBase   = 0x10000000
	defaultCapacity = 16384
)

// idRanges lends out ranges of ids, each with its user namespace bound at <dir>/<n>. A range is lent once at a time; namespaces
// are used again, since nothing of a tenant stays in one: its sysctls and maps cannot be written from inside, its budgets
// are given back with its processes, and keyrings are refused.
type idRanges struct {
	dir      string
	base     uint32
	capacity int
	stage    *stageRunner
	log      *slog.Logger

	fill   chan struct{} // asks for more
	cancel context.CancelFunc
	filler sync.WaitGroup

	mu     sync.Mutex
	lent   map[int]sandbox.ID
	ready  []int
	next   int          // ranges from here on were never made
	broken map[int]bool // overlap with what the host gave to others
	making map[int]bool // being made right now
}

// openRanges finds the namespaces that are there. lent are those that sandboxes have, by their records.
func openRanges(ctx context.Context, dir string, o Options, stage *stageRunner, lent map[int]sandbox.ID) (*idRanges, error) {
	r := &idRanges{
		dir: dir, base: o.IDBase, capacity: o.IDCapacity, stage: stage, log: o.Log,
		fill: make(chan struct{}, 1), lent: lent, making: map[int]bool{},
	}
	var err error
	if r.broken, err = foreignRanges(r.base, r.capacity); err != nil {
		return nil, err
	}
	if err := r.adopt(); err != nil {
		return nil, err
	}
	fillCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r.cancel = cancel
	r.filler.Go(func() { r.fillLoop(fillCtx) })
	r.askFill()
	return r, nil
}

// adopt sorts what an earlier process of the edge left in the directory.
func (r *idRanges) adopt() error {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return fmt.Errorf("list user namespaces: %w", err)
	}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n < 0 || n >= r.capacity {
			continue
		}
		r.next = max(r.next, n+1)
		if r.isLentLocked(n) {
			continue
		}
		if magic, err := linux.FSMagic(r.path(n)); err == nil && magic == linux.MagicNsfs {
			r.ready = append(r.ready, n)
		} else if err := os.Remove(r.path(n)); err != nil {
			return fmt.Errorf("remove unfinished user namespace: %w", err)
		}
	}
	for n := range r.lent {
		r.next = max(r.next, n+1)
	}
	// Numbers below next that are neither lent nor bound are given again.
	for n := range r.next {
		if _, err := os.Lstat(r.path(n)); errors.Is(err, os.ErrNotExist) && !r.isLentLocked(n) && !r.broken[n] {
			r.next = n
			break
		}
	}
	return nil
}

func (r *idRanges) path(n int) string { return filepath.Join(r.dir, strconv.Itoa(n)) }

// first is the host's id of the sandbox's root.
func (r *idRanges) first(n int) uint32 { return r.base + uint32(n)*idsPerRange }

func (r *idRanges) isLentLocked(n int) bool {
	_, lent := r.lent[n]
	return lent
}

// acquire lends a range to a sandbox.
func (r *idRanges) acquire(ctx context.Context, id sandbox.ID) (int, error) {
	r.mu.Lock()
	if n := len(r.ready); n > 0 {
		slot := r.ready[n-1]
		r.ready = r.ready[:n-1]
		r.lent[slot] = id
		short := n-1 < readyRanges/2
		r.mu.Unlock()
		if short {
			r.askFill()
		}
		return slot, nil
	}
	slot, err := r.claimNewLocked()
	r.mu.Unlock()
	if err != nil {
		return noSlot, err
	}
	if err := r.make(ctx, slot); err != nil {
		r.forget(slot)
		return noSlot, err
	}
	r.mu.Lock()
	delete(r.making, slot)
	r.lent[slot] = id
	r.mu.Unlock()
	r.askFill()
	return slot, nil
}

// claimNewLocked picks a number that was never made.
func (r *idRanges) claimNewLocked() (int, error) {
	for n := r.next; n < r.capacity; n++ {
		if r.broken[n] || r.isLentLocked(n) || r.making[n] {
			continue
		}
		if _, err := os.Lstat(r.path(n)); err == nil {
			continue
		}
		r.next = n + 1
		r.making[n] = true
		return n, nil
	}
	return noSlot, sandbox.Errorf(sandbox.ResourceExhausted, "id_ranges_exhausted",
		"all %d ranges of user ids of this node are in use; retry later or elsewhere", r.capacity)
}

func (r *idRanges) forget(slot int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.making, slot)
	r.next = min(r.next, slot)
}

// release takes a range back. The caller knows that no process of it is left. Of one that the sandbox does not have
// (any more) nothing happens: a late clean-up cannot take it from the next one.
func (r *idRanges) release(slot int, id sandbox.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if owner, lent := r.lent[slot]; !lent || owner != id {
		return
	}
	delete(r.lent, slot)
	r.ready = append(r.ready, slot)
	if len(r.ready) > mostRanges {
		r.askFill()
	}
}

func (r *idRanges) askFill() {
	select {
	case r.fill <- struct{}{}:
	default:
	}
}

// fillLoop keeps namespaces ready. A failure is logged and tried again with the next request.
func (r *idRanges) fillLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.fill:
		}
		for ctx.Err() == nil && r.makeOneAhead(ctx) {
		}
		for ctx.Err() == nil && r.removeSurplus(ctx) {
		}
	}
}

func (r *idRanges) makeOneAhead(ctx context.Context) bool {
	r.mu.Lock()
	if len(r.ready) >= readyRanges {
		r.mu.Unlock()
		return false
	}
	slot, err := r.claimNewLocked()
	r.mu.Unlock()
	if err != nil {
		return false // exhausted: the one who needs it is told
	}
	if err := r.make(ctx, slot); err != nil {
		r.forget(slot)
		if ctx.Err() == nil {
			r.log.ErrorContext(ctx, "cannot make a user namespace ahead", "slot", slot, "error", err)
		}
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.making, slot)
	r.ready = append(r.ready, slot)
	return true
}

// removeSurplus removes one of too many ready namespaces. Its number is given again.
func (r *idRanges) removeSurplus(ctx context.Context) bool {
	r.mu.Lock()
	if len(r.ready) <= mostRanges {
		r.mu.Unlock()
		return false
	}
	slot := r.ready[0] // the one that was not used for longest
	r.ready = slices.Delete(r.ready, 0, 1)
	r.making[slot] = true
	r.mu.Unlock()
	err := errors.Join(linux.UnmountPath(r.path(slot), true), os.Remove(r.path(slot)))
	r.forget(slot)
	if err != nil {
		r.log.WarnContext(ctx, "a user namespace that is not needed cannot be removed", "slot", slot, "error", err)
	}
	return err == nil
}

// make makes the namespace of a range and binds it.
func (r *idRanges) make(ctx context.Context, slot int) error {
	base := r.first(slot)
	proc, err := linux.PrivateProc()
	if err != nil {
		return err
	}
	h, err := r.stage.helper(ctx, "users", strconv.FormatUint(uint64(base), 10), proc)
	linux.Close(proc)
	if err != nil {
		return fmt.Errorf("make user namespace: %w", err)
	}
	defer h.end()
	if err := linux.MapUserNamespace(h.pid, base, idsPerRange); err != nil {
		return err
	}
	if err := h.proceed(); err != nil {
		return fmt.Errorf("set up user namespace: %w", err)
	}
	f, err := os.OpenFile(r.path(slot), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("make place for user namespace: %w", err)
	}
	f.Close()
	if err := linux.BindMount(fmt.Sprintf("/proc/%d/ns/user", h.pid), r.path(slot)); err != nil {
		return errors.Join(err, os.Remove(r.path(slot)))
	}
	return nil
}

// close ends the work ahead; namespaces stay.
func (r *idRanges) close() {
	r.cancel()
	r.filler.Wait()
}

// removeAll removes the namespaces of all ranges that are not lent, after close.
func (r *idRanges) removeAll() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return fmt.Errorf("list user namespaces: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err != nil || r.isLentLocked(n) {
			continue
		}
		path := filepath.Join(r.dir, e.Name())
		errs = append(errs, linux.UnmountPath(path, true), os.Remove(path))
	}
	r.ready = nil
	return errors.Join(errs...)
}

// foreignRanges finds the ranges that overlap with ids which the host gave to its users.
func foreignRanges(base uint32, capacity int) (map[int]bool, error) {
	broken := map[int]bool{}
	for _, path := range []string{"/etc/subuid", "/etc/subgid"} {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read given ids: %w", err)
		}
		markForeign(f, base, capacity, broken)
		f.Close()
	}
	return broken, nil
}

// markForeign reads lines of name:first:count. Lines that are none are skipped, as the tools of the format do.
func markForeign(in io.Reader, base uint32, capacity int, broken map[int]bool) {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		fields := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(fields) != 3 {
			continue
		}
		first, err1 := strconv.ParseUint(fields[1], 10, 32)
		count, err2 := strconv.ParseUint(fields[2], 10, 32)
		if err1 != nil || err2 != nil || count == 0 {
			continue
		}
		last := first + count - 1
		end := uint64(base) + uint64(capacity)*idsPerRange
		if last < uint64(base) || first >= end {
			continue
		}
		from := (max(first, uint64(base)) - uint64(base)) / idsPerRange
		to := (min(last, end-1) - uint64(base)) / idsPerRange
		for n := from; n <= to; n++ {
			broken[int(n)] = true
		}
	}
}
