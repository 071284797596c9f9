package sandbox

import (
	"strings"
	"testing"
)

func TestEnvRefs(t *testing.T) {
	digest := "sha256:" + strings.Repeat("ab", 32)
	for in, want := range map[string]EnvRef{
		"a":                    {Name: "a", Tag: "latest"},
		"team/py:3.12":         {Name: "team/py", Tag: "3.12"},
		"a@" + digest:          {Name: "a", Digest: digest},
		"a:latest@" + digest:   {Name: "a", Tag: "latest", Digest: digest},
		"b/c:3.12_x@" + digest: {Name: "b/c", Tag: "3.12_x", Digest: digest},
	} {
		got, err := ParseEnvRef(in)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", in, got, err)
		}
		if again, err := ParseEnvRef(got.String()); err != nil || again != got {
			t.Errorf("%s: became %s", in, got)
		}
	}
	for _, in := range []string{"", "a:", ":a", "a@", "a:@" + digest, "@" + digest, ":t@" + digest, "a:t@sha256:ab", "a:t:u", "a:t@" + digest + "@" + digest,
		"a:../b@" + digest, "../a:t@" + digest, "A:t@" + digest, "a@" + digest + ":t"} {
		if r, err := ParseEnvRef(in); ReasonOf(err) != "invalid_name" {
			t.Errorf("%q: %+v, %v", in, r, err)
		}
	}
}

// The kernel takes "NAME=VALUE" with its NUL up to MAX_ARG_STRLEN, which is 32 pages.
func TestEnvIsWhatTheKernelTakes(t *testing.T) {
	for name, c := range map[string]struct {
		size int
		fits bool
	}{"A": {128<<10 - 3, true}, "B": {128<<10 - 2, false}, "LONG_NAME": {128<<10 - 11, true}, "LONG_NAMES": {128<<10 - 11, false}} {
		if err := validateEnv(map[string]string{name: strings.Repeat("v", c.size)}); (err == nil) != c.fits {
			t.Errorf("%s with %d bytes: %.100v", name, c.size, err)
		}
	}
	for _, env := range []map[string]string{{"A": "\x00"}, {"": "v"}, {"1A": "v"}, {"A=B": "v"}} {
		if err := validateEnv(env); ReasonOf(err) != "invalid_env" {
			t.Errorf("%v: %v", env, err)
		}
	}
}
