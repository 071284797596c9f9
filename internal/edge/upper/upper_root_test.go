//go:build rootful

package upper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux"
	"dsec/internal/linux/hoststate"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

const (
	edge = sandbox.EdgeCode("upttt")
	mib  = 1 << 20
	size = 1 << 30
)

// churnEnv makes the test binary a process that opens the pool in that directory, and makes and removes until it is killed.
const (
	churnEnv = "DSEC_TEST_UPPER_CHURN"
	kindEnv  = "DSEC_TEST_UPPER_KIND"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(churnEnv); dir != "" {
		churn(dir)
	}
	os.Exit(m.Run())
}

func churn(dir string) {
	p, err := Open(context.Background(), Options{DataDir: dir, Bytes: size, Kind: os.Getenv(kindEnv)})
	for err == nil {
		id := sandbox.NewID(edge)
		if _, err = p.Create(context.Background(), id, mib); err == nil && rand.IntN(4) > 0 {
			err = p.Remove(context.Background(), id)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// open opens a pool; at the end of the test it is closed and nothing may be left.
func open(t testing.TB, dir, kind string) *Pool {
	t.Helper()
	p, err := Open(t.Context(), Options{DataDir: dir, Bytes: size, Kind: kind})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func closePool(t testing.TB, p *Pool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := p.Close(ctx); err != nil {
		t.Fatal(err)
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := mountinfo.At(mounts, p.dir); ok {
		t.Errorf("left mounted: %+v", m)
	}
	if done, err := p.detached(); err != nil || !done {
		t.Errorf("the loop device is left, %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(p.dir)); err != nil || len(left) > 0 {
		t.Errorf("left in the data directory: %v, %v", left, err)
	}
}

func create(t testing.TB, p *Pool, bytes int64) (sandbox.ID, string) {
	t.Helper()
	id := sandbox.NewID(edge)
	u, err := p.Create(t.Context(), id, bytes)
	if err != nil {
		t.Fatal(err)
	}
	return id, u.Dir
}

func TestDirectoriesAreAsPromised(t *testing.T) { eachKind(t, testDirectoriesAreAsPromised) }

func testDirectoriesAreAsPromised(t *testing.T, kind string) {
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	id := sandbox.NewID(edge)
	u, err := p.Create(t.Context(), id, 4*mib)
	if err != nil {
		t.Fatal(err)
	}
	if u.Kind != kind || p.Kind() != kind || u.Bytes != 4*mib || u.Dir != p.path(id) {
		t.Errorf("upper %+v", u)
	}
	for _, name := range []string{"u", "w", "etc"} {
		st, err := os.Stat(filepath.Join(u.Dir, name))
		if err != nil || st.Mode() != fs.ModeDir|0o755 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	if st, err := os.Stat(p.dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("others can enter the pool: %v, %v", st, err)
	}
	if err := os.WriteFile(filepath.Join(u.Dir, "u", "old"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if u, err = p.Create(t.Context(), id, 4*mib); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(u.Dir, "u", "old")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a second Create kept what was in the first: %v", err)
	}
	for _, bad := range []sandbox.ID{"", "../x", "sabc"} {
		if _, err := p.Create(t.Context(), bad, 4*mib); sandbox.ClassOf(err) != sandbox.InvalidArgument {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := p.Create(t.Context(), sandbox.NewID(edge), 0); sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("no limit: %v", err)
	}
}

func TestRestartFindsThePoolAndSweepsTheRest(t *testing.T) {
	eachKind(t, testRestartFindsThePoolAndSweepsTheRest)
}

func testRestartFindsThePoolAndSweepsTheRest(t *testing.T, kind string) {
	dir := t.TempDir()
	p := open(t, dir, kind)
	live, liveDir := create(t, p, 16*mib)
	dead, _ := create(t, p, 16*mib)
	if err := os.WriteFile(filepath.Join(liveDir, "u", "x"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.Detach(); err != nil {
		t.Fatal(err)
	}

	p = open(t, dir, kind)
	defer closePool(t, p)
	gone, err := p.Sweep(t.Context(), map[sandbox.ID]bool{live: true})
	if err != nil || len(gone) != 1 || gone[0] != dead {
		t.Errorf("Sweep gives %v, %v; want %s", gone, err, dead)
	}
	if b, err := os.ReadFile(filepath.Join(liveDir, "u", "x")); string(b) != "kept" {
		t.Errorf("the live sandbox's file: %q, %v", b, err)
	}
	if _, limit, err := p.Usage(live); err != nil || limit != 16*mib {
		t.Errorf("limit after the restart %d, %v", limit, err)
	}
}

func TestWithoutAMountThePoolIsMadeAnew(t *testing.T) {
	eachKind(t, testWithoutAMountThePoolIsMadeAnew)
}

func testWithoutAMountThePoolIsMadeAnew(t *testing.T, kind string) {
	dir := t.TempDir()
	p := open(t, dir, kind)
	create(t, p, 16*mib)
	if err := p.Detach(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Unmount(p.dir, 0); err != nil { // a reset of the machine, as far as the pool can see
		t.Fatal(err)
	}
	p = open(t, dir, kind)
	defer closePool(t, p)
	if ids, err := p.list(); err != nil || len(ids) > 0 {
		t.Errorf("the new pool has %v, %v", ids, err)
	}
}

func TestKilledProcessLeavesAPoolThatOpens(t *testing.T) {
	eachKind(t, testKilledProcessLeavesAPoolThatOpens)
}

func testKilledProcessLeavesAPoolThatOpens(t *testing.T, kind string) {
	dir := t.TempDir()
	for round := range 6 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), churnEnv+"="+dir, kindEnv+"="+kind)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// The first rounds hit the making of the pool, later ones the churn.
		time.Sleep(time.Duration(5+round*25+rand.IntN(20)) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("the child ended by itself: %v %s", err, stderr.String())
		}
	}
	p := open(t, dir, kind)
	defer closePool(t, p)
	if _, err := p.Sweep(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if ids, err := p.list(); err != nil || len(ids) > 0 {
		t.Errorf("left after Sweep: %v, %v", ids, err)
	}
}

func TestConcurrentSandboxesKeepTheirLimits(t *testing.T) {
	eachKind(t, testConcurrentSandboxesKeepTheirLimits)
}

func testConcurrentSandboxesKeepTheirLimits(t *testing.T, kind string) {
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 20 {
				id := sandbox.NewID(edge)
				limit := int64(i+1) * 4 * mib
				if _, err := p.Create(t.Context(), id, limit); err != nil {
					t.Error(err)
					return
				}
				p.keep.tidy()
				if _, got, err := p.Usage(id); err != nil || got != limit {
					t.Errorf("limit %d, %v; want %d", got, err, limit)
				}
				if err := p.Remove(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestCloseReportsACopyOfTheMountElsewhere(t *testing.T) {
	eachKind(t, testCloseReportsACopyOfTheMountElsewhere)
}

func testCloseReportsACopyOfTheMountElsewhere(t *testing.T, kind string) {
	p := open(t, t.TempDir(), kind)
	// Any program that gets a private mount namespace while the pool is mounted has such a copy.
	copied := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 100")
	out, err := copied.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := copied.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(p.dir)); err != nil || len(left) > 0 {
		t.Errorf("left in the data directory: %v, %v", left, err)
	}
	_ = copied.Process.Kill()
	_ = copied.Wait()
	waitFor(t, func() bool {
		devices, err := linux.LoopDevices()
		if err != nil {
			t.Fatal(err)
		}
		for _, backing := range devices {
			if strings.HasPrefix(backing, p.file) { // "… (deleted)"
				return false
			}
		}
		return true
	})
}

func TestAForeignMountIsRefused(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, mountPoint)
	if err := os.Mkdir(target, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", target, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(target, 0)
	if _, err := Open(t.Context(), Options{DataDir: dir}); sandbox.ReasonOf(err) != "uppers_taken" {
		t.Errorf("error %v", err)
	}
}

func TestAFullPoolIsATypedErrorAndRecovers(t *testing.T) {
	eachKind(t, testAFullPoolIsATypedErrorAndRecovers)
}

func testAFullPoolIsATypedErrorAndRecovers(t *testing.T, kind string) {
	t.Parallel() // it waits for the kernel, which turns free data space into metadata space after some 10 s
	p, err := Open(t.Context(), Options{DataDir: t.TempDir(), Bytes: minPool, Kind: kind})
	if err != nil {
		t.Fatal(err)
	}
	defer closePool(t, p)
	full, dir := create(t, p, 16<<30)
	if _, refused := fill(t, filepath.Join(dir, "u", "data")); !errors.Is(refused, syscall.ENOSPC) {
		t.Errorf("the pool is full, but: %v", refused)
	}
	var made []sandbox.ID
	for i := 0; ; i++ { // directories are metadata, which has some room of its own
		id := sandbox.NewID(edge)
		if _, err = p.Create(t.Context(), id, mib); err != nil {
			break
		}
		if made = append(made, id); i == 100_000 {
			t.Fatal("100,000 directories fit into a full pool")
		}
	}
	if sandbox.ClassOf(err) != sandbox.ResourceExhausted || sandbox.ReasonOf(err) != "node_disk_full" {
		t.Errorf("error %v", err)
	}
	for _, id := range append(made, full) {
		if err := p.Remove(t.Context(), id); err != nil {
			t.Fatalf("nothing can be removed from a full pool: %v", err)
		}
	}
	waitFor(t, func() bool {
		settle(t, p)
		_, err := p.Create(t.Context(), full, mib)
		return err == nil
	})
}

func TestCloseLeavesTheHostAsBefore(t *testing.T) { eachKind(t, testCloseLeavesTheHostAsBefore) }

func testCloseLeavesTheHostAsBefore(t *testing.T, kind string) {
	dir := t.TempDir()
	before, err := hoststate.Snapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := open(t, dir, kind)
	create(t, p, 16*mib)
	closePool(t, p)
	after, err := hoststate.Snapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	mine := func(i hoststate.Item) bool { return i.Kind == hoststate.FD || strings.Contains(i.Name, dir) }
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
		time.Sleep(20 * time.Millisecond)
	}
}

func BenchmarkCreateRemove(b *testing.B) {
	p := open(b, b.TempDir(), kinds()[0])
	defer closePool(b, p)
	for b.Loop() {
		id, _ := create(b, p, 16*mib)
		if err := p.Remove(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
}
