package iam

import (
	"strings"
	"testing"
	"time"
)

func TestPortToken(t *testing.T) {
	i, c, _ := setup(t)
	var first PortToken
	for range 40 { // keys whose ids share all but the last digit are told apart
		_, row := mint(t, i, ann)
		first = PortToken{Sandbox: "s", Port: 80, Project: row.Project, Principal: row.Principal, KeyID: row.ID, Expires: c.t.Add(time.Hour).Unix()}
		got, who, err := i.VerifyPort(t.Context(), i.SignPort(first))
		if err != nil || got != first || who.KeyID != row.ID || who.Role != RoleUser {
			t.Fatalf("%+v %+v %v", got, who, err)
		}
	}
	raw := i.SignPort(first)
	for n := range len(raw) {
		b := []byte(raw)
		b[n] ^= 1
		if got, _, err := i.VerifyPort(t.Context(), string(b)); err == nil && got != first {
			t.Fatalf("byte %d: %+v", n, got)
		}
	}
	for _, bad := range []string{"", ".", "x", raw + "x", strings.Repeat("a", 5000), raw[:len(raw)-3]} {
		if _, _, err := i.VerifyPort(t.Context(), bad); reason(err) != "bad_port_token" {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	foreign := first
	foreign.Project = "other"
	if _, _, err := i.VerifyPort(t.Context(), i.SignPort(foreign)); reason(err) != "bad_port_token" {
		t.Errorf("%v", err)
	}
	if err := i.RevokeKey(t.Context(), first.KeyID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := i.VerifyPort(t.Context(), raw); reason(err) != "bad_port_token" {
		t.Errorf("revoked: %v", err)
	}
	c.t = c.t.Add(time.Hour)
	if _, _, err := i.VerifyPort(t.Context(), raw); reason(err) != "port_token_expired" {
		t.Errorf("expired: %v", err)
	}
}

func FuzzVerifyPort(f *testing.F) {
	f.Add("eyJzIjoicyJ9.AAAA")
	i := &IAM{portKey: make([]byte, portSecretLen), now: time.Now}
	f.Fuzz(func(t *testing.T, raw string) {
		if _, _, err := i.VerifyPort(t.Context(), raw); err == nil {
			t.Fatalf("%q was taken", raw)
		}
	})
}
