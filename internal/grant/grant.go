// Package grant signs and checks what an apiserver tells an edge about a caller. It is the one thing that both sides link.
//
// A grant says: this principal may act in this project, with this role, on this edge, until then. The apiserver signs it
// with Ed25519 after it has authenticated the caller; the edge, which knows the sandbox's project, decides. On the wire a
// grant is the base64url form (no padding) of edge.v1.SignedGrant.
//
// What surprises: both sides cache. A Signer hands out the same string for the same caller until half of its life is over,
// so that a Verifier's hot path is one map look-up by that string; Ed25519 is paid once per caller and half-life. A cached
// grant still expires at its time. Revoking a key therefore works within a grant's life (TTL), not at once.
package grant

import (
	"time"

	"dsec/sandbox"
)

// Metadata and header names that carry a grant.
const (
	MetadataKey = "dsec-grant" // gRPC
	Header      = "Dsec-Grant" // HTTP
)

// Roles.
const (
	RoleUser    = "user"    // acts on the sandboxes of its project
	RoleWatcher = "watcher" // reads an edge's status and lists the sandboxes of all projects; nothing else
)

// DefaultTTL is the life of a grant. It bounds how long a revoked API key may still be used.
const DefaultTTL = 5 * time.Minute

// MaxSize bounds the encoded form; a longer one is refused before it is decoded.
const MaxSize = 4096

// domain separates these signatures from any other use of the key.
const domain = "dsec-grant-v1\x00"

// skew is how far an apiserver's clock may be ahead: a grant that lives longer than MaxTTL plus this is refused, whoever
// signed it.
const skew = time.Minute

// MaxTTL is the longest life an edge accepts.
const MaxTTL = time.Hour

// A Grant is what the apiserver made of a caller's credentials.
type Grant struct {
	Project   string
	Role      string
	Principal string
	Edge      sandbox.EdgeCode
	ExpiresAt time.Time // zero when signing: now plus the signer's TTL
}

func refuse(reason, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.Unauthenticated, reason, format, args...)
}
