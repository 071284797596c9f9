package aether

import (
	"strings"
	"testing"
)

func TestTemporaryNames(t *testing.T) {
	seen := make(map[string]bool)
	for i := range 1000 {
		name := temporaryName(i%2 == 0)
		if ours, replaces := isTemporary(name); !ours || replaces != (i%2 == 0) || seen[name] || len(name) > 40 || strings.Contains(name, "/") {
			t.Fatalf("%q: %v, %v", name, ours, replaces)
		}
		seen[name] = true
		for at := range len(name) { // no other is
			changed := []byte(name)
			changed[at] = "AB"[max(0, strings.IndexByte("BA", name[at]))]
			if ours, _ := isTemporary(string(changed)); ours {
				t.Fatalf("%q is not %q", changed, name)
			}
		}
	}
	for _, name := range []string{"", ".dsec-", ".dsec-x", ".dsec-" + strings.Repeat("A", 24), ".dsec-" + strings.Repeat("=", 24), strings.Repeat("x", 255)} {
		if ours, _ := isTemporary(name); ours {
			t.Errorf("%q", name)
		}
	}
}
