// Package allow is the policy of a sandbox's network as plain data, what it means for one destination, and its compiled form for
// the packet filter. Filter and relay judge by it independently of each other.
package allow

import (
	"cmp"
	"net/netip"
	"slices"

	"dsec/sandbox"
)

// Protocols of a Destination.
const (
	TCP uint8 = 6
	UDP uint8 = 17
)

// A Policy is what a sandbox may reach. The zero value is nothing.
type Policy struct {
	Open   []Destination `json:"open,omitempty"`   // may be reached,
	Closed []Destination `json:"closed,omitempty"` // unless one of these says no
	// BytesPerSecond bounds each direction; 0 = unbounded.
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"`
	// Connections bounds those to the outside at once, with flows of datagrams; 0 = DefaultConnections.
	Connections int `json:"connections,omitempty"`
}

// DefaultConnections is how many connections to the outside a sandbox has at most, unless its policy says otherwise.
const DefaultConnections = 1024

// A Destination is addresses and ports. No rule opens what is undeniable: see sandbox.Undeniable.
type Destination struct {
	Prefix    netip.Prefix `json:"prefix"`
	FirstPort uint16       `json:"first"` // 0 to 65535 = all
	LastPort  uint16       `json:"last"`
	Protocol  uint8        `json:"protocol"` // TCP or UDP
}

// Has reports whether d holds one destination.
func (d Destination) Has(to netip.AddrPort, protocol uint8) bool {
	return d.Protocol == protocol && d.FirstPort <= to.Port() && to.Port() <= d.LastPort && d.Prefix.Contains(to.Addr())
}

// Allows reports whether p opens one destination. What nothing opens is not looked at here.
func (p Policy) Allows(to netip.AddrPort, protocol uint8) bool {
	has := func(d Destination) bool { return d.Has(to, protocol) }
	return slices.ContainsFunc(p.Open, has) && !slices.ContainsFunc(p.Closed, has)
}

// Bounds of a compiled policy.
const (
	MaxRanges   = 16 // of ports, at one address
	MaxPrefixes = 16384
)

// A Range is ports of one protocol.
type Range struct {
	First, Last, Protocol uint16
}

// An Opened is what is open at the addresses of a prefix for which there is no longer one.
type Opened struct {
	Prefix netip.Prefix
	Ranges []Range
}

// Compile gives the form in which the longest prefix says all. The result is in order, so that equal policies are equal.
func (p Policy) Compile() ([]Opened, error) {
	prefixes := make(map[netip.Prefix]bool)
	for _, d := range slices.Concat(p.Open, p.Closed) {
		switch {
		case !d.Prefix.IsValid() || d.Prefix != d.Prefix.Masked() || d.Prefix.Addr().Is4In6():
			return nil, sandbox.Errorf(sandbox.Internal, "internal", "network policy: prefix %s", d.Prefix)
		case d.Protocol != TCP && d.Protocol != UDP, d.FirstPort > d.LastPort:
			return nil, sandbox.Errorf(sandbox.Internal, "internal", "network policy: protocol %d, ports %d to %d", d.Protocol, d.FirstPort, d.LastPort)
		}
		prefixes[d.Prefix] = true
	}
	if len(prefixes) > MaxPrefixes {
		return nil, sandbox.Errorf(sandbox.ResourceExhausted, "too_many_network_rules", "the network rules come to %d addresses and prefixes; at most %d", len(prefixes), MaxPrefixes)
	}
	index := indexed(p.Open, p.Closed)
	all := make([]Opened, 0, len(prefixes))
	for prefix := range prefixes {
		o := Opened{Prefix: prefix}
		open, closed := index.over(prefix)
		for _, protocol := range []uint8{TCP, UDP} {
			o.Ranges = append(o.Ranges, subtract(protocol, open, closed)...)
		}
		if len(o.Ranges) > MaxRanges {
			return nil, sandbox.Errorf(sandbox.ResourceExhausted, "too_many_network_rules", "the network rules open %d ranges of ports at %s; at most %d", len(o.Ranges), prefix, MaxRanges)
		}
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b Opened) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return all, nil
}

// An index finds the rules above a prefix without looking at all of them.
type index map[netip.Prefix][2][]Destination

func indexed(open, closed []Destination) index {
	x := make(index)
	for i, list := range [][]Destination{open, closed} {
		for _, d := range list {
			e := x[d.Prefix]
			e[i] = append(e[i], d)
			x[d.Prefix] = e
		}
	}
	return x
}

func (x index) over(p netip.Prefix) (open, closed []Destination) {
	for bits := p.Bits(); bits >= 0; bits-- {
		above, _ := p.Addr().Prefix(bits)
		e := x[above]
		open, closed = append(open, e[0]...), append(closed, e[1]...)
	}
	return open, closed
}

// subtract gives the ports that are open and not closed, as few ranges in order.
func subtract(protocol uint8, open, closed []Destination) []Range {
	// Ports at which something changes. 1<<16 is behind the last.
	edges := []int{}
	of := func(list []Destination) (mine []Destination) {
		for _, d := range list {
			if d.Protocol == protocol {
				mine = append(mine, d)
				edges = append(edges, int(d.FirstPort), int(d.LastPort)+1)
			}
		}
		return mine
	}
	open, closed = of(open), of(closed)
	slices.Sort(edges)
	edges = slices.Compact(edges)
	var all []Range
	for i := 0; i+1 < len(edges); i++ {
		holds := func(d Destination) bool { return int(d.FirstPort) <= edges[i] && edges[i] <= int(d.LastPort) }
		if !slices.ContainsFunc(open, holds) || slices.ContainsFunc(closed, holds) {
			continue
		}
		r := Range{uint16(edges[i]), uint16(edges[i+1] - 1), uint16(protocol)}
		if n := len(all); n > 0 && int(all[n-1].Last)+1 == edges[i] {
			all[n-1].Last = r.Last
		} else {
			all = append(all, r)
		}
	}
	return all
}
