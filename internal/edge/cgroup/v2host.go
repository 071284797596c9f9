package cgroup

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dsec/internal/linux"
)

// moveAttempts bounds the race against processes that fork while they are moved.
const moveAttempts = 16

// A v2Host is what Open changes in the group that holds the tree, so that Close can undo it. It is kept as an attribute of the
// tree's own group, before anything is changed: there a later process finds it if this one is killed, and nobody does after
// a reset of the machine, which undoes all of it.
type v2Host struct {
	Parent  string `json:"parent,omitempty"`  // "" if nothing is changed
	Leaf    string `json:"leaf,omitempty"`    // where the processes of parent are moved to, if it has any
	Enabled string `json:"enabled,omitempty"` // controllers that are enabled in parent: "+memory +cpu"
}

// hostMark is the attribute with a v2Host.
const hostMark = "trusted.dsec.host"

// openV2 finds a place for the tree where the kernel and systemd allow one: below the own group if systemd delegated it, else
// at the root of the mounted tree. Controllers can only be enabled for children of a group without processes, so
// where there are some they move into a leaf beside the tree.
func (t *Tree) openV2() error {
	parent, err := t.parentV2()
	if err != nil {
		return err
	}
	t.v2 = filepath.Join(parent, t.name)
	if err := mkdir(t.v2); err != nil {
		return err
	}
	if t.host, err = enable(parent, filepath.Join(parent, t.leaf()), t.v2, enableAll); err != nil {
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

// enable enables controllers for the children of parent, and gives what it, or an earlier process for the same tree, changed.
func enable(parent, leaf, tree, what string) (v2Host, error) {
	host, err := keptHost(tree)
	if err != nil {
		return v2Host{}, err
	}
	control := filepath.Join(parent, subtreeControl)
	before, err := os.ReadFile(control)
	if err != nil {
		return v2Host{}, err
	}
	missing := missingFrom(string(before), what)
	if missing == "" {
		return host, nil
	}
	if host == (v2Host{}) {
		host = v2Host{Parent: parent, Leaf: leaf, Enabled: missing}
		mark, err := json.Marshal(host)
		if err == nil {
			err = linux.Lsetxattr(tree, hostMark, string(mark))
		}
		if err != nil {
			return v2Host{}, fmt.Errorf("note what is changed in %s: %w", parent, err)
		}
	}
	for range moveAttempts {
		err := linux.WriteControl(control, missing)
		if err == nil || !linux.IsBusy(err) {
			return host, err
		}
		if err := mkdir(leaf); err != nil {
			return host, err
		}
		if err := moveAll(parent, leaf); err != nil {
			return host, err
		}
	}
	return host, fmt.Errorf("%s keeps getting new processes", parent)
}

// keptHost is what an earlier process for this tree changed and did not undo.
func keptHost(tree string) (v2Host, error) {
	var h v2Host
	attrs, err := linux.Lxattrs(tree)
	if err != nil || attrs[hostMark] == "" {
		return h, err
	}
	if err := json.Unmarshal([]byte(attrs[hostMark]), &h); err != nil {
		return h, fmt.Errorf("what an earlier process changed around %s: %w", tree, err)
	}
	return h, nil
}

// missingFrom is what of "+memory +cpu" is not among the enabled.
func missingFrom(enabled, what string) string {
	have := strings.Fields(enabled)
	missing := slices.DeleteFunc(strings.Fields(what), func(c string) bool { return slices.Contains(have, c[1:]) })
	return strings.Join(missing, " ")
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

// restore undoes what enable did, as far as it got.
func (h v2Host) restore() error {
	if h.Parent == "" {
		return nil
	}
	errs := []error{linux.WriteControl(filepath.Join(h.Parent, subtreeControl), strings.ReplaceAll(h.Enabled, "+", "-"))}
	if err := moveAll(h.Leaf, h.Parent); !linux.IsGone(err) {
		errs = append(errs, err, linux.RemoveDir(h.Leaf))
	}
	return errors.Join(errs...)
}
