package fake

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/network"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// part is what the fakes around the driver have in common.
type part struct {
	h          *Host
	name, kind string
}

func (p part) make(ctx context.Context, call string, id sandbox.ID, v any) error {
	return p.h.call(ctx, p.name+"."+call, id, func() error { return p.h.put(p.kind, id, v) })
}

func (p part) drop(ctx context.Context, call string, id sandbox.ID) error {
	return p.h.call(ctx, p.name+"."+call, id, func() error { return p.h.remove(p.kind, id) })
}

// Sweep removes what belongs to no id in keep.
func (p part) Sweep(ctx context.Context, keep map[sandbox.ID]bool) (found []sandbox.ID, err error) {
	err = p.h.call(ctx, p.name+".Sweep", "", func() error {
		for _, id := range p.h.list(p.kind) {
			if keep[id] {
				continue
			}
			found = append(found, id)
			if err := p.h.remove(p.kind, id); err != nil {
				return err
			}
		}
		return nil
	})
	return found, err
}

// Close removes everything that the part made.
func (p part) Close(ctx context.Context) error {
	_, err := p.Sweep(ctx, nil)
	return err
}

// Layers, Uppers, Networks and Cgroups are the parts of this host.
type (
	Layers   struct{ part }
	Uppers   struct{ part }
	Networks struct{ part }
	Cgroups  struct{ part }
)

func (h *Host) Layers() *Layers     { return &Layers{part{h, "layers", "layers"}} }
func (h *Host) Uppers() *Uppers     { return &Uppers{part{h, "uppers", "upper"}} }
func (h *Host) Networks() *Networks { return &Networks{part{h, "networks", "network"}} }
func (h *Host) Cgroups() *Cgroups   { return &Cgroups{part{h, "cgroups", "cgroup"}} }

func (l *Layers) Acquire(ctx context.Context, holder sandbox.ID, sources []rootfs.Source) ([]string, error) {
	lowers := make([]string, len(sources))
	for i, s := range sources {
		lowers[len(sources)-1-i] = "/fake/layers/" + s.Metadata.Digest
	}
	return lowers, l.make(ctx, "Acquire", holder, lowers)
}

func (l *Layers) Release(ctx context.Context, holder sandbox.ID) error {
	return l.drop(ctx, "Release", holder)
}

func (u *Uppers) Create(ctx context.Context, id sandbox.ID, bytes int64) (rootfs.Upper, error) {
	up := rootfs.Upper{Dir: "/fake/uppers/" + string(id), Bytes: bytes, Kind: "fake"}
	return up, u.make(ctx, "Create", id, up)
}

func (u *Uppers) Remove(ctx context.Context, id sandbox.ID) error { return u.drop(ctx, "Remove", id) }

func (u *Uppers) Usage(sandbox.ID) (used, limit int64, err error) { return 1 << 20, 1 << 30, nil }

func (u *Uppers) Free() (free, total int64, err error) {
	u.h.mu.Lock()
	defer u.h.mu.Unlock()
	return u.h.free, u.h.total, nil
}

func (n *Networks) Acquire(ctx context.Context, id sandbox.ID, p network.Policy) (driver.Network, error) {
	slot := fakeSlot(id, p)
	n.h.setPolicy(id, p)
	return slot, n.make(ctx, "Acquire", id, slot)
}

func fakeSlot(id sandbox.ID, p network.Policy) driver.Network {
	slot := driver.Network{Namespace: "/fake/net/" + string(id), Sysfs: "/fake/sysfs"}
	if len(p.Open) > 0 {
		slot.Addresses = []netip.Addr{netip.MustParseAddr("198.18.0.16")}
	}
	return slot
}

// SetPolicy keeps p for Host.Policy.
func (n *Networks) SetPolicy(ctx context.Context, id sandbox.ID, p network.Policy) error {
	return n.h.call(ctx, "networks.SetPolicy", id, func() error {
		n.h.setPolicy(id, p)
		return nil
	})
}

func (h *Host) setPolicy(id sandbox.ID, p network.Policy) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.policy[id] = p
}

// Policy is the last that Acquire or SetPolicy was given for id.
func (h *Host) Policy(id sandbox.ID) network.Policy {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.policy[id]
}

func (n *Networks) Refused(sandbox.ID) (network.Refusals, error) {
	return network.Refusals{Packets: 3, Reasons: map[string]int64{network.NotAllowed: 3}}, nil
}

func (n *Networks) Release(ctx context.Context, id sandbox.ID) error {
	n.h.mu.Lock()
	delete(n.h.policy, id)
	n.h.mu.Unlock()
	return n.drop(ctx, "Release", id)
}

func (n *Networks) Traffic(driver.Network) (driver.Traffic, error) {
	return driver.Traffic{RxBytes: 10, TxBytes: 20}, nil
}

func (c *Cgroups) Create(ctx context.Context, id sandbox.ID, _ sandbox.Limits) (driver.Cgroups, error) {
	cg := driver.Cgroups{V2Aether: fmt.Sprintf("/fake/cgroup/%s/aether", id), V2User: fmt.Sprintf("/fake/cgroup/%s/user", id)}
	return cg, c.make(ctx, "Create", id, cg)
}

func (c *Cgroups) Remove(ctx context.Context, id sandbox.ID) error { return c.drop(ctx, "Remove", id) }

func (c *Cgroups) OOMKills(cg driver.Cgroups) (int64, error) {
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	return c.h.oom[cg.V2User], nil
}

func (c *Cgroups) Stats(cg driver.Cgroups) (driver.Stats, error) {
	kills, err := c.OOMKills(cg)
	return driver.Stats{CPU: 1.5, Memory: 1 << 20, OOMKills: kills, PIDs: 1}, err
}

// KillStuck finds nothing: the fake guest forks nothing.
func (c *Cgroups) KillStuck(driver.Cgroups, time.Duration) (int, error) { return 0, nil }

// Trusted gives names only.
func (c *Cgroups) Trusted(_ context.Context, id sandbox.ID, cg driver.Cgroups, _ sandbox.Limits) (driver.Trusted, error) {
	return driver.Trusted{Freeze: cg.V2User + "/cgroup.freeze", V2: fmt.Sprintf("/fake/cgroup/%s/trusted", id)}, nil
}
