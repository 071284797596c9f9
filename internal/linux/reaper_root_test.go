//go:build rootful

package linux

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A grandchild whose parent ended becomes ours and is reaped; a child that somebody waits for is left to them.
func TestAdoptOrphans(t *testing.T) {
	waited := exec.Command("sh", "-c", "sleep 0.2; exit 7")
	if err := waited.Start(); err != nil {
		t.Fatal(err)
	}
	stop, err := AdoptOrphans(func(pid int) bool { return pid == waited.Process.Pid })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	out, err := exec.Command("sh", "-c", "(sleep 0.1) >/dev/null & echo $!").Output()
	if err != nil && !strings.Contains(err.Error(), "no child") { // the reaper may be first: then Wait has nothing to wait for
		t.Fatal(err)
	}
	orphan := fmt.Sprintf("/proc/%s", strings.TrimSpace(string(out)))
	deadline := time.Now().Add(time.Minute)
	for _, err := os.Stat(orphan); err == nil; _, err = os.Stat(orphan) {
		if time.Now().After(deadline) {
			t.Fatalf("%s is still there", orphan)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := waited.Wait(); waited.ProcessState.ExitCode() != 7 {
		t.Errorf("the child that is waited for: %v", err)
	}
}
