package network

import "dsec/internal/edge/network/allow"

// A Policy is what a sandbox may reach. The zero value is nothing.
type (
	Policy      = allow.Policy
	Destination = allow.Destination
	Refusals    = allow.Refusals
	Refusal     = allow.Refusal
)

// Protocols of a Destination.
const (
	TCP = allow.TCP
	UDP = allow.UDP
)

// Reasons of refusals.
const (
	BadFrame           = allow.BadFrame
	BadPacket          = allow.BadPacket
	BadProtocol        = allow.BadProtocol
	Forbidden          = allow.Forbidden
	NotAllowed         = allow.NotAllowed
	TooManyConnections = allow.TooManyConnections
	Unreachable        = allow.Unreachable
)
