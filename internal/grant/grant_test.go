package grant

import (
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

const edge = sandbox.EdgeCode("abcde")

func keyOf(b byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed([]byte(strings.Repeat(string(b), 32)))
}

func pair(t testing.TB) (*Signer, *Verifier, *time.Time) {
	t.Helper()
	now := time.Unix(1_800_000_000, 0)
	clock := func() time.Time { return now }
	s := NewSigner(keyOf('k'))
	v := NewVerifier(edge, keyOf('x').Public().(ed25519.PublicKey), s.Public())
	s.now, v.now = clock, clock
	return s, v, &now
}

func caller() Grant { return Grant{Project: "default", Role: RoleUser, Principal: "ada", Edge: edge} }

func mustSign(t testing.TB, s *Signer, g Grant) string {
	t.Helper()
	raw, err := s.Sign(g)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestSignAndVerify(t *testing.T) {
	s, v, now := pair(t)
	raw := mustSign(t, s, caller())
	for range 2 { // second time from the cache
		g, err := v.Verify(raw)
		if err != nil {
			t.Fatal(err)
		}
		if g.Project != "default" || g.Role != RoleUser || g.Principal != "ada" || !g.ExpiresAt.Equal(now.Add(DefaultTTL)) {
			t.Errorf("got %+v", g)
		}
	}
	*now = now.Add(DefaultTTL)
	if _, err := v.Verify(raw); sandbox.ReasonOf(err) != "grant_expired" {
		t.Errorf("after its life, from the cache: %v", err)
	}
}

func TestSignerCachesForHalfALife(t *testing.T) {
	s, _, now := pair(t)
	first := mustSign(t, s, caller())
	*now = now.Add(DefaultTTL/2 - time.Second)
	if mustSign(t, s, caller()) != first {
		t.Error("signed anew within half of the life")
	}
	*now = now.Add(time.Second)
	if mustSign(t, s, caller()) == first {
		t.Error("the old grant after half of its life")
	}
	other := caller()
	other.Principal = "eve"
	if mustSign(t, s, other) == mustSign(t, s, caller()) {
		t.Error("two callers share a grant")
	}
}

func TestSignerCacheIsBounded(t *testing.T) {
	s, _, _ := pair(t)
	for i := range maxSigned + 10 {
		s.cache[Grant{Principal: fmt.Sprint(i)}] = signed{until: s.now().Add(time.Hour)}
	}
	mustSign(t, s, caller())
	if len(s.cache) > maxSigned {
		t.Errorf("%d entries", len(s.cache))
	}
}

func TestRefused(t *testing.T) {
	s, v, now := pair(t)
	good := mustSign(t, s, caller())
	otherEdge := caller()
	otherEdge.Edge = "zzzzz"
	expired, eternal := caller(), caller()
	expired.ExpiresAt = now.Add(-time.Second)
	eternal.ExpiresAt = now.Add(48 * time.Hour)
	stranger := NewSigner(keyOf('s'))
	stranger.now = s.now
	for name, c := range map[string]struct{ raw, reason string }{
		"none":         {"", "grant_missing"},
		"other edge":   {mustSign(t, s, otherEdge), "grant_for_other_edge"},
		"expired":      {mustSign(t, s, expired), "grant_expired"},
		"eternal":      {mustSign(t, s, eternal), "grant_invalid"},
		"stranger":     {mustSign(t, stranger, caller()), "grant_invalid"},
		"not base64":   {"%%%", "grant_invalid"},
		"padded":       {good + "=", "grant_invalid"},
		"cut":          {good[:len(good)-8], "grant_invalid"},
		"huge":         {strings.Repeat("A", MaxSize+1), "grant_invalid"},
		"other domain": {otherDomain(t), "grant_invalid"},
	} {
		_, err := v.Verify(c.raw)
		if sandbox.ClassOf(err) != sandbox.Unauthenticated || sandbox.ReasonOf(err) != c.reason {
			t.Errorf("%s: %v (%s)", name, err, sandbox.ReasonOf(err))
		}
	}
	if len(v.young) > 1 { // only the one that expired is genuine
		t.Errorf("%d refused grants are cached", len(v.young))
	}
}

// otherDomain is a genuine signature over the grant alone, as some other protocol with the same key might make it.
func otherDomain(t *testing.T) string {
	t.Helper()
	body, err := proto.Marshal(&edgev1.Grant{Edge: string(edge)})
	if err != nil {
		t.Fatal(err)
	}
	env, err := proto.Marshal(&edgev1.SignedGrant{Grant: body, Signature: ed25519.Sign(keyOf('k'), body)})
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(env)
}

func TestEveryFlippedBitIsRefused(t *testing.T) {
	s, v, _ := pair(t)
	env, err := base64.RawURLEncoding.DecodeString(mustSign(t, s, caller()))
	if err != nil {
		t.Fatal(err)
	}
	for i := range len(env) * 8 {
		bad := append([]byte(nil), env...)
		bad[i/8] ^= 1 << (i % 8)
		if _, err := v.Verify(base64.RawURLEncoding.EncodeToString(bad)); err == nil {
			t.Errorf("bit %d flipped: accepted", i)
		}
	}
}

func TestVerifierCacheIsBoundedAndKeepsWhatIsUsed(t *testing.T) {
	s, v, _ := pair(t)
	used := mustSign(t, s, caller())
	for i := range 3 * maxVerified {
		v.mu.Lock() // fill as slow does, without the cost of signing
		if len(v.young) >= maxVerified {
			v.old, v.young = v.young, make(map[string]*Grant)
		}
		v.young[fmt.Sprint(i)] = &Grant{}
		v.mu.Unlock()
		if i%1000 == 0 {
			if _, err := v.Verify(used); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := len(v.young) + len(v.old); n > 2*maxVerified {
		t.Errorf("%d entries", n)
	}
	if v.young[used] == nil && v.old[used] == nil {
		t.Error("the one in use was dropped")
	}
}

func TestConcurrentUse(t *testing.T) {
	s, v, _ := pair(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 200 {
				g := caller()
				g.Principal = fmt.Sprint(i, j%7)
				raw, err := s.Sign(g)
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := v.Verify(raw); err != nil || got.Principal != g.Principal {
					t.Errorf("%v %v", got, err)
				}
			}
		})
	}
	wg.Wait()
}

func FuzzVerify(f *testing.F) {
	s, v, _ := pair(f)
	good := mustSign(f, s, caller())
	f.Add(good)
	f.Add("")
	f.Add("AAAA")
	f.Add(good[:20])
	f.Fuzz(func(t *testing.T, raw string) {
		g, err := v.Verify(raw)
		if err == nil && raw != good {
			t.Fatalf("accepted %q as %+v", raw, g)
		}
		if err != nil && sandbox.ClassOf(err) != sandbox.Unauthenticated {
			t.Fatalf("%q: class of %v", raw, err)
		}
	})
}

func BenchmarkVerifyCached(b *testing.B) {
	s, v, _ := pair(b)
	raw := mustSign(b, s, caller())
	for b.Loop() {
		if _, err := v.Verify(raw); err != nil {
			b.Fatal(err)
		}
	}
}
