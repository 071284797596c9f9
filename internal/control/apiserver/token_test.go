package apiserver

import (
	"strings"
	"testing"
	"unicode/utf8"

	"dsec/internal/control/store"
	"dsec/internal/image"
	"dsec/sandbox"
)

func TestTokensRoundTrip(t *testing.T) {
	at, token, err := parseSandboxToken(sandboxToken("eaaaa", "edge's\x00own"))
	if err != nil || at != "eaaaa" || token != "edge's\x00own" {
		t.Errorf("%q %q %v", at, token, err)
	}
	k := store.NameKey{Kind: "base", Name: "a/b", Tag: "1"}
	if got, err := parseNameToken(nameToken(k)); err != nil || got != k {
		t.Errorf("%+v %v", got, err)
	}
	for _, s := range []string{"x", sandboxToken("eaaaa", ""), strings.Repeat("a", maxToken+4), "!!", writeToken("n1", "a")} {
		if _, err := parseNameToken(s); sandbox.ReasonOf(err) != "invalid_page_token" {
			t.Errorf("%.20q: %v", s, err)
		}
	}
	if _, _, err := parseSandboxToken(sandboxToken("../..", "")); sandbox.ReasonOf(err) != "invalid_page_token" {
		t.Errorf("%v", err)
	}
}

func FuzzPageTokens(f *testing.F) {
	f.Add(sandboxToken("eaaaa", "t"))
	f.Add(nameToken(store.NameKey{Kind: "base", Name: "a", Tag: "b"}))
	f.Add("")
	f.Add("AAAA")
	f.Fuzz(func(t *testing.T, s string) {
		if at, token, err := parseSandboxToken(s); err == nil && s != "" {
			if !at.Valid() || sandboxToken(at, token) != s {
				t.Fatalf("%q is not what it says: %q %q", s, at, token)
			}
		}
		if k, err := parseNameToken(s); err == nil && s != "" && nameToken(k) != s {
			t.Fatalf("%q is not what it says: %+v", s, k)
		}
	})
}

// Whatever the path and query of an import are, what gets through is a name that cannot be a path and a valid config.
func FuzzImportRoute(f *testing.F) {
	f.Add("base", "a:1", "user=root&env=A=1")
	f.Add("base", "../../etc:1", "")
	f.Add("toolkit", "a/../b:1", "env==")
	f.Add("base", "a\x00:1", "workdir=/%00")
	f.Add("base", "a@sha256:0", "env=A%3D")
	f.Fuzz(func(t *testing.T, kind, name, query string) {
		if checkKind(kind) == nil && !image.ValidKind(kind) {
			t.Fatal("kind")
		}
		if ref, err := tagged(name); err == nil {
			if ref.Digest != "" || ref.Tag == "" || ref.Name[0] == '/' || strings.Contains("/"+ref.Name+"/", "/../") || strings.ContainsRune(ref.Name+ref.Tag, 0) {
				t.Fatalf("%q became %+v", name, ref)
			}
		}
		if c, err := parseConfig(query); err == nil {
			if c.Validate() != nil {
				t.Fatalf("%q became %+v", query, c)
			}
			for k, v := range c.Env {
				if strings.ContainsRune(k+v, 0) || k == "" {
					t.Fatalf("%q: %q=%q", query, k, v)
				}
			}
		}
	})
}

func TestSpecDigestIsCanonical(t *testing.T) {
	digest := func(s sandbox.Spec) string {
		d, err := specDigest(s.WithDefaults())
		if err != nil || !utf8.ValidString(d) {
			t.Fatal(err)
		}
		return d
	}
	a := sandbox.Spec{Image: "a", Labels: map[string]string{"x": "1", "y": "2"}, Network: map[string]bool{"p": false}}
	b := a.Clone()
	b.Backend, b.Limits.CPU, b.Lifetime = sandbox.BackendContainer, sandbox.DefaultCPU, sandbox.DefaultLifetime
	if digest(a) != digest(b) {
		t.Error("defaults change the digest")
	}
	seen := map[string]string{digest(a): "itself"}
	for name, change := range map[string]func(*sandbox.Spec){
		"image": func(s *sandbox.Spec) { s.Image = "b" }, "workspace": func(s *sandbox.Spec) { s.Workspace = "w" },
		"toolkits": func(s *sandbox.Spec) { s.Toolkits = []string{"t"} }, "memory": func(s *sandbox.Spec) { s.Limits.Memory = 1 << 30 },
		"label": func(s *sandbox.Spec) { s.Labels["x"] = "2" }, "env": func(s *sandbox.Spec) { s.Env = map[string]string{"A": ""} },
		"user": func(s *sandbox.Spec) { s.User = "1" }, "network": func(s *sandbox.Spec) { s.Network["q"] = false }, "name": func(s *sandbox.Spec) { s.Name = "n" },
	} {
		c := a.Clone()
		change(&c)
		if other, ok := seen[digest(c)]; ok {
			t.Errorf("%s has the digest of %s", name, other)
		}
		seen[digest(c)] = name
	}
}

func TestSecondsDoNotOverflow(t *testing.T) {
	for in, want := range map[int64]bool{0: true, 1: true, 1 << 62: false, -1 << 62: false, int64(sandbox.MaxLifetime.Seconds()) + 1: false} {
		s := sandbox.Spec{Image: "a", Lifetime: seconds(in)}.WithDefaults()
		if err := s.Validate(); (err == nil) != want {
			t.Errorf("%d s: %v", in, err)
		}
	}
}
