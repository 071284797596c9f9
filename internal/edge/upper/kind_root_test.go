//go:build rootful

package upper

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// kinds are those that this host must be able to make, by what its kernel says without being tried.
func kinds() []string {
	var all []string
	if _, err := os.Stat("/sys/fs/btrfs/features/simple_quota"); err == nil {
		all = append(all, KindSimple)
	}
	if exec.Command("modprobe", "--dry-run", "--quiet", "quota_v2").Run() == nil {
		all = append(all, KindProject)
	}
	return append(all, KindQgroup)
}

// eachKind runs a test with every kind of quota that this host must have: the same promises hold for all.
func eachKind(t *testing.T, test func(t *testing.T, kind string)) {
	for _, kind := range kinds() {
		t.Run(kind, func(t *testing.T) { test(t, kind) })
	}
}

// asSandbox runs f without the capability that lets root of the host exceed a quota of ext4: nobody inside has it, nor does an
// overlay use it. f must not leave its thread.
func asSandbox(t testing.TB, f func()) {
	t.Helper()
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var before [2]unix.CapUserData
	if err := unix.Capget(&header, &before[0]); err != nil {
		t.Fatal(err)
	}
	without := before
	without[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	if err := unix.Capset(&header, &without[0]); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if unix.Capset(&header, &before[0]) == nil {
			runtime.UnlockOSThread()
		}
	}()
	f()
}

func syncDisk(p *Pool) {
	if p.kind == KindProject {
		const syncfs = 306
		_, _, _ = syscall.Syscall(syncfs, p.root.Fd(), 0, 0)
		return
	}
	_ = linux.BtrfsSync(p.root)
}

// settle makes the disk and the accounts what they will be.
func settle(t testing.TB, p *Pool) {
	t.Helper()
	syncDisk(p)
	if p.readOnly() {
		t.Fatal("the pool is lost")
	}
}

// What a new pool is of is the first kind that the host has, and it says why of no better one.
func TestTheBestKindIsChosen(t *testing.T) {
	p := open(t, t.TempDir(), "")
	defer closePool(t, p)
	if want := kinds()[0]; p.Kind() != want || (p.Refused() == nil) != (want == Kinds()[0]) {
		t.Errorf("%s instead of %s; of no better kind because of %v", p.Kind(), want, p.Refused())
	}
	if _, err := Open(t.Context(), Options{DataDir: t.TempDir(), Bytes: size, Kind: "abacus"}); sandbox.ClassOf(err) != sandbox.Unsupported || !strings.Contains(err.Error(), "abacus") {
		t.Errorf("error %v", err)
	}
}

// Root inside owns its files, and so may try to take them out of its quota.
func TestProjectOfAFileCannotBeChangedFromInside(t *testing.T) { eachKind(t, testProjectOfAFile) }

func testProjectOfAFile(t *testing.T, kind string) {
	if kind != KindProject {
		return
	}
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	_, dir := create(t, p, 16*mib)
	sub := filepath.Join(dir, "u", "a")
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(sub)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	project, err := linux.ProjectOf(f)
	if err != nil || project < firstProject {
		t.Fatalf("project %d, %v", project, err)
	}
	if _, err := os.Stat(filepath.Join(p.dir, trash)); err != nil {
		t.Error(err)
	}
	if err := os.Rename(sub, filepath.Join(p.dir, "elsewhere")); err == nil {
		t.Log("root of the host may move it out") // it does so with what is removed
	}
	if err := os.Link(filepath.Join(dir, "u"), filepath.Join(p.dir, "link")); !errors.Is(err, os.ErrPermission) {
		t.Errorf("linked a directory: %v", err)
	}
}

func TestInodesAreLimitedWhereTheyAreCounted(t *testing.T) { eachKind(t, testInodes) }

func testInodes(t *testing.T, kind string) {
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	c, ok := p.Counted()
	if ok != (kind == KindProject) {
		t.Fatalf("counted: %v", ok)
	}
	if !ok {
		return
	}
	const limit = 300
	u, err := c.CreateCounted(t.Context(), sandbox.NewID(edge), 64*mib, limit)
	if err != nil {
		t.Fatal(err)
	}
	var refused error
	n := 0
	asSandbox(t, func() {
		for ; n < 2*limit && refused == nil; n++ {
			refused = os.WriteFile(filepath.Join(u.Dir, "u", strconv.Itoa(n)), nil, 0o600)
		}
	})
	if !errors.Is(refused, syscall.EDQUOT) || n > limit || n < limit-8 {
		t.Errorf("after %d files: %v", n, refused)
	}
}
