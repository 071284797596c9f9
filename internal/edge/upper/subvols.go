package upper

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// subvols keeps each directory as a subvolume of btrfs with a quota group.
type subvols struct {
	p       *Pool
	simple  bool
	qgroups string // directory of /sys with the live counters

	// making is held for reading while a subvolume exists that is not yet in the table, and for writing while groups without
	// a subvolume in the table are removed: a kernel that does not check would take the limit of a live one.
	making sync.RWMutex

	mu       sync.Mutex
	ids      map[sandbox.ID]uint64 // of subvolumes
	removals int
}

func newSubvols(p *Pool, simple bool) *subvols {
	return &subvols{p: p, simple: simple, ids: make(map[sandbox.ID]uint64)}
}

// isSimple reports whether the mounted btrfs has simple quotas. A kernel without a mode has none.
func (p *Pool) isSimple() (bool, error) {
	dir, err := p.qgroupsDir()
	if err != nil {
		return false, err
	}
	mode, err := os.ReadFile(filepath.Join(dir, "mode"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return strings.TrimSpace(string(mode)) == "squota", err
}

func (p *Pool) qgroupsDir() (string, error) {
	uuid, err := linux.BtrfsUUID(p.root)
	return filepath.Join("/sys/fs/btrfs", uuid, "qgroups"), err
}

func (s *subvols) adopt(ids []sandbox.ID) (err error) {
	enable := linux.BtrfsEnableQuota
	if s.simple {
		enable = linux.BtrfsEnableSimpleQuota
	}
	if err := enable(s.p.root); err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_simple_quota", "this kernel has no such quotas of btrfs; simple ones need Linux 6.7").WithCause(err)
	}
	if s.qgroups, err = s.p.qgroupsDir(); err != nil {
		return err
	}
	if simple, err := s.p.isSimple(); err != nil || simple != s.simple {
		return fmt.Errorf("quotas of %s are not of the kind that was asked for: %w", s.p.dir, errors.Join(err, errors.ErrUnsupported))
	}
	for _, id := range ids {
		if s.ids[id], err = s.subvolOf(id); err != nil {
			return err
		}
	}
	return nil
}

func (s *subvols) make(id sandbox.ID, bytes, _ int64) error {
	subvol, err := s.makeSubvol(id)
	if err != nil {
		return err
	}
	return linux.BtrfsQgroupLimit(s.p.root, subvol, bytes)
}

func (s *subvols) makeSubvol(id sandbox.ID) (uint64, error) {
	s.making.RLock()
	defer s.making.RUnlock()
	if err := linux.BtrfsSubvolCreate(s.p.root, string(id)); err != nil {
		return 0, err
	}
	subvol, err := s.subvolOf(id)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids[id] = subvol
	return subvol, nil
}

func (s *subvols) subvolOf(id sandbox.ID) (uint64, error) {
	f, err := os.Open(s.p.path(id))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return linux.BtrfsSubvolID(f)
}

// remove does not wait for the disk: the kernel frees the space in the background, and with it the quota group.
func (s *subvols) remove(id sandbox.ID) error {
	err := linux.BtrfsSubvolDestroy(s.p.root, string(id))
	s.mu.Lock()
	delete(s.ids, id)
	s.removals++
	reap := s.removals%reapEvery == 0
	s.mu.Unlock()
	if reap && err == nil {
		s.tidy()
	}
	return err
}

// usage is as of the last commit.
func (s *subvols) usage(id sandbox.ID) (used, limit int64, err error) {
	s.mu.Lock()
	subvol, ok := s.ids[id]
	s.mu.Unlock()
	if !ok {
		return 0, 0, fs.ErrNotExist
	}
	dir := filepath.Join(s.qgroups, "0_"+strconv.FormatUint(subvol, 10))
	if used, err = readCount(filepath.Join(dir, "referenced")); err != nil {
		return 0, 0, err
	}
	limit, err = readCount(filepath.Join(dir, "max_referenced"))
	return used, limit, err
}

func readCount(path string) (int64, error) {
	var buf [64]byte
	b, err := linux.ReadControl(path, buf[:])
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// tidy removes quota groups of subvolumes that are gone. Newer kernels do it themselves; older ones leave them, and each
// makes every commit a little slower. One that is still being freed is busy and waits for the next time.
func (s *subvols) tidy() {
	s.making.Lock()
	defer s.making.Unlock()
	stale, err := s.staleQgroups()
	if err != nil {
		s.p.log.Warn("cannot list quota groups", "error", err)
		return
	}
	for _, subvol := range stale {
		if err := linux.BtrfsQgroupRemove(s.p.root, subvol); err != nil && !linux.IsBusy(err) && !errors.Is(err, fs.ErrNotExist) {
			s.p.log.Warn("cannot remove a quota group", "subvolume", subvol, "error", err)
		}
	}
}

// staleQgroups lists the groups without a subvolume of ours. Ids below 256 are the file system's own.
func (s *subvols) staleQgroups() ([]uint64, error) {
	entries, err := os.ReadDir(s.qgroups)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	live := make(map[uint64]bool, len(s.ids))
	for _, subvol := range s.ids {
		live[subvol] = true
	}
	var stale []uint64
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "0_")
		if !ok {
			continue
		}
		if n, err := strconv.ParseUint(number, 10, 64); err == nil && n >= 256 && !live[n] {
			stale = append(stale, n)
		}
	}
	return stale, nil
}

func (s *subvols) close() {}
