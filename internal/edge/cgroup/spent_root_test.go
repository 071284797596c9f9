//go:build rootful

package cgroup

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// spentOf are the memory groups that belong to nobody.
func spentOf(t *testing.T, tree *Tree) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(tree.v1["memory"], spentPrefix+"*"))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

func requireV1(t *testing.T, tree *Tree) bool {
	t.Helper()
	if tree.Mode() == V2 { // nothing is kept there
		if got := tree.Waiting(); got != 0 {
			t.Errorf("%d groups wait", got)
		}
		return false
	}
	return true
}

// The memory group of an aether is used by the next, the other one goes by itself, and a new sandbox's groups are as if nobody had
// used them.
func TestSpentGroups(t *testing.T) {
	tree := open(t, uniqueName())
	if !requireV1(t, tree) {
		return
	}
	id, cg := create(t, tree, limits)
	first, err := os.Stat(cg.V1Aether["memory"])
	if err != nil {
		t.Fatal(err)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, tree, id); len(left) > 0 {
		t.Errorf("left under its name: %v", left)
	}
	next, cg := create(t, tree, limits)
	second, err := os.Stat(cg.V1Aether["memory"])
	if err != nil || !os.SameFile(first, second) {
		t.Errorf("the next aether's group is another one: %v", err)
	}
	if got := control(t, cg.V1Aether["memory"], "memory.limit_in_bytes"); got != decimal(AetherMemory) {
		t.Errorf("its limit is %s", got)
	}
	for deadline := time.Now().Add(30 * time.Second); tree.Waiting() > 0 || len(spentOf(t, tree)) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still there: %v", spentOf(t, tree))
		}
	}
	if err := tree.Remove(t.Context(), next); err != nil {
		t.Fatal(err)
	}
}

// A group in which the kernel has killed counts for ever, so no other sandbox gets it.
func TestGroupsWithKillsAreNotUsedAgain(t *testing.T) {
	tree := open(t, uniqueName())
	if !requireV1(t, tree) {
		return
	}
	id, cg := create(t, tree, limits)
	if err := os.WriteFile(filepath.Join(cg.V1Aether["memory"], "memory.limit_in_bytes"), []byte("1M"), 0); err != nil {
		t.Fatal(err)
	}
	eater := exec.Command("/bin/sh", "-c", "echo $$ >"+cg.V1Aether["memory"]+"/cgroup.procs; head -c 50000000 /dev/zero | tail -c 40000000 >/dev/null")
	_ = eater.Run() // it is killed
	if kills, err := flatValue(filepath.Join(cg.V1Aether["memory"], "memory.oom_control"), "oom_kill"); err != nil || kills == 0 {
		t.Fatalf("%d kills, %v", kills, err)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_, cg = create(t, tree, limits)
	if kills, err := flatValue(filepath.Join(cg.V1Aether["memory"], "memory.oom_control"), "oom_kill"); err != nil || kills != 0 {
		t.Errorf("a new aether's group counts %d kills, %v", kills, err)
	}
}

// What a killed edge has not removed yet goes with the next.
func TestSpentGroupsOfAnEarlierProcess(t *testing.T) {
	name := uniqueName()
	tree := open(t, name)
	if !requireV1(t, tree) {
		return
	}
	left := filepath.Join(tree.v1["memory"], spentPrefix+"7")
	if err := os.Mkdir(left, 0o755); err != nil {
		t.Fatal(err)
	}
	next := open(t, name)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(left); os.IsNotExist(err) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it is still there")
		}
	}
	id, _ := create(t, next, limits)
	if err := next.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for _, dir := range spentOf(t, next) {
		if strings.HasSuffix(dir, ".7") {
			t.Errorf("%s came back", dir)
		}
	}
}
