package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"dsec/internal/edge/network/allow"
	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

const (
	linkMTU   = 65520 // no packet leaves the node
	loopback  = 1     // index in every namespace
	peerIndex = 15    // of a link's end in its slot, behind the tunnels that some hosts have in every namespace
	mainTable = 254
	// localTable is looked at first. It says that every address is the router's own, but those of links.
	localTable = 255
)

// routerSysctls make a namespace in which nothing is forwarded and every address may be answered for.
var routerSysctls = map[string]string{
	"net/ipv4/ip_forward":                 "0",
	"net/ipv4/conf/all/rp_filter":         "0",
	"net/ipv4/conf/default/rp_filter":     "0",
	"net/ipv4/conf/all/accept_redirects":  "0",
	"net/ipv4/conf/all/send_redirects":    "0",
	"net/ipv4/ip_nonlocal_bind":           "1",
	"net/ipv4/ip_unprivileged_port_start": "0",
	"net/ipv4/tcp_syncookies":             "1", // connections that one sandbox leaves half open must not keep out the others'
	"net/ipv4/tcp_synack_retries":         "2", // nothing is lost on the way
	"net/ipv4/tcp_max_syn_backlog":        "8192",
	"net/core/somaxconn":                  "8192",
	"net/ipv4/tcp_max_tw_buckets":         "0", // a sandbox may use a port again at once
	"net/ipv4/tcp_fin_timeout":            "5", // what is left of a connection is soon gone, before the address has another owner
	"net/ipv4/tcp_orphan_retries":         "2",
	"net/ipv4/tcp_retries2":               "6",
}

// quietIPv6 makes links that say nothing by themselves.
var quietIPv6 = map[string]string{
	"net/ipv6/conf/default/addr_gen_mode": "1", // no address of their own making
	"net/ipv6/conf/default/accept_ra":     "0",
	"net/ipv6/conf/default/accept_dad":    "0",
	"net/ipv6/conf/all/forwarding":        "0",
}

func writeSysctls(all ...map[string]string) error {
	proc, err := linux.PrivateProc()
	if err != nil {
		return err
	}
	defer linux.Close(proc)
	dir := fmt.Sprintf("/proc/self/fd/%d/sys", proc)
	for _, m := range all {
		for name, value := range m {
			err := os.WriteFile(filepath.Join(dir, name), []byte(value), 0)
			if err != nil && !(strings.HasPrefix(name, "net/ipv6/") && errors.Is(err, fs.ErrNotExist)) {
				return fmt.Errorf("set %s: %w", name, err)
			}
		}
	}
	return nil
}

// A router is the namespace in which the slots' links end, with the packet filter on each end.
type router struct {
	dir    string // of the slots
	ranged addressRange
	path   string
	thread *linux.NetnsThread
	nl     *linux.Netlink
	filter *filter

	mu        sync.Mutex
	policies  *policies
	forbidden map[netip.Prefix]bool
	numbers   numbers
}

func (s *Slots) routerPath() string { return filepath.Join(s.dir, "router") }
func (s *Slots) linksDir() string   { return filepath.Join(s.dir, "links") }
func (s *Slots) bpfDir() string     { return filepath.Join(s.dir, "bpf") }
func (s *Slots) policyDir() string  { return filepath.Join(s.dir, "policies") }
func (s *Slots) emptyDir() string   { return filepath.Join(s.dir, "empty") }

// openRouter makes the router, or finds the one of an earlier process.
func (s *Slots) openRouter() (_ *router, err error) {
	r := &router{dir: s.dir, ranged: s.ranged, path: s.routerPath(), forbidden: make(map[netip.Prefix]bool)}
	defer func() {
		if err != nil {
			r.detach()
		}
	}()
	if err := s.prepareRouter(); err != nil {
		return nil, err
	}
	if r.thread, err = linux.EnterNetns(r.path); err != nil {
		return nil, err
	}
	err = r.thread.Do(func() (err error) {
		r.nl, err = linux.OpenNetlink()
		return err
	})
	if err != nil {
		return nil, err
	}
	if r.filter, err = loadFilter(s.bpfDir(), r.ranged); err != nil {
		return nil, err
	}
	last, err := r.filter.lastPolicy()
	if err != nil {
		return nil, err
	}
	r.policies = newPolicies(r.filter, last+1)
	if err := r.refreshForbidden(); err != nil {
		return nil, err
	}
	return r, nil
}

// prepareRouter makes what outlives this process.
func (s *Slots) prepareRouter() error {
	for _, dir := range []string{s.linksDir(), s.bpfDir(), s.policyDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(s.emptyDir(), 0o555); err != nil {
		return err
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		return err
	}
	if _, ok := mountinfo.At(mounts, s.bpfDir()); !ok {
		if err := linux.MountBPF(s.bpfDir()); err != nil {
			return err
		}
	}
	if _, ok := mountinfo.At(mounts, s.routerPath()); ok {
		return nil
	}
	if err := linux.RemoveNetns(s.routerPath()); err != nil { // killed before the bind mount
		return err
	}
	return linux.CreateNetns(s.routerPath(), setUpRouter)
}

// setUpRouter makes the calling thread's fresh namespace the router.
func setUpRouter() error {
	if err := writeSysctls(routerSysctls, quietIPv6); err != nil {
		return err
	}
	if err := linux.LinkUp("lo"); err != nil {
		return err
	}
	nl, err := linux.OpenNetlink()
	if err != nil {
		return err
	}
	defer nl.Close()
	var b linux.NetlinkBatch
	b.AddRoute(linux.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Index: loopback, Local: true, Table: localTable})
	if linux.HasIPv6() {
		b.AddRoute(linux.Route{To: netip.MustParsePrefix("::/0"), Index: loopback, Local: true, Table: localTable})
		if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0); err != nil {
			return err
		}
	}
	return nl.Do(&b)
}

// detach ends what this process has of the router, and leaves the router.
func (r *router) detach() {
	if r.filter != nil {
		r.filter.close()
	}
	if r.nl != nil {
		r.nl.Close()
	}
	if r.thread != nil {
		r.thread.Close()
	}
}

// removeRouter removes it, and all links with it. There may be none.
func (s *Slots) removeRouter() error {
	errs := []error{linux.RemoveNetns(s.routerPath()), linux.UnmountPath(s.bpfDir(), true)}
	return errors.Join(errs...)
}

// refreshForbidden closes to all what is undeniable, and what the host's own addresses are now.
func (r *router) refreshForbidden() error {
	want := make(map[netip.Prefix]bool)
	for _, p := range slices.Concat(sandbox.Undeniable(), r.ranged.prefixes()) {
		want[p] = true
	}
	own, err := hostAddresses()
	if err != nil {
		return fmt.Errorf("list this host's addresses: %w", err) // what was closed stays closed
	}
	for _, a := range own {
		want[netip.PrefixFrom(a.WithZone(""), a.BitLen())] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for p := range want {
		if !r.forbidden[p] {
			errs = append(errs, r.filter.forbid(p, true))
			r.forbidden[p] = true
		}
	}
	for p := range r.forbidden {
		if !want[p] {
			errs = append(errs, r.filter.forbid(p, false))
			delete(r.forbidden, p)
		}
	}
	return errors.Join(errs...)
}

// numbers of links that are free: the one that is free for the longest time is next, so that what is left of a sandbox's connections has
// ended before its address has another owner.
type numbers struct {
	free []uint32
	next uint32
}

func (n *numbers) get() (uint32, error) {
	n.next = max(n.next, firstLink)
	if n.next < firstLink+reuseAfter || len(n.free) == 0 {
		if n.next < maxLinks {
			n.next++
			return n.next - 1, nil
		}
		if len(n.free) == 0 {
			return 0, sandbox.Errorf(sandbox.ResourceExhausted, "no_network_links", "all %d links to the outside of this node are in use", maxLinks-firstLink)
		}
	}
	got := n.free[0]
	n.free = n.free[1:]
	return got, nil
}

// adopt makes free what an earlier process used and no link has any more.
func (n *numbers) adopt(used map[uint32]bool) {
	n.free, n.next = nil, firstLink
	for number := range used {
		n.next = max(n.next, number+1)
	}
	for number := uint32(firstLink); number < n.next; number++ {
		if !used[number] {
			n.free = append(n.free, number)
		}
	}
}

// reuseAfter is how many numbers are used before one is used again.
const reuseAfter = 4096

func (r *router) giveNumber(n uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.numbers.free = append(r.numbers.free, n)
}

// addLink connects the slot kept at path. It returns the link's number, which owner names until it is complete.
func (r *router) addLink(slot string, record func(number uint32) error) (uint32, error) {
	ns, err := os.Open(slot)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	var taken []uint32
	defer func() {
		for _, n := range taken {
			r.giveNumber(n)
		}
	}()
	for {
		r.mu.Lock()
		n, err := r.numbers.get()
		r.mu.Unlock()
		if err != nil {
			return 0, err
		}
		if err := record(n); err != nil {
			r.giveNumber(n)
			return 0, err
		}
		err = r.connect(n, ns)
		if err == nil {
			return n, nil
		}
		if exists := errors.Is(err, syscall.EEXIST) || errors.Is(err, syscall.EBUSY); !exists || len(taken) == maxTaken {
			if !exists {
				_ = r.disconnect(n) // one that is left makes the next try of its number fail
			}
			r.giveNumber(n)
			return 0, err
		}
		taken = append(taken, n) // its last owner's namespace is on its way out
	}
}

// maxTaken is how many numbers are tried beside one that is free: where all fail, it is the slot that has something already.
const maxTaken = 256

// connect makes link n. Its end in the router is down until the filter is on it.
func (r *router) connect(n uint32, ns *os.File) error {
	name, mac, addresses := "s"+strconv.FormatUint(uint64(n), 10), r.ranged.mac(n), r.ranged.addresses(n)
	var b linux.NetlinkBatch
	b.AddVeth(linux.Veth{Name: name, PeerName: "eth0", Index: int(n), PeerIndex: peerIndex, MAC: mac, MTU: linkMTU, PeerNamespace: ns})
	if err := r.nl.Do(&b); err != nil {
		return err
	}
	b = linux.NetlinkBatch{}
	b.AddFilters(int(n), r.filter.from.FD(), r.filter.to.FD())
	if err := r.nl.Do(&b); err != nil {
		return err
	}
	if err := r.filter.begin(n); err != nil {
		return err
	}
	b = linux.NetlinkBatch{}
	b.LinkUp(int(n))
	for _, a := range addresses {
		b.AddRoute(linux.Route{To: netip.PrefixFrom(a, a.BitLen()), Index: int(n), Table: localTable})
		b.AddNeighbor(int(n), a, mac)
	}
	if err := r.nl.Do(&b); err != nil {
		return err
	}
	if err := setUpLink(ns, addresses, r.ranged.addresses(1), mac); err != nil {
		return err
	}
	return r.thread.Do(func() error { return linux.SettleLink(name) })
}

// setUpLink gives the slot's end its addresses and the way out.
func setUpLink(ns *os.File, addresses, gateways []netip.Addr, mac [6]byte) error {
	var b linux.NetlinkBatch
	b.LinkUp(peerIndex)
	for i, a := range addresses {
		b.AddAddress(peerIndex, a)
		b.AddNeighbor(peerIndex, gateways[i], mac)
		everywhere, _ := a.Prefix(0)
		b.AddRoute(linux.Route{To: everywhere, Via: gateways[i], Index: peerIndex, Table: mainTable})
	}
	return linux.InNetnsFile(ns, func() error {
		nl, err := linux.OpenNetlink()
		if err != nil {
			return err
		}
		defer nl.Close()
		return nl.Do(&b)
	})
}

// disconnect removes link n while its slot stays.
func (r *router) disconnect(n uint32) error {
	var b linux.NetlinkBatch
	b.DeleteLink(int(n))
	if err := r.nl.Do(&b); err != nil && !errors.Is(err, syscall.ENODEV) {
		return err
	}
	return nil
}

// setPolicy makes rules the policy of a slot's link, which had another one.
func (r *router) setPolicy(x *slot, rules []allow.Opened) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	number, err := r.policies.get(rules)
	if err != nil {
		return err
	}
	if err := r.filter.activate(x.link, number); err != nil {
		return errors.Join(err, r.policies.put(number))
	}
	last := x.active
	x.active = number
	return r.policies.put(last)
}
