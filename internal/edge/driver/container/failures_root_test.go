//go:build rootful

package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/driver"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

// A footprint is what the driver could leave behind.
type footprint struct {
	fds, mounts, children int
	files                 []string
}

func (b *bench) footprint() footprint {
	b.t.Helper()
	var f footprint
	fds, err := os.ReadDir("/proc/self/fd")
	must(b.t, err)
	f.fds = len(fds)
	mounts, err := mountinfo.Self()
	must(b.t, err)
	for _, m := range mounts { // others on this host mount and unmount meanwhile
		if strings.HasPrefix(m.Point, b.run) {
			f.mounts++
		}
	}
	for _, dir := range []string{"g", "c"} {
		entries, err := os.ReadDir(filepath.Join(b.run, dir))
		must(b.t, err)
		for _, e := range entries {
			f.files = append(f.files, e.Name())
		}
	}
	f.children = children(b.t)
	return f
}

// children counts this process's children, zombies too.
func children(t testing.TB) int {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	must(t, err)
	n := 0
	for _, path := range tasks {
		data, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
		n += len(strings.Fields(string(data)))
	}
	return n
}

// settle waits until namespaces that are made ahead are made.
func (b *bench) settle() {
	b.t.Helper()
	for range 6000 {
		b.driver.ranges.mu.Lock()
		done := len(b.driver.ranges.ready) >= readyRanges/2 && len(b.driver.ranges.making) == 0
		b.driver.ranges.mu.Unlock()
		if done && children(b.t) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.t.Fatal("user namespaces are not made ahead")
}

func (b *bench) expectSame(before footprint) {
	b.t.Helper()
	after := b.footprint()
	if after.fds != before.fds || after.children != before.children || !slices.Equal(after.files, before.files) {
		b.t.Errorf("left behind: before %+v, after %+v", before, after)
	}
}

// Every step of stage can fail; the failure has the step's name, and nothing is left.
func TestRootStartFailsAtEachStep(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	b.settle()
	for i, name := range stepNames {
		spec := b.spec()
		before := b.footprint()
		b.driver.failStep = uint32(i + 1)
		h, err := b.driver.Create(ctx, spec)
		must(t, err)
		h, err = b.driver.Start(ctx, h)
		b.driver.failStep = 0
		var step *StepError
		if !errors.As(err, &step) || step.Step != name || !errors.Is(err, syscall.EIO) {
			t.Errorf("step %s: %v", name, err)
		}
		if got := sandbox.ReasonOf(err); got != "start_failed" {
			t.Errorf("step %s: reason %q", name, got)
		}
		if pids, err := b.tree.Pids(spec.ID); err != nil || len(pids) > 0 {
			t.Errorf("step %s: processes %v left, %v", name, pids, err)
		}
		b.expectSame(before)
		must(t, b.driver.Stop(ctx, h))
		must(t, b.driver.Destroy(ctx, h))
		b.cleanup(spec.ID)
	}
}

// Every thing that Create needs can be missing.
func TestRootCreateFailsAtEachThing(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	b.settle()
	things := map[string]func(*driver.Spec){
		"network":     func(s *driver.Spec) { s.Network.Namespace += "-no" },
		"sysfs":       func(s *driver.Spec) { s.Network.Sysfs += "-no" },
		"layer":       func(s *driver.Spec) { s.Rootfs.Lowers = []string{"/nonexistent"} },
		"upper":       func(s *driver.Spec) { s.Rootfs.Upper.Dir += "-no" },
		"upper's u":   func(s *driver.Spec) { must(t, os.Remove(filepath.Join(s.Rootfs.Upper.Dir, "u"))) },
		"upper's w":   func(s *driver.Spec) { must(t, os.Remove(filepath.Join(s.Rootfs.Upper.Dir, "w"))) },
		"upper's etc": func(s *driver.Spec) { must(t, os.Remove(filepath.Join(s.Rootfs.Upper.Dir, "etc"))) },
		"group":       func(s *driver.Spec) { s.Cgroups.V2Aether += "-no" },
		"user group":  func(s *driver.Spec) { s.Cgroups.V2User += "-no" },
		"key":         func(s *driver.Spec) { s.GuestKey = nil },
		"host name":   func(s *driver.Spec) { s.Hostname = strings.Repeat("x", 65) },
		"socket":      func(s *driver.Spec) { must(t, os.Mkdir(filepath.Join(b.run, "g", string(s.ID)), 0o700)) },
		"mapping":     func(s *driver.Spec) { must(t, os.Lchown(filepath.Join(s.Rootfs.Upper.Dir, "w"), 1<<20, 1<<20)) },
	}
	if b.tree.Mode() == cgroup.Hybrid {
		things["v1 group"] = func(s *driver.Spec) { s.Cgroups.V1User["pids"] += "-no" }
	}
	for name, spoil := range things {
		spec := b.spec()
		before := b.footprint()
		spoil(&spec)
		if name == "socket" { // what is in the way is the test's, and goes away with a rmdir
			if _, err := b.driver.Create(ctx, spec); err == nil {
				t.Errorf("%s: created", name)
			}
			must(t, os.Remove(filepath.Join(b.run, "g", string(spec.ID))))
			must(t, b.driver.Destroy(ctx, driver.Handle{ID: spec.ID}))
		} else if h, err := b.driver.Create(ctx, spec); err == nil {
			t.Errorf("%s: created", name)
			must(t, b.driver.Destroy(ctx, h))
		}
		b.expectSame(before)
		must(t, b.driver.Destroy(ctx, driver.Handle{ID: spec.ID}))
		b.cleanup(spec.ID)
	}
}

func TestRootThousandFailingStartsLeaveNothing(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	b.settle()
	spec := b.spec()
	defer b.cleanup(spec.ID)
	before := b.footprint()
	for i := range 1000 {
		b.driver.failStep = uint32(1 + i%len(stepNames))
		h, err := b.driver.Create(ctx, spec)
		must(t, err)
		if _, err := b.driver.Start(ctx, h); err == nil {
			t.Fatal("started")
		}
		must(t, os.RemoveAll(filepath.Join(spec.Rootfs.Upper.Dir, "w", "work", "incompat"))) // volatile refuses a used workdir
	}
	b.expectSame(before)
	if after := b.footprint(); after.mounts != before.mounts {
		t.Errorf("%d mounts before, %d after", before.mounts, after.mounts)
	}
}

// A program that cannot be executed is a failure of exec, not a sandbox that dies at once.
func TestRootAetherThatIsNoProgram(t *testing.T) {
	b := newBench(t)
	b.driver.Detach()
	bad := filepath.Join(b.dir, "bad")
	must(t, os.WriteFile(bad, []byte("no program"), 0o755))
	good := b.opts.Aether
	b.opts.Aether = bad
	b.open()
	ctx := context.Background()
	spec := b.spec()
	h, err := b.driver.Create(ctx, spec)
	must(t, err)
	_, err = b.driver.Start(ctx, h)
	var step *StepError
	if !errors.As(err, &step) || step.Step != "exec" || !errors.Is(err, syscall.ENOEXEC) {
		t.Errorf("start: %v", err)
	}
	b.cleanup(spec.ID)
	b.opts.Aether = good
	b.reopen()
}

// An image whose /proc is a link could lead the mount elsewhere.
func TestRootImageWithLinksForMountPoints(t *testing.T) {
	b := newBench(t)
	for _, name := range []string{"proc", "sys", "dev"} {
		layer := tempDir(t)
		must(t, os.Symlink("/tmp", filepath.Join(layer, name)))
		spec := b.spec()
		spec.Rootfs.Lowers = append([]string{layer}, b.lowers...)
		ctx := context.Background()
		h, err := b.driver.Create(ctx, spec)
		must(t, err)
		_, err = b.driver.Start(ctx, h)
		if sandbox.ClassOf(err) != sandbox.InvalidArgument || sandbox.ReasonOf(err) != "image_unusable" {
			t.Errorf("/%s is a link: %v", name, err)
		}
		b.cleanup(spec.ID)
	}
}

// Links in /etc stay inside, and are skipped if they lead nowhere; but not because others rename meanwhile, when the kernel
// cannot follow "..".
func TestRootImageWithLinksInEtc(t *testing.T) {
	b := newBench(t)
	defer renaming(t)()
	layer := tempDir(t)
	must(t, os.MkdirAll(filepath.Join(layer, "etc"), 0o755))
	must(t, os.MkdirAll(filepath.Join(layer, "run"), 0o755))
	must(t, os.Symlink("../../../../run/resolv.conf", filepath.Join(layer, "etc/resolv.conf")))
	must(t, os.Symlink("/nowhere", filepath.Join(layer, "etc/hostname")))
	must(t, os.WriteFile(filepath.Join(layer, "run/resolv.conf"), []byte("nameserver 192.0.2.1\n"), 0o644))
	spec := b.spec()
	spec.Rootfs.Lowers = append([]string{layer}, b.lowers...)
	h := b.startSpec(spec)
	defer b.destroy(h)
	if got := b.ask(h, request{Probe: "sh:cat /etc/resolv.conf /run/resolv.conf; grep -c box /etc/hosts", Command: true}); got != resolvConf+resolvConf+"1\n" {
		t.Errorf("files in /etc: %q, want the sandbox's own", got)
	}
}

// renaming renames a directory again and again until stop is called.
func renaming(t *testing.T) (stop func()) {
	dir, end := tempDir(t), make(chan struct{})
	must(t, os.Mkdir(filepath.Join(dir, "a"), 0o755))
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			for _, names := range [][2]string{{"a", "b"}, {"b", "a"}} {
				if err := os.Rename(filepath.Join(dir, names[0]), filepath.Join(dir, names[1])); err != nil {
					t.Error(err)
					return
				}
			}
			select {
			case <-end:
				return
			default:
			}
		}
	})
	return func() { close(end); wg.Wait() }
}

// A sandbox without anything in it, not even /etc, starts, and its upper stays empty.
func TestRootEmptyImage(t *testing.T) {
	b := newBench(t)
	spec := b.spec()
	spec.Rootfs.Lowers = nil
	h := b.startSpec(spec)
	defer b.destroy(h)
	if got := b.ask(h, request{Probe: "write tmp"}); got != "ok" {
		t.Errorf("write to /tmp of the skeleton: %s", got)
	}
	must(t, b.driver.Stop(context.Background(), h))
	entries, err := os.ReadDir(filepath.Join(spec.Rootfs.Upper.Dir, "u"))
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, []string{"tmp"}) {
		t.Errorf("upper holds %v, want what was written only", names)
	}
}

// The work of a start that is cancelled is undone.
func TestRootCancelledStart(t *testing.T) {
	b := newBench(t)
	b.settle()
	spec := b.spec()
	before := b.footprint()
	h, err := b.driver.Create(context.Background(), spec)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := b.driver.Start(ctx, h); !errors.Is(err, context.Canceled) {
		t.Errorf("start: %v", err)
	}
	b.expectSame(before)
	if _, err := b.driver.Create(ctx, spec); !errors.Is(err, context.Canceled) {
		t.Errorf("create: %v", err)
	}
	b.expectSame(before)
	b.cleanup(spec.ID)
}

func TestRootRangesRunOut(t *testing.T) {
	b := newBench(t)
	must(t, b.driver.Close(context.Background()))
	b.opts.IDCapacity = 2
	b.open()
	first, second := b.start(), b.start()
	spec := b.spec()
	defer b.cleanup(spec.ID)
	if _, err := b.driver.Create(context.Background(), spec); sandbox.ClassOf(err) != sandbox.ResourceExhausted {
		t.Errorf("third of two: %v", err)
	}
	if first.ID == second.ID {
		t.Fatal("same id")
	}
	uids := map[string]bool{}
	for _, h := range []driver.Handle{first, second} {
		uids[b.ask(h, request{Probe: "sh:cat /proc/self/uid_map", Command: true})] = true
	}
	if len(uids) != 2 {
		t.Errorf("id maps %v", fmt.Sprint(uids))
	}
}
