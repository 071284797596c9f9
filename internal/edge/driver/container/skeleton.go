package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
)

// makeSkeleton makes the lowest layer, so that a mount finds its place also in an image without it, and nothing has to be
// written to the upper directory. It is never changed while sandboxes use it: what is there is left as it is.
func makeSkeleton(dir string) error {
	modes := []struct {
		path string
		mode os.FileMode
	}{{"proc", 0o555}, {"sys", 0o555}, {"dev", 0o755}, {"etc", 0o755}, {"run", 0o755}, {"tmp", 0o777 | os.ModeSticky}}
	for _, m := range modes {
		path := filepath.Join(dir, m.path)
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := errors.Join(os.Mkdir(path, 0o755), os.Chmod(path, m.mode)); err != nil {
			return fmt.Errorf("make skeleton: %w", err)
		}
	}
	for _, name := range etcFiles {
		f, err := os.OpenFile(filepath.Join(dir, "etc", name), os.O_CREATE|os.O_RDONLY, 0o644)
		if err != nil {
			return fmt.Errorf("make skeleton: %w", err)
		}
		f.Close()
	}
	return nil
}

// A skeletons gives each sandbox its lowest layer: one for all, seen through its ids, or where the kernel does not map those of
// a tmpfs (before Linux 6.3) one for each range of ids, which belongs to its root.
type skeletons struct {
	common string
	own    string      // directory of those by range
	each   atomic.Bool // the kernel has refused to map the common one
}

// clone makes a mount of the lowest layer for the sandbox that has a range.
func (s *skeletons) clone(ranges *idRanges, slot, userNS int) (int, error) {
	if !s.each.Load() {
		fd, err := linux.CloneMountWith(s.common, linux.MountAttr{Set: linux.MountReadOnly, UserNS: userNS})
		if !linux.IsInvalid(err) {
			return fd, err
		}
		s.each.Store(true)
	}
	dir, first := filepath.Join(s.own, strconv.Itoa(slot)), int(ranges.first(slot))
	if _, err := os.Lstat(filepath.Join(dir, lastOfSkeleton)); err != nil {
		err := linux.WithFSIDs(first, first, func() error {
			return errors.Join(os.MkdirAll(dir, 0o755), makeSkeleton(dir))
		})
		if err != nil {
			return -1, err
		}
	}
	return linux.CloneMountWith(dir, linux.MountAttr{Set: linux.MountReadOnly})
}

// lastOfSkeleton is what makeSkeleton makes last.
var lastOfSkeleton = filepath.Join("etc", etcFiles[len(etcFiles)-1])

// feature says for people what the lowest layer is. It is known when one sandbox was made, or tried.
func (s *skeletons) feature() (string, driver.Fallback) {
	if !s.each.Load() {
		return "one for all, idmapped", driver.Fallback{}
	}
	return "one for each range of ids", driver.Fallback{Instead: "one for all, idmapped", Why: "this kernel does not map the ids of a tmpfs (Linux 6.3 does)",
		Cost: "10 inodes of the run directory for each sandbox at a time"}
}
