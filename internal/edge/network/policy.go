package network

import (
	"net/netip"
	"time"
)

// Protocols of a Destination.
const (
	TCP uint8 = 6
	UDP uint8 = 17
)

// A Policy is what a sandbox may reach. The zero value is nothing.
type Policy struct {
	Open   []Destination // may be reached,
	Closed []Destination // unless one of these says no
	// BytesPerSecond bounds each direction; 0 = unbounded.
	BytesPerSecond int64
	// Connections bounds those to the outside at once, with flows of datagrams; 0 = DefaultConnections.
	Connections int
}

// DefaultConnections is how many connections to the outside a sandbox has at most, unless its policy says otherwise.
const DefaultConnections = 1024

// A Destination is addresses and ports. No rule opens what is undeniable: see sandbox.Undeniable.
type Destination struct {
	Prefix    netip.Prefix
	FirstPort uint16 // 0 to 65535 = all
	LastPort  uint16
	Protocol  uint8 // TCP or UDP
}

// Reasons of refusals.
const (
	BadFrame           = "bad_frame"            // neither IPv4 nor IPv6, a VLAN, or another's source address of any layer
	BadPacket          = "bad_packet"           // fragments, IPv4 options, IPv6 extension headers
	BadProtocol        = "bad_protocol"         // neither TCP nor UDP
	Forbidden          = "forbidden"            // a destination that no rule opens
	NotAllowed         = "not_allowed"          // a destination that the policy does not open
	TooManyConnections = "too_many_connections" // the policy allows no more at once
	Unreachable        = "unreachable"          // the node could not connect to an allowed destination
)

// Refusals are what was refused to a sandbox.
type Refusals struct {
	Packets int64            // and connections, in all
	Reasons map[string]int64 // the same by reason
	Samples []Refusal        // the last 64 destinations, the latest first
}

// A Refusal is one destination of refused packets.
type Refusal struct {
	Destination netip.AddrPort // the port is 0 where there is none
	Protocol    uint8
	Reason      string
	Count       int64
	Last        time.Time
}
