package startspec

import (
	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

// Endpoints converts endpoints from the wire, with their defaults: tcp, and one port.
func Endpoints(list []*dsecv1.NetworkEndpoint) []sandbox.NetworkEndpoint {
	out := make([]sandbox.NetworkEndpoint, len(list))
	for i, p := range list {
		e := sandbox.NetworkEndpoint{Host: p.GetHost(), FirstPort: port(p.GetPort()), LastPort: port(p.GetLastPort()), Protocol: p.GetProtocol()}
		if e.LastPort == 0 {
			e.LastPort = e.FirstPort
		}
		if e.Protocol == "" {
			e.Protocol = sandbox.TCP
		}
		out[i] = e
	}
	return out
}

// port keeps what is too large too large.
func port(n uint32) int { return int(min(n, 1<<20)) }

// WireEndpoints converts endpoints to the wire.
func WireEndpoints(list []sandbox.NetworkEndpoint) []*dsecv1.NetworkEndpoint {
	out := make([]*dsecv1.NetworkEndpoint, len(list))
	for i, e := range list {
		out[i] = &dsecv1.NetworkEndpoint{Host: e.Host, Port: uint32(e.FirstPort), LastPort: uint32(e.LastPort), Protocol: e.Protocol}
	}
	return out
}

// NetworkRules converts rules with their services looked up.
func NetworkRules(list []*edgev1.NetworkRule) []sandbox.NetworkRule {
	out := make([]sandbox.NetworkRule, len(list))
	for i, r := range list {
		out[i] = sandbox.NetworkRule{Rule: r.GetRule(), Allowed: r.GetAllowed(), Endpoints: Endpoints(r.GetEndpoints())}
	}
	return out
}

// WireNetworkRules converts rules to the wire.
func WireNetworkRules(list []sandbox.NetworkRule) []*edgev1.NetworkRule {
	out := make([]*edgev1.NetworkRule, len(list))
	for i, r := range list {
		out[i] = &edgev1.NetworkRule{Rule: r.Rule, Allowed: r.Allowed, Endpoints: WireEndpoints(r.Endpoints)}
	}
	return out
}
