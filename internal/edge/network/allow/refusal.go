package allow

import (
	"net/netip"
	"time"
)

// Reasons of refusals.
const (
	BadFrame           = "bad_frame"            // neither IPv4 nor IPv6, a VLAN, or another's source address of any layer
	BadPacket          = "bad_packet"           // fragments, IPv4 options, IPv6 extension headers
	BadProtocol        = "bad_protocol"         // neither TCP nor UDP
	Forbidden          = "forbidden"            // a destination that no rule opens
	NotAllowed         = "not_allowed"          // a destination that the policy does not open
	TooManyConnections = "too_many_connections" // the policy or the node allows no more at once
	Unreachable        = "unreachable"          // the node could not connect to an allowed destination
)

// MaxSamples is how many destinations are remembered.
const MaxSamples = 64

// Refusals are what was refused to a sandbox, and how much was not.
type Refusals struct {
	Packets int64            `json:"packets"` // and connections, in all
	Reasons map[string]int64 `json:"reasons"` // the same by reason
	Samples []Refusal        `json:"samples"` // the last destinations, the latest first
	// Connections is how many were let pass and stand now, with flows of datagrams.
	Connections int `json:"connections"`
}

// A Refusal is one destination of refused packets or connections.
type Refusal struct {
	Destination netip.AddrPort `json:"destination"` // the port is 0 where there is none
	Protocol    uint8          `json:"protocol"`
	Reason      string         `json:"reason"`
	Count       int64          `json:"count"`
	Last        time.Time      `json:"last"`
}
