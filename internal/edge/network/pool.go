package network

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

// sysctls of every slot: ports below 1024 and ping work without a capability that would allow more.
var sysctls = map[string]string{
	"net/ipv4/ip_unprivileged_port_start": "0",
	"net/ipv4/ping_group_range":           "0 2147483647",
}

// setUp makes the calling thread's fresh network namespace a slot.
func setUp() error {
	if err := linux.LinkUp("lo"); err != nil {
		return err
	}
	return writeSysctls(sysctls, quietIPv6)
}

// make makes a slot under a number that was never used in this run.
func (s *Slots) make(linked bool) (*slot, error) {
	s.mu.Lock()
	x := &slot{n: s.next}
	s.next++
	s.mu.Unlock()
	if err := linux.CreateNetns(s.path(x.n), setUp); err != nil {
		return nil, err
	}
	if !linked {
		return x, nil
	}
	if err := s.addLink(x); err != nil {
		return nil, errors.Join(err, linux.RemoveNetns(s.path(x.n)))
	}
	if s.freshLinked.Load() == nil { // nobody was inside yet
		c, err := readCounters(s.path(x.n))
		if err != nil {
			return nil, errors.Join(err, s.remove(x))
		}
		c.sockets = 0 // the one that made the link may be on its way out
		s.freshLinked.CompareAndSwap(nil, &c)
	}
	return x, nil
}

// adopt reads what an earlier run left.
func (s *Slots) adopt(ctx context.Context) error {
	mounts, err := mountinfo.Self()
	if err != nil {
		return err
	}
	mounted := make(map[string]bool)
	for _, m := range mountinfo.Under(mounts, s.dir) {
		mounted[m.Point] = m.Type == "nsfs"
	}
	taken, err := s.adoptOwners(mounted)
	if err != nil {
		return err
	}
	linked, err := s.adoptLinks(mounted)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		n, err := parseNumber(e.Name())
		if err != nil {
			continue // what is not a slot
		}
		s.next = max(s.next, n+1)
		if taken[n] {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		x := &slot{n: n}
		if mounted[s.path(n)] && !linked[n] && len(s.free) < s.ready && s.asNew(x) {
			s.free = append(s.free, x)
		} else if err := linux.RemoveNetns(s.path(n)); err != nil {
			return err
		}
	}
	return nil
}

// adoptOwners reads who has which slot. A link to a slot that is not there was left by a process killed within Release.
func (s *Slots) adoptOwners(mounted map[string]bool) (taken map[int]bool, err error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "owners"))
	if err != nil {
		return nil, err
	}
	taken = make(map[int]bool)
	for _, e := range entries {
		id, badID := sandbox.ParseID(e.Name())
		link := filepath.Join(s.dir, "owners", e.Name())
		target, _ := os.Readlink(link)
		n, badNumber := parseNumber(target)
		if badID != nil || badNumber != nil || !mounted[s.path(n)] || taken[n] {
			s.log.Warn("removing a broken owner of a network slot", "name", e.Name(), "target", target)
			if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			continue
		}
		taken[n] = true
		s.owned[id] = &slot{n: n}
	}
	return taken, nil
}

func (s *Slots) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wakeLocked()
}

func (s *Slots) wakeLocked() {
	select {
	case s.wanted <- struct{}{}:
	default: // it is awake
	}
}

// refill fills the pool whenever less than half is left, until ctx ends.
func (s *Slots) refill(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wanted:
		}
		for _, linked := range []bool{false, true} {
			if s.level(linked) >= (s.ready+1)/2 {
				continue // slots in use come back soon; filling up at once would make one too many for each of them
			}
			for ctx.Err() == nil && s.level(linked) < s.ready {
				x, err := s.make(linked)
				if err != nil {
					s.log.Error("cannot make a network slot ahead", "error", err)
					wait(ctx, refillRetry)
					continue
				}
				s.mu.Lock()
				s.keepLocked(x)
				s.mu.Unlock()
			}
		}
	}
}

// level is how many slots of a kind are ready.
func (s *Slots) level(linked bool) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !linked:
		return len(s.free)
	case s.wantLinks:
		return len(s.freeLinked)
	}
	return s.ready // of what nobody wants there is enough
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
