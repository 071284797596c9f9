package network

import (
	"context"
	"errors"
	"fmt"
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
	"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
	"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
}

// setUp makes the calling thread's fresh network namespace a slot.
func setUp() error {
	if err := linux.LinkUp("lo"); err != nil {
		return err
	}
	for path, value := range sysctls {
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("set %s: %w", path, err)
		}
	}
	return nil
}

// make makes a slot under a number that was never used in this run.
func (s *Slots) make() (int, error) {
	s.mu.Lock()
	n := s.next
	s.next++
	s.mu.Unlock()
	return n, linux.CreateNetns(s.path(n), setUp)
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
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		n, err := parseNumber(e.Name())
		if err != nil {
			continue // sysfs, sysfs.ns, owners
		}
		s.next = max(s.next, n+1)
		if taken[n] {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if mounted[s.path(n)] && len(s.free) < s.ready && s.asNew(n) {
			s.free = append(s.free, n)
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
		s.owned[id] = n
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
	defer close(s.done)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wanted:
		}
		if s.level() >= (s.ready+1)/2 {
			continue // slots in use come back soon; filling up at once would make one too many for each of them
		}
		for ctx.Err() == nil && s.level() < s.ready {
			n, err := s.make()
			if err != nil {
				s.log.Error("cannot make a network slot ahead", "error", err)
				wait(ctx, refillRetry)
				continue
			}
			s.mu.Lock()
			s.free = append(s.free, n)
			s.mu.Unlock()
		}
	}
}

func (s *Slots) level() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.free)
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
