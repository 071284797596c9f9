// Package cgroup makes the control groups of each sandbox: where its limits are, and what kills it whole.
//
// A sandbox has two parts. "user" holds its commands and carries the limits. "aether" holds the proxy, with a small memory
// limit of its own: so the sandbox's OOM killer cannot choose it, and its share of the CPU inside the sandbox is much higher, so
// that it answers while every command spins.
//
// What surprises:
//
//   - Which cgroup a host has is told by statfs and the table of mounts, never by trying: on a tmpfs, mkdir and writes succeed
//     as well and limit nothing.
//   - On a host whose controllers are in v1 each sandbox has v1 groups for its limits and a twin in the v2 tree, which has no
//     controllers there but kills, freezes and carries BPF programs. Memory groups are flat (<id>.user), because a
//     parent would be one memory cgroup more for each sandbox, and every page that is charged is charged to all parents.
//   - A process is in all of these groups because somebody wrote it there; this package makes the groups and empties
//     them. Tasks that are only in a v1 group, left by a launcher that was killed in the middle, are found and killed by Remove.
//   - The CPU quota is on the user part alone: a throttled sandbox still answers.
//   - All sandboxes together are limited too, in the groups that hold them: their pids, so that those of a few do not take all of
//     the node's, without which nothing of the edge and of other sandboxes could make a thread; and their memory, so that
//     what runs out is theirs and not the host's. Besides, Open asks the kernel's OOM killer to spare this process; what it
//     starts inherits that, and the driver takes it back from sandboxes.
//   - A v1 memory group is not removed with its sandbox, but renamed: see spent.
//   - Page cache of shared layers is charged to the sandbox that touched it first and keeps its dead memory cgroup alive until
//     it is reclaimed. Emptying the group before removing it would throw away cache that others use, so it is not done.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

// AetherMemory is the memory limit of aether's part, in bytes: many times what it needs at rest, for buffers of streams and for
// scripts. It is a limit, not a reservation.
const AetherMemory = 64 << 20

// aetherPIDs is the most threads of aether's part: a few at rest, one more for each call that blocks.
const aetherPIDs = 512

// Bounds of the pauses between two tries to remove a group whose tasks are dying.
const (
	minPause = 200 * time.Microsecond
	maxPause = 10 * time.Millisecond
)

// Options of Open.
type Options struct {
	Name string // of the directory that holds all groups: "dsec-" and the edge's code
	Log  *slog.Logger
}

// A Tree is all control groups of one edge.
type Tree struct {
	name   string
	layout layout
	v2     string            // directory of all sandboxes in the v2 tree
	v1     map[string]string // controller -> directory of all sandboxes; empty on v2
	memsw  bool              // v1 limits memory and swap together
	cpus   []int
	turn   atomic.Uint64 // where the next CPU mask begins
	host   v2Host        // what Open changed around v2
	spent  spent         // memory groups of sandboxes that have ended
	log    *slog.Logger
}

var treeName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)

// Open finds out which cgroups this host has, and finds or makes the directory for all sandboxes. An Unsupported error says
// what the host lacks.
func Open(ctx context.Context, o Options) (*Tree, error) {
	if !treeName.MatchString(o.Name) {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "bad_cgroup_name", "%q cannot be the name of a control group", o.Name)
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		return nil, err
	}
	l, err := detect(mounts, linux.FSMagic, readControllers)
	if err != nil {
		return nil, err
	}
	cpus, err := linux.AllowedCPUs()
	if err != nil {
		return nil, err
	}
	t := &Tree{name: o.Name, layout: l, cpus: cpus, v1: make(map[string]string), log: o.Log}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	if l.mode == V2 {
		err = t.openV2()
	} else {
		err = t.openHybrid()
	}
	if err == nil {
		err = t.limitAll()
	}
	if err == nil && l.mode != V2 {
		err = t.spent.open(ctx, t.v1["memory"], t.log)
	}
	if err != nil {
		return nil, fmt.Errorf("open the control groups of %s: %w", o.Name, err)
	}
	return t, nil
}

func (t *Tree) openHybrid() error {
	for _, c := range controllers {
		t.v1[c] = filepath.Join(t.layout.v1[c], t.name)
		if err := mkdir(t.v1[c]); err != nil {
			return err
		}
	}
	_, err := os.Stat(filepath.Join(t.v1["memory"], "memory.memsw.limit_in_bytes"))
	t.memsw = err == nil
	t.v2 = filepath.Join(t.layout.v2, t.name)
	return mkdir(t.v2)
}

// Waiting is how many groups of sandboxes that have ended wait to be removed.
func (t *Tree) Waiting() int { return t.spent.waiting() }

// Mode says where the limits are.
func (t *Tree) Mode() Mode { return t.layout.mode }

// Root is the v2 directory of all sandboxes: a BPF program attached to it holds for each.
func (t *Tree) Root() string { return t.v2 }

// Create makes the groups of id with its limits. Groups of that name left by an earlier attempt are removed first.
func (t *Tree) Create(ctx context.Context, id sandbox.ID, l sandbox.Limits) (driver.Cgroups, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return driver.Cgroups{}, err
	}
	p := t.plan(id, l)
	err := p.make()
	if errors.Is(err, fs.ErrExist) {
		if err = t.Remove(ctx, id); err == nil {
			err = p.make()
		}
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), sandbox.StoppingDeadline)
		defer cancel()
		return driver.Cgroups{}, fmt.Errorf("make control groups: %w", errors.Join(err, t.Remove(undo, id)))
	}
	p.cgroups.CPUs = t.mask(l.CPU)
	return p.cgroups, nil
}

// Kill kills every process of the sandbox and waits until none is left. Without groups
// there is nothing to kill.
func (t *Tree) Kill(ctx context.Context, id sandbox.ID) error {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return err
	}
	if err := linux.KillCgroup(ctx, filepath.Join(t.v2, string(id))); err != nil {
		return fmt.Errorf("kill the sandbox: %w", err)
	}
	return nil
}

// Remove kills what is in the groups of id and removes them. It returns when they are gone, or when ctx ends: then a later call
// goes on. Without groups it does nothing.
func (t *Tree) Remove(ctx context.Context, id sandbox.ID) error {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return err
	}
	if err := t.removeV2(ctx, id); err != nil {
		return fmt.Errorf("remove the v2 control group of %s: %w", id, err)
	}
	for _, dir := range t.v1Dirs(id) {
		if err := t.removeV1(ctx, dir); err != nil {
			return fmt.Errorf("remove the control group of %s: %w", id, err)
		}
	}
	return nil
}

func (t *Tree) removeV2(ctx context.Context, id sandbox.ID) error {
	dir := filepath.Join(t.v2, string(id))
	if err := removeTree(dir); !linux.IsBusy(err) {
		return err
	}
	if err := t.Kill(ctx, id); err != nil {
		return err
	}
	// A task that is no longer counted as populating may hold its group for a moment more.
	return retry(ctx, func() (bool, error) {
		err := removeTree(dir)
		if linux.IsBusy(err) {
			return false, nil
		}
		return err == nil, err
	})
}

func (t *Tree) removeV1(ctx context.Context, dir string) error {
	if kept, err := t.retire(dir); kept || err != nil {
		return err
	}
	return retry(ctx, func() (bool, error) {
		err := removeTree(dir)
		if !linux.IsBusy(err) {
			return err == nil, err
		}
		return false, t.killStrays(dir)
	})
}

// retire keeps an empty memory group for another use, or until it is removed when that disturbs nobody. The kernel's count of
// kills stays with a group, so where there were any it is not used again.
func (t *Tree) retire(dir string) (bool, error) {
	if t.spent.base == "" || filepath.Dir(dir) != t.spent.base {
		return false, nil
	}
	pids, err := readPids(filepath.Join(dir, "cgroup.procs"))
	if linux.IsGone(err) {
		return true, nil
	}
	if err != nil || len(pids) > 0 {
		return false, err
	}
	again := strings.HasSuffix(dir, aetherSuffix)
	if again {
		kills, err := flatValue(filepath.Join(dir, "memory.oom_control"), "oom_kill")
		again = err == nil && kills == 0
	}
	kept, err := t.spent.put(dir, again)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return kept, err
}

// killStrays kills the processes that are in a v1 group and its children but in no v2 group of the sandbox.
func (t *Tree) killStrays(dir string) error {
	return walk(dir, func(d string) error {
		procs := filepath.Join(d, "cgroup.procs")
		pids, err := readPids(procs)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			t.log.Warn("killing a process left in a control group", "pid", pid, "cgroup", d)
			err := linux.KillIf(pid, func() bool { return contains(procs, pid) })
			if err != nil {
				return err
			}
		}
		return nil
	})
}

func contains(procs string, pid int) bool {
	pids, err := readPids(procs)
	if err != nil {
		return false
	}
	for _, p := range pids {
		if p == pid {
			return true
		}
	}
	return false
}

// OOMKills is how many commands' processes the kernel has killed for want of memory so far. It costs four system calls.
func (t *Tree) OOMKills(cg driver.Cgroups) (int64, error) {
	file := filepath.Join(cg.V2User, "memory.events")
	if dir, ok := cg.V1User["memory"]; ok {
		file = filepath.Join(dir, "memory.oom_control")
	}
	n, err := flatValue(file, "oom_kill")
	if err != nil {
		return 0, fmt.Errorf("count OOM kills: %w", err)
	}
	return n + trustedKills(cg), nil
}

// Pids lists the processes of a sandbox, as this process's pid namespace numbers them. Without groups it is empty.
func (t *Tree) Pids(id sandbox.ID) ([]int, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return nil, err
	}
	var all []int
	err := walk(filepath.Join(t.v2, string(id)), func(dir string) error {
		pids, err := readPids(filepath.Join(dir, "cgroup.procs"))
		all = append(all, pids...)
		return err
	})
	return all, err
}

// Sweep removes the groups of every id that is not in keep, with the processes in them, and returns these ids.
func (t *Tree) Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error) {
	ids, err := t.list()
	if err != nil {
		return nil, err
	}
	var gone []sandbox.ID
	var errs []error
	for _, id := range ids {
		if !keep[id] {
			gone = append(gone, id)
			errs = append(errs, t.Remove(ctx, id))
		}
	}
	return gone, errors.Join(errs...)
}

// list is the ids of all sandboxes that have a group in any hierarchy, in no order.
func (t *Tree) list() ([]sandbox.ID, error) {
	seen := make(map[sandbox.ID]bool)
	var ids []sandbox.ID
	for _, base := range t.bases() {
		entries, err := os.ReadDir(base)
		if errors.Is(err, fs.ErrNotExist) {
			continue // after Close
		} else if err != nil {
			return nil, err
		}
		for _, e := range entries {
			name, _, _ := strings.Cut(e.Name(), ".") // <id>.user; control files do not parse as ids
			id, err := sandbox.ParseID(name)
			if err == nil && e.IsDir() && !seen[id] {
				seen[id] = true
				ids = append(ids, id)
			}
		}
	}
	return ids, nil
}

func (t *Tree) bases() []string {
	bases := []string{t.v2}
	for _, c := range controllers {
		if dir, ok := t.v1[c]; ok {
			bases = append(bases, dir)
		}
	}
	return bases
}

// Close removes every group, killing what is in them, and the directories themselves.
func (t *Tree) Close(ctx context.Context) error {
	if _, err := t.Sweep(ctx, nil); err != nil {
		return err
	}
	if err := t.spent.close(ctx); err != nil {
		return err
	}
	for _, base := range t.bases() {
		if err := linux.RemoveDir(base); err != nil {
			return err
		}
	}
	return t.host.restore()
}

// mask chooses the CPUs of a sandbox whose cores are fewer than the node's, beginning where the last one ended.
func (t *Tree) mask(cores float64) []int {
	n := cpusFor(cores)
	if n >= len(t.cpus) {
		return nil
	}
	return rotate(t.cpus, t.turn.Add(uint64(n))-uint64(n), n)
}
