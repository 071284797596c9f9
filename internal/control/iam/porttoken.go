package iam

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"dsec/internal/control/store"
	"dsec/sandbox"
)

const (
	portSecret    = "port_token_key"
	portDomain    = "dsec-port-v1\x00" // separates these signatures from any other use of the key
	maxPortToken  = 2048
	portSecretLen = 32
)

// A PortToken lets who has it speak to one port of one sandbox, for whoever made it.
type PortToken struct {
	Sandbox   string `json:"s"`
	Port      int    `json:"p"`
	Project   string `json:"j"`
	Principal string `json:"u"`
	KeyID     string `json:"k"`
	Expires   int64  `json:"e"` // Unix seconds
}

// SignPort makes the token's wire form.
func (i *IAM) SignPort(t PortToken) string {
	b, _ := json.Marshal(t) // strings and numbers always encode
	return base64.RawURLEncoding.EncodeToString(b) + "." + base64.RawURLEncoding.EncodeToString(i.portMAC(b))
}

func (i *IAM) portMAC(b []byte) []byte {
	m := hmac.New(sha256.New, i.portKey)
	m.Write([]byte(portDomain))
	m.Write(b)
	return m.Sum(nil)
}

// VerifyPort reads a token that has not expired and whose key has not been revoked.
func (i *IAM) VerifyPort(ctx context.Context, raw string) (PortToken, Identity, error) {
	bad := sandbox.Errorf(sandbox.Unauthenticated, "bad_port_token", "this link is not valid: it is damaged, or its key has been revoked; ask for a new one")
	var t PortToken
	body, sum, ok := strings.Cut(raw, ".")
	if !ok || len(raw) > maxPortToken {
		return t, Identity{}, bad
	}
	b, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		return t, Identity{}, bad
	}
	mac, err := base64.RawURLEncoding.DecodeString(sum)
	if err != nil || !hmac.Equal(mac, i.portMAC(b)) {
		return t, Identity{}, bad
	}
	if err := json.Unmarshal(b, &t); err != nil {
		return t, Identity{}, bad
	}
	if !i.now().Before(time.Unix(t.Expires, 0)) {
		return t, Identity{}, sandbox.Errorf(sandbox.Unauthenticated, "port_token_expired", "this link has expired; ask for a new one")
	}
	row, err := i.keyByID(ctx, t.Project, t.KeyID)
	switch {
	case err != nil:
		return t, Identity{}, err
	case row.ID == "" || !row.RevokedAt.IsZero() || (!row.ExpiresAt.IsZero() && !i.now().Before(row.ExpiresAt)):
		return t, Identity{}, bad
	}
	return t, Identity{KeyID: t.KeyID, Principal: t.Principal, Project: t.Project, Role: Role(row.Role)}, nil
}

// keyByID finds a key's row, zero if there is none. Answers are kept as those for secrets are.
func (i *IAM) keyByID(ctx context.Context, project, id string) (store.Key, error) {
	now := i.now()
	i.mu.RLock()
	c, ok := i.byID[id]
	i.mu.RUnlock()
	if ok && now.Before(c.until) && c.key.Project == project {
		return c.key, nil
	}
	if id == "" {
		return store.Key{}, nil
	}
	// Ids are hexadecimal: what follows all but the last digit are the sixteen that share it, at most.
	rows, err := i.store.Keys(ctx, project, id[:len(id)-1], 16)
	if err != nil {
		return store.Key{}, fmt.Errorf("find key: %w", err)
	}
	for _, k := range rows {
		if k.ID != id {
			continue
		}
		i.mu.Lock()
		if len(i.byID) >= maxCache {
			clear(i.byID)
		}
		i.byID[id] = cached{key: k, until: now.Add(CacheTTL)}
		i.mu.Unlock()
		return k, nil
	}
	return store.Key{}, nil
}

func portKey(ctx context.Context, st store.Store) ([]byte, error) {
	key, err := st.Secret(ctx, portSecret, func() ([]byte, error) {
		b := make([]byte, portSecretLen)
		_, err := rand.Read(b)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("read key of port tokens: %w", err)
	}
	if len(key) != portSecretLen {
		return nil, sandbox.Errorf(sandbox.DataLoss, "signing_key_damaged", "the stored key of port tokens has %d bytes instead of %d; restore the database from a copy", len(key), portSecretLen)
	}
	return key, nil
}

// LooksLikeKey reports whether an Authorization header holds a key of this platform, valid or not.
func LooksLikeKey(header string) bool { return strings.Contains(header, keyPrefix) }
