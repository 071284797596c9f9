//go:build rootful

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The doctor's word is compared with what the kernel says of itself, by which the doctor does not go.
func TestRootDoctorSaysWhatThisKernelHas(t *testing.T) {
	cmd := exec.Command("../../bin/dsec", "doctor", "--json")
	cmd.Env = append(os.Environ(), "DSEC_CONFIG="+t.TempDir()+"/config.json")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if code := cmd.ProcessState.ExitCode(); code != 1 { // there is no platform, which it says
		t.Fatalf("exit code %d, %v\n%s", code, err, out)
	}
	found := map[string]finding{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var f finding
		if err := dec.Decode(&f); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		found[strings.TrimSpace(f.Subject)] = f
		if f.Verdict == verdictFail && f.Subject != "platform" || (f.Instead != "" && (f.Why == "" || f.Cost == "")) {
			t.Errorf("%+v", f)
		}
	}
	second := func(subject string, want bool) {
		f, ok := found[subject]
		if !ok || (f.Instead != "") != want {
			t.Errorf("%s: second best %v is wrong: %+v", subject, !want, f)
		}
	}
	second("disk quota", !present("/sys/fs/btrfs/features/simple_quota"))
	second("layers", !kernelAtLeast(t, 6, 12))
	second("root", !kernelAtLeast(t, 6, 15))
	second("lowest layer", !kernelAtLeast(t, 6, 3))
	second("exit status", !kernelAtLeast(t, 6, 15))
	second("cgroup namespace", strings.Contains(read(t, "/proc/mounts"), "nsdelegate"))
	enforced := func(subject string, want bool) {
		if f, ok := found[subject]; !ok || strings.HasPrefix(f.Detail, "enforced") != want || f.Verdict != verdictOK {
			t.Errorf("%s: want enforced %v: %+v", subject, want, f)
		}
	}
	enforced("AppArmor", present("/sys/kernel/security/apparmor/.load"))
	modules := strings.Split(strings.TrimSpace(read(t, "/sys/kernel/security/lsm")), ",")
	if has := strings.Contains(","+strings.Join(modules, ",")+",", ",bpf,"); !has || os.Getenv("DSEC_LAB") != "" {
		enforced("BPF LSM", has)
	} // else: some kernels list it and load no program of it
	if t.Failed() {
		t.Logf("%s", out)
	}
}

func present(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func read(t *testing.T, path string) string {
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

func kernelAtLeast(t *testing.T, major, minor int) bool {
	var a, b int
	if _, err := fmt.Sscanf(read(t, "/proc/sys/kernel/osrelease"), "%d.%d", &a, &b); err != nil {
		t.Fatal(err)
	}
	return a > major || a == major && b >= minor
}
