//go:build rootful

package launchbench

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

const minbase = "/var/tmp/dsec-test/minbase"

func options(t *testing.T, ops int) Options {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-launchbench-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	o := Options{Dir: filepath.Join(dir, "disk"), RunDir: filepath.Join(dir, "run"), Stage: filepath.Join(dir, "stage"), Ops: ops, Workers: 8, Lowers: []string{minbase}}
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Mkdir(o.Dir, 0o755))
	must(t, os.Mkdir(o.RunDir, 0o755))
	must(t, syscall.Mount("bench", o.RunDir, "tmpfs", 0, "mode=755"))
	t.Cleanup(func() { must(t, syscall.Unmount(o.RunDir, syscall.MNT_DETACH)) })
	must(t, syscall.Mount("", o.RunDir, "", syscall.MS_PRIVATE, ""))
	if _, err := os.Stat(minbase); err != nil {
		t.Fatalf("%v: run the tests of the container driver first, they make it", err)
	}
	out, err := exec.Command("musl-gcc", "-static", "-Os", "-std=gnu11", "-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu",
		"-o", o.Stage, "../stage/stage.c").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return o
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Both sides run, and the driver is faster. How much is for the benchmark to say.
func TestRootBothLaunch(t *testing.T) {
	ctx := context.Background()
	ours, err := Driver(ctx, options(t, 400))
	must(t, err)
	theirs, err := Crun(ctx, options(t, 200))
	must(t, err)
	t.Logf("driver %+v", ours)
	t.Logf("crun %+v", theirs)
	if ours.PerSecond <= theirs.PerSecond {
		t.Errorf("%.0f launches a second, crun %.0f", ours.PerSecond, theirs.PerSecond)
	}
}
