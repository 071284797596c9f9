// Package iam turns an API key into a principal, and a principal into a signed grant that an edge accepts.
//
// What surprises:
//
//   - Keys are looked up by hash, and answers are kept for at most CacheTTL. A revocation made through another apiserver
//     therefore works after at most that time; one made here works at once. Grants already signed live on: see package grant.
//   - An unknown, an expired and a revoked key get the same answer.
//   - A Key never prints itself.
package iam

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"dsec/internal/control/store"
	"dsec/internal/grant"
	"dsec/sandbox"
)

const (
	// CacheTTL is how long the answer for a key is kept, and so how long a revocation may take.
	CacheTTL = 5 * time.Second
	maxCache = 4096
	// RootProject is the one root project there is for now.
	RootProject = "default"
	// BootstrapPrincipal owns the first key.
	BootstrapPrincipal = "admin"

	signingKey   = "grant_signing_key"
	maxPrincipal = 128
)

// An Identity is who a key belongs to.
type Identity struct {
	KeyID     string
	Principal string
	Project   string
	Role      Role
}

// IAM authenticates callers. It is safe for concurrent use.
type IAM struct {
	store   store.Store
	signer  *grant.Signer
	portKey []byte
	now     func() time.Time

	mu    sync.RWMutex
	cache map[store.Hash]cached
	byID  map[string]cached
}

type cached struct {
	key   store.Key
	until time.Time
}

// New reads the signing key from st, making it at the first start, and makes sure that the root project exists. now is the
// clock.
func New(ctx context.Context, st store.Store, now func() time.Time) (*IAM, error) {
	seed, err := st.Secret(ctx, signingKey, func() ([]byte, error) {
		b := make([]byte, ed25519.SeedSize)
		_, err := rand.Read(b)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("read signing key: %w", err)
	}
	if len(seed) != ed25519.SeedSize {
		return nil, sandbox.Errorf(sandbox.DataLoss, "signing_key_damaged", "the stored signing key has %d bytes instead of %d; restore the database from a copy", len(seed), ed25519.SeedSize)
	}
	ports, err := portKey(ctx, st)
	if err != nil {
		return nil, err
	}
	err = st.AddProject(ctx, store.Project{Path: RootProject, CreatedAt: now()})
	if err != nil && sandbox.ClassOf(err) != sandbox.AlreadyExists {
		return nil, fmt.Errorf("make root project: %w", err)
	}
	return &IAM{
		store: st, signer: grant.NewSigner(ed25519.NewKeyFromSeed(seed)), portKey: ports, now: now,
		cache: make(map[store.Hash]cached), byID: make(map[string]cached),
	}, nil
}

// PublicKey is what edges verify grants with.
func (i *IAM) PublicKey() ed25519.PublicKey { return i.signer.Public() }

// A KeyRequest says what a new key is for. A zero Lifetime means that it does not expire.
type KeyRequest struct {
	Principal string
	Project   string
	Role      Role
	Lifetime  time.Duration
}

// CreateKey makes a key. The secret is returned once and cannot be read back.
func (i *IAM) CreateKey(ctx context.Context, r KeyRequest) (Key, store.Key, error) {
	switch {
	case r.Principal == "" || len(r.Principal) > maxPrincipal:
		return Key{}, store.Key{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_principal", "a principal needs a name of 1 to %d bytes", maxPrincipal)
	case !r.Role.Valid():
		return Key{}, store.Key{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_role", "role %q is none of admin, user and reader", string(r.Role))
	case r.Lifetime < 0:
		return Key{}, store.Key{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_lifetime", "the lifetime of a key must be greater than 0")
	}
	key, err := newKey()
	if err != nil {
		return Key{}, store.Key{}, err
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return Key{}, store.Key{}, fmt.Errorf("make key id: %w", err)
	}
	now := i.now().UTC().Truncate(time.Millisecond)
	row := store.Key{ID: "k" + hex.EncodeToString(id[:]), Hash: key.hash(), Principal: r.Principal, Project: r.Project, Role: string(r.Role), CreatedAt: now}
	if r.Lifetime > 0 {
		row.ExpiresAt = now.Add(r.Lifetime)
	}
	if err := i.store.AddKey(ctx, row); err != nil {
		return Key{}, store.Key{}, fmt.Errorf("add key: %w", err)
	}
	return key, row, nil
}

// RevokeKey ends a key. Requests that are running go on.
func (i *IAM) RevokeKey(ctx context.Context, id string) error {
	if err := i.store.RevokeKey(ctx, id, i.now()); err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.byID, id)
	for h, c := range i.cache {
		if c.key.ID == id {
			delete(i.cache, h)
		}
	}
	return nil
}

// Bootstrap returns a key of the root project's administrator: current, if that is still a valid key, else a new one. So
// starting a platform again keeps the key in its user's configuration.
func (i *IAM) Bootstrap(ctx context.Context, current string) (Key, error) {
	if key, ok := ParseKey(current); ok {
		switch _, err := i.lookup(ctx, key); {
		case err == nil:
			return key, nil
		case sandbox.ClassOf(err) != sandbox.Unauthenticated:
			return Key{}, fmt.Errorf("check present key: %w", err)
		}
	}
	key, _, err := i.CreateKey(ctx, KeyRequest{Principal: BootstrapPrincipal, Project: RootProject, Role: RoleAdmin})
	return key, err
}

// Authenticate finds out who sent an Authorization header.
func (i *IAM) Authenticate(ctx context.Context, header string) (Identity, error) {
	if header == "" {
		return Identity{}, sandbox.Errorf(sandbox.Unauthenticated, "no_credentials",
			"the request has no API key; send the header `Authorization: Bearer dsec_…` (`dsec up` writes the key into your config file)")
	}
	key, ok := bearer(header)
	if !ok {
		return Identity{}, badKey()
	}
	row, err := i.lookup(ctx, key)
	if err != nil {
		return Identity{}, err
	}
	return Identity{KeyID: row.ID, Principal: row.Principal, Project: row.Project, Role: Role(row.Role)}, nil
}

func badKey() error {
	return sandbox.Errorf(sandbox.Unauthenticated, "bad_key", "the API key is not valid: it is malformed, unknown, expired or revoked")
}

func (i *IAM) lookup(ctx context.Context, key Key) (store.Key, error) {
	h, now := key.hash(), i.now()
	i.mu.RLock()
	c, ok := i.cache[h]
	i.mu.RUnlock()
	if !ok || !now.Before(c.until) {
		row, err := i.store.KeyByHash(ctx, h)
		var e *sandbox.Error
		switch {
		case errors.As(err, &e) && e.Class == sandbox.NotFound:
			return store.Key{}, badKey()
		case err != nil:
			return store.Key{}, fmt.Errorf("find key: %w", err)
		}
		c = cached{key: row, until: now.Add(CacheTTL)}
		i.keep(h, c)
	}
	// The map and the index compare hashes of the secret, so their timing tells nothing of it; this comparison makes a row
	// found under a wrong hash useless.
	if subtle.ConstantTimeCompare(c.key.Hash[:], h[:]) != 1 || !c.key.RevokedAt.IsZero() ||
		(!c.key.ExpiresAt.IsZero() && !now.Before(c.key.ExpiresAt)) {
		return store.Key{}, badKey()
	}
	return c.key, nil
}

func (i *IAM) keep(h store.Hash, c cached) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.cache) >= maxCache {
		clear(i.cache) // a look-up is cheap, unbounded memory is not
	}
	i.cache[h] = c
}

// Grant is what the caller may do on an edge, signed.
func (i *IAM) Grant(id Identity, edge sandbox.EdgeCode) (string, error) {
	return i.sign(grant.Grant{Project: id.Project, Role: grant.RoleUser, Principal: id.Principal, Edge: edge})
}

// WatcherGrant is the control plane's own: it reads status and lists the sandboxes of all projects.
func (i *IAM) WatcherGrant(edge sandbox.EdgeCode) (string, error) {
	return i.sign(grant.Grant{Role: grant.RoleWatcher, Principal: "control", Edge: edge})
}

func (i *IAM) sign(g grant.Grant) (string, error) {
	raw, err := i.signer.Sign(g)
	if err != nil {
		return "", fmt.Errorf("sign grant: %w", err)
	}
	return raw, nil
}
