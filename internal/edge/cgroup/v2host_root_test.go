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
	mark := func(name string) string { // a group that stands for a tree
		dir := filepath.Join(tree.v2, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := linux.RemoveDir(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	above, err := enable(tree.layout.v2, "/none", mark("above"), one)
	if err != nil {
		t.Fatal(err)
	}
	middle, err := enable(tree.v2, "/none", mark("middle"), one)
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

	marked := mark("tree")
	host, err := enable(parent, leaf, marked, one)
	if err != nil {
		t.Fatal(err)
	}
	if got := control(t, leaf, "cgroup.procs"); got != fmt.Sprint(cmd.Process.Pid) {
		t.Errorf("the leaf has %q, want the process of its parent", got)
	}
	again, err := enable(parent, leaf, marked, one) // a process that was started again after a kill
	if err != nil || again != host || again.Enabled != one {
		t.Errorf("a second time finds %+v, %v", again, err)
	}
	if other, err := enable(parent, leaf, mark("other"), one); err != nil || other != (v2Host{}) {
		t.Errorf("another tree changes %+v, %v", other, err)
	}
	if err := again.restore(); err != nil {
		t.Fatal(err)
	}
	if got := control(t, parent, "cgroup.procs"); got != fmt.Sprint(cmd.Process.Pid) || control(t, parent, subtreeControl) != "" {
		t.Errorf("not restored: processes %q, controllers %q", got, control(t, parent, subtreeControl))
	}
}
