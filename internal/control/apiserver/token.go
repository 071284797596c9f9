package apiserver

import (
	"encoding/base64"
	"strings"

	"dsec/internal/control/store"
	"dsec/sandbox"
)

// Page tokens say where a list goes on. They are opaque to callers, not secret and not trusted: a forged one only starts
// the caller's own list elsewhere.
const (
	sandboxTokenVersion = "s1"
	nameTokenVersion    = "n1"
	serviceTokenVersion = "v1"
	maxToken            = 4 << 10
)

func writeToken(fields ...string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.Join(fields, "\x00")))
}

// readToken gives the fields behind the version; nil for an empty token.
func readToken(token, version string, fields int) ([]string, error) {
	if token == "" {
		return nil, nil
	}
	bad := sandbox.Errorf(sandbox.InvalidArgument, "invalid_page_token", "the page token is not one that this list has given; start without one")
	if len(token) > maxToken {
		return nil, bad
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil {
		return nil, bad
	}
	list := strings.SplitN(string(b), "\x00", fields+1)
	if len(list) != fields+1 || list[0] != version {
		return nil, bad
	}
	return list[1:], nil
}

func sandboxToken(at sandbox.EdgeCode, token string) string {
	return writeToken(sandboxTokenVersion, string(at), token)
}

// parseSandboxToken gives the edge at which a list goes on, and the edge's own token.
func parseSandboxToken(s string) (sandbox.EdgeCode, string, error) {
	f, err := readToken(s, sandboxTokenVersion, 2)
	if err != nil || f == nil {
		return "", "", err
	}
	at := sandbox.EdgeCode(f[0])
	if !at.Valid() {
		return "", "", sandbox.Errorf(sandbox.InvalidArgument, "invalid_page_token", "the page token is not one that this list has given; start without one")
	}
	return at, f[1], nil
}

func nameToken(k store.NameKey) string { return writeToken(nameTokenVersion, k.Kind, k.Name, k.Tag) }

func parseNameToken(s string) (store.NameKey, error) {
	f, err := readToken(s, nameTokenVersion, 3)
	if err != nil || f == nil {
		return store.NameKey{}, err
	}
	return store.NameKey{Kind: f[0], Name: f[1], Tag: f[2]}, nil
}

func serviceToken(name string) string { return writeToken(serviceTokenVersion, name) }

func parseServiceToken(s string) (string, error) {
	f, err := readToken(s, serviceTokenVersion, 1)
	if err != nil || f == nil {
		return "", err
	}
	return f[0], nil
}
