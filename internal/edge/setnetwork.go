package edge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/failpoint"
	"dsec/internal/edge/journal"
	"dsec/internal/edge/network"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

const (
	namesWithin  = 8 * time.Second  // of a create or SetNetwork, for all its names
	firstWithin  = 3 * time.Second  // of these, for names that only services have
	policyWithin = 10 * time.Second // for a policy to be applied, whatever became of who asked for it
)

// Failpoints of a policy that is replaced, behind those of the journal.
var (
	pointPolicy = failpoint.New("network.policy")
	pointHosts  = failpoint.New("network.hosts")
)

// netState is an instance's network rules and what was made of them.
type netState struct {
	changing sync.Mutex  // held while they are replaced or applied; above instance.mu
	missed   atomic.Bool // names changed while it was held by another

	// The rest is guarded by instance.mu.
	network  journal.Network
	applied  reach  // what the host was told last
	acquired bool   // there is a slot
	written  string // what the sandbox's /etc/hosts has
}

// rulesOf checks what an apiserver sends beside the rules as somebody wrote them.
func rulesOf(asked map[string]bool, sent []*edgev1.NetworkRule) (journal.Network, error) {
	bad := func(format string, args ...any) (journal.Network, error) {
		return journal.Network{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_network_rule", format, args...)
	}
	if err := sandbox.ValidateNetworkRules(asked); err != nil {
		return journal.Network{}, err
	}
	if len(sent) > sandbox.MaxNetworkRules {
		return bad("%d network rules; at most %d", len(sent), sandbox.MaxNetworkRules)
	}
	rules := startspec.NetworkRules(sent)
	seen := make(map[string]bool, len(rules))
	for _, r := range rules {
		allowed, ok := asked[r.Rule]
		if !ok || seen[r.Rule] || allowed != r.Allowed {
			return bad("network rule %q is not as it was asked for", clip(r.Rule))
		}
		if len(r.Endpoints) > sandbox.MaxServiceEndpoints {
			return bad("network rule %q stands for %d endpoints; at most %d", clip(r.Rule), len(r.Endpoints), sandbox.MaxServiceEndpoints)
		}
		seen[r.Rule] = true
	}
	for rule, allowed := range asked {
		if allowed && !seen[rule] {
			return bad("network rule %q came without what it stands for", clip(rule))
		}
	}
	return journal.Network{Asked: asked, Rules: rules}, sandbox.ValidateNetwork(rules)
}

// denied says why no rule opens an address, or "".
func (e *Edge) denied() func(netip.Addr) string {
	own := sync.OnceValue(e.o.NodeAddresses) // most sandboxes have no rules for which it counts
	return func(a netip.Addr) string {
		for _, u := range sandbox.Undeniable() {
			if u.Contains(a) {
				return "which no rule opens: " + u.String() + " is the node's own, a cloud's metadata service, multicast or reserved"
			}
		}
		if slices.Contains(own(), a) {
			return "an address of the node itself, which no rule opens"
		}
		return ""
	}
}

// nodeAddresses are those of the machine's interfaces. What cannot be listed is not known; the network's own checks remain.
func nodeAddresses() []netip.Addr {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []netip.Addr
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, addr.Unmap())
			}
		}
	}
	return out
}

func (e *Edge) reach(in *instance, n journal.Network) reach {
	return reachOf(n.Rules, in.intent.Spec.Limits, e.names.Get, e.denied())
}

// awaitNames looks up what rules name, and refuses what cannot be found. The names are used by in from here on.
func (e *Edge) awaitNames(ctx context.Context, in *instance, n journal.Network, also []string) error {
	names := namesOf(n.Rules)
	if err := e.names.Use(in.id, append(slices.Clone(names), also...)); err != nil || len(names) == 0 {
		return err
	}
	// A service that cannot be found keeps nothing from starting, so that where name servers are out of reach nobody waits for
	// them again and again.
	demanded := hostNames(n.Rules, func(r sandbox.NetworkRule) bool { return !sandbox.IsService(r.Rule) })
	names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(demanded, name) })
	for _, w := range []struct {
		within time.Duration
		names  []string
		await  func(context.Context, []string) error
	}{{namesWithin, demanded, e.names.Await}, {firstWithin, names, e.names.AwaitFirst}} {
		wait, cancel := context.WithTimeout(ctx, w.within)
		err := w.await(wait, w.names)
		cancel()
		if err != nil && (ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded)) {
			return err
		}
	}
	return e.reach(in, n).unresolved()
}

// useNames makes the names that in uses those of the rules that are in force.
func (e *Edge) useNames(in *instance) {
	if err := e.names.Use(in.id, namesOf(in.snapshot().network.Rules)); err != nil {
		e.log.Warn("names of network rules are not looked up any more", "sandbox_id", in.id, "error", err)
	}
}

// replaceNetwork gives a live sandbox other rules. They are in the journal before anything of them is in force: an edge that
// dies on the way leaves them to the next one. A caller that goes away changes nothing any more once the names are found.
func (e *Edge) replaceNetwork(ctx context.Context, in *instance, n journal.Network) error {
	if err := checkNode(n.Rules, e.denied()); err != nil {
		return err
	}
	in.net.changing.Lock()
	defer e.endChange(in)
	if _, err := in.live(); err != nil {
		return err
	}
	defer e.useNames(in)
	old := in.snapshot().network
	if err := e.awaitNames(ctx, in, n, namesOf(old.Rules)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := detached(ctx, policyWithin)
	defer cancel()
	if err := e.record(ctx, journal.Record{Op: journal.OpNetwork, ID: in.id, Network: &n}); err != nil {
		return fmt.Errorf("recording network rules: %w", err)
	}
	if err := e.applyLocked(ctx, in, n); err != nil {
		return e.undoNetwork(ctx, in, old, err)
	}
	e.watchers.changed(in)
	return nil
}

// undoNetwork goes back to rules that were in force, after others could not be applied.
func (e *Edge) undoNetwork(ctx context.Context, in *instance, old journal.Network, cause error) error {
	if _, err := in.live(); err != nil {
		return err // it ended meanwhile
	}
	if err := e.record(ctx, journal.Record{Op: journal.OpNetwork, ID: in.id, Network: &old}); err != nil {
		e.log.Error("network rules that are in force are not recorded", "sandbox_id", in.id, "error", err)
	}
	if err := e.applyLocked(ctx, in, old); err != nil {
		e.log.Error("network rules cannot be restored", "sandbox_id", in.id, "error", err)
	}
	return fmt.Errorf("applying network rules: %w", cause)
}

// applyLocked puts rules in force as they mean now. netState.changing is held.
func (e *Edge) applyLocked(ctx context.Context, in *instance, n journal.Network) error {
	r := e.reach(in, n)
	if err := pointPolicy.Around(ctx, func() error { return e.o.Networks.SetPolicy(ctx, in.id, r.policy) }); err != nil {
		return err
	}
	slot, err := e.o.Networks.Acquire(ctx, in.id, r.policy) // a slot may have got its link just now
	if err != nil {
		return err
	}
	in.mu.Lock()
	in.net.network, in.net.applied, in.made.network = n, r, slot
	in.mu.Unlock()
	e.writeHosts(ctx, in, r.hosts)
	return nil
}

// writeHosts brings a sandbox's /etc/hosts up to date. A sandbox whose disk is full, or that keeps the file to itself, loses
// names and nothing else.
func (e *Edge) writeHosts(ctx context.Context, in *instance, lines string) {
	w, ok := in.driver.(driver.HostsWriter)
	s := in.snapshot()
	if !ok || s.made.handle == nil || s.hosts == lines {
		return
	}
	err := pointHosts.Around(ctx, func() error { return w.WriteHosts(ctx, *s.made.handle, s.made.rootfs, lines) })
	if err != nil {
		e.log.Warn("names cannot be written into a sandbox's /etc/hosts", "sandbox_id", in.id, "error", err)
		return
	}
	in.mu.Lock()
	in.net.written = lines
	in.mu.Unlock()
}

// endChange lets the next change of rules begin, and makes up for names that changed meanwhile.
func (e *Edge) endChange(in *instance) {
	in.net.changing.Unlock()
	if in.net.missed.Load() {
		e.refreshNetwork(in)
	}
}

// refreshNetwork applies what names stand for by now. It belongs to no request, and waits for none: where rules are being replaced,
// which may take as long as names do, who replaces them does this afterwards.
func (e *Edge) refreshNetwork(in *instance) {
	in.net.missed.Store(true)
	if !in.net.changing.TryLock() {
		return
	}
	defer e.endChange(in)
	in.net.missed.Store(false)
	in.mu.Lock()
	n, applied, live := in.net.network, in.net.applied, in.net.acquired && in.life.state == sandbox.Ready
	stale := in.net.written != applied.hosts
	in.mu.Unlock()
	if !live || e.reach(in, n).same(applied) && !stale {
		return
	}
	ctx, cancel := detached(e.ctx, policyWithin)
	defer cancel()
	if err := e.applyLocked(ctx, in, n); err != nil {
		if _, ended := in.live(); ended == nil {
			e.log.Warn("what names stand for cannot be applied; it is tried again when they change", "sandbox_id", in.id, "error", err)
		}
	}
}

// namesChanged is called by the resolver.
func (e *Edge) namesChanged(holders []sandbox.ID) {
	for _, id := range holders {
		e.index.mu.RLock()
		in := e.index.byID[id]
		e.index.mu.RUnlock()
		if in != nil {
			e.refreshNetwork(in)
		}
	}
}

// restoreNetwork puts the rules of a sandbox that an earlier edge left in force again: that edge may have died between the
// record of new ones and their application.
func (e *Edge) restoreNetwork(ctx context.Context, in *instance) {
	n := in.snapshot().network
	e.useNames(in)
	in.net.changing.Lock()
	defer e.endChange(in)
	in.mu.Lock()
	in.net.acquired = true
	in.net.written = "?" // nobody knows
	in.mu.Unlock()
	if err := e.applyLocked(ctx, in, n); err != nil {
		e.log.Error("network rules cannot be applied after a restart; what was in force stays", "sandbox_id", in.id, "error", err)
	}
}

func (s *server) SetNetwork(ctx context.Context, req *edgev1.SetNetworkRequest) (*dsecv1.SetNetworkResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err == nil {
		defer s.e.begin(in)()
		var n journal.Network
		if n, err = rulesOf(req.GetNetworkRules(), req.GetNetwork()); err == nil {
			err = s.e.replaceNetwork(ctx, in, n)
		}
	}
	if err != nil {
		return nil, s.wire(ctx, "SetNetwork", err)
	}
	return &dsecv1.SetNetworkResponse{Sandbox: s.e.viewOf(in)}, nil
}

// GetNetwork is no activity of the sandbox.
func (s *server) GetNetwork(ctx context.Context, req *dsecv1.GetNetworkRequest) (*dsecv1.GetNetworkResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err == nil {
		_, err = in.live()
	}
	var n *dsecv1.NetworkStatus
	if err == nil {
		n, err = s.e.networkStatus(in)
	}
	if err != nil {
		return nil, s.wire(ctx, "GetNetwork", err)
	}
	return &dsecv1.GetNetworkResponse{Network: n}, nil
}

// refused is what the network refused to a sandbox. One without a link sends nothing that could be.
func (e *Edge) refused(in *instance, m made) (network.Refusals, error) {
	if len(m.network.Addresses) == 0 {
		return network.Refusals{}, nil
	}
	return e.o.Networks.Refused(in.id)
}

func (e *Edge) networkStatus(in *instance) (*dsecv1.NetworkStatus, error) {
	s := in.snapshot()
	refused, err := e.refused(in, s.made)
	if err != nil {
		return nil, err
	}
	n := &dsecv1.NetworkStatus{RefusedPackets: refused.Packets, Connections: int64(refused.Connections), Addresses: texts(s.made.network.Addresses)}
	for _, r := range e.reach(in, s.network).rules {
		n.Rules = append(n.Rules, &dsecv1.NetworkRuleStatus{
			Rule: r.Rule, Allowed: r.Allowed, Endpoints: startspec.WireEndpoints(r.Endpoints), Addresses: texts(r.addresses), Error: r.trouble,
		})
	}
	for _, sample := range refused.Samples {
		n.Refused = append(n.Refused, refusalOf(sample))
	}
	return n, nil
}

func texts(addresses []netip.Addr) []string {
	out := make([]string, len(addresses))
	for i, a := range addresses {
		out[i] = a.String()
	}
	return out
}

var protocolNames = map[uint8]string{network.TCP: "tcp", network.UDP: "udp", 1: "icmp", 58: "icmpv6"}

func refusalOf(r network.Refusal) *dsecv1.RefusedTraffic {
	name, ok := protocolNames[r.Protocol]
	if !ok && r.Protocol != 0 {
		name = fmt.Sprint(r.Protocol)
	}
	t := &dsecv1.RefusedTraffic{Port: uint32(r.Destination.Port()), Protocol: name, Reason: r.Reason, Packets: r.Count}
	if r.Destination.Addr().IsValid() {
		t.Destination = r.Destination.Addr().String()
	}
	if !r.Last.IsZero() {
		t.LastAt = timestamppb.New(r.Last)
	}
	return t
}
