package grant

import (
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "dsec/api/edge/v1"
)

// A Signer signs grants and remembers them. It is safe for concurrent use.
type Signer struct {
	key ed25519.PrivateKey
	ttl time.Duration
	now func() time.Time

	mu    sync.Mutex
	cache map[Grant]signed // by the grant without its expiry
}

type signed struct {
	raw   string
	until time.Time // half of its life
}

// maxSigned bounds a Signer's cache; what is stale is dropped when it is full.
const maxSigned = 16384

// NewSigner makes a signer whose grants live for DefaultTTL.
func NewSigner(key ed25519.PrivateKey) *Signer {
	return &Signer{key: key, ttl: DefaultTTL, now: time.Now, cache: make(map[Grant]signed)}
}

// Public is the key that edges verify with.
func (s *Signer) Public() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }

// Sign gives the wire form of g. With a zero ExpiresAt the grant lives for the signer's TTL and comes from the cache
// while at least half of that is left; with an expiry it is signed anew.
func (s *Signer) Sign(g Grant) (string, error) {
	if !g.ExpiresAt.IsZero() {
		return s.sign(g)
	}
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.cache[g]; ok && now.Before(c.until) {
		return c.raw, nil
	}
	if len(s.cache) >= maxSigned {
		s.dropStaleLocked(now)
	}
	key := g
	g.ExpiresAt = now.Add(s.ttl)
	raw, err := s.sign(g)
	if err != nil {
		return "", err
	}
	s.cache[key] = signed{raw: raw, until: now.Add(s.ttl / 2)}
	return raw, nil
}

func (s *Signer) dropStaleLocked(now time.Time) {
	for k, c := range s.cache {
		if !now.Before(c.until) {
			delete(s.cache, k)
		}
	}
	if len(s.cache) >= maxSigned { // all fresh: a signature is cheaper than unbounded memory
		clear(s.cache)
	}
}

func (s *Signer) sign(g Grant) (string, error) {
	body, err := proto.Marshal(&edgev1.Grant{
		Project: g.Project, Role: g.Role, Principal: g.Principal, Edge: string(g.Edge), ExpiresAt: timestamppb.New(g.ExpiresAt),
	})
	if err != nil {
		return "", fmt.Errorf("encoding grant: %w", err)
	}
	sig := ed25519.Sign(s.key, append([]byte(domain), body...))
	env, err := proto.Marshal(&edgev1.SignedGrant{Grant: body, Signature: sig})
	if err != nil {
		return "", fmt.Errorf("encoding signed grant: %w", err)
	}
	raw := base64.RawURLEncoding.EncodeToString(env)
	if len(raw) > MaxSize {
		return "", fmt.Errorf("grant of %d bytes; at most %d", len(raw), MaxSize)
	}
	return raw, nil
}
