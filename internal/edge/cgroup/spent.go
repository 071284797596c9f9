package cgroup

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/internal/linux"
)

// Memory groups of sandboxes that have ended. When one is removed the kernel asks every file system whether it caches
// something for the group, with a lock held that each new group needs: 2 ms with 2,000 live sandboxes. So those of aether, which
// all have the same limits, are used again, and the others wait under another name until the file systems of their own
// sandboxes, and of others that ended with it, are gone. v2 groups cannot be renamed: on a host with them alone nothing waits.
const (
	readyGroups = 64              // of aether, kept for use
	maxSpent    = 16384           // that wait; from then on who ends a sandbox waits for the removal
	spentAge    = time.Second     // for which nothing ended before they are removed,
	spentMost   = 15 * spentAge   // unless they have waited for so long
	spentPrefix = "spent."        // names of groups that belong to nobody
	closeSlack  = 2 * time.Second // of the goroutine that removes them, at the end
)

type spentGroup struct {
	dir   string
	since time.Time
}

// spent are the memory groups that belong to nobody. The zero value holds none and takes none.
type spent struct {
	base string // directory of the memory groups; "" = none are kept
	log  *slog.Logger

	mu     sync.Mutex
	next   int
	ready  []string // for aether
	queue  []spentGroup
	last   time.Time // when something was queued
	closed bool
	wake   chan struct{}
	done   chan struct{}
	cancel context.CancelFunc
}

// open queues what an earlier process left, and begins to remove.
func (s *spent) open(ctx context.Context, base string, log *slog.Logger) error {
	s.base, s.log = base, log
	dirs, err := subgroups(base)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		number, ok := strings.CutPrefix(filepath.Base(dir), spentPrefix)
		n, err := strconv.Atoi(number)
		if !ok || err != nil || n < 0 {
			continue
		}
		s.next = max(s.next, n+1)
		s.queue = append(s.queue, spentGroup{dir: dir})
	}
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.wake, s.done = make(chan struct{}, 1), make(chan struct{})
	s.wake <- struct{}{}
	go s.work(ctx)
	return nil
}

// waiting is how many groups wait to be removed.
func (s *spent) waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue)
}

// take makes a ready group the one of that directory, or reports that there is none.
func (s *spent) take(dir string) (bool, error) {
	s.mu.Lock()
	n := len(s.ready)
	if n == 0 {
		s.mu.Unlock()
		return false, nil
	}
	from := s.ready[n-1]
	s.ready = s.ready[:n-1]
	s.mu.Unlock()
	if err := os.Rename(from, dir); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ready = append(s.ready, from)
		return false, err
	}
	return true, nil
}

// put takes an empty group over, if there is room for it. again: it may be used once more.
func (s *spent) put(dir string, again bool) (bool, error) {
	s.mu.Lock()
	if s.base == "" || s.closed || len(s.queue) >= maxSpent {
		s.mu.Unlock()
		return false, nil
	}
	to := filepath.Join(s.base, spentPrefix+strconv.Itoa(s.next))
	s.next++
	s.mu.Unlock()
	if err := os.Rename(dir, to); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if again && len(s.ready) < readyGroups {
		s.ready = append(s.ready, to)
		return true, nil
	}
	s.last = time.Now()
	s.queue = append(s.queue, spentGroup{to, s.last})
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return true, nil
}

// work removes what waits, one after the other, and at most half of the time: others need the kernel's lock, too.
func (s *spent) work(ctx context.Context) {
	defer close(s.done)
	for {
		g, due, ok := s.first()
		if !ok {
			select {
			case <-s.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		if d := time.Until(due); d > 0 {
			if !pause(ctx, min(d, spentAge)) {
				return
			}
			continue
		}
		start := time.Now()
		err := removeTree(g.dir)
		took := time.Since(start)
		if err != nil {
			s.log.Warn("an unused memory group cannot be removed", "dir", g.dir, "error", err)
			took = spentAge
		}
		s.removed(g, err != nil)
		if !pause(ctx, took) {
			return
		}
	}
}

// first is what is removed next, and when.
func (s *spent) first() (g spentGroup, due time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		return g, due, false
	}
	g, due = s.queue[0], s.last.Add(spentAge)
	if latest := g.since.Add(spentMost); latest.Before(due) {
		due = latest
	}
	if len(s.queue) > maxSpent/2 {
		due = time.Time{}
	}
	return g, due, true
}

// removed drops the first; one that failed comes again after all others.
func (s *spent) removed(g spentGroup, failed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = s.queue[1:]
	if failed {
		s.queue = append(s.queue, spentGroup{g.dir, time.Now()})
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(max(d, 0))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// close removes all that is left. Nothing is taken over any more.
func (s *spent) close(ctx context.Context) error {
	if s.base == "" {
		return nil
	}
	s.cancel()
	select {
	case <-s.done:
	case <-time.After(closeSlack):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, g := range s.queue {
		s.ready = append(s.ready, g.dir)
	}
	s.queue = nil
	for len(s.ready) > 0 {
		dir := s.ready[0]
		if err := retry(ctx, func() (bool, error) {
			err := removeTree(dir)
			if linux.IsBusy(err) {
				return false, nil
			}
			return err == nil, err
		}); err != nil {
			return fmt.Errorf("remove unused memory groups: %w", err)
		}
		s.ready = s.ready[1:]
	}
	return nil
}
