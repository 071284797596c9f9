package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/policy"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// probeID borrows a range for a trial; it is no valid id.
const probeID sandbox.ID = "probe"

// Probe implements driver.Driver. It tries what cannot be asked: a user namespace, and an idmapped overlay that is writable.
func (d *Driver) Probe(ctx context.Context) (driver.Capabilities, error) {
	slot, err := d.ranges.acquire(ctx, probeID)
	if err != nil {
		return driver.Capabilities{}, unsupported("user namespaces with ids of their own", err)
	}
	defer d.ranges.release(slot, probeID)
	if err := d.tryOverlay(slot); err != nil {
		return driver.Capabilities{}, unsupported("an overlay of idmapped layers", err)
	}
	fallbacks := map[string]driver.Fallback{}
	exit := "pidfd, also after a restart of the edge (PIDFD_INFO_EXIT)"
	if !linux.KeepsExitStatus() {
		exit = "pidfd, of children of the edge alone"
		fallbacks["exit_status"] = driver.Fallback{Instead: "PIDFD_INFO_EXIT", Why: "this kernel does not keep it (Linux 6.15 does)",
			Cost: "of a sandbox that ends while the edge is away it is not known how"}
	}
	groups := "a cgroup namespace of its own"
	if d.host.nsDelegate {
		groups = "out of sight, but named in /proc/self/cgroup"
		fallbacks["cgroup_namespace"] = driver.Fallback{Instead: "a cgroup namespace of its own",
			Why: "the host's control groups are mounted with nsdelegate, which ties who starts commands to the groups of his namespace", Cost: "a command can read how the groups above its own are called"}
	}
	root, fallback := d.host.overlays.feature()
	if fallback != (driver.Fallback{}) {
		fallbacks["root"] = fallback
	}
	lowest, fallback := d.skeletons.feature()
	if fallback != (driver.Fallback{}) {
		fallbacks["lowest_layer"] = fallback
	}
	return driver.Capabilities{Backend: Name, Fallbacks: fallbacks, Features: map[string]string{
		"launcher":         "stage, PID 1 is a child of the edge (CLONE_PARENT)",
		"user_namespaces":  fmt.Sprintf("%d ranges of %d ids from %d on, made ahead", d.ranges.capacity, idsPerRange, d.ranges.base),
		"root":             root,
		"lowest_layer":     lowest,
		"system_calls":     fmt.Sprintf("seccomp, %d instructions, stricter than %s", len(d.host.filter)/sockFilter, policy.ProfileSource),
		"devices":          "read-only tree, nodev elsewhere, BPF device program",
		"masks":            fmt.Sprintf("%d paths of /proc", len(d.host.masks)),
		"exit_status":      exit,
		"kill":             "cgroup.kill",
		"cgroup_namespace": groups,
	}}, nil
}

func unsupported(what string, err error) error {
	if e := (*sandbox.Error)(nil); errors.As(err, &e) {
		return err
	}
	return sandbox.Errorf(sandbox.Unsupported, "container_backend_unsupported",
		"this host cannot make %s, so it can run no containers; `dsec doctor` lists what is needed", what).WithCause(err)
}

// tryOverlay makes a root with an upper on the run directory's tmpfs, and leaves nothing.
func (d *Driver) tryOverlay(slot int) (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(d.dirs.users), "probe-")
	if err != nil {
		return fmt.Errorf("make scratch directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	b := &built{files: make([]int, fdTasks)}
	defer b.close()
	userNS, err := b.own(linux.OpenRead(d.ranges.path(slot)))
	if err != nil {
		return err
	}
	lowest, err := b.own(d.skeletons.clone(d.ranges, slot, userNS))
	if err != nil {
		return err
	}
	first := 0
	if d.skeletons.each.Load() { // no ids of a tmpfs are mapped: what belongs to the range's root takes the place of that
		first, userNS = int(d.ranges.first(slot)), 0
	}
	err = linux.WithFSIDs(first, first, func() error {
		return errors.Join(os.Mkdir(filepath.Join(dir, "u"), 0o755), os.Mkdir(filepath.Join(dir, "w"), 0o755))
	})
	if err != nil {
		return fmt.Errorf("make scratch directory: %w", err)
	}
	return d.overlay(b, linux.Overlay{Lowers: []int{lowest}}, dir, slot, userNS)
}
