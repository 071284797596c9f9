//go:build rootful

package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
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

const edge = sandbox.EdgeCode("nettt")

// churnEnv makes the test binary a process that opens the slots in that directory, and hands out and takes back until it is
// killed.
const churnEnv = "DSEC_TEST_NETWORK_CHURN"

func TestMain(m *testing.M) {
	// First: a relay must not start others, whatever its environment.
	if len(os.Args) > 1 && os.Args[1] == "relay" {
		relayMain(os.Args[2:])
	}
	if dir := os.Getenv(churnEnv); dir != "" {
		churn(dir)
	}
	os.Exit(m.Run())
}

func churn(dir string) {
	s, err := Open(context.Background(), Options{RunDir: dir, Ready: 4, Relay: []string{os.Args[0], "relay"}, RelayUID: relayUID})
	policies := []Policy{{}, {Open: []Destination{opened("10.0.0.0/8", 443, 443, TCP)}}, {Open: []Destination{opened("10.1.0.0/16", 53, 53, UDP)}}}
	for err == nil {
		id := sandbox.NewID(edge)
		if _, err = s.Acquire(context.Background(), id, policies[rand.IntN(3)]); err == nil && rand.IntN(2) == 0 {
			err = s.SetPolicy(context.Background(), id, policies[rand.IntN(3)])
		}
		if err == nil && rand.IntN(4) > 0 {
			err = s.Release(context.Background(), id)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// privateDir is a directory on a private tmpfs, as <run> is.
func privateDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size=16m"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("", dir, "", syscall.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("something was left mounted or in use below the run directory: %v", err)
		}
	})
	return filepath.Join(dir, "net")
}

func open(t testing.TB, dir string, ready int) *Slots {
	t.Helper()
	s, err := Open(t.Context(), Options{RunDir: dir, Ready: ready})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// closeSlots closes s and proves that nothing is left.
func closeSlots(t testing.TB, s *Slots) {
	t.Helper()
	if err := s.Close(context.Background()); err != nil {
		out, _ := exec.Command("sh", "-c", "ls -la "+s.dir+" "+s.dir+"/*; grep "+s.dir+" /proc/self/mountinfo").CombinedOutput()
		t.Fatalf("%v\n%s %v %v", err, out, s.owned, s.next)
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		t.Fatal(err)
	}
	if left := mountinfo.Under(mounts, s.dir); len(left) > 0 {
		t.Errorf("left mounted: %+v", left)
	}
	if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
}

func acquire(t testing.TB, s *Slots, id sandbox.ID) string {
	t.Helper()
	n, err := s.Acquire(t.Context(), id, Policy{})
	if err != nil {
		t.Fatal(err)
	}
	return n.Namespace
}

func release(t testing.TB, s *Slots, id sandbox.ID) {
	t.Helper()
	if err := s.Release(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

func TestSlotHasLoopbackPortsAndNothingElse(t *testing.T) {
	s := open(t, privateDir(t), 1)
	defer closeSlots(t, s)
	id := sandbox.NewID(edge)
	ns := acquire(t, s, id)
	err := linux.InNetns(ns, func() error {
		links, err := net.Interfaces()
		if err != nil {
			return err
		}
		if len(links) != 1 || links[0].Name != "lo" || links[0].Flags&net.FlagUp == 0 {
			t.Errorf("interfaces: %+v, want lo alone and up", links)
		}
		for path, want := range sysctls {
			b, err := os.ReadFile(filepath.Join("/proc/sys", path))
			if err != nil {
				return err
			}
			if got := string(b); got != want+"\n" && got != "0\t2147483647\n" {
				t.Errorf("%s is %q, want %q", path, got, want)
			}
		}
		return dialSelf(t)
	})
	if err != nil {
		t.Fatal(err)
	}
	release(t, s, id)
}

// dialSelf sends bytes over 127.0.0.1 with raw sockets, since the runtime's may be served by another thread.
func dialSelf(t *testing.T) error {
	l, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(l)
	addr := &syscall.SockaddrInet4{Port: 80, Addr: [4]byte{127, 0, 0, 1}}
	if err := syscall.Bind(l, addr); err != nil {
		return err
	}
	if err := syscall.Listen(l, 1); err != nil {
		return err
	}
	c, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(c)
	return syscall.Connect(c, addr)
}

func TestUntouchedSlotIsReused(t *testing.T) {
	s := open(t, privateDir(t), 0)
	defer closeSlots(t, s)
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	first := acquire(t, s, a)
	if again := acquire(t, s, a); again != first {
		t.Errorf("the same sandbox got %s and then %s", first, again)
	}
	time.Sleep(50 * time.Millisecond) // late counters, if there were any, would show now
	release(t, s, a)
	if got := acquire(t, s, b); got != first {
		t.Errorf("a slot in which nothing happened was not used again: %s then %s", first, got)
	}
	release(t, s, b)
	release(t, s, b) // without a slot
}

func TestUsedSlotIsDestroyed(t *testing.T) {
	uses := map[string]func(t *testing.T, ns string) (undo func()){
		"an open unix socket": func(t *testing.T, ns string) func() {
			var fd int
			err := linux.InNetns(ns, func() (err error) {
				fd, err = syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return func() { syscall.Close(fd) }
		},
		"traffic that ended": func(t *testing.T, ns string) func() {
			if err := linux.InNetns(ns, func() error { return dialSelf(t) }); err != nil {
				t.Fatal(err)
			}
			return func() {}
		},
		"a refused datagram": func(t *testing.T, ns string) func() {
			err := linux.InNetns(ns, func() error {
				fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
				if err != nil {
					return err
				}
				defer syscall.Close(fd)
				return syscall.Sendto(fd, []byte("x"), 0, &syscall.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}})
			})
			if err != nil {
				t.Fatal(err)
			}
			return func() {}
		},
		"a flow label that lingers": func(t *testing.T, ns string) func() {
			err := linux.InNetns(ns, func() error {
				fd, err := syscall.Socket(syscall.AF_INET6, syscall.SOCK_DGRAM, 0)
				if err != nil {
					return err
				}
				defer syscall.Close(fd)
				request := make([]byte, 32)                       // struct in6_flowlabel_req
				request[15] = 1                                   // for ::1
				binary.BigEndian.PutUint32(request[16:], 0x12345) // the message to the next one
				request[21] = 1                                   // exclusive
				binary.NativeEndian.PutUint16(request[22:], 1)    // make it
				binary.NativeEndian.PutUint16(request[26:], 60)   // s to linger
				const flowLabelManager = 32
				return syscall.SetsockoptString(fd, syscall.IPPROTO_IPV6, flowLabelManager, string(request))
			})
			if err != nil {
				t.Fatal(err)
			}
			return func() {}
		},
	}
	for name, use := range uses {
		t.Run(name, func(t *testing.T) {
			s := open(t, privateDir(t), 0)
			defer closeSlots(t, s)
			id := sandbox.NewID(edge)
			ns := acquire(t, s, id)
			undo := use(t, ns)
			defer undo()
			release(t, s, id)
			if exists(ns) {
				t.Error("the slot is still there")
			}
			if got := acquire(t, s, sandbox.NewID(edge)); got == ns {
				t.Error("a used slot was given to another sandbox")
			}
		})
	}
}

func TestRestartFindsOwnersAndChecksTheRest(t *testing.T) {
	dir := privateDir(t)
	s := open(t, dir, 2)
	live, dead := sandbox.NewID(edge), sandbox.NewID(edge)
	liveNS, deadNS := acquire(t, s, live), acquire(t, s, dead)
	dirty := filepath.Join(s.dir, "900") // made, then used by who knows whom, and no owner recorded
	if err := linux.CreateNetns(dirty, setUp); err != nil {
		t.Fatal(err)
	}
	if err := linux.InNetns(dirty, func() error { return dialSelf(t) }); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.dir, "901"), nil, 0o400); err != nil { // killed before the bind mount
		t.Fatal(err)
	}
	if err := os.Symlink("902", s.owner(sandbox.NewID(edge))); err != nil { // killed within Release
		t.Fatal(err)
	}
	s.Detach()

	s = open(t, dir, 2)
	defer closeSlots(t, s)
	if got := acquire(t, s, live); got != liveNS {
		t.Errorf("after the restart the sandbox has %s, had %s", got, liveNS)
	}
	if exists(dirty) || exists(filepath.Join(s.dir, "901")) {
		t.Error("an unclean or half-made slot survived the restart")
	}
	gone, err := s.Sweep(t.Context(), map[sandbox.ID]bool{live: true})
	if err != nil || len(gone) != 1 || gone[0] != dead {
		t.Errorf("Sweep gives %v, %v; want %s", gone, err, dead)
	}
	if exists(deadNS) || exists(s.owner(dead)) {
		t.Error("the swept slot is still there")
	}
	if !exists(liveNS) {
		t.Error("Sweep took the slot of a sandbox to be kept")
	}
}

func TestConcurrentSandboxesNeverShareASlot(t *testing.T) {
	s := open(t, privateDir(t), 4)
	defer closeSlots(t, s)
	var mu sync.Mutex
	inUse := make(map[string]sandbox.ID)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				id := sandbox.NewID(edge)
				n, err := s.Acquire(t.Context(), id, Policy{})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if other, taken := inUse[n.Namespace]; taken {
					t.Errorf("%s is with %s and %s", n.Namespace, other, id)
				}
				inUse[n.Namespace] = id
				mu.Unlock()
				mu.Lock()
				delete(inUse, n.Namespace)
				mu.Unlock()
				if err := s.Release(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestKilledProcessLeavesSlotsThatAreFoundOrRemoved(t *testing.T) {
	dir := privateDir(t)
	for round := range 8 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), churnEnv+"="+dir)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(5+round*40+rand.IntN(40)) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("the child ended by itself: %v %s", err, stderr.String())
		}
	}
	s := openLinked(t, dir, 2)
	defer closeSlots(t, s)
	keep := make(map[sandbox.ID]bool)
	for id, x := range s.owned {
		if err := linux.InNetns(s.path(x.n), func() error { return nil }); err != nil {
			t.Errorf("the slot of %s cannot be entered: %v", id, err)
		}
		if len(keep) == 0 {
			keep[id] = true
		}
	}
	if _, err := s.Sweep(t.Context(), keep); err != nil {
		t.Fatal(err)
	}
	links, err := os.ReadDir(s.linksDir())
	for _, l := range links {
		if target, _ := os.Readlink(filepath.Join(s.linksDir(), l.Name())); !exists(filepath.Join(s.dir, target)) || strings.HasSuffix(l.Name(), ".new") {
			t.Errorf("link %s leads to %s, which is not there: %v", l.Name(), target, err)
		}
	}
	owners, err := os.ReadDir(filepath.Join(s.dir, "owners"))
	if err != nil || len(owners) != len(keep) {
		t.Errorf("owners %v, %v; want %v", owners, err, keep)
	}
}

func TestBadIDsAndClosedSlotsAreRefused(t *testing.T) {
	s := open(t, privateDir(t), 0)
	if _, err := s.Acquire(t.Context(), "../../etc", Policy{}); sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("a path as id: %v", err)
	}
	closeSlots(t, s)
	if _, err := s.Acquire(t.Context(), sandbox.NewID(edge), Policy{}); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("Acquire after Close: %v", err)
	}
}

func TestSysfsShowsLoopbackAndNothingOfTheHost(t *testing.T) {
	s := open(t, privateDir(t), 0)
	defer closeSlots(t, s)
	b, err := os.ReadFile(filepath.Join(s.sysfs, "class/net/lo/mtu"))
	if err != nil || string(b) != "65536\n" {
		t.Errorf("mtu of lo: %q, %v", b, err)
	}
	links, err := os.ReadDir(filepath.Join(s.sysfs, "class/net"))
	if err != nil || len(links) != 1 {
		t.Errorf("class/net shows %v, %v", links, err)
	}
	err = filepath.WalkDir(s.sysfs, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(s.sysfs, path)
		if within, _ := filepath.Match("*/net/*", rel); rel == "devices/virtual/net" || rel == "class/net" || within {
			return filepath.SkipDir
		}
		if !d.IsDir() {
			t.Errorf("%s of the host is visible", rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"x", "class/net/x", "devices/virtual/net/lo/mtu"} {
		f, err := os.OpenFile(filepath.Join(s.sysfs, p), os.O_WRONLY|os.O_CREATE, 0o600)
		if err == nil {
			f.Close()
		}
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("opening %s for writing: %v, want EROFS", p, err)
		}
	}
}

func TestHalfMadeSysfsIsMadeAgain(t *testing.T) {
	dir := privateDir(t)
	s := open(t, dir, 0)
	s.Detach()
	if err := syscall.Unmount(filepath.Join(s.sysfs, "class/net"), 0); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, 0)
	defer closeSlots(t, s)
	if !exists(filepath.Join(s.sysfs, "class/net/lo")) {
		t.Error("the half-made /sys was kept")
	}
}

func TestCloseLeavesTheHostAsBefore(t *testing.T) {
	dir := privateDir(t)
	proc, err := linux.PrivateProc() // the process keeps one
	if err != nil {
		t.Fatal(err)
	}
	linux.Close(proc)
	before, err := hoststate.Snapshot(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	s := openLinked(t, dir, 4)
	acquire(t, s, sandbox.NewID(edge))
	acquireOpen(t, s, Policy{Open: []Destination{opened("10.0.0.0/8", 443, 443, TCP)}})
	closeSlots(t, s)
	after, err := hoststate.Snapshot(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	mine := func(i hoststate.Item) bool {
		return i.Kind == hoststate.FD || i.Kind == hoststate.Link || strings.Contains(i.Name, filepath.Dir(dir))
	}
	if diff := hoststate.Diff(before.Only(mine), after.Only(mine)); len(diff) > 0 {
		t.Error(strings.Join(diff, "\n"))
	}
}

func BenchmarkAcquireReleaseReused(b *testing.B) {
	s := open(b, privateDir(b), 4)
	defer closeSlots(b, s)
	for b.Loop() {
		id := sandbox.NewID(edge)
		acquire(b, s, id)
		release(b, s, id)
	}
}

func BenchmarkCreateDestroy(b *testing.B) {
	dir := privateDir(b)
	s := open(b, dir, 0)
	defer closeSlots(b, s)
	for b.Loop() {
		x, err := s.make(false)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.remove(x); err != nil {
			b.Fatal(err)
		}
	}
}
