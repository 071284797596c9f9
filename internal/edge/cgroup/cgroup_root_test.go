//go:build rootful

package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/internal/linux/hoststate"
	"dsec/sandbox"
)

const edge = sandbox.EdgeCode("cgttt")

var limits = sandbox.Limits{Memory: 64 << 20, CPU: 0.5, PIDs: 16}

// churnEnv makes the test binary a process that makes and removes groups until it is killed.
const churnEnv = "DSEC_TEST_CGROUP_CHURN"

func TestMain(m *testing.M) {
	if name := os.Getenv(churnEnv); name != "" {
		churn(name)
	}
	os.Exit(m.Run())
}

func churn(name string) {
	t, err := Open(context.Background(), Options{Name: name})
	for fmt.Println("open"); err == nil; {
		id := sandbox.NewID(edge)
		if _, err = t.Create(context.Background(), id, limits); err == nil && rand.IntN(4) > 0 {
			err = t.Remove(context.Background(), id)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func uniqueName() string { return "dsec-test-" + string(sandbox.NewEdgeCode()) }

func open(t testing.TB, name string) *Tree {
	t.Helper()
	tree, err := Open(t.Context(), Options{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := tree.Close(ctx); err != nil {
			t.Error(err)
		}
		for _, base := range tree.bases() {
			if _, err := os.Stat(base); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left", base)
			}
		}
	})
	return tree
}

func create(t testing.TB, tree *Tree, l sandbox.Limits) (sandbox.ID, driver.Cgroups) {
	t.Helper()
	id := sandbox.NewID(edge)
	cg, err := tree.Create(t.Context(), id, l)
	if err != nil {
		t.Fatal(err)
	}
	return id, cg
}

// run starts a shell script inside the user part.
func run(t testing.TB, cg driver.Cgroups, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", "read go; "+script)
	gate, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = &bytes.Buffer{}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range cg.V1User {
		join(t, dir, cmd.Process.Pid)
	}
	join(t, cg.V2User, cmd.Process.Pid)
	if _, err := io.WriteString(gate, "go\n"); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func join(t testing.TB, dir string, pid int) {
	t.Helper()
	if err := linux.WriteControl(filepath.Join(dir, "cgroup.procs"), fmt.Sprint(pid)); err != nil {
		t.Fatal(err)
	}
}

func control(t testing.TB, dir, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// partOf is the user part's group of a controller.
func partOf(tree *Tree, cg driver.Cgroups, controller string) string {
	if tree.Mode() == V2 {
		return cg.V2User
	}
	return cg.V1User[controller]
}

// all is the group of all sandboxes of a controller.
func all(tree *Tree, controller string) string {
	if tree.Mode() == V2 {
		return tree.v2
	}
	return tree.v1[controller]
}

func leftovers(t testing.TB, tree *Tree, id sandbox.ID) []string {
	t.Helper()
	var left []string
	for _, base := range tree.bases() {
		found, err := filepath.Glob(filepath.Join(base, string(id)+"*"))
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	return left
}

func TestLimitsAreInTheKernel(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	type want struct{ dir, file, want string }
	wants := []want{
		{cg.V2User, "cgroup.max.depth", "1"},
		{cg.V2User, "cgroup.max.descendants", "272"},
	}
	if tree.Mode() == V2 {
		wants = append(wants,
			want{cg.V2User, "memory.max", "67108864"},
			want{cg.V2User, "memory.swap.max", "0"},
			want{cg.V2User, "memory.oom.group", "0"},
			want{cg.V2Aether, "memory.max", fmt.Sprint(AetherMemory)},
			want{cg.V2Aether, "memory.swap.max", "0"},
			want{filepath.Dir(cg.V2User), "cpu.weight", "50"},
			want{cg.V2User, "cpu.max", "50000 100000"},
			want{cg.V2User, "cpu.weight", "100"},
			want{cg.V2Aether, "cpu.weight", aetherWeight},
			want{cg.V2Aether, "cpu.max", "max 100000"},
			want{cg.V2User, "pids.max", "16"},
			want{cg.V2Aether, "pids.max", "512"},
		)
	} else {
		wants = append(wants,
			want{cg.V1User["memory"], "memory.limit_in_bytes", "67108864"},
			want{cg.V1Aether["memory"], "memory.limit_in_bytes", fmt.Sprint(AetherMemory)},
			want{filepath.Dir(cg.V1User["cpu"]), "cpu.shares", "512"},
			want{cg.V1User["cpu"], "cpu.cfs_quota_us", "50000"},
			want{cg.V1Aether["cpu"], "cpu.shares", aetherShares},
			want{cg.V1Aether["cpu"], "cpu.cfs_quota_us", "-1"},
			want{cg.V1User["pids"], "pids.max", "17"},
			want{cg.V1Aether["pids"], "pids.max", "512"},
		)
	}
	for _, c := range wants {
		if got := control(t, c.dir, c.file); got != c.want {
			t.Errorf("%s/%s is %s, want %s", c.dir, c.file, got, c.want)
		}
	}
	if len(cg.CPUs) != 1 {
		t.Errorf("CPU mask %v for half a core", cg.CPUs)
	}
	for _, dir := range []string{cg.V2User, cg.V2Aether} {
		if m, err := linux.FSMagic(dir); err != nil || m != linux.MagicCgroup2 {
			t.Errorf("%s is on file system %x, %v", dir, m, err)
		}
	}
	for range 2 {
		if err := tree.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if left := leftovers(t, tree, id); len(left) > 0 {
		t.Errorf("left after Remove: %v", left)
	}
}

func TestOutOfMemoryIsCountedAndHitsTheUserPartAlone(t *testing.T) {
	tree := open(t, uniqueName())
	_, cg := create(t, tree, limits)
	before, err := tree.OOMKills(cg)
	if err != nil || before != 0 {
		t.Fatalf("%d kills before anything ran, %v", before, err)
	}
	cmd := run(t, cg, "head -c 300m /dev/zero | tail; exit 3")
	if err := cmd.Wait(); err == nil {
		t.Error("a command that needs 300 MiB succeeded within 64")
	}
	after, err := tree.OOMKills(cg)
	if err != nil || after < 1 {
		t.Errorf("%d kills counted, %v", after, err)
	}
	if err := tree.Remove(t.Context(), sandbox.ID(filepath.Base(filepath.Dir(cg.V2User)))); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.OOMKills(cg); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("OOMKills of removed groups: %v", err)
	}
}

func TestPidsAreLimited(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	cmd := run(t, cg, "i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done; wait")
	cmd.Stderr = io.Discard
	waitFor(t, func() bool {
		events := control(t, partOf(tree, cg, "pids"), "pids.events")
		return strings.HasPrefix(events, "max ") && events != "max 0"
	})
	pids, err := tree.Pids(id)
	if err != nil || len(pids) == 0 || len(pids) > int(limits.PIDs)+1 {
		t.Errorf("%d processes, %v; the limit is %d", len(pids), err, limits.PIDs)
	}
	if err := tree.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

// Otherwise a few that fill their limits leave nobody a thread, and the Go programs around them end.
func TestAllTogetherAreLimited(t *testing.T) {
	tree := open(t, uniqueName())
	host, err := linux.MaxTasks()
	if err != nil {
		t.Fatal(err)
	}
	pids, memoryFile := all(tree, "pids"), "memory.limit_in_bytes"
	if tree.Mode() == V2 {
		memoryFile = "memory.max"
	}
	if got := control(t, pids, "pids.max"); got != fmt.Sprint(maxTasks(host)) {
		t.Errorf("all sandboxes may have %s of the host's %d threads", got, host)
	}
	memory, err := linux.TotalMemory()
	if err != nil {
		t.Fatal(err)
	}
	const page = 4096
	if got := control(t, all(tree, "memory"), memoryFile); got != fmt.Sprint(maxMemory(memory)/page*page) {
		t.Errorf("all sandboxes may have %s of the host's %d bytes", got, memory)
	}
	// The kernel counts all of them there: two that each stay within their own limit meet that of both.
	if err := linux.WriteControl(filepath.Join(pids, "pids.max"), "12"); err != nil {
		t.Fatal(err)
	}
	const eight = "for i in 1 2 3 4 5 6 7 8; do sleep 1000 >/dev/null & done; "
	first, cg := create(t, tree, limits)
	waiting := run(t, cg, eight+"wait")
	defer waiting.Wait()
	defer tree.Kill(context.Background(), first)
	waitFor(t, func() bool { all, err := tree.Pids(first); return err == nil && len(all) == 9 })
	second, cg := create(t, tree, limits)
	defer tree.Kill(context.Background(), second)
	if err := run(t, cg, eight).Wait(); err == nil {
		t.Error("two sandboxes have more processes than all may have")
	}
}

func TestTheDelegatedGroupIsFlatAndBounded(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	if err := os.Mkdir(filepath.Join(cg.V2User, "1"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(cg.V2User, "1", "deeper"), 0o755); err == nil {
		t.Error("a group within a command's group")
	}
	made := 1
	for made < 10_000 && os.Mkdir(filepath.Join(cg.V2User, fmt.Sprint(made+1)), 0o755) == nil {
		made++
	}
	if made != int(limits.PIDs)+groupsAhead {
		t.Errorf("%d groups could be made", made)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestKillTakesSessionsChildGroupsAndFrozenOnes(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	deep := filepath.Join(cg.V2User, "1")
	if err := os.Mkdir(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := run(t, cg, "setsid sh -c 'trap \"\" TERM HUP; sleep 100 & sleep 100' & wait")
	waitFor(t, func() bool { p, _ := tree.Pids(id); return len(p) >= 4 })
	pids, err := tree.Pids(id)
	if err != nil {
		t.Fatal(err)
	}
	join(t, deep, pids[len(pids)-1])
	if err := linux.WriteControl(filepath.Join(cg.V2User, "cgroup.freeze"), "1"); err != nil {
		t.Fatal(err)
	}
	go cmd.Wait()
	if err := tree.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if left, err := tree.Pids(id); err != nil || len(left) != 0 {
		t.Errorf("left after Kill: %v, %v", left, err)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := tree.Kill(t.Context(), id); err != nil {
		t.Errorf("Kill without groups: %v", err)
	}
}

func TestRemoveKillsWhatIsStillRunning(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	cmd := run(t, cg, "sleep 100")
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	<-done
	if left := leftovers(t, tree, id); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestRemoveKillsAProcessThatIsInAV1GroupAlone(t *testing.T) {
	tree := open(t, uniqueName())
	if tree.Mode() != Hybrid {
		t.Skip("there are no v1 groups on this host")
	}
	id, cg := create(t, tree, limits)
	cmd := exec.Command("/bin/sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	join(t, cg.V1User["memory"], cmd.Process.Pid)
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	<-done
}

func TestCreateEndsEarlyWhenTheContextDoes(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	// A thread of this process cannot be killed: the group stays busy, and Remove must give up with ctx.
	if err := os.MkdirAll(filepath.Join(cg.V2User, "1"), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	cmd := run(t, cg, "sleep 100")
	defer func() { _ = cmd.Wait() }()
	err := tree.Remove(ctx, id)
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Remove with an ended context: %v", err)
	}
	if err := tree.Remove(t.Context(), id); err != nil {
		t.Errorf("a later Remove does not go on: %v", err)
	}
}

func TestEveryHalfMadeSandboxIsSwept(t *testing.T) {
	name := uniqueName()
	tree := open(t, name)
	whole := len(tree.plan(sandbox.NewID(edge), limits).groups)
	kept, _ := create(t, tree, limits)
	want := make(map[sandbox.ID]bool)
	for n := range whole {
		id := sandbox.NewID(edge)
		p := tree.plan(id, limits)
		p.groups = p.groups[:n+1] // what a process killed after group n leaves
		if err := p.make(); err != nil {
			t.Fatal(err)
		}
		want[id] = true
	}
	tree = open(t, name) // the next edge
	gone, err := tree.Sweep(t.Context(), map[sandbox.ID]bool{kept: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(gone) != len(want) {
		t.Errorf("swept %d, want %d", len(gone), len(want))
	}
	for _, id := range gone {
		if left := leftovers(t, tree, id); !want[id] || len(left) > 0 {
			t.Errorf("%s: expected %v, left %v", id, want[id], left)
		}
	}
	if len(leftovers(t, tree, kept)) == 0 {
		t.Error("Sweep removed a sandbox to be kept")
	}
}

func TestCreateAfterAHalfMadeOneStartsAfresh(t *testing.T) {
	tree := open(t, uniqueName())
	id := sandbox.NewID(edge)
	p := tree.plan(id, limits)
	p.groups = p.groups[:len(p.groups)/2]
	if err := p.make(); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.Create(t.Context(), id, limits); err != nil {
		t.Fatal(err)
	}
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	tree := open(t, uniqueName())
	id := sandbox.NewID(edge)
	if _, err := tree.Create(t.Context(), id, sandbox.Limits{Memory: -5, CPU: 1, PIDs: 10}); err == nil {
		t.Fatal("a memory limit of -5 was accepted")
	}
	if left := leftovers(t, tree, id); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := tree.Create(t.Context(), "../x", limits); sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("a path as id: %v", err)
	}
}

func TestKilledProcessLeavesNothingThatSweepMisses(t *testing.T) {
	name := uniqueName()
	for range 5 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), churnEnv+"="+name)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = out.Read(make([]byte, 1)) // it has begun, however slow this machine is
		time.Sleep(time.Duration(30+rand.IntN(40)) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("the child ended by itself: %v %s", err, stderr.String())
		}
	}
	tree := open(t, name)
	gone, err := tree.Sweep(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(gone) == 0 {
		t.Error("nothing was swept: the children did not get to work")
	}
	if ids, err := tree.list(); err != nil || len(ids) > 0 {
		t.Errorf("left after Sweep: %v, %v", ids, err)
	}
}

func TestConcurrentSandboxes(t *testing.T) {
	tree := open(t, uniqueName())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				id := sandbox.NewID(edge)
				if _, err := tree.Create(t.Context(), id, limits); err != nil {
					t.Error(err)
				}
				if err := tree.Remove(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if ids, err := tree.list(); err != nil || len(ids) > 0 {
		t.Errorf("left: %v, %v", ids, err)
	}
}

func TestCloseLeavesTheHostAsBefore(t *testing.T) {
	name := uniqueName()
	before, err := hoststate.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	tree, err := Open(t.Context(), Options{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	create(t, tree, limits)
	for range 2 {
		if err := tree.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	after, err := hoststate.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	mine := func(i hoststate.Item) bool { return i.Kind == hoststate.FD || strings.Contains(i.Name, name) }
	if diff := hoststate.Diff(before.Only(mine), after.Only(mine)); len(diff) > 0 {
		t.Error(strings.Join(diff, "\n"))
	}
}

func waitFor(t testing.TB, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen within a minute")
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func BenchmarkCreateRemove(b *testing.B) {
	tree := open(b, uniqueName())
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	for b.Loop() {
		id, _ := create(b, tree, limits)
		if err := tree.Remove(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	cpu := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	b.ReportMetric(float64(cpu)/1e3/float64(b.N), "cpu-µs/op")
}

func BenchmarkOOMKills(b *testing.B) {
	tree := open(b, uniqueName())
	_, cg := create(b, tree, limits)
	for b.Loop() {
		if _, err := tree.OOMKills(cg); err != nil {
			b.Fatal(err)
		}
	}
}
