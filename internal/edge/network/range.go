package network

import (
	"encoding/binary"
	"net"
	"net/netip"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// An addressRange is where sandboxes have their addresses: of IPv4 and of IPv6.
type addressRange struct{ four, six netip.Prefix }

// DefaultRange of IPv4 is reserved for benchmarks of networks, and seen in none.
const (
	DefaultRange = "198.18.0.0/15"
	range6       = "fd64:7365:6300::/96"
)

// parseRange checks an operator's choice.
func parseRange(s string) (addressRange, error) {
	if s == "" {
		s = DefaultRange
	}
	r := addressRange{six: netip.MustParsePrefix(range6)}
	p, err := netip.ParsePrefix(s)
	if err != nil || !p.Addr().Is4() || p != p.Masked() || p.Bits() > 18 || p.Bits() < 8 {
		return r, sandbox.Errorf(sandbox.InvalidArgument, "invalid_network_range", "network range %.40q: it must be a prefix of IPv4 of length 8 to 18, such as %s", s, DefaultRange)
	}
	r.four = p
	return r, nil
}

func (r addressRange) base4() uint32 {
	a := r.four.Addr().As4()
	return binary.BigEndian.Uint32(a[:])
}

func (r addressRange) prefixes() []netip.Prefix {
	wide, _ := r.six.Addr().Prefix(48)
	return []netip.Prefix{r.four, wide}
}

// addresses of link n. The gateway is number 1.
func (r addressRange) addresses(n uint32) []netip.Addr {
	var four [4]byte
	binary.BigEndian.PutUint32(four[:], r.base4()+n)
	all := []netip.Addr{netip.AddrFrom4(four)}
	if linux.HasIPv6() {
		six := r.six.Addr().As16()
		binary.BigEndian.PutUint32(six[12:], n)
		all = append(all, netip.AddrFrom16(six))
	}
	return all
}

// mac of both ends of link n.
func (r addressRange) mac(n uint32) (m [6]byte) {
	m[0], m[1] = 0x02, 0x64
	binary.BigEndian.PutUint32(m[2:], r.base4()+n)
	return m
}

// overlaps finds an address or route of the host in the range, where sandboxes could not reach what is there.
func (r addressRange) overlaps() error {
	routes, err := linux.Routes()
	if err != nil {
		return err
	}
	own, err := hostAddresses()
	if err != nil {
		return err
	}
	for _, a := range own {
		routes = append(routes, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, have := range routes {
		for _, p := range r.prefixes() {
			// What is wider than a network of a site, like a default route in two halves, says nothing of the range.
			if have.Overlaps(p) && (have.Bits() >= 8 || have.Addr().Is6() && have.Bits() >= 16) {
				return sandbox.Errorf(sandbox.FailedPrecondition, "network_range_overlaps",
					"the sandboxes' network range %s overlaps this host's %s; choose another with --network-range", p, have)
			}
		}
	}
	return nil
}

// hostAddresses are those of this host's interfaces.
func hostAddresses() (all []netip.Addr, err error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				all = append(all, addr.Unmap())
			}
		}
	}
	return all, nil
}
