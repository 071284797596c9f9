//go:build rootful

package container

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/network"
	"dsec/internal/edge/policy"
	"dsec/sandbox"
)

// A bench is a host for sandboxes: a run directory on a private tmpfs, control groups, network slots and a driver, with this
// test's own program in the place of aether.
type bench struct {
	t      testing.TB
	dir    string // on disk: uppers
	run    string // private tmpfs
	opts   Options
	driver *Driver
	tree   *cgroup.Tree
	slots  *network.Slots
	lowers []string
}

const minbase = "/var/tmp/dsec-test/minbase"

func newBench(t testing.TB) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	b := &bench{t: t, dir: tempDir(t), run: tempDir(t)}
	must(t, syscall.Mount("dsec-test", b.run, "tmpfs", syscall.MS_NOSUID, "mode=700"))
	t.Cleanup(func() { must(t, syscall.Unmount(b.run, syscall.MNT_DETACH)) })
	must(t, syscall.Mount("", b.run, "", syscall.MS_PRIVATE, ""))
	b.lowers = []string{probeLayer(t), baseLayer(t)}
	self, err := os.Executable()
	must(t, err)
	b.opts = Options{RunDir: b.run, Stage: stageProgram(t), Aether: self, IDBase: 0x30000000, IDCapacity: 512, Log: testLog(t)}
	ctx := context.Background()
	b.tree, err = cgroup.Open(ctx, cgroup.Options{Name: fmt.Sprintf("dsec-t%d", os.Getpid()), Log: b.opts.Log})
	must(t, err)
	t.Cleanup(func() { must(t, b.tree.Close(context.Background())) })
	must(t, policy.AttachDevices(b.tree.Root()))
	b.slots, err = network.Open(ctx, network.Options{RunDir: filepath.Join(b.run, "net"), Ready: 8, Log: b.opts.Log})
	must(t, err)
	t.Cleanup(func() { must(t, b.slots.Close(context.Background())) })
	b.open()
	t.Cleanup(func() { must(t, b.driver.Close(context.Background())) })
	return b
}

func (b *bench) open() {
	b.t.Helper()
	var err error
	b.driver, err = Open(context.Background(), b.opts)
	must(b.t, err)
}

// reopen is a restart of the edge.
func (b *bench) reopen() {
	b.t.Helper()
	b.driver.Detach()
	b.open()
}

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, nil))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tempDir is a directory that everybody may enter, unlike t.TempDir: programs inside run as other users.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-container-")
	must(t, err)
	must(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// stageProgram builds stage from the source here, so that the test never runs an old one.
func stageProgram(t testing.TB) string {
	t.Helper()
	out := filepath.Join(tempDir(t), "stage")
	cmd := exec.Command("musl-gcc", "-static", "-Os", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-idirafter", "/usr/include",
		"-idirafter", "/usr/include/x86_64-linux-gnu", "-o", out, "stage/stage.c")
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build stage: %v\n%s", err, msg)
	}
	return out
}

// baseLayer is a minimal Debian, made once per machine.
func baseLayer(t testing.TB) string {
	t.Helper()
	if _, err := os.Stat(filepath.Join(minbase, "bin/sh")); err == nil {
		return minbase
	}
	must(t, os.MkdirAll(filepath.Dir(minbase), 0o755))
	tmp := minbase + fmt.Sprintf(".%d", os.Getpid())
	if msg, err := exec.Command("mmdebstrap", "--variant=minbase", "bookworm", tmp).CombinedOutput(); err != nil {
		t.Fatalf("make base: %v\n%s", err, msg)
	}
	must(t, os.Rename(tmp, minbase))
	return minbase
}

// probeLayer holds this test program as /opt/probe, which is what hostile commands run, and things that a layer should not have.
func probeLayer(t testing.TB) string {
	t.Helper()
	dir := tempDir(t)
	must(t, os.MkdirAll(filepath.Join(dir, "opt"), 0o755))
	self, err := os.Executable()
	must(t, err)
	must(t, copyFile(self, filepath.Join(dir, "opt/probe"), 0o755))
	must(t, syscall.Mknod(filepath.Join(dir, "opt/disk"), syscall.S_IFBLK|0o666, 7<<8)) // loop0
	must(t, syscall.Mknod(filepath.Join(dir, "opt/mem"), syscall.S_IFCHR|0o666, 1<<8|1))
	must(t, os.Chmod(filepath.Join(dir, "opt/disk"), 0o666))
	return dir
}

// spec makes what the other steps of the edge make.
func (b *bench) spec() driver.Spec {
	b.t.Helper()
	return b.specFor(sandbox.NewID("test2"))
}

func (b *bench) specFor(id sandbox.ID) driver.Spec {
	b.t.Helper()
	ctx := context.Background()
	limits := sandbox.Spec{}.WithDefaults().Limits
	limits.Memory = 512 << 20
	limits.PIDs = 64
	groups, err := b.tree.Create(ctx, id, limits)
	must(b.t, err)
	net, err := b.slots.Acquire(ctx, id, network.Policy{})
	must(b.t, err)
	upper := filepath.Join(b.dir, string(id))
	for _, name := range []string{"u", "w", "etc"} {
		must(b.t, os.MkdirAll(filepath.Join(upper, name), 0o755))
	}
	s := driver.Spec{ID: id, Hostname: "box", Limits: limits, Network: net, Cgroups: groups, GuestKey: make([]byte, 32)}
	s.Rootfs.Lowers = b.lowers
	s.Rootfs.Upper.Dir = upper
	return s
}

// cleanup removes what spec made.
func (b *bench) cleanup(id sandbox.ID) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(b.t, b.tree.Remove(ctx, id))
	must(b.t, b.slots.Release(ctx, id))
	must(b.t, os.RemoveAll(filepath.Join(b.dir, string(id))))
}

// start makes a running sandbox, which ends with the test.
func (b *bench) start() driver.Handle {
	b.t.Helper()
	spec := b.spec()
	h := b.startSpec(spec)
	b.t.Cleanup(func() { b.destroy(h) })
	return h
}

func (b *bench) startSpec(spec driver.Spec) driver.Handle {
	b.t.Helper()
	ctx := context.Background()
	h, err := b.driver.Create(ctx, spec)
	must(b.t, err)
	h, err = b.driver.Start(ctx, h)
	must(b.t, err)
	return h
}

func (b *bench) destroy(h driver.Handle) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(b.t, b.driver.Stop(ctx, h))
	must(b.t, b.driver.Destroy(ctx, h))
	b.cleanup(h.ID)
}

// A request to the program that stands for aether: a probe to run itself, or in a command.
type request struct {
	Probe   string
	Command bool // as a command, without aether's one capability more
	UID     int
}

// ask runs a probe inside.
func (b *bench) ask(h driver.Handle, r request) string {
	b.t.Helper()
	answer, err := b.tryAsk(h, r)
	must(b.t, err)
	return answer
}

func (b *bench) tryAsk(h driver.Handle, r request) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := b.driver.DialGuest(ctx, h)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return roundTrip(conn, r)
}

func roundTrip(conn net.Conn, r request) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return "", err
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return "", err
	}
	var answer string
	err := json.NewDecoder(bufio.NewReader(conn)).Decode(&answer)
	return answer, err
}
