package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"dsec/internal/linux"
)

// moveAttempts bounds the race against processes that fork while they are moved.
const moveAttempts = 16

// A v2Host is what Open changed in the group that holds the tree, so that Close can undo it.
type v2Host struct {
	parent  string // "" if nothing was changed
	leaf    string // where the processes of parent were moved to, "" if they were not
	enabled string // controllers that were enabled in parent: "+memory +cpu"
}

// openV2 finds a place for the tree where the kernel and systemd allow one: below the own group if systemd delegated it, else
// at the root of the mounted tree. Controllers can only be enabled for children of a group without processes, so
// where there are some they move into a leaf beside the tree.
func (t *Tree) openV2() error {
	parent, err := t.parentV2()
	if err != nil {
		return err
	}
	t.host, err = enable(parent, filepath.Join(parent, t.leaf()), enableAll)
	if err != nil {
		return err
	}
	t.v2 = filepath.Join(parent, t.name)
	if err := mkdir(t.v2); err != nil {
		return err
	}
	return linux.WriteControl(filepath.Join(t.v2, subtreeControl), enableAll)
}

func (t *Tree) leaf() string { return t.name + "-host" }

func (t *Tree) parentV2() (string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	own, err := ownV2(b)
	if err != nil {
		return t.layout.v2, nil // outside of what is mounted: the root of that is the only place
	}
	// After a restart this process may be a child of one that moved.
	own = strings.TrimSuffix(own, "/"+t.leaf())
	dir := filepath.Join(t.layout.v2, own)
	if linux.CgroupDelegated(dir) {
		return dir, nil
	}
	return t.layout.v2, nil
}

// enable enables controllers for the children of parent. It reports what it changed, also with an error.
func enable(parent, leaf, what string) (v2Host, error) {
	control := filepath.Join(parent, subtreeControl)
	before, err := os.ReadFile(control)
	if err != nil {
		return v2Host{}, err
	}
	if containsAll(string(before), what) {
		return v2Host{}, nil
	}
	host := v2Host{parent: parent}
	for range moveAttempts {
		err := linux.WriteControl(control, what)
		if err == nil {
			host.enabled = what
			return host, nil
		}
		if !linux.IsBusy(err) {
			return host, err
		}
		if err := mkdir(leaf); err != nil {
			return host, err
		}
		host.leaf = leaf
		if err := moveAll(parent, leaf); err != nil {
			return host, err
		}
	}
	return host, fmt.Errorf("%s keeps getting new processes", parent)
}

func containsAll(enabled, what string) bool {
	have := make(map[string]bool)
	for _, c := range strings.Fields(enabled) {
		have["+"+c] = true
	}
	for _, c := range strings.Fields(what) {
		if !have[c] {
			return false
		}
	}
	return true
}

// moveAll moves the processes of one group into another. Those that end meanwhile are gone; kernel threads cannot move.
func moveAll(from, to string) error {
	pids, err := readPids(filepath.Join(from, "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		err := linux.WriteControl(filepath.Join(to, "cgroup.procs"), strconv.Itoa(pid))
		if err != nil && !linux.IsGone(err) {
			return err
		}
	}
	return nil
}

// restore undoes what enable did.
func (h v2Host) restore() error {
	var errs []error
	if h.enabled != "" {
		errs = append(errs, linux.WriteControl(filepath.Join(h.parent, subtreeControl), strings.ReplaceAll(h.enabled, "+", "-")))
	}
	if h.leaf != "" {
		errs = append(errs, moveAll(h.leaf, h.parent), linux.RemoveDir(h.leaf))
	}
	return errors.Join(errs...)
}
