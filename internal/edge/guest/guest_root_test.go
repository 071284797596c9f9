//go:build rootful

package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/aether/config"
	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	idBase   = 0x20000000
	idCount  = 65536
	pidLimit = 60
	memLimit = 64 << 20
)

// dockerCaps is what a sandbox's processes may have, and CAP_SYS_RESOURCE for aether.
const dockerCaps = "-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+setgid,+setuid,+setfcap,+setpcap,+net_bind_service,+sys_chroot,+kill,+audit_write,+sys_resource"

// Where this host has its limits: v1 groups beside a v2 tree without controllers, or that tree alone.
var (
	v2Root        = "/sys/fs/cgroup/unified"
	v1Controllers = []string{"memory", "cpu", "pids"}
	cgroupMode    = config.CgroupHybrid
)

func init() {
	if magic, err := linux.FSMagic("/sys/fs/cgroup"); err == nil && magic == linux.MagicCgroup2 {
		v2Root, v1Controllers, cgroupMode = "/sys/fs/cgroup", nil, config.CgroupV2
	}
}

// A jail is the real aether as PID 1 of namespaces of its own, with delegated control groups, over the host's root.
type jail struct {
	t      *testing.T
	name   string
	pid    int // on the host
	client *Client
	stderr *os.File // of aether
}

// buildAether makes it once, for all tests: TestMain removes it.
var buildAether = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "aether")
	if err != nil {
		return "", err
	}
	atExit = append(atExit, func() { os.RemoveAll(dir) })
	bin := filepath.Join(dir, "aether")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin, "dsec/cmd/aether")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return bin, errors.Join(os.Chmod(dir, 0o755), os.Chmod(bin, 0o111)) // as launched: not readable from inside
})

func (j *jail) v2(part string) string { return filepath.Join(v2Root, j.name, part) }
func (j *jail) v1(controller string) string {
	return filepath.Join("/sys/fs/cgroup", controller, j.name+"-user")
}

func write(t *testing.T, name, content string) {
	t.Helper()
	must(t, os.WriteFile(name, []byte(content), 0))
}

func newJail(t *testing.T) *jail {
	t.Helper()
	return newJailWith(t, os.Stderr)
}

func newJailWith(t *testing.T, stderr *os.File) *jail {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("root tests need root")
	}
	b := make([]byte, 6)
	_, err := rand.Read(b)
	must(t, err)
	j := &jail{t: t, name: "guesttest-" + hex.EncodeToString(b), stderr: stderr}
	files := j.makeCgroups()
	j.start(files)
	return j
}

// makeCgroups returns what aether inherits after its config: the v2 directory and the v1 tasks files.
func (j *jail) makeCgroups() []*os.File {
	t := j.t
	t.Cleanup(j.removeCgroups)
	for _, d := range []string{j.v2(""), j.v2("aether"), j.v2("user")} {
		must(t, os.Mkdir(d, 0o755))
	}
	for _, p := range []string{j.v2("cgroup.procs"), j.v2("user"), j.v2("user/cgroup.procs"), j.v2("user/cgroup.threads"), j.v2("user/cgroup.subtree_control")} {
		must(t, os.Chown(p, idBase, idBase))
	}
	dir, err := os.Open(j.v2("user"))
	must(t, err)
	files := []*os.File{dir}
	for _, c := range v1Controllers {
		must(t, os.Mkdir(j.v1(c), 0o755))
		f, err := os.OpenFile(filepath.Join(j.v1(c), "tasks"), os.O_WRONLY, 0)
		must(t, err)
		files = append(files, f)
	}
	if cgroupMode == config.CgroupV2 {
		write(t, j.v2("cgroup.subtree_control"), "+memory +cpu +pids")
		write(t, j.v2("user/pids.max"), fmt.Sprint(pidLimit))
		write(t, j.v2("user/memory.max"), fmt.Sprint(memLimit))
		write(t, j.v2("user/memory.swap.max"), "0")
		return files
	}
	write(t, filepath.Join(j.v1("pids"), "pids.max"), fmt.Sprint(pidLimit+1))
	write(t, filepath.Join(j.v1("memory"), "memory.limit_in_bytes"), fmt.Sprint(memLimit))
	return files
}

func (j *jail) removeCgroups() {
	_ = os.WriteFile(j.v2("cgroup.kill"), []byte("1"), 0)
	var dirs []string
	_ = filepath.WalkDir(j.v2(""), func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append([]string{p}, dirs...)
		}
		return nil
	})
	for _, c := range v1Controllers {
		dirs = append(dirs, j.v1(c))
	}
	deadline := time.Now().Add(time.Minute)
	for _, d := range dirs {
		for {
			err := os.Remove(d)
			if err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			if time.Now().After(deadline) {
				j.t.Errorf("left behind: %v", err)
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
}

func (j *jail) start(inherited []*os.File) {
	t := j.t
	bin, err := buildAether()
	must(t, err)
	dir, err := os.MkdirTemp("", "ja")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	key := make([]byte, config.KeyLen)
	_, err = rand.Read(key)
	must(t, err)
	message, err := config.Config{Key: key, Hostname: "jail", Cgroup: cgroupMode, V1Tasks: len(v1Controllers), CPUs: []int{0}}.Encode()
	must(t, err)
	cfg, w, err := os.Pipe()
	must(t, err)
	_, err = w.Write(message)
	must(t, err)
	w.Close()
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	defer l.Close() // or nobody would notice that aether no longer listens
	lf, err := l.(*net.UnixListener).File()
	must(t, err)
	leaf, err := os.Open(j.v2("aether"))
	must(t, err)

	cmd := exec.Command("/bin/sh", "-c", "mount -t proc proc /proc && GOMAXPROCS=1 exec setpriv --bounding-set="+dockerCaps+" "+bin)
	cmd.ExtraFiles = append([]*os.File{lf, cfg}, inherited...)
	cmd.Stderr = j.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: idBase, Size: idCount}}, GidMappings: []syscall.SysProcIDMap{{HostID: idBase, Size: idCount}},
		GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
		UseCgroupFD: true, CgroupFD: int(leaf.Fd()),
	}
	must(t, cmd.Start())
	for _, f := range append(cmd.ExtraFiles, leaf) {
		f.Close()
	}
	j.pid = cmd.Process.Pid
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	j.client, err = Connect(testContext(t), Options{ID: "jail", Key: key, OutputDir: filepath.Join(dir, "out"), Dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}})
	must(t, err)
	t.Cleanup(func() { j.client.Close() })
}

func as(user, script string) sandbox.Command {
	return sandbox.Command{Shell: script, Cwd: "/", User: user, Env: map[string]string{"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}}
}

// procs are the processes in the control groups of commands.
func (j *jail) procs() []string {
	var all []string
	files, _ := filepath.Glob(j.v2("user/*/cgroup.procs"))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		all = append(all, strings.Fields(string(b))...)
	}
	return all
}

func (j *jail) waitNoProcs() {
	j.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for len(j.procs()) > 0 {
		if time.Now().After(deadline) {
			j.t.Fatalf("processes are left: %v", j.procs())
		}
		time.Sleep(time.Millisecond)
	}
}

func TestTreeKill(t *testing.T) {
	j := newJail(t)
	const escape = "setsid sh -c 'sleep 1000 & sleep 1000' >/dev/null 2>&1 & (setsid sleep 1000 &) ; echo ready; sleep 1000"
	cmd := as("", escape)
	cmd.Timeout = 200 * time.Millisecond
	r, out, _ := run(t, j.client, cmd)
	for out == "" && r.TimedOut && cmd.Timeout < time.Minute { // on a slow machine the shell gets no further
		cmd.Timeout *= 5
		r, out, _ = run(t, j.client, cmd)
	}
	if !r.TimedOut || r.Signal != 9 || out != "ready\n" {
		t.Errorf("%+v %q", r, out)
	}
	j.waitNoProcs()
	ctx := testContext(t)
	m, err := j.client.Start(ctx, newID(), as("", escape))
	must(t, err)
	o := follow(t, m, 1)
	defer o.Close()
	if _, err = io.ReadFull(o, make([]byte, 6)); err != nil {
		t.Fatalf("%v %+v", err, m.Result())
	}
	must(t, m.Kill(ctx, 0))
	must(t, m.Wait(ctx))
	if r := m.Result(); !r.Killed {
		t.Errorf("%+v", r)
	}
	j.waitNoProcs()
}

func TestBackgroundChildLivesOnInItsGroup(t *testing.T) {
	j := newJail(t)
	r, out, _ := run(t, j.client, as("", "echo out; sleep 1000 &"))
	if r.ExitCode != 0 || out != "out\n" || len(j.procs()) != 1 {
		t.Errorf("%+v %q, left running: %v", r, out, j.procs())
	}
	for range 30 {
		run(t, j.client, as("", "true"))
	}
	dirs, _ := filepath.Glob(j.v2("user/*/cgroup.procs"))
	if len(dirs) > 3 {
		t.Errorf("%d groups after commands one by one: they are not used again", len(dirs))
	}
}

func TestPidsLimitIsTyped(t *testing.T) {
	j := newJail(t)
	ctx := testContext(t)
	var started []*Command
	for {
		m, err := j.client.Start(ctx, newID(), sandbox.Command{Argv: []string{"/bin/sleep", "1000"}, Cwd: "/"})
		if err != nil {
			if e := sandbox.AsError(err); e.Class != sandbox.ResourceExhausted || e.Reason != "sandbox_resources" {
				t.Errorf("over the limit: %v", err)
			}
			break
		}
		started = append(started, m)
		if len(started) > pidLimit {
			t.Fatalf("%d commands run under a limit of %d", len(started), pidLimit)
		}
	}
	if len(started) != pidLimit {
		t.Errorf("%d commands run, the limit is %d", len(started), pidLimit)
	}
	for _, m := range started {
		must(t, m.Kill(ctx, 0))
	}
	for _, m := range started {
		must(t, m.Wait(ctx))
	}
	r, _, _ := run(t, j.client, as("", "b() { b | b & }; b; sleep 0.2"))
	t.Logf("fork bomb: %+v", r)
	m, err := j.client.Start(ctx, newID(), as("", "true"))
	t.Logf("beside its remains: %v %v", m != nil, err)
	if len(j.client.Commands()) == 0 {
		t.Error("aether did not survive")
	}
}

func TestSpawnerGroupsAndMask(t *testing.T) {
	j := newJail(t)
	_, out, _ := run(t, j.client, as("", "cat /proc/self/cgroup; nproc"))
	for _, c := range v1Controllers {
		if !strings.Contains(out, ":"+c) || !strings.Contains(out, j.name+"-user") {
			t.Errorf("a command's groups lack %s:\n%s", c, out)
		}
		b, err := os.ReadFile(filepath.Join(j.v1(c), "tasks"))
		must(t, err)
		tids := strings.Fields(string(b))
		if len(tids) != 1 || tids[0] == fmt.Sprint(j.pid) {
			t.Errorf("%s: tasks %v of aether %d; want the spawner alone", c, tids, j.pid)
		}
	}
	if !strings.Contains(out, "/user/") {
		t.Errorf("a command has no group of its own in the user part:\n%s", out)
	}
	if !strings.HasSuffix(out, "\n1\n") {
		t.Errorf("nproc under a mask of one cpu:\n%s", out)
	}
}

func TestOOMHitsTheCommand(t *testing.T) {
	j := newJail(t)
	r, _, errOut := run(t, j.client, as("", "exec python3 -c 'x = bytearray(200 << 20)'"))
	if r.Signal != 9 {
		t.Errorf("%+v %s", r, errOut)
	}
	counter := j.v2("user/memory.events")
	if cgroupMode == config.CgroupHybrid {
		counter = filepath.Join(j.v1("memory"), "memory.oom_control")
	}
	b, err := os.ReadFile(counter)
	must(t, err)
	if !strings.Contains(string(b), "oom_kill 1\n") {
		t.Errorf("%s", b)
	}
	if _, out, _ := run(t, j.client, as("", "cat /proc/self/oom_score_adj; echo alive")); out != "0\nalive\n" {
		t.Errorf("afterwards: %q", out)
	}
}

// Whoever reads aether's log is the edge that started the sandbox. If it was killed, the next line of the log must not end
// the sandbox.
func TestLogWithoutAReader(t *testing.T) {
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	defer w.Close()
	j := newJailWith(t, w)
	ctx := testContext(t)
	provoke := func() {
		t.Helper()
		m, err := j.client.Start(ctx, newID(), as("", "exec sleep 1000"))
		must(t, err)
		kills, err := filepath.Glob(j.v2("user/*/cgroup.kill"))
		must(t, err)
		for _, k := range kills { // not aether's to write: it logs that
			must(t, errors.Join(os.Chown(k, 0, 0), os.Chmod(k, 0)))
		}
		must(t, m.Kill(ctx, 0))
		must(t, m.Wait(ctx))
	}
	provoke()
	must(t, r.SetReadDeadline(time.Now().Add(time.Minute)))
	buf := make([]byte, 1000)
	if n, err := r.Read(buf); err != nil || !strings.Contains(string(buf[:n]), "kill by control group") {
		t.Fatalf("the log says %q, %v", buf[:n], err)
	}
	r.Close()
	provoke()
	if res, out, _ := run(t, j.client, as("", "echo alive")); out != "alive\n" {
		t.Errorf("%+v %q", res, out)
	}
}

const attack = `
import ctypes, os, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def sys(n, *a): return libc.syscall(n, *a)
def show(name, ok): print(name, "SUCCEEDED" if ok else "refused")
show("ptrace attach", sys(101, 16, 1, 0, 0) == 0)
show("ptrace seize", sys(101, 0x4206, 1, 0, 0) == 0)
buf = ctypes.create_string_buffer(64)
iov = struct.pack("QQ", ctypes.addressof(buf), 64)
riov = struct.pack("QQ", 0x400000, 64)
show("process_vm_readv", sys(310, 1, iov, 1, riov, 1, 0) > 0)
p = sys(434, 1, 0)
show("pidfd_getfd", p >= 0 and any(sys(438, p, fd, 0) >= 0 for fd in range(16)))
for f in ("mem", "environ", "root/etc/passwd", "exe", "fd/3", "maps", "auxv"):
    try:
        fd = os.open("/proc/1/" + f, os.O_RDONLY); n = len(os.read(fd, 64)); show("/proc/1/" + f, n > 0 or f in ("mem", "exe"))
    except OSError: show("/proc/1/" + f, False)
try: show("/proc/1/fd", len(os.listdir("/proc/1/fd")) > 0)
except OSError: show("/proc/1/fd", False)
for s in range(1, 65):
    try: os.kill(1, s)
    except OSError: pass
    info = struct.pack("iii", s, 0, -1) + bytes(116)
    sys(129, 1, s, info)
print("done")
`

func TestHostileRoot(t *testing.T) {
	j := newJail(t)
	ctx := testContext(t)
	other, err := j.client.Start(ctx, newID(), as("", "sleep 1; echo fine"))
	must(t, err)
	cmd := as("", "exec python3 -")
	cmd.Stdin = []byte(attack)
	_, out, errOut := run(t, j.client, cmd)
	if strings.Contains(out, "SUCCEEDED") || !strings.HasSuffix(out, "done\n") {
		t.Errorf("%s%s", out, errOut)
	}
	must(t, other.Wait(ctx))
	if r := other.Result(); r.ExitCode != 0 || string(other.Head(1, 100)) != "fine\n" {
		t.Errorf("another command: %+v", r)
	}
	_, out, _ = run(t, j.client, as("", "grep -E '^(CapBnd|CapEff|SigIgn|SigBlk)' /proc/self/status"))
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		name, hexa, _ := strings.Cut(line, ":\t")
		var v uint64
		if _, err := fmt.Sscanf(hexa, "%x", &v); err != nil {
			t.Fatal(out)
		}
		if strings.HasPrefix(name, "Cap") && v&(1<<24) != 0 {
			t.Errorf("a command has CAP_SYS_RESOURCE: %s", line)
		}
		if strings.HasPrefix(name, "Sig") && v != 0 {
			t.Errorf("a command starts with signals ignored or blocked: %s", line)
		}
	}
}

func TestOrdinaryUser(t *testing.T) {
	j := newJail(t)
	_, out, _ := run(t, j.client, as("nobody", "id -u; id -g; id -G; echo $HOME $USER; grep CapEff /proc/self/status; umask; echo x > /dev/stderr; echo y > /dev/stdout"))
	if want := "65534\n65534\n65534\n/nonexistent nobody\nCapEff:\t0000000000000000\n0022\ny\n"; out != want {
		t.Errorf("%q, want %q", out, want)
	}
	if _, out, _ = run(t, j.client, as("4321:1234", "id -u; id -g; echo $HOME")); out != "4321\n1234\n/\n" {
		t.Errorf("%q", out)
	}
	script := as("nobody", "#"+strings.Repeat("x", 200<<10)+"\necho long")
	if _, out, errOut := run(t, j.client, script); out != "long\n" {
		t.Errorf("a long script: %q %q", out, errOut)
	}
	_, err := j.client.Start(testContext(t), newID(), sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/root", User: "nobody"})
	if r := sandbox.ReasonOf(err); r != "workdir_not_found" {
		t.Errorf("a directory that the user may not enter: %v", err)
	}
	ctx := testContext(t)
	if _, _, err := j.client.ReadFile(ctx, FileRead{Path: "/etc/shadow", User: "nobody"}); sandbox.ReasonOf(err) != "permission_denied" {
		t.Errorf("read /etc/shadow: %v", err)
	}
	if _, _, err := j.client.WriteFile(ctx, FileWrite{Path: "/etc/dsec-test", User: "nobody", Size: -1}, strings.NewReader("x")); sandbox.ReasonOf(err) != "permission_denied" {
		t.Errorf("write to /etc: %v", err)
	}
	p := "/tmp/" + j.name
	t.Cleanup(func() { os.Remove(p) })
	if _, _, err := j.client.WriteFile(ctx, FileWrite{Path: p, User: "nobody", Size: -1, Mode: 0o4711}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	info, r, err := j.client.ReadFile(ctx, FileRead{Path: p})
	must(t, err)
	r.Close()
	if info.UID != 65534 || info.GID != 65534 || info.Mode != 0o4711 {
		t.Errorf("%+v", info)
	}
}

// TestPrivateMemoryAtRest takes the median of three: how many threads a runtime has made depends on the machine's load.
func TestPrivateMemoryAtRest(t *testing.T) {
	const limit = 2048  // KiB; the promise is 1536, which the benchmark measures: this test is for a leak
	other := newJail(t) // shares the program's text, as in real life
	run(t, other.client, as("", "true"))
	var sizes []int
	for range 3 {
		j := newJail(t)
		for range 1000 {
			if r, _, _ := run(t, j.client, sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/"}); r.ExitCode != 0 {
				t.Fatalf("%+v", r)
			}
		}
		size := 0
		for range 20 { // aether gives memory back after a second of rest, on a slow machine later
			time.Sleep(3 * time.Second)
			if size = privateKiB(t, j.pid); size <= limit {
				break
			}
		}
		sizes = append(sizes, size)
	}
	slices.Sort(sizes)
	t.Logf("private memory of aether after 1000 commands: %v KiB", sizes)
	if sizes[0] == 0 || sizes[1] > limit {
		t.Errorf("%v KiB, at most %d", sizes, limit)
	}
}

// privateKiB is what a process shares with no other.
func privateKiB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	must(t, err)
	total := 0
	for line := range strings.Lines(string(b)) {
		for _, form := range []string{"Private_Clean: %d kB", "Private_Dirty: %d kB"} {
			var kb int
			if n, _ := fmt.Sscanf(line, form, &kb); n == 1 {
				total += kb
			}
		}
	}
	return total
}

func TestAetherDiesWithItsCommands(t *testing.T) {
	j := newJail(t)
	ctx := testContext(t)
	m, err := j.client.Start(ctx, newID(), as("", "sleep 1000"))
	must(t, err)
	must(t, syscall.Kill(j.pid, syscall.SIGKILL))
	<-j.client.Done()
	if r := sandbox.ReasonOf(j.client.Err()); r != "guest_died" {
		t.Errorf("%v", j.client.Err())
	}
	if err := m.Wait(ctx); err != nil || !m.Result().Killed {
		t.Errorf("%v %+v", err, m.Result())
	}
	if _, err := j.client.Start(ctx, newID(), as("", "true")); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("start at a dead aether: %v", err)
	}
}
