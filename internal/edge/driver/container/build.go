package container

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"dsec/internal/aether/config"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/policy"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Places in the table that stage inherits. Keep in step with stage.c; control groups' files follow.
const (
	fdControl = 3 + iota
	fdMountNS
	fdUserNS
	fdNetNS
	fdRoot
	fdDev
	fdSys
	fdEtc
)

const (
	fdAether = fdEtc + len(etcFiles) + iota
	fdListener
	fdConfig
	fdCgroup
	fdTasks
)

// built is what Create made for Start: descriptors, by their place in stage's table.
type built struct {
	files       []int
	group       int // v2 directory in which stage is born, or -1
	aetherTasks int // files behind fdTasks through which stage enters aether's groups; those of the user's groups follow
	owned       []int
	plan        []byte
	log         *linux.LogPipe
	remote      *os.File // our end of the control socket
}

// own notes that a descriptor is closed with b.
func (b *built) own(fd int, err error) (int, error) {
	if err == nil {
		b.owned = append(b.owned, fd)
	}
	return fd, err
}

// put places an owned descriptor into the table.
func (b *built) put(place int, fd int, err error) error {
	if _, err := b.own(fd, err); err != nil {
		return err
	}
	b.files[place] = fd
	return nil
}

// close gives everything back that a started sandbox does not need.
func (b *built) close() {
	linux.Close(b.owned...)
	b.owned = nil
}

// abandon is close, and the ends that a started sandbox would keep.
func (b *built) abandon() {
	b.close()
	if b.log != nil {
		b.log.Close()
	}
	if b.remote != nil {
		b.remote.Close()
	}
}

// build makes everything that stage needs. What it made is in b whatever it returns.
func (d *Driver) build(b *built, spec driver.Spec, slot int) error {
	b.files = make([]int, fdTasks)
	for i := range b.files {
		b.files[i] = d.stage.null
	}
	b.files[fdMountNS], b.files[fdAether] = d.host.mountNS, d.host.aether
	userNS, err := linux.OpenRead(d.ranges.path(slot))
	if err := b.put(fdUserNS, userNS, err); err != nil {
		return err
	}
	netNS, err := linux.OpenRead(spec.Network.Namespace)
	if err := b.put(fdNetNS, netNS, err); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if err := d.buildRoot(b, spec, slot, userNS); err != nil {
		return err
	}
	if err := d.buildMounts(b, spec, slot); err != nil {
		return err
	}
	etc, err := d.buildEtc(b, spec, userNS)
	if err != nil {
		return err
	}
	if err := d.buildGroups(b, spec.Cgroups, slot); err != nil {
		return err
	}
	if err := d.buildChannels(b, spec); err != nil {
		return err
	}
	return d.buildPlan(b, spec, etc)
}

// buildRoot makes the overlay. Layers and upper are seen through the sandbox's ids.
func (d *Driver) buildRoot(b *built, spec driver.Spec, slot, userNS int) error {
	var o linux.Overlay
	for _, dir := range spec.Rootfs.Lowers {
		fd, err := b.own(linux.CloneMountWith(dir, linux.MountAttr{Set: linux.MountReadOnly, UserNS: userNS}))
		if err != nil {
			return fmt.Errorf("layer: %w", err)
		}
		o.Lowers = append(o.Lowers, fd)
	}
	lowest, err := b.own(d.skeletons.clone(d.ranges, slot, userNS))
	if err != nil {
		return fmt.Errorf("lowest layer: %w", err)
	}
	o.Lowers = append(o.Lowers, lowest)
	return d.overlay(b, o, spec.Rootfs.Upper.Dir, slot, userNS)
}

// overlay puts the directories of an upper over the layers in o. Without a user namespace the upper is seen as it is.
func (d *Driver) overlay(b *built, o linux.Overlay, dir string, slot, userNS int) error {
	upper, err := b.own(linux.CloneMountWith(dir, linux.MountAttr{UserNS: userNS}))
	if err != nil {
		return fmt.Errorf("upper directory: %w", err)
	}
	o.Mounts = append(slices.Clone(o.Lowers), upper)
	for name, place := range map[string]*int{"u": &o.Upper, "w": &o.Work} {
		if *place, err = b.own(linux.OpenPathAt(upper, name)); err != nil {
			return fmt.Errorf("upper directory: %w", err)
		}
	}
	// volatile: what is in the upper does not outlive a reset of the machine anyway, so nothing waits for the disk. The others
	// keep the upper in the plain form that a layer can be made of.
	o.Options = []linux.FSOption{{Key: "volatile", Flag: true}, {Key: "index", Value: "off"}, {Key: "metacopy", Value: "off"}, {Key: "redirect_dir", Value: "off"}}
	first := int(d.ranges.first(slot))
	root := -1
	err = linux.WithFSIDs(first, first, func() (err error) {
		// Device nodes in a layer or made by whomever must not work: nodev. Programs with setuid must: no nosuid.
		if root, err = d.host.overlays.mount(o); err != nil {
			return err
		}
		return linux.CheckWritable(root)
	})
	if root >= 0 {
		b.owned = append(b.owned, root)
		b.files[fdRoot] = root
	}
	if linux.IsQuotaFull(err) {
		return sandbox.Errorf(sandbox.ResourceExhausted, "disk_full",
			"the node's disk for sandboxes is full; retry later or elsewhere").WithCause(err)
	}
	if err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	return nil
}

// buildMounts makes /dev and clones /sys.
func (d *Driver) buildMounts(b *built, spec driver.Spec, slot int) error {
	dev, err := devTree(int(d.ranges.first(slot)))
	if err := b.put(fdDev, dev, err); err != nil {
		return err
	}
	sys, err := linux.CloneMount(spec.Network.Sysfs, true)
	if err := b.put(fdSys, sys, err); err != nil {
		return fmt.Errorf("sysfs: %w", err)
	}
	return nil
}

// buildGroups opens the control groups and gives the user part to the sandbox's root, so that aether can make a group per
// command.
func (d *Driver) buildGroups(b *built, g driver.Cgroups, slot int) error {
	enter := []string{}
	var err error
	if sandboxGroup := filepath.Dir(g.V2Aether); wasKilled(sandboxGroup) {
		b.group = -1
		enter = append(enter, filepath.Join(g.V2Aether, "cgroup.procs")) // slower: the kernel waits for all CPUs
	} else if b.group, err = b.own(linux.OpenRead(g.V2Aether)); err != nil {
		return fmt.Errorf("control group: %w", err)
	}
	// A mount of its own, attached to nowhere: "..", from a directory of the host's mount, leads through the host's tree,
	// and a command's first moments have this descriptor (/proc/self/fd/5 as a working directory).
	user, err := linux.CloneMountWith(g.V2User, linux.MountAttr{Set: linux.MountNoSUID | linux.MountNoDev | linux.MountNoExec})
	if err := b.put(fdCgroup, user, err); err != nil {
		return fmt.Errorf("control group: %w", err)
	}
	first := int(d.ranges.first(slot))
	// A process may be born in another group only by who may write cgroup.procs of the nearest group above both.
	give := []string{filepath.Join(filepath.Dir(g.V2User), "cgroup.procs"), g.V2User}
	for _, name := range []string{"cgroup.procs", "cgroup.threads", "cgroup.subtree_control"} {
		give = append(give, filepath.Join(g.V2User, name))
	}
	for _, path := range give {
		if err := os.Lchown(path, first, first); err != nil {
			return fmt.Errorf("delegate control group: %w", err)
		}
	}
	for _, controller := range v1Order(g.V1Aether) {
		enter = append(enter, filepath.Join(g.V1Aether[controller], "tasks"))
	}
	b.aetherTasks = len(enter)
	for _, controller := range v1Order(g.V1User) {
		enter = append(enter, filepath.Join(g.V1User[controller], "tasks"))
	}
	for _, path := range enter {
		fd, err := b.own(linux.OpenWrite(path))
		if err != nil {
			return fmt.Errorf("control group: %w", err)
		}
		b.files = append(b.files, fd)
	}
	return nil
}

// v1Order is memory, cpu, pids, then others by name: the order in which aether expects its files.
func v1Order(dirs map[string]string) []string {
	rank := map[string]int{"memory": -3, "cpu": -2, "pids": -1}
	names := slices.Sorted(maps.Keys(dirs))
	slices.SortStableFunc(names, func(a, b string) int { return rank[a] - rank[b] })
	return names
}

// listenBacklog is small: only the edge connects.
const listenBacklog = 8

// buildChannels makes aether's socket, its configuration, its log and the control socket.
func (d *Driver) buildChannels(b *built, spec driver.Spec) error {
	mode := config.CgroupV2
	if len(spec.Cgroups.V1User) > 0 {
		mode = config.CgroupHybrid
	}
	message, err := config.Config{
		Key: spec.GuestKey, Hostname: spec.Hostname, Cgroup: mode, V1Tasks: len(spec.Cgroups.V1User), CPUs: spec.Cgroups.CPUs,
	}.Encode()
	if err != nil {
		return err
	}
	fd, err := linux.MessageFile(message)
	if err := b.put(fdConfig, fd, err); err != nil {
		return err
	}
	fd, err = d.sockets.Listen(string(spec.ID), listenBacklog)
	if err := b.put(fdListener, fd, err); err != nil {
		return err
	}
	if b.log, fd, err = linux.NewLogPipe(); err != nil {
		return err
	}
	b.owned = append(b.owned, fd)
	b.files[2] = fd
	control, remote, err := linux.SocketPair()
	if err := b.put(fdControl, remote, err); err != nil {
		return err
	}
	b.remote = control
	return nil
}

func (d *Driver) buildPlan(b *built, spec driver.Spec, etc uint32) (err error) {
	b.plan, err = plan{
		failStep:     d.failStep,
		aetherTasks:  b.aetherTasks,
		userTasks:    len(spec.Cgroups.V1User),
		capabilities: policy.GuestCapabilities(),
		nofile:       d.host.nofile,
		shmBytes:     uint64(spec.Limits.Memory) / 2, // as the kernel's own default; it is charged to the memory limit
		etc:          etc,
		cgroupNS:     !d.host.nsDelegate,
		hostname:     spec.Hostname,
		masks:        d.host.masks,
		filter:       d.host.filter,
	}.encode()
	return err
}
