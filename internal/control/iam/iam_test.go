package iam

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"dsec/internal/control/store"
	"dsec/internal/grant"
	"dsec/sandbox"
)

type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func setup(t *testing.T) (*IAM, *clock, store.Store) {
	t.Helper()
	st, err := store.OpenSQLite(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	c := &clock{time.Now().UTC().Truncate(time.Millisecond)}
	i, err := New(t.Context(), st, c.now)
	if err != nil {
		t.Fatal(err)
	}
	return i, c, st
}

func mint(t *testing.T, i *IAM, r KeyRequest) (Key, store.Key) {
	t.Helper()
	k, row, err := i.CreateKey(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return k, row
}

var ann = KeyRequest{Principal: "ann", Project: RootProject, Role: RoleUser}

func reason(err error) string {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return fmt.Sprint(err)
}

func TestAuthenticate(t *testing.T) {
	i, _, _ := setup(t)
	k, row := mint(t, i, ann)
	for _, header := range []string{"Bearer " + k.Reveal(), "bearer  " + k.Reveal()} {
		id, err := i.Authenticate(t.Context(), header)
		if err != nil {
			t.Fatal(err)
		}
		if id != (Identity{KeyID: row.ID, Principal: "ann", Project: RootProject, Role: RoleUser}) {
			t.Errorf("got %+v", id)
		}
	}
	other, _ := newKey()
	for header, want := range map[string]string{
		"": "no_credentials", "Bearer": "bad_key", "Bearer ": "bad_key", "Basic " + k.Reveal(): "bad_key", k.Reveal(): "bad_key",
		"Bearer " + other.Reveal(): "bad_key", "Bearer " + strings.ToUpper(k.Reveal()): "bad_key",
		"Bearer " + k.Reveal() + "0": "bad_key", "Bearer " + k.Reveal()[:keyLen-1]: "bad_key", "Bearer " + k.Reveal() + " ": "bad_key",
	} {
		if _, err := i.Authenticate(t.Context(), header); reason(err) != want || sandbox.ClassOf(err) != sandbox.Unauthenticated {
			t.Errorf("%.20q: got %v; want %s", header, err, want)
		}
	}
}

func TestRevocation(t *testing.T) {
	i, c, st := setup(t)
	k, row := mint(t, i, ann)
	header := "Bearer " + k.Reveal()
	auth := func() error { _, err := i.Authenticate(t.Context(), header); return err }
	if err := auth(); err != nil {
		t.Fatal(err)
	}
	// Through another apiserver: within the TTL the cache answers, after it the store.
	if err := st.RevokeKey(t.Context(), row.ID, c.t); err != nil {
		t.Fatal(err)
	}
	c.t = c.t.Add(CacheTTL - time.Millisecond)
	if err := auth(); err != nil {
		t.Fatalf("the cache did not answer: %v", err)
	}
	c.t = c.t.Add(time.Millisecond)
	if reason(auth()) != "bad_key" {
		t.Fatal("a revoked key was accepted after the cache's time")
	}

	// Here: at once.
	k, row = mint(t, i, ann)
	header = "Bearer " + k.Reveal()
	if err := auth(); err != nil {
		t.Fatal(err)
	}
	if err := i.RevokeKey(t.Context(), row.ID); err != nil {
		t.Fatal(err)
	}
	if reason(auth()) != "bad_key" {
		t.Fatal("a revoked key was accepted")
	}
}

func TestExpiryIsExactWithinTheCache(t *testing.T) {
	i, c, _ := setup(t)
	r := ann
	r.Lifetime = time.Second
	k, _ := mint(t, i, r)
	if _, err := i.Authenticate(t.Context(), "Bearer "+k.Reveal()); err != nil {
		t.Fatal(err)
	}
	c.t = c.t.Add(time.Second)
	if _, err := i.Authenticate(t.Context(), "Bearer "+k.Reveal()); reason(err) != "bad_key" {
		t.Fatalf("got %v", err)
	}
}

func TestAStoreThatFailsIsNoWrongKey(t *testing.T) {
	i, _, _ := setup(t)
	k, _ := newKey()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := i.Authenticate(ctx, "Bearer "+k.Reveal()); sandbox.ClassOf(err) != sandbox.Canceled {
		t.Fatalf("got %v", err)
	}
}

func TestBootstrapKeepsAValidKey(t *testing.T) {
	i, _, _ := setup(t)
	first, err := i.Bootstrap(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	again, err := i.Bootstrap(t.Context(), first.Reveal())
	if err != nil || again.Reveal() != first.Reveal() {
		t.Fatalf("a valid key was replaced (%v)", err)
	}
	foreign, _ := newKey()
	for _, current := range []string{foreign.Reveal(), "junk"} {
		fresh, err := i.Bootstrap(t.Context(), current)
		if err != nil || fresh.Reveal() == current {
			t.Fatalf("got %v, %v", fresh, err)
		}
		if id, err := i.Authenticate(t.Context(), "Bearer "+fresh.Reveal()); err != nil || id.Role != RoleAdmin || id.Project != RootProject {
			t.Errorf("got %+v, %v", id, err)
		}
	}
}

func TestSigningKeyStays(t *testing.T) {
	i, c, st := setup(t)
	again, err := New(t.Context(), st, c.now)
	if err != nil {
		t.Fatal(err)
	}
	if !again.PublicKey().Equal(i.PublicKey()) {
		t.Fatal("a restart changed the signing key")
	}
	raw, err := i.Grant(Identity{Principal: "ann", Project: "default"}, "eaaaa")
	if err != nil {
		t.Fatal(err)
	}
	g, err := grant.NewVerifier("eaaaa", again.PublicKey()).Verify(raw)
	if err != nil || g.Project != "default" || g.Principal != "ann" || g.Role != grant.RoleUser {
		t.Fatalf("got %+v, %v", g, err)
	}
	if _, err := grant.NewVerifier("ebbbb", again.PublicKey()).Verify(raw); err == nil {
		t.Fatal("another edge accepted the grant")
	}
}

func TestBadRequests(t *testing.T) {
	i, _, _ := setup(t)
	for want, r := range map[string]KeyRequest{
		"invalid_principal": {Project: RootProject, Role: RoleUser},
		"invalid_role":      {Principal: "a", Project: RootProject, Role: "root"},
		"invalid_lifetime":  {Principal: "a", Project: RootProject, Role: RoleUser, Lifetime: -1},
		"project_not_found": {Principal: "a", Project: "nowhere", Role: RoleUser},
	} {
		if _, _, err := i.CreateKey(t.Context(), r); reason(err) != want {
			t.Errorf("%s: got %v", want, err)
		}
	}
	if err := i.RevokeKey(t.Context(), "k0"); reason(err) != "key_not_found" {
		t.Errorf("got %v", err)
	}
}

func TestAKeyNeverPrints(t *testing.T) {
	k, err := newKey()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		fmt.Fprintf(&out, verb+" "+verb+"\n", k, struct{ K *Key }{&k})
	}
	slog.New(slog.NewTextHandler(&out, nil)).Info("key", "key", k, "in", struct{ K Key }{k})
	slog.New(slog.NewJSONHandler(&out, nil)).Info("key", "key", k, "in", struct{ K Key }{k})
	if err := json.NewEncoder(&out).Encode(map[string]any{"k": k, "p": &k}); err != nil {
		t.Fatal(err)
	}
	if secret := k.Reveal()[len(keyPrefix):]; strings.Contains(out.String(), secret) || strings.Contains(out.String(), secret[:16]) {
		t.Fatal("the key was printed")
	}
}

func TestCacheIsBounded(t *testing.T) {
	i, c, _ := setup(t)
	for n := range 2 * maxCache {
		i.keep(store.Hash{byte(n), byte(n >> 8)}, cached{until: c.t})
	}
	if len(i.cache) > maxCache {
		t.Fatalf("%d entries", len(i.cache))
	}
}

func TestRoles(t *testing.T) {
	if Role("").May(Read) || Role("root").Valid() || RoleReader.May(Use) || RoleReader.May(Publish) || !RoleReader.May(Read) || !RoleUser.May(Publish) {
		t.Fatal("the table of roles is wrong")
	}
	for _, id := range []Identity{{Project: RootProject, Role: RoleUser}, {Project: RootProject, Role: RoleReader}, {Project: RootProject + "/a", Role: RoleAdmin}} {
		if id.May(Operate) {
			t.Errorf("%+v may change what all projects have", id)
		}
	}
	if id := (Identity{Project: RootProject, Role: RoleAdmin}); !id.May(Operate) || !id.May(Use) {
		t.Error("the root's administrator may not")
	}
}

func FuzzParseKey(f *testing.F) {
	k, err := newKey()
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"Bearer " + k.Reveal(), "Bearer dsec_", "", "Bearer dsec_\x00", "bearer " + strings.Repeat("a", 69)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		k, ok := bearer(s)
		if ok != (k.secret != "") {
			t.Fatalf("%v with %d bytes", ok, len(k.secret))
		}
		if again, parsed := ParseKey(k.secret); ok && (!parsed || again != k || !strings.HasSuffix(s, k.secret)) {
			t.Fatal("not the key that was sent")
		}
	})
}
