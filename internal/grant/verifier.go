package grant

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

// A Verifier checks grants that are meant for one edge. It is safe for concurrent use.
//
// Verified strings are remembered in two generations of at most maxVerified entries: a look-up tries the young one, then
// the old one, and moves what it finds there; when the young one is full it becomes the old one. That is least recently
// used to within a factor of two, with no list to maintain. Refused strings are not remembered: whoever sends garbage
// pays for a signature check each time, and cannot push out what is in use.
type Verifier struct {
	edge sandbox.EdgeCode
	keys []ed25519.PublicKey
	now  func() time.Time

	mu         sync.RWMutex
	young, old map[string]*Grant
}

const maxVerified = 4096

// NewVerifier makes a verifier of grants for that edge, signed with any of the keys.
func NewVerifier(edge sandbox.EdgeCode, keys ...ed25519.PublicKey) *Verifier {
	return &Verifier{edge: edge, keys: keys, now: time.Now, young: make(map[string]*Grant)}
}

// Verify checks signature, edge and expiry. The grant is shared: do not change it. Errors are Unauthenticated with the
// reason "grant_missing", "grant_invalid", "grant_expired" or "grant_for_other_edge".
func (v *Verifier) Verify(raw string) (*Grant, error) {
	v.mu.RLock()
	g := v.young[raw]
	v.mu.RUnlock()
	if g == nil {
		var err error
		if g, err = v.slow(raw); err != nil {
			return nil, err
		}
	}
	if !v.now().Before(g.ExpiresAt) {
		return nil, refuse("grant_expired", "the grant has expired; ask the control plane for a new one")
	}
	return g, nil
}

func (v *Verifier) slow(raw string) (*Grant, error) {
	v.mu.RLock()
	g := v.old[raw]
	v.mu.RUnlock()
	if g == nil {
		var err error
		if g, err = v.check(raw); err != nil {
			return nil, err
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.young) >= maxVerified {
		v.old, v.young = v.young, make(map[string]*Grant)
	}
	v.young[raw] = g
	return g, nil
}

// check does everything that does not depend on the time of the call, and bounds the expiry.
func (v *Verifier) check(raw string) (*Grant, error) {
	switch {
	case raw == "":
		return nil, refuse("grant_missing", "the request carries no grant")
	case len(raw) > MaxSize:
		return nil, refuse("grant_invalid", "the grant is longer than %d bytes", MaxSize)
	}
	env, err := base64.RawURLEncoding.Strict().DecodeString(raw)
	if err != nil {
		return nil, refuse("grant_invalid", "the grant is not base64url").WithCause(err)
	}
	var s edgev1.SignedGrant
	if err := proto.Unmarshal(env, &s); err != nil {
		return nil, refuse("grant_invalid", "the grant cannot be decoded").WithCause(err)
	}
	// One grant has one form: else whoever holds a genuine one could fill the cache with variants of its envelope.
	if again, err := proto.Marshal(&edgev1.SignedGrant{Grant: s.GetGrant(), Signature: s.GetSignature()}); err != nil || !bytes.Equal(again, env) {
		return nil, refuse("grant_invalid", "the grant is not in its canonical form")
	}
	if !v.signedByUs(s.GetGrant(), s.GetSignature()) {
		return nil, refuse("grant_invalid", "the grant is not signed by a control plane of this node")
	}
	var m edgev1.Grant
	if err := proto.Unmarshal(s.GetGrant(), &m); err != nil {
		return nil, refuse("grant_invalid", "the grant cannot be decoded").WithCause(err)
	}
	return v.accept(&m)
}

func (v *Verifier) accept(m *edgev1.Grant) (*Grant, error) {
	if sandbox.EdgeCode(m.GetEdge()) != v.edge {
		return nil, refuse("grant_for_other_edge", "the grant is for node %q; this is %q", m.GetEdge(), v.edge)
	}
	if m.GetExpiresAt().CheckValid() != nil {
		return nil, refuse("grant_invalid", "the grant has no valid expiry")
	}
	expires := m.GetExpiresAt().AsTime()
	if expires.After(v.now().Add(MaxTTL + skew)) {
		return nil, refuse("grant_invalid", "the grant lives longer than %v", MaxTTL)
	}
	return &Grant{Project: m.GetProject(), Role: m.GetRole(), Principal: m.GetPrincipal(), Edge: v.edge, ExpiresAt: expires}, nil
}

func (v *Verifier) signedByUs(body, sig []byte) bool {
	if len(sig) != ed25519.SignatureSize {
		return false
	}
	msg := append([]byte(domain), body...)
	for _, k := range v.keys {
		if ed25519.Verify(k, msg, sig) {
			return true
		}
	}
	return false
}
