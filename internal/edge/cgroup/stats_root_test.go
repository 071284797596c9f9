//go:build rootful

package cgroup

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// The figures of real groups move with what is done in them.
func TestStatsOfRealGroups(t *testing.T) {
	tree := open(t, uniqueName())
	const memory = 64 << 20
	_, cg := create(t, tree, sandbox.Limits{Memory: memory, CPU: 0.5, PIDs: 20})
	stats := func() driver.Stats {
		t.Helper()
		s, err := tree.Stats(cg)
		if err != nil || len(s.Unavailable) > 0 {
			t.Fatalf("%v, without %v", err, s.Unavailable)
		}
		return s
	}
	before := stats()
	if before.MemoryLimit != memory || before.PIDsLimit != 20 || before.OOMKills != 0 || before.MemoryHits != 0 || before.PIDsHits != 0 {
		t.Errorf("at the beginning: %+v", before)
	}

	// A shell that spins is throttled and counted; one task less is told than there are, which is aether's thread in a real sandbox.
	spins := run(t, cg, "while :; do :; done & while :; do :; done")
	await(t, "the spinning shell is counted", func() bool {
		s := stats()
		return s.CPU > before.CPU+0.05 && s.ThrottledPeriods > 0 && s.Throttled > 0 && s.PIDs >= 1
	})
	end := func(cmd *exec.Cmd) {
		t.Helper()
		if err := linux.KillCgroup(t.Context(), cg.V2User); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
	}
	end(spins)

	// Memory goes up, runs into the limit, and costs a process.
	if err := run(t, cg, "x=0123456789abcdef; while :; do x=$x$x; done").Wait(); err == nil {
		t.Error("endless memory fits into 64 MiB")
	}
	full := stats()
	if full.MemoryPeak < memory/2 || full.MemoryHits == 0 || full.OOMKills == 0 {
		t.Errorf("after running out of memory: %+v", full)
	}
	if n, err := tree.OOMKills(cg); err != nil || n != full.OOMKills {
		t.Errorf("%d kills, %v; the figures say %d", n, err, full.OOMKills)
	}

	// One task too many is refused, and counted.
	forks := run(t, cg, "i=0; while [ $i -lt 40 ]; do sleep 1000 & i=$((i+1)); done; wait")
	await(t, "a refused fork is counted", func() bool { return stats().PIDsHits > 0 })
	end(forks)
}

func await(t *testing.T, what string, check func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !check(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// Groups of trusted commands are beside the user part, with limits of their own, and go with the sandbox.
func TestTrustedGroups(t *testing.T) {
	tree := open(t, uniqueName())
	limits := sandbox.Limits{Memory: 64 << 20, CPU: 0.5, PIDs: 20}
	id, cg := create(t, tree, limits)
	if err := os.Lchown(cg.V2User, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	var made driver.Trusted
	for range 2 { // the second time it finds them
		var err error
		if made, err = tree.Trusted(t.Context(), id, cg, limits); err != nil {
			t.Fatal(err)
		}
	}
	if filepath.Dir(made.V2) != filepath.Dir(cg.V2User) || made.Freeze != filepath.Join(cg.V2User, "cgroup.freeze") {
		t.Errorf("%+v", made)
	}
	if tree.Mode() == Hybrid {
		if got := control(t, made.V1["memory"], "memory.limit_in_bytes"); got != decimal(TrustedMemory) {
			t.Errorf("memory of trusted commands: %s", got)
		}
		if got := control(t, made.V1["cpu"], "cpu.cfs_quota_us"); got != "50000" {
			t.Errorf("quota of trusted commands: %s", got)
		}
	}
	info, err := os.Stat(filepath.Join(made.V2, "cgroup.procs"))
	if err != nil || !strings.HasSuffix(control(t, made.V2, "cgroup.max.depth"), "1") {
		t.Errorf("%v, %v", info, err)
	}
	// A frozen sandbox can be removed.
	cmd := run(t, cg, "sleep 1000")
	if err := os.WriteFile(made.Freeze, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if left := leftovers(t, tree, id); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// What is said of a host's further controls is so. That a peak can be set back is tried.
func TestControlsAreThere(t *testing.T) {
	tree := open(t, uniqueName())
	_, cg := create(t, tree, limits)
	has, hasNot := Controls(cg)
	for _, name := range extras {
		_, err := os.Stat(filepath.Join(cg.V2User, name))
		if slices.Contains(has, name) != (err == nil) || slices.Contains(hasNot, name) == (err == nil) {
			t.Errorf("%s: %v; has %v, has not %v", name, err, has, hasNot)
		}
	}
	if !slices.Contains(has, "memory.peak") {
		return
	}
	f, err := os.OpenFile(filepath.Join(cg.V2User, "memory.peak"), os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteString("0")
		f.Close()
	}
	if slices.Contains(has, "memory.peak set back") != (err == nil) {
		t.Errorf("set back: %v; has %v", err, has)
	}
}
