//go:build rootful

package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux"
)

// openV2 opens a tree whose controllers are in v2. test/skips.txt lists the tests that need one: the lab runs them.
func openV2(t *testing.T) *Tree {
	t.Helper()
	tree := open(t, uniqueName())
	if tree.Mode() != V2 {
		t.Skip("this host has its controllers in v1")
	}
	return tree
}

func set(t *testing.T, dir, file, value string) {
	t.Helper()
	if err := linux.WriteControl(filepath.Join(dir, file), value); err != nil {
		t.Fatalf("%s/%s: %v", dir, file, err)
	}
}

// event is one figure of a flat-keyed file.
func event(t *testing.T, dir, file, key string) int64 {
	t.Helper()
	n, err := flatValue(filepath.Join(dir, file), key)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// ended waits for a command and gives its exit code, or 128 and the signal.
func ended(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	_ = cmd.Wait()
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// eat is a script that holds so many MiB of memory of its own, and ends with 3 if it got them: tail keeps a line until it ends.
func eat(mib int) string {
	return fmt.Sprintf("head -c %dM /dev/zero | tail >/dev/null && exit 3", mib)
}

func TestV2CPUQuotaHolds(t *testing.T) {
	tree := openV2(t)
	_, cg := create(t, tree, limits) // half a core
	run(t, cg, "while :; do :; done & while :; do :; done")
	const periods = 30
	waitFor(t, func() bool { return event(t, cg.V2User, "cpu.stat", "nr_periods") >= periods })
	used, n := event(t, cg.V2User, "cpu.stat", "usage_usec"), event(t, cg.V2User, "cpu.stat", "nr_periods")
	// The kernel lets a group overrun by a slice per CPU, which it has to give back in the next period.
	if most := (n + 2) * quotaPeriod / 2 * 6 / 5; used > most {
		t.Errorf("%d us of CPU in %d periods with a quota of %d", used, n, quotaPeriod/2)
	}
	if event(t, cg.V2User, "cpu.stat", "nr_throttled") == 0 || event(t, cg.V2User, "cpu.stat", "throttled_usec") == 0 {
		t.Error("two loops under half a core are not throttled")
	}
	if !stalled(t, cg.V2User, "cpu.pressure") {
		t.Error("they wait for the CPU, and cpu.pressure knows nothing of it")
	}
}

// stalled reports whether a pressure file has seen any.
func stalled(t *testing.T, dir, file string) bool {
	t.Helper()
	_, total, ok := strings.Cut(strings.SplitN(control(t, dir, file), "\n", 2)[0], "total=")
	n, err := strconv.ParseInt(total, 10, 64)
	if !ok || err != nil {
		t.Fatalf("%s: %q", file, control(t, dir, file))
	}
	return n > 0
}

func TestV2MemoryHighHoldsBackAndKillsNobody(t *testing.T) {
	tree := openV2(t)
	_, cg := create(t, tree, limits) // 64 MiB
	set(t, cg.V2User, "memory.high", "16M")
	cmd := run(t, cg, eat(32))
	waitFor(t, func() bool { return event(t, cg.V2User, "memory.events", "high") > 0 })
	waitFor(t, func() bool { return stalled(t, cg.V2User, "memory.pressure") })
	set(t, cg.V2User, "memory.high", "max")
	if code := ended(t, cmd); code != 3 {
		t.Errorf("it ended with %d", code)
	}
	if n := event(t, cg.V2User, "memory.events", "oom_kill"); n != 0 {
		t.Errorf("%d processes were killed", n)
	}
}

// A sandbox does not swap, even where the host has swap: what it has beyond its limit would be another's memory and disk.
func TestV2SwapIsNotForSandboxes(t *testing.T) {
	tree := openV2(t)
	addSwap(t, 256)
	_, cg := create(t, tree, limits) // 64 MiB
	if code := ended(t, run(t, cg, eat(72))); code == 3 {
		t.Error("72 MiB fit into 64")
	}
	if n, err := tree.OOMKills(cg); err != nil || n == 0 {
		t.Errorf("%d kills, %v", n, err)
	}
	if peak := control(t, cg.V2User, "memory.swap.current"); peak != "0" {
		t.Errorf("%s bytes are in swap", peak)
	}
	// It is the limit that did it: without, the same fits.
	set(t, cg.V2User, "memory.swap.max", "max")
	if code := ended(t, run(t, cg, eat(72))); code != 3 {
		t.Errorf("with swap it ended with %d", code)
	}
}

// addSwap gives this host swap until the test ends.
func addSwap(t *testing.T, mib int) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-swap-")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "swap")
	shell := func(script string) {
		t.Helper()
		if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", script, err, out)
		}
	}
	t.Cleanup(func() { shell("swapoff " + file + "; rm -r " + dir) })
	shell(fmt.Sprintf("umask 077; fallocate -l %dM %s; mkswap -q %s; swapon %s", mib, file, file, file))
}

func TestV2ReclaimGivesCacheBack(t *testing.T) {
	tree := openV2(t)
	id, cg := create(t, tree, limits)
	file := filepath.Join(t.TempDir(), "file")
	if code := ended(t, run(t, cg, "head -c 24M /dev/urandom >"+file+"; sync "+file+"; cat "+file+" >/dev/null")); code != 0 {
		t.Fatalf("it ended with %d", code)
	}
	memory := func() int64 {
		n, err := strconv.ParseInt(control(t, cg.V2User, "memory.current"), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := memory()
	if before < 16<<20 {
		t.Fatalf("the group has %d bytes after reading 24 MiB", before)
	}
	set(t, cg.V2User, "memory.reclaim", "12M")
	if after := memory(); after > before-8<<20 {
		t.Errorf("%d bytes before and %d after 12 MiB were asked back", before, after)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

// The platform sets no limit of a disk's speed; whoever runs it may. What a sandbox writes is charged to it, through the page
// cache as well, which v1 cannot do.
func TestV2IOMaxSlowsWriteback(t *testing.T) {
	tree := openV2(t)
	_, cg := create(t, tree, limits)
	group := filepath.Dir(cg.V2User)
	set(t, filepath.Dir(tree.v2), subtreeControl, "+io")
	set(t, tree.v2, subtreeControl, "+io")
	set(t, group, subtreeControl, "+io")
	dir := t.TempDir()
	const rate, size = 4 << 20, 12 << 20
	set(t, cg.V2User, "io.max", fmt.Sprintf("%s wbps=%d", deviceOf(t, dir), rate))
	start := time.Now()
	script := fmt.Sprintf("head -c %d /dev/zero >%s/file; sync %s/file", size, dir, dir)
	if code := ended(t, run(t, cg, script)); code != 0 {
		t.Fatalf("it ended with %d", code)
	}
	// A lower bound: a slow machine only adds to it.
	if took, least := time.Since(start), time.Duration(float64(size-rate)/rate*float64(time.Second)); took < least {
		t.Errorf("%d bytes were on the disk after %s, with %d a second", size, took, rate)
	}
}

// deviceOf is the number of the block device below a directory.
func deviceOf(t *testing.T, dir string) string {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d:%d", st.Dev>>8&0xfff, st.Dev&0xff)
}

// Freezing stops what runs and what is born there; killing does not wait for a thaw.
func TestV2FreezeStopsAndKillEndsTheFrozen(t *testing.T) {
	tree := openV2(t)
	id, cg := create(t, tree, limits)
	cmd := run(t, cg, "while :; do :; done")
	used := func() int64 { return event(t, cg.V2User, "cpu.stat", "usage_usec") }
	waitFor(t, func() bool { return used() > 0 })
	set(t, cg.V2User, "cgroup.freeze", "1")
	waitFor(t, func() bool { return event(t, cg.V2User, "cgroup.events", "frozen") == 1 })
	frozen := used()
	time.Sleep(50 * time.Millisecond) // what must not happen has time to
	if now := used(); now != frozen {
		t.Errorf("%d us were used while frozen", now-frozen)
	}
	if err := tree.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if code := ended(t, cmd); code != 128+9 {
		t.Errorf("it ended with %d", code)
	}
}

// The reason is told apart: a process that its sandbox's limit killed, and one that somebody killed.
func TestV2OOMIsCountedOnlyForMemory(t *testing.T) {
	tree := openV2(t)
	_, cg := create(t, tree, limits)
	if code := ended(t, run(t, cg, "kill -9 $$")); code != 128+9 {
		t.Fatalf("it ended with %d", code)
	}
	if n, err := tree.OOMKills(cg); err != nil || n != 0 {
		t.Errorf("%d kills for memory, %v", n, err)
	}
	ended(t, run(t, cg, eat(96)))
	if n, err := tree.OOMKills(cg); err != nil || n == 0 {
		t.Errorf("%d kills for memory, %v", n, err)
	}
}
