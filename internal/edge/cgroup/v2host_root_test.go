//go:build rootful

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"dsec/internal/linux"
)

func TestControllersAreEnabledAroundProcesses(t *testing.T) {
	tree := open(t, uniqueName())
	parent := filepath.Join(tree.v2, "parent")
	leaf := filepath.Join(parent, "host")
	if err := os.Mkdir(parent, 0o755); err != nil {
		t.Fatal(err)
	}
	// The one controller that this host has in v2, enabled above for the length of the test.
	const one = "+hugetlb"
	above, err := enable(tree.layout.v2, "", one)
	if err != nil {
		t.Fatal(err)
	}
	middle, err := enable(tree.v2, "", one)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(linux.RemoveDir(parent), middle.restore(), above.restore()); err != nil {
			t.Error(err)
		}
	}()
	cmd := exec.Command("/bin/sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		waitFor(t, func() bool { return linux.RemoveDir(parent) == nil })
	}()
	join(t, parent, cmd.Process.Pid)

	host, err := enable(parent, leaf, one)
	if err != nil {
		t.Fatal(err)
	}
	if got := control(t, leaf, "cgroup.procs"); got != fmt.Sprint(cmd.Process.Pid) {
		t.Errorf("the leaf has %q, want the process of its parent", got)
	}
	if again, err := enable(parent, leaf, one); err != nil || again != (v2Host{}) {
		t.Errorf("a second time changes %+v, %v", again, err)
	}
	if err := host.restore(); err != nil {
		t.Fatal(err)
	}
	if got := control(t, parent, "cgroup.procs"); got != fmt.Sprint(cmd.Process.Pid) || control(t, parent, subtreeControl) != "" {
		t.Errorf("not restored: processes %q, controllers %q", got, control(t, parent, subtreeControl))
	}
}
