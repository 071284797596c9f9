package sandbox

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Protocols of network endpoints.
const (
	TCP = "tcp"
	UDP = "udp"
)

// Bounds of network rules.
const (
	MaxNetworkRules     = 256 // of one sandbox
	MaxNetworkEndpoints = 1024
	MaxServiceEndpoints = 64
	maxNetworkRule      = 300 // bytes
)

// A NetworkEndpoint is a destination of packets: a host and a range of ports.
type NetworkEndpoint struct {
	Host      string // a name, an address, or a prefix in CIDR notation
	FirstPort int    // 0 = all, for prefixes only
	LastPort  int
	Protocol  string // TCP or UDP
}

// A NetworkRule allows or denies endpoints. Denied ones are denied whatever else is allowed.
type NetworkRule struct {
	Rule      string // as its author wrote it
	Allowed   bool
	Endpoints []NetworkEndpoint
}

// A Service is a name for endpoints that the platform's operator has defined.
type Service struct {
	Name        string
	Endpoints   []NetworkEndpoint
	Description string
}

var (
	service  = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)
	dnsLabel = regexp.MustCompile(`^[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9])?$`)
	allDigit = regexp.MustCompile(`^[0-9.]+$`)
)

// undeniable is what no rule opens: the loopback, what is link-local (with it the metadata services of most clouds), other
// metadata services, multicast, reserved, and the forms of IPv6 that hold an address of IPv4, which would be a way around.
// Edges add the addresses of their node, of the platform and of the sandboxes.
var undeniable = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("168.63.129.16/32"),   // Azure
	netip.MustParsePrefix("192.0.0.192/32"),     // Oracle
	netip.MustParsePrefix("100.100.100.200/32"), // Alibaba
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("::/96"), // with the loopback
	netip.MustParsePrefix("::ffff:0:0/96"),
	netip.MustParsePrefix("64:ff9b::/96"),
	netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("2001::/32"), // Teredo
	netip.MustParsePrefix("2002::/16"), // 6to4
	netip.MustParsePrefix("fd00:ec2::/32"),
	netip.MustParsePrefix("fd20:ce::254/128"), // Google
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("fec0::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

// Undeniable are the prefixes that no rule opens on any node.
func Undeniable() []netip.Prefix { return slices.Clone(undeniable) }

func badRule(rule, format string, args ...any) error {
	return Errorf(InvalidArgument, "invalid_network_rule", "network rule %q: "+format, append([]any{clip(rule)}, args...)...)
}

// IsService reports whether a rule names a service.
func IsService(rule string) bool { return service.MatchString(rule) }

// ParseNetworkRule reads a rule that is not the name of a service: "host:port", "prefix" or "prefix:port", each with "/tcp"
// or "/udp" behind if it likes. A port may be a range ("8000-8010"); addresses of IPv6 before a port stand in brackets. A
// prefix without a port means all ports; without a protocol, both.
func ParseNetworkRule(rule string) ([]NetworkEndpoint, error) {
	if len(rule) > maxNetworkRule {
		return nil, badRule(rule, "%d bytes; at most %d", len(rule), maxNetworkRule)
	}
	rest, protocols := rule, []string{}
	for _, p := range []string{TCP, UDP} {
		if cut, ok := strings.CutSuffix(rest, "/"+p); ok && len(protocols) == 0 {
			rest, protocols = cut, []string{p}
		}
	}
	e := NetworkEndpoint{Host: rest}
	if _, ok := e.Prefix(); !ok {
		host, ports, ok := cutPort(rest)
		if !ok {
			return nil, badRule(rule, "it is neither a service's name nor host:port nor a prefix such as 10.0.0.0/8; all may end with /tcp or /udp")
		}
		e.Host = host
		if e.FirstPort, e.LastPort, ok = parsePorts(ports); !ok {
			return nil, badRule(rule, "%q is not a port of 1 to 65535, or a range of them", clip(ports))
		}
		if len(protocols) == 0 {
			protocols = []string{TCP}
		}
	} else if len(protocols) == 0 {
		protocols = []string{TCP, UDP}
	}
	var all []NetworkEndpoint
	for _, p := range protocols {
		e.Protocol = p
		if err := e.validate(rule); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

// cutPort splits host:port. Brackets are needed around what holds colons itself.
func cutPort(s string) (host, port string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return "", "", false
	}
	host, port = s[:i], s[i+1:]
	if inner, ok := strings.CutPrefix(host, "["); ok {
		host, ok = strings.CutSuffix(inner, "]")
		return host, port, ok
	}
	return host, port, !strings.ContainsRune(host, ':')
}

func parsePorts(s string) (first, last int, ok bool) {
	a, b, isRange := strings.Cut(s, "-")
	first, err := strconv.Atoi(a)
	last = first
	if err == nil && isRange {
		last, err = strconv.Atoi(b)
	}
	return first, last, err == nil && first > 0 && last >= first && last < 1<<16
}

// Prefix is the endpoint's host as a prefix, if it is one or an address.
func (e NetworkEndpoint) Prefix() (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(e.Host); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(e.Host)
	return p, err == nil
}

// String is the endpoint as a rule has it.
func (e NetworkEndpoint) String() string {
	s := e.Host
	if strings.ContainsRune(s, ':') && e.FirstPort != 0 {
		s = "[" + s + "]"
	}
	if e.FirstPort != 0 {
		s += ":" + strconv.Itoa(e.FirstPort)
	}
	if e.LastPort > e.FirstPort {
		s += "-" + strconv.Itoa(e.LastPort)
	}
	if e.Protocol != TCP || e.FirstPort == 0 { // a bare prefix means both
		s += "/" + e.Protocol
	}
	return s
}

// validate checks an endpoint of a rule or, for the operator, of a service.
func (e NetworkEndpoint) validate(of string) error {
	prefix, isPrefix := e.Prefix()
	switch {
	case e.Protocol != TCP && e.Protocol != UDP:
		return badRule(of, "protocol %q; there are tcp and udp", clip(e.Protocol))
	case e.FirstPort < 0 || e.LastPort < e.FirstPort || e.LastPort > 65535 || (e.FirstPort == 0 && e.LastPort != 0):
		return badRule(of, "ports %d to %d", e.FirstPort, e.LastPort)
	case !isPrefix && e.FirstPort == 0:
		return badRule(of, "host %q needs a port", clip(e.Host))
	case !isPrefix && !validHost(e.Host):
		return badRule(of, "%q is not a host's name, an address or a prefix", clip(e.Host))
	case isPrefix && prefix != prefix.Masked():
		return badRule(of, "%s has bits behind its length; did you mean %s?", prefix, prefix.Masked())
	}
	for _, u := range undeniable {
		if isPrefix && u.Bits() <= prefix.Bits() && u.Contains(prefix.Addr()) {
			return Errorf(InvalidArgument, "network_rule_forbidden",
				"network rule %q: nothing in %s can be opened to a sandbox: it is the node's own, a cloud's metadata service, multicast or reserved", clip(of), u)
		}
	}
	return nil
}

func validHost(name string) bool {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > 253 || allDigit.MatchString(name) || strings.EqualFold(name, "localhost") {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if !dnsLabel.MatchString(label) {
			return false
		}
	}
	return true
}

// Validate is the one check of a service's definition.
func (s Service) Validate() error {
	switch {
	case !IsService(s.Name):
		return Errorf(InvalidArgument, "invalid_service", "service %q: lower-case letters, digits and -, at most 63, a letter first", clip(s.Name))
	case len(s.Endpoints) == 0 || len(s.Endpoints) > MaxServiceEndpoints:
		return Errorf(InvalidArgument, "invalid_service", "service %q has %d endpoints; it needs 1 to %d", s.Name, len(s.Endpoints), MaxServiceEndpoints)
	case len(s.Description) > 1024:
		return Errorf(InvalidArgument, "invalid_service", "the description of service %q is over 1024 bytes", s.Name)
	}
	for _, e := range s.Endpoints {
		if err := e.validate(s.Name); err != nil {
			return err
		}
	}
	return nil
}

// ValidateNetworkRules checks rules as far as that is possible without looking services up.
func ValidateNetworkRules(rules map[string]bool) error {
	if len(rules) > MaxNetworkRules {
		return Errorf(InvalidArgument, "invalid_network_rule", "%d network rules; at most %d", len(rules), MaxNetworkRules)
	}
	for rule := range rules {
		if !IsService(rule) {
			if _, err := ParseNetworkRule(rule); err != nil {
				return err
			}
		}
	}
	return nil
}

// covers reports whether e holds all of f.
func (e NetworkEndpoint) covers(f NetworkEndpoint) bool {
	if e.Protocol != f.Protocol || (e.FirstPort != 0 && (f.FirstPort < e.FirstPort || f.LastPort > e.LastPort || f.FirstPort == 0)) {
		return false
	}
	p, isPrefix := e.Prefix()
	q, isAlso := f.Prefix()
	if isPrefix && isAlso {
		return p.Bits() <= q.Bits() && p.Contains(q.Addr())
	}
	return isPrefix == isAlso && strings.EqualFold(strings.TrimSuffix(e.Host, "."), strings.TrimSuffix(f.Host, "."))
}

// ValidateNetwork checks rules with their services looked up: a rule that allows what others deny altogether is a
// contradiction, which is nobody's intention.
func ValidateNetwork(rules []NetworkRule) error {
	var denied []NetworkEndpoint
	total := 0
	for _, r := range rules {
		if total += len(r.Endpoints); total > MaxNetworkEndpoints {
			return Errorf(InvalidArgument, "invalid_network_rule", "the network rules stand for more than %d endpoints together", MaxNetworkEndpoints)
		}
		for _, e := range r.Endpoints {
			if err := e.validate(r.Rule); err != nil {
				return err
			}
		}
		if !r.Allowed {
			denied = append(denied, r.Endpoints...)
		}
	}
	for _, r := range rules {
		vain := func(e NetworkEndpoint) bool {
			return slices.ContainsFunc(denied, func(d NetworkEndpoint) bool { return d.covers(e) })
		}
		if r.Allowed && len(r.Endpoints) > 0 && !slices.ContainsFunc(r.Endpoints, func(e NetworkEndpoint) bool { return !vain(e) }) {
			return Errorf(InvalidArgument, "network_rules_conflict", "network rule %q is true, but others that are false deny all that it allows; leave one of them out", clip(r.Rule))
		}
	}
	return nil
}
