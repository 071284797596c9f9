package edge

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"dsec/internal/edge/network"
	"dsec/internal/edge/resolve"
	"dsec/sandbox"
)

// What network rules come to: pure, given what names stand for.

// A reach is what a sandbox's rules mean now.
type reach struct {
	policy network.Policy
	hosts  string // lines of its /etc/hosts
	rules  []ruleReach
}

// A ruleReach is what one rule means now.
type ruleReach struct {
	sandbox.NetworkRule
	addresses []netip.Addr // of its names, sorted
	trouble   string
	unknown   bool // it has a name of which nobody knows whether it exists
}

var protocolNumbers = map[string]uint8{sandbox.TCP: network.TCP, sandbox.UDP: network.UDP}

func destination(p netip.Prefix, e sandbox.NetworkEndpoint) network.Destination {
	d := network.Destination{Prefix: p, FirstPort: uint16(e.FirstPort), LastPort: uint16(e.LastPort), Protocol: protocolNumbers[e.Protocol]}
	if e.FirstPort == 0 {
		d.LastPort = 65535
	}
	return d
}

// reachOf compiles rules. denied says why no rule opens an address; "" if one may.
func reachOf(rules []sandbox.NetworkRule, l sandbox.Limits, names func(string) resolve.Answer, denied func(netip.Addr) string) reach {
	r := reach{policy: network.Policy{BytesPerSecond: l.NetworkRate, Connections: int(l.NetworkConnections)}}
	hosts := make(map[string][]netip.Addr)
	var opened []ruleDestination
	var closed []ruleDestination
	for i, rule := range rules {
		out := ruleReach{NetworkRule: rule}
		var troubles []string
		add := func(d network.Destination) {
			r.add(rule.Allowed, d)
			if rule.Allowed {
				opened = append(opened, ruleDestination{i, d})
			} else {
				closed = append(closed, ruleDestination{i, d})
			}
		}
		for _, e := range rule.Endpoints {
			if p, ok := e.Prefix(); ok {
				add(destination(p, e))
				continue
			}
			name := resolve.Canonical(e.Host)
			usable, trouble := usableOf(name, names(name), rule.Allowed, denied)
			out.unknown = out.unknown || usable.unknown
			for _, a := range usable.all() {
				add(destination(netip.PrefixFrom(a, a.BitLen()), e))
			}
			out.addresses = append(out.addresses, usable.all()...)
			if rule.Allowed {
				hosts[name] = usable.first()
			}
			if trouble != "" && !slices.Contains(troubles, trouble) {
				troubles = append(troubles, trouble)
			}
		}
		slices.SortFunc(out.addresses, netip.Addr.Compare)
		out.addresses = slices.Compact(out.addresses)
		out.trouble = strings.Join(troubles, "; ")
		r.rules = append(r.rules, out)
	}
	r.hosts = hostsLines(hosts)
	r.tellShadowed(opened, closed)
	return r
}

// A ruleDestination is a destination of the rule with this index.
type ruleDestination struct {
	rule int
	network.Destination
}

func (d ruleDestination) overlaps(o ruleDestination) bool {
	return d.Protocol == o.Protocol && d.FirstPort <= o.LastPort && o.FirstPort <= d.LastPort && d.Prefix.Overlaps(o.Prefix)
}

// tellShadowed says what a rule opens and another one closes. Two services at one address and port cannot be told apart by
// their packets: the denial holds, and whoever misses the other one must find out why.
func (r *reach) tellShadowed(opened, closed []ruleDestination) {
	at := make(map[netip.Prefix][]ruleDestination) // addresses, of which there may be many
	var wide []ruleDestination
	for _, c := range closed {
		if c.Prefix.IsSingleIP() {
			at[c.Prefix] = append(at[c.Prefix], c)
		} else {
			wide = append(wide, c)
		}
	}
	for _, o := range opened {
		for _, c := range slices.Concat(at[o.Prefix], wide) {
			rule := &r.rules[o.rule]
			if !o.Prefix.IsSingleIP() || !o.overlaps(c) || strings.Count(rule.trouble, "; ") >= maxTroubles {
				continue
			}
			trouble := fmt.Sprintf("%s is closed, because the rule %q denies it", o.Prefix.Addr(), clip(r.rules[c.rule].Rule))
			if !strings.Contains(rule.trouble, trouble) {
				rule.trouble = strings.TrimPrefix(rule.trouble+"; "+trouble, "; ")
			}
		}
	}
}

func (r *reach) add(open bool, d network.Destination) {
	list := &r.policy.Closed
	if open {
		list = &r.policy.Open
	}
	if !slices.Contains(*list, d) {
		*list = append(*list, d)
	}
}

// usable is the addresses of a name that rules can open.
type usable struct {
	current, kept []netip.Addr
	unknown       bool
}

func (u usable) all() []netip.Addr { return append(slices.Clone(u.current), u.kept...) }

// first is those to connect to: what lately was one is better than none.
func (u usable) first() []netip.Addr {
	if len(u.current) > 0 {
		return u.current
	}
	return u.kept
}

func usableOf(name string, a resolve.Answer, allowed bool, denied func(netip.Addr) string) (u usable, trouble string) {
	var refused []string
	sift := func(from []netip.Addr) (to []netip.Addr) {
		for _, addr := range from {
			if why := denied(addr); allowed && why != "" {
				refused = append(refused, fmt.Sprintf("%s stands for %s, %s", name, addr, why))
				continue
			}
			to = append(to, addr)
		}
		return to
	}
	u.current, u.kept = sift(a.Current), sift(a.Kept)
	var e *net.DNSError
	switch {
	case a.Err != nil:
		refused = append(refused, name+": "+lookUpTrouble(a.Err))
		u.unknown = !errors.As(a.Err, &e) || !e.IsNotFound
	case !a.Known && allowed && len(a.Current) == 0:
		refused = append(refused, name+" has not been found yet")
		u.unknown = true
	}
	return u, strings.Join(refused[:min(len(refused), maxTroubles)], "; ")
}

// maxTroubles is about how many a rule tells.
const maxTroubles = 4

// lookUpTrouble is what a user may read of a failed look-up.
func lookUpTrouble(err error) string {
	var e *net.DNSError
	switch {
	case !errors.As(err, &e):
		return "the node cannot look it up"
	case e.IsNotFound:
		return "there is no such host"
	case e.IsTimeout:
		return "the node's name servers do not answer"
	}
	return "the node's name servers fail"
}

// maxHostsAddresses is how many addresses of a name are in /etc/hosts. Programs try one after the other.
const maxHostsAddresses = 16

func hostsLines(hosts map[string][]netip.Addr) string {
	names := make([]string, 0, len(hosts))
	for name := range hosts {
		names = append(names, name)
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		for _, a := range hosts[name][:min(len(hosts[name]), maxHostsAddresses)] {
			fmt.Fprintf(&b, "%s\t%s\n", a, name)
		}
	}
	return b.String()
}

// namesOf are the names that rules need looked up. Where nothing is allowed, nothing is.
func namesOf(rules []sandbox.NetworkRule) []string {
	if !slices.ContainsFunc(rules, func(r sandbox.NetworkRule) bool { return r.Allowed && len(r.Endpoints) > 0 }) {
		return nil
	}
	return hostNames(rules, func(sandbox.NetworkRule) bool { return true })
}

// hostNames are the names in those rules that want has.
func hostNames(rules []sandbox.NetworkRule, want func(sandbox.NetworkRule) bool) (names []string) {
	for _, r := range rules {
		if !want(r) {
			continue
		}
		for _, e := range r.Endpoints {
			if _, isPrefix := e.Prefix(); !isPrefix {
				names = append(names, resolve.Canonical(e.Host))
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// unresolved refuses rules that name a host which nobody can find. A service is its operator's: a registry that is away must
// not keep sandboxes from starting, and is opened once it is found.
func (r reach) unresolved() error {
	for _, rule := range r.rules {
		if len(rule.addresses) > 0 || rule.trouble == "" || sandbox.IsService(rule.Rule) || !rule.Allowed && !rule.unknown {
			continue
		}
		return sandbox.Errorf(sandbox.FailedPrecondition, "network_name_unresolved", "network rule %q cannot be kept: %s", clip(rule.Rule), rule.trouble).
			WithFact("rule", clip(rule.Rule))
	}
	return nil
}

// same reports whether two reaches demand the same of the host.
func (r reach) same(o reach) bool {
	return r.hosts == o.hosts && slices.Equal(r.policy.Open, o.policy.Open) && slices.Equal(r.policy.Closed, o.policy.Closed) &&
		r.policy.BytesPerSecond == o.policy.BytesPerSecond && r.policy.Connections == o.policy.Connections
}

// checkNode refuses rules for an address of the node itself: nothing on it is for sandboxes.
func checkNode(rules []sandbox.NetworkRule, denied func(netip.Addr) string) error {
	for _, r := range rules {
		for _, e := range r.Endpoints {
			p, ok := e.Prefix()
			if !ok || !r.Allowed || !p.IsSingleIP() {
				continue
			}
			if why := denied(p.Addr()); why != "" {
				return sandbox.Errorf(sandbox.InvalidArgument, "network_rule_forbidden", "network rule %q: %s is %s", clip(r.Rule), p.Addr(), why)
			}
		}
	}
	return nil
}
