//go:build rootful

package policy

import (
	"errors"
	"os"
	"strings"
	"testing"

	"dsec/sandbox"
)

// What the probes say is what an independent look at this host says. Debian's kernel has both; the lab boots it with both.
func TestRootLSMProbesTellTheTruth(t *testing.T) {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	active, err := os.ReadFile("/sys/kernel/security/lsm")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	debian := strings.Contains(string(release), "-amd64")
	for name, probe := range map[string]func(string) error{
		"bpf":      ProbeBPFLSM,
		"apparmor": func(dir string) error { return ProbeAppArmor(t.Context(), dir) },
	} {
		dir := t.TempDir()
		err := probe(dir)
		listed := strings.Contains(","+strings.TrimSpace(string(active))+",", ","+name+",")
		switch {
		case debian && listed && err != nil:
			t.Errorf("%s is active on Debian's kernel, and the probe says: %v", name, err)
		case !listed && err == nil:
			t.Errorf("%s is not active, and the probe has seen it deny", name)
		case err != nil && sandbox.ClassOf(err) != sandbox.Unsupported:
			t.Errorf("%s: %v", name, err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s leaves %v, %v", name, left, err)
		}
		if err := os.Mkdir(dir+"/x", 0o700); err != nil {
			t.Errorf("%s: nothing can be made any more: %v", name, err)
		}
		t.Logf("%s: listed %v, %v", name, listed, err)
	}
}
