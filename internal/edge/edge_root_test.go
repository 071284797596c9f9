//go:build rootful

package edge

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/container"
	"dsec/internal/edge/layers"
	"dsec/internal/edge/network"
	"dsec/internal/edge/policy"
	"dsec/internal/edge/upper"
	"dsec/internal/grant"
	"dsec/internal/linux"
	"dsec/internal/linux/hoststate"
	"dsec/sandbox"
)

// realHost is this machine with the real parts: everything but the control plane.
type realHost struct {
	*world
	run, data string
	layer     *dsecv1.Layer
	blobs     string
	code      sandbox.EdgeCode
	programs  string // stage and aether
	tree      *cgroup.Tree
	pool      *upper.Pool
	slots     *network.Slots
	mounts    *layers.Mounts
	driver    *container.Driver
	opened    []Sweeper

	programIDs []string // of the device programs
}

func rootMust(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func rootDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-edge-") // on ext4: EROFS takes no backing file on a tmpfs
	rootMust(t, err)
	rootMust(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { rootMust(t, os.RemoveAll(dir)) })
	return dir
}

func command(t testing.TB, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, msg)
	}
}

func newRealHost(t testing.TB) *realHost {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	proc, err := linux.PrivateProc() // the process keeps one
	rootMust(t, err)
	linux.Close(proc)
	before, err := hoststate.Snapshot()
	rootMust(t, err)
	r := &realHost{world: &world{TB: t, signer: grant.NewSigner(testKey)}, run: rootDir(t), data: rootDir(t), code: sandbox.NewEdgeCode()}
	r.buildPrograms()
	r.buildLayer()
	rootMust(t, syscall.Mount("dsec-edge-test", r.run, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=700"))
	rootMust(t, syscall.Mount("", r.run, "", syscall.MS_PRIVATE, ""))
	t.Cleanup(func() { r.leave(before) })
	r.openParts()
	r.open()
	return r
}

// leave ends everything and checks that nothing is left, also when the test could not make all of it.
func (r *realHost) leave(before hoststate.State) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if r.e != nil {
		if err := r.e.Shutdown(ctx); err != nil {
			r.Errorf("Shutdown: %v", err)
		}
	}
	var errs []error
	if r.driver != nil {
		errs = append(errs, r.driver.Close(ctx))
	}
	if r.e == nil {
		for _, part := range r.opened {
			errs = append(errs, part.Close(ctx))
		}
	}
	errs = append(errs, syscall.Unmount(r.run, 0)) // busy if anything is left in it
	if err := errors.Join(errs...); err != nil {
		r.Errorf("leaving: %v", err)
	}
	if left, _ := os.ReadDir(r.data); len(left) != 0 {
		r.Errorf("left in the data directory: %v", left)
	}
	r.compare(before)
}

// compare looks for what was there only because of this test: others work on the machine at the same time. Descriptors count
// by what they lead to, since their numbers come again.
func (r *realHost) compare(before hoststate.State) {
	r.Helper()
	var after hoststate.State
	var left []string
	for range 3000 { // the kernel frees programs in the background
		var err error
		after, err = hoststate.Snapshot()
		rootMust(r, err)
		left = slices.DeleteFunc(hoststate.Diff(before, after), func(d string) bool {
			mine := strings.Contains(d, string(r.code)) || strings.Contains(d, r.run) || strings.Contains(d, r.data)
			return !mine && !slices.ContainsFunc(r.programIDs, func(id string) bool { return strings.Contains(d, "program "+id+" ") })
		})
		if len(left) == 0 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if len(left) > 0 {
		r.Errorf("left on the host: %q", left)
	}
	was, is := descriptors(before), descriptors(after)
	for class, n := range is {
		if n > was[class] {
			r.Errorf("left open: %d of %s, were %d", n, class, was[class])
		}
	}
	children, err := hoststate.Descendants(os.Getpid())
	rootMust(r, err)
	if len(children) > 0 {
		r.Errorf("processes are left: %q", children)
	}
}

// descriptors counts those of this process by what they lead to: "socket", "anon_inode:[pidfd]", a path.
func descriptors(s hoststate.State) map[string]int {
	out := make(map[string]int)
	for i, n := range s {
		if i.Kind != hoststate.FD {
			continue
		}
		_, class, _ := strings.Cut(i.Name, " ")
		for _, kind := range []string{"socket", "pipe", "net", "mnt", "user"} {
			if strings.HasPrefix(class, kind+":[") {
				class = kind
			}
		}
		out[class] += n
	}
	return out
}

// attachDevices is what the wiring does with the tree, and notes which programs are on it.
func (r *realHost) attachDevices() {
	r.Helper()
	rootMust(r, policy.AttachDevices(r.tree.Root()))
	group, err := os.Open(r.tree.Root())
	rootMust(r, err)
	defer group.Close()
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(group.Fd()), Attach: ebpf.AttachCGroupDevice})
	rootMust(r, err)
	for _, p := range attached.Programs {
		r.programIDs = append(r.programIDs, fmt.Sprint(p.ID))
	}
	if len(attached.Programs) == 0 {
		r.Error("no device program is attached")
	}
}

func (r *realHost) buildPrograms() {
	r.programs = rootDir(r)
	command(r, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(r.programs, "aether"), "dsec/cmd/aether")
	command(r, "musl-gcc", "-static", "-Os", "-std=gnu11", "-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu",
		"-o", filepath.Join(r.programs, "stage"), "driver/container/stage/stage.c")
}

const rootMinbase = "/var/tmp/dsec-test/minbase"

// buildLayer makes an EROFS layer of a minimal Debian, once per machine, with the reference tool.
func (r *realHost) buildLayer() {
	r.blobs = filepath.Join(filepath.Dir(rootMinbase), "edge-layer")
	meta, blob := filepath.Join(r.blobs, "meta"), filepath.Join(r.blobs, "blob")
	if _, err := os.Stat(blob + ".done"); err != nil {
		if _, err := os.Stat(rootMinbase + "/bin/sh"); err != nil {
			rootMust(r, os.MkdirAll(filepath.Dir(rootMinbase), 0o755))
			command(r, "mmdebstrap", "--variant=minbase", "bookworm", rootMinbase)
		}
		rootMust(r, os.MkdirAll(r.blobs, 0o755))
		_ = os.Remove(blob)
		command(r, "mkfs.erofs", "--chunksize=4096", "--blobdev="+blob, meta, rootMinbase)
		rootMust(r, os.WriteFile(blob+".done", nil, 0o644))
	}
	r.layer = &dsecv1.Layer{Metadata: r.blobOf(meta), Data: []*dsecv1.Blob{r.blobOf(blob)}}
}

func (r *realHost) blobOf(path string) *dsecv1.Blob {
	f, err := os.Open(path)
	rootMust(r, err)
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	rootMust(r, err)
	digest := "sha256:" + hex.EncodeToString(h.Sum(nil))
	link := filepath.Join(r.data+".links", strings.ReplaceAll(digest, ":", "-"))
	rootMust(r, os.MkdirAll(filepath.Dir(link), 0o755))
	r.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(link)) })
	rootMust(r, os.Link(path, link))
	return &dsecv1.Blob{Digest: digest, Size: n}
}

func (r *realHost) openParts() {
	ctx, log := context.Background(), slog.New(slog.NewTextHandler(io.Discard, nil))
	if os.Getenv("EDGE_TEST_LOG") != "" {
		log = testLog()
	}
	var err error
	r.tree, err = cgroup.Open(ctx, cgroup.Options{Name: "dsec-" + string(r.code), Log: log})
	rootMust(r, err)
	r.opened = append(r.opened, r.tree)
	r.attachDevices()
	r.pool, err = upper.Open(ctx, upper.Options{DataDir: r.data, RunDir: r.run, Bytes: 4 << 30, Log: log})
	rootMust(r, err)
	r.opened = append(r.opened, r.pool)
	r.slots, err = network.Open(ctx, network.Options{RunDir: filepath.Join(r.run, "net"), Ready: 16, Log: log})
	rootMust(r, err)
	r.opened = append(r.opened, r.slots)
	r.mounts, err = layers.Open(ctx, layers.Options{RunDir: filepath.Join(r.run, "layers"), KeepIdle: 4, Log: log})
	rootMust(r, err)
	r.opened = append(r.opened, r.mounts)
	r.driver, err = container.Open(ctx, container.Options{RunDir: r.run, Stage: filepath.Join(r.programs, "stage"),
		Aether: filepath.Join(r.programs, "aether"), IDBase: 0x38000000, IDCapacity: 512, Log: log})
	rootMust(r, err)
	r.o = Options{
		Code: r.code, DataDir: r.data, Version: "test", Verifier: grant.NewVerifier(r.code, r.signer.Public()),
		Drivers: []driver.Driver{r.driver},
		BlobPath: func(d string) (string, error) {
			return filepath.Join(r.data+".links", strings.ReplaceAll(d, ":", "-")), nil
		},
		Layers: r.mounts, Uppers: r.pool, Networks: r.slots, Cgroups: r.tree, Guests: ConnectAether, Log: log, Retention: time.Minute,
	}
}

// restart is a new process of the edge, as far as one process can show it.
func (r *realHost) restart() {
	r.Helper()
	r.detach()
	r.slots.Detach()
	r.mounts.Detach()
	r.driver.Detach()
	rootMust(r, r.pool.Detach())
	r.openParts()
	r.open()
}

func (r *realHost) ctx() context.Context { return r.userOf(r.code) }

func (r *realHost) make(change ...func(*edgev1.CreateSandbox)) sandbox.ID {
	r.Helper()
	c := &edgev1.CreateSandbox{
		Id: string(sandbox.NewID(r.code)), Grant: r.grantFor(r.code), Layers: []*dsecv1.Layer{r.layer},
		Spec: &dsecv1.SandboxSpec{Image: "base", Limits: &dsecv1.Limits{MemoryBytes: 128 << 20, DiskBytes: 64 << 20, Pids: 64}},
	}
	for _, f := range change {
		f(c)
	}
	all, err := r.createAll(r.ctx(), c)
	if err != nil || all[c.Id].GetFailure() != nil {
		r.Fatalf("create: %v %v", all[c.Id].GetFailure(), err)
	}
	return sandbox.ID(c.Id)
}

func (r *realHost) sh(id sandbox.ID, script string) *dsecv1.CommandResult {
	r.Helper()
	res, err := r.s.Exec(r.ctx(), &dsecv1.ExecRequest{SandboxId: string(id), Command: &dsecv1.Command{Shell: script}, WaitSeconds: -1})
	if err != nil {
		r.Fatalf("%s: %v", script, err)
	}
	return res
}

func (r *realHost) view(id sandbox.ID) *dsecv1.Sandbox {
	r.Helper()
	v, err := r.s.GetSandbox(r.ctx(), &edgev1.GetSandboxRequest{Id: string(id)})
	rootMust(r, err)
	return v
}

func (r *realHost) drop(id sandbox.ID) {
	r.Helper()
	_, err := r.s.DeleteSandbox(r.ctx(), &edgev1.DeleteSandboxRequest{Id: string(id), Wait: true})
	rootMust(r, err)
}

func TestRealSandbox(t *testing.T) {
	r := newRealHost(t)
	id := r.make()
	if res := r.sh(id, "echo hello world; id -u; pwd; exit 4"); string(res.Stdout.Data) != "hello world\n0\n/\n" || res.ExitCode != 4 {
		t.Errorf("%q %q %d", res.Stdout.Data, res.Stderr.Data, res.ExitCode)
	}
	if res := r.sh(id, "dd if=/dev/zero of=/big bs=1M count=100"); res.ExitCode == 0 {
		t.Error("100 MiB written with a quota of 64 MiB")
	}
	if res := r.sh(id, "rm -f /big; head -c 400M /dev/zero | tail -c 300M >/dev/null"); !res.OomKilled || res.ExitCode == 0 {
		t.Errorf("out of memory: %v", res)
	}
	if res := r.sh(id, "exit 1"); res.OomKilled {
		t.Errorf("%v", res)
	}
	if res := r.sh(id, "echo still here"); string(res.Stdout.Data) != "still here\n" {
		t.Errorf("after an OOM kill: %v", res)
	}
	r.drop(id)
	if v := r.view(id); v.State != stopped {
		t.Errorf("%v", v)
	}
}

func TestRealRestart(t *testing.T) {
	r := newRealHost(t)
	id := r.make()
	r.sh(id, "echo kept > /file; sleep 1000 >/dev/null 2>&1 &")
	if _, err := r.s.Exec(r.ctx(), &dsecv1.ExecRequest{SandboxId: string(id), CommandId: "long", Command: &dsecv1.Command{Shell: "echo a; until [ -e /go ]; do sleep 0.1; done; echo b; exit 6"}}); err != nil {
		t.Fatal(err)
	}
	r.restart()
	if v := r.view(id); v.State != ready {
		t.Errorf("%v", v)
	}
	// a command that had ended counts until aether has said so again
	eventually(t, "one command runs", func() bool { return r.view(id).RunningCommands == 1 })
	r.sh(id, "touch /go")
	res, err := r.s.GetCommand(r.ctx(), &dsecv1.GetCommandRequest{SandboxId: string(id), CommandId: "long", WaitSeconds: 60})
	if err != nil || res.ExitCode != 6 || string(res.Stdout.Data) != "a\nb\n" {
		t.Errorf("%v %v", res, err)
	}
	if res := r.sh(id, "cat /file; ls /proc | grep -c '^[0-9]'"); !strings.HasPrefix(string(res.Stdout.Data), "kept\n") {
		t.Errorf("%v", res)
	}
	r.drop(id)
}

// The sandbox's processes are killed behind the edge's back: it notices, says so, and cleans up.
func TestRealDeathFromOutside(t *testing.T) {
	r := newRealHost(t)
	id := r.make()
	in := r.e.index.byID[id]
	kill := filepath.Join(filepath.Dir(in.snapshot().made.cgroups.V2Aether), "cgroup.kill")
	rootMust(t, os.WriteFile(kill, []byte("1"), 0))
	select {
	case <-in.gone:
	case <-time.After(time.Minute):
		t.Fatal("its death was not noticed")
	}
	if v := r.view(id); v.State != failed || v.Reason.Code != sandbox.ReasonKilled {
		t.Errorf("%v", v)
	}
}

// Creates that fail at each step of real parts leave nothing: the comparison is at the end of newRealHost.
func TestRealFailureAtEveryStep(t *testing.T) {
	r := newRealHost(t)
	for _, point := range setupPoints() {
		restore, _ := r.arm(point + ":error")
		c := &edgev1.CreateSandbox{Id: string(sandbox.NewID(r.code)), Grant: r.grantFor(r.code), Layers: []*dsecv1.Layer{r.layer}, Spec: &dsecv1.SandboxSpec{Image: "base"}}
		all, err := r.createAll(r.ctx(), c)
		restore()
		if err != nil || all[c.Id].GetFailure() == nil {
			t.Errorf("%s: %v %v", point, all, err)
		}
		if v := r.view(sandbox.ID(c.Id)); v.State != failed {
			t.Errorf("%s: %v", point, v)
		}
	}
	if id := r.make(); r.sh(id, "true").ExitCode != 0 {
		t.Error("afterwards nothing works")
	}
}

// BenchmarkRealLife is create, one command, delete, with 8 callers on the real parts and without the control plane.
func BenchmarkRealLife(b *testing.B) {
	r := newRealHost(b)
	r.drop(r.make())
	var mu sync.Mutex
	var first []time.Duration
	b.SetParallelism(4)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			start := time.Now()
			id := r.make()
			r.sh(id, "true")
			d := time.Since(start)
			r.drop(id)
			mu.Lock()
			first = append(first, d)
			mu.Unlock()
		}
	})
	b.StopTimer()
	slices.Sort(first)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lives/s")
	b.ReportMetric(float64(first[len(first)/2].Microseconds())/1000, "p50_first_command_ms")
}

// BenchmarkRealFirstCommand is create and one command, one after the other.
func BenchmarkRealFirstCommand(b *testing.B) {
	r := newRealHost(b)
	r.drop(r.make())
	var first []time.Duration
	for b.Loop() {
		start := time.Now()
		id := r.make()
		r.sh(id, "true")
		first = append(first, time.Since(start))
		r.drop(id)
	}
	slices.Sort(first)
	b.ReportMetric(float64(first[len(first)/2].Microseconds())/1000, "p50_first_command_ms")
}

// BenchmarkRealExec is /bin/true in one sandbox.
func BenchmarkRealExec(b *testing.B) {
	r := newRealHost(b)
	id := r.make()
	ctx := r.ctx()
	for b.Loop() {
		res, err := r.s.Exec(ctx, &dsecv1.ExecRequest{SandboxId: string(id), CommandId: rand.Text(), Command: &dsecv1.Command{Argv: []string{"/bin/true"}}, WaitSeconds: -1})
		if err != nil || res.ExitCode != 0 {
			b.Fatal(res, err)
		}
	}
}
