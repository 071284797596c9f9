//go:build rootful

package layers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
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
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

func TestLayersAreMountedOnceInOverlaysOrder(t *testing.T) {
	a, b := makeImage(t, t.TempDir(), "lower"), makeImage(t, t.TempDir(), "upper")
	m := open(t, privateDir(t), 1)
	defer closeMounts(t, m)
	one, two := sandbox.NewID(edge), sandbox.NewID(edge)
	lowers := acquire(t, m, one, a, b)
	if len(lowers) != 2 || firstLine(t, lowers[0]) != "upper" || firstLine(t, lowers[1]) != "lower" {
		t.Errorf("lowers %v: want the topmost first", lowers)
	}
	again := acquire(t, m, two, a)
	if again[0] != lowers[1] || len(mounted(t, m.dir)) != 2 {
		t.Errorf("the second sandbox got %v, with %d mounts", again, len(mounted(t, m.dir)))
	}
	acquire(t, m, one, a) // once more by the same holder
	release(t, m, one)
	if len(mounted(t, m.dir)) != 2 { // a is held by two, b is the one kept
		t.Errorf("%d mounts after the first release", len(mounted(t, m.dir)))
	}
	release(t, m, two)
	release(t, m, two)
	left := mounted(t, m.dir)
	if len(left) != 1 || left[0].Point != lowers[1] {
		t.Errorf("kept %+v, want the layer that was used last", left)
	}
	want := int64(0)
	if !readsFiles(t) {
		want = 2
	}
	if m.Fallbacks() != want {
		t.Errorf("%d mounts went through loop devices, want %d", m.Fallbacks(), want)
	}
}

func TestMountFlags(t *testing.T) {
	m := open(t, privateDir(t), 0)
	defer closeMounts(t, m)
	holder := sandbox.NewID(edge)
	dir := acquire(t, m, holder, makeImage(t, t.TempDir(), "x"))[0]
	mount := mounted(t, m.dir)[0]
	options := strings.Join(mount.Options, ",")
	// A source that leads through /proc/self would be another file for everyone who looks: mkfs.btrfs then takes its own
	// output for mounted.
	if _, err := os.Lstat(mount.Source); readsFiles(t) && (!errors.Is(err, os.ErrNotExist) || !strings.HasPrefix(mount.Source, m.dir)) ||
		!readsFiles(t) && !strings.HasPrefix(mount.Source, "/dev/loop") {
		t.Errorf("the source of the mount is %s: %v", mount.Source, err)
	}
	if super := strings.Join(mount.Super, ","); strings.Contains(super, "/proc/") {
		t.Errorf("options of the file system name descriptors: %s", super)
	}
	if !strings.HasPrefix(options, "ro,") || !strings.Contains(options, "nodev") || strings.Contains(options, "nosuid") {
		t.Errorf("options %s: want ro, nodev and no nosuid", options)
	}
	if _, err := os.ReadFile(filepath.Join(dir, "null")); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a device node in a layer can be opened: %v", err)
	}
	if st, err := os.Stat(filepath.Join(dir, "setuid")); err != nil || st.Mode()&os.ModeSetuid == 0 {
		t.Errorf("a set-user-id program lost its bit: %v, %v", st, err)
	}
	release(t, m, holder)
}

func TestDamagedAndMissingFiles(t *testing.T) {
	images := t.TempDir()
	good := makeImage(t, images, "x")
	other := makeImage(t, t.TempDir(), "other")
	change := func(f func(*rootfs.Source)) rootfs.Source {
		s := rootfs.Source{Metadata: good.Metadata, Data: append([]rootfs.File(nil), good.Data...)}
		f(&s)
		return s
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	notErofs := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(notErofs, bytes.Repeat([]byte("x"), 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(bytes.Repeat([]byte("x"), 8192))
	cases := map[string]struct {
		source rootfs.Source
		class  sandbox.Class
		reason string
	}{
		"missing metadata":     {change(func(s *rootfs.Source) { s.Metadata.Path += "x" }), sandbox.NotFound, "layer_missing"},
		"missing blob":         {change(func(s *rootfs.Source) { s.Data[0].Path += "x" }), sandbox.NotFound, "layer_missing"},
		"other metadata":       {change(func(s *rootfs.Source) { s.Metadata.Path = other.Metadata.Path }), sandbox.DataLoss, "layer_corrupt"},
		"wrong blob size":      {change(func(s *rootfs.Source) { s.Data[0].Size++ }), sandbox.DataLoss, "layer_corrupt"},
		"a directory":          {change(func(s *rootfs.Source) { s.Data[0].Path = images }), sandbox.DataLoss, "layer_corrupt"},
		"a fifo":               {change(func(s *rootfs.Source) { s.Metadata.Path = fifo }), sandbox.DataLoss, "layer_corrupt"},
		"no erofs":             {rootfs.Source{Metadata: rootfs.File{Path: notErofs, Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: 8192}}, sandbox.DataLoss, "layer_unmountable"},
		"a digest like a path": {change(func(s *rootfs.Source) { s.Metadata.Digest = "sha256:../../../../etc" }), sandbox.InvalidArgument, "bad_layer"},
		"too many blobs":       {change(func(s *rootfs.Source) { s.Data = make([]rootfs.File, 17) }), sandbox.InvalidArgument, "bad_layer"},
	}
	m := open(t, privateDir(t), 4)
	defer closeMounts(t, m)
	settled := sandbox.NewID(edge)
	acquire(t, m, settled, other)
	release(t, m, settled)
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			// With a good layer below, which must not stay held.
			holder := sandbox.NewID(edge)
			_, err := m.Acquire(t.Context(), holder, []rootfs.Source{other, c.source})
			if sandbox.ClassOf(err) != c.class || sandbox.ReasonOf(err) != c.reason {
				t.Fatalf("error %v, want %s", err, c.reason)
			}
			if len(m.held) != 0 || len(mounted(t, m.dir)) != 1 || m.layers[keyOf(other)].users != 0 {
				t.Errorf("after the error: held %v, mounts %v", m.held, mounted(t, m.dir))
			}
		})
	}
	acquire(t, m, sandbox.NewID(edge), good) // the failures of this layer are not remembered
}

func TestDamageInTheMiddleOfTheMetadataIsFound(t *testing.T) {
	s := makeImage(t, t.TempDir(), "x")
	f, err := os.OpenFile(s.Metadata.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{0xff}, s.Metadata.Size-1); err != nil {
		t.Fatal(err)
	}
	m := open(t, privateDir(t), 0)
	defer closeMounts(t, m)
	if _, err := m.Acquire(t.Context(), sandbox.NewID(edge), []rootfs.Source{s}); sandbox.ReasonOf(err) != "layer_corrupt" {
		t.Errorf("error %v", err)
	}
}

func TestSameMetadataWithOtherBlobsIsAnotherLayer(t *testing.T) {
	a, b := makeImage(t, t.TempDir(), "aaaa"), makeImage(t, t.TempDir(), "bbbb")
	b.Metadata = a.Metadata
	m := open(t, privateDir(t), 0)
	defer closeMounts(t, m)
	one, two := acquire(t, m, sandbox.NewID(edge), a), acquire(t, m, sandbox.NewID(edge), b)
	if one[0] == two[0] {
		t.Fatal("two sandboxes share a mount although their blobs differ")
	}
	if firstLine(t, one[0]) != "aaaa" || firstLine(t, two[0]) != "bbbb" {
		t.Errorf("contents %q and %q", firstLine(t, one[0]), firstLine(t, two[0]))
	}
}

func TestFilesOnTmpfsGoThroughLoopDevices(t *testing.T) {
	before, err := linux.LoopDevices()
	if err != nil {
		t.Fatal(err)
	}
	run := privateDir(t)
	images := filepath.Join(filepath.Dir(run), "images")
	if err := os.Mkdir(images, 0o700); err != nil {
		t.Fatal(err)
	}
	m := open(t, run, 0)
	holder := sandbox.NewID(edge)
	dir := acquire(t, m, holder, makeImage(t, images, "tmpfs"))[0]
	if firstLine(t, dir) != "tmpfs" || m.Fallbacks() != 1 {
		t.Errorf("content %q, %d fallbacks", firstLine(t, dir), m.Fallbacks())
	}
	release(t, m, holder)
	closeMounts(t, m)
	waitFor(t, func() bool {
		now, err := linux.LoopDevices()
		return err == nil && len(now) <= len(before)
	})
}

func TestRestartAdoptsMounts(t *testing.T) {
	run := privateDir(t)
	s := makeImage(t, t.TempDir(), "x")
	m := open(t, run, 0)
	holder := sandbox.NewID(edge)
	dir := acquire(t, m, holder, s)[0]
	id := mounted(t, m.dir)[0].ID
	if err := os.Symlink("/proc/self/fd/3", dir+".erofs"); err != nil { // killed while mounting
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(m.dir, strings.Repeat("0", 64)), 0o700); err != nil { // killed before mounting
		t.Fatal(err)
	}

	m = open(t, run, 0)
	if got := acquire(t, m, holder, s)[0]; got != dir || mounted(t, m.dir)[0].ID != id {
		t.Errorf("mounted anew at %s", got)
	}
	if entries, err := os.ReadDir(m.dir); err != nil || len(entries) != 1 {
		t.Errorf("directory %v, %v", entries, err)
	}
	gone, err := m.Sweep(t.Context(), map[sandbox.ID]bool{holder: true})
	if err != nil || len(gone) != 0 || len(mounted(t, m.dir)) != 1 {
		t.Errorf("Sweep took %v of the sandbox to be kept, %v", gone, err)
	}

	m = open(t, run, 0)
	defer closeMounts(t, m)
	if gone, err := m.Sweep(t.Context(), nil); err != nil || len(gone) != 0 || len(mounted(t, m.dir)) != 0 {
		t.Errorf("without holders Sweep gives %v, %v and leaves %v", gone, err, mounted(t, m.dir))
	}
}

func TestSweepReleasesHoldersThatAreGone(t *testing.T) {
	m := open(t, privateDir(t), 0)
	defer closeMounts(t, m)
	s := makeImage(t, t.TempDir(), "x")
	live, dead := sandbox.NewID(edge), sandbox.NewID(edge)
	acquire(t, m, live, s)
	acquire(t, m, dead, s)
	gone, err := m.Sweep(t.Context(), map[sandbox.ID]bool{live: true})
	if err != nil || len(gone) != 1 || gone[0] != dead || len(mounted(t, m.dir)) != 1 {
		t.Errorf("Sweep gives %v, %v", gone, err)
	}
	release(t, m, live)
	if left := mounted(t, m.dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestConcurrentSandboxesMountOnce(t *testing.T) {
	m := open(t, privateDir(t), 8)
	defer closeMounts(t, m)
	a, b := makeImage(t, t.TempDir(), "a"), makeImage(t, t.TempDir(), "b")
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 20 {
				holder := sandbox.NewID(edge)
				lowers, err := m.Acquire(t.Context(), holder, []rootfs.Source{a, b})
				if err != nil || len(lowers) != 2 {
					t.Error(err)
				} else if _, err := os.Stat(filepath.Join(lowers[0], "name")); err != nil {
					t.Error(err)
				}
				release(t, m, holder)
			}
		})
	}
	wg.Wait()
	if n := len(mounted(t, m.dir)); n != 2 {
		t.Errorf("%d mounts, want 2", n)
	}
}

func TestConcurrentEvictionNeverUnmountsWhatIsHeld(t *testing.T) {
	m := open(t, privateDir(t), 0)
	defer closeMounts(t, m)
	a := makeImage(t, t.TempDir(), "a")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				holder := sandbox.NewID(edge)
				lowers, err := m.Acquire(t.Context(), holder, []rootfs.Source{a})
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Stat(filepath.Join(lowers[0], "name")); err != nil {
					t.Error(err)
				}
				release(t, m, holder)
			}
		})
	}
	wg.Wait()
}

func TestACancelledCallerHoldsNothing(t *testing.T) {
	m := open(t, privateDir(t), 4)
	s := makeImage(t, t.TempDir(), "x")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	holder := sandbox.NewID(edge)
	_, err := m.Acquire(ctx, holder, []rootfs.Source{s})
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	release(t, m, holder)
	closeMounts(t, m)
	if _, err := m.Acquire(t.Context(), holder, []rootfs.Source{s}); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("Acquire after Close: %v", err)
	}
}

func TestCloseGivesUpOnALayerInUseWhenTheContextEnds(t *testing.T) {
	m := open(t, privateDir(t), 4)
	holder := sandbox.NewID(edge)
	f, err := os.Open(filepath.Join(acquire(t, m, holder, makeImage(t, t.TempDir(), "x"))[0], "name"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := m.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if left := mounted(t, m.dir); len(left) != 0 {
		t.Errorf("still visible: %v", left)
	}
}

func TestKilledProcessLeavesMountsThatAreAdoptedOrRemoved(t *testing.T) {
	run, images := privateDir(t), t.TempDir()
	s := makeImage(t, images, "x")
	for range 6 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), churnEnv+"="+run+":"+images)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(20+rand.IntN(40)) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("the child ended by itself: %v %s", err, stderr.String())
		}
	}
	m := open(t, run, 1)
	defer closeMounts(t, m)
	if dir := acquire(t, m, sandbox.NewID(edge), s)[0]; firstLine(t, dir) != "x" {
		t.Error("the layer cannot be read")
	}
}

func waitFor(t testing.TB, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen within a minute")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestCloseLeavesTheHostAsBefore(t *testing.T) {
	dir := privateDir(t)
	before, err := hoststate.Snapshot(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	source := makeImage(t, t.TempDir(), "x")
	m := open(t, dir, 4)
	acquire(t, m, sandbox.NewID(edge), source)
	closeMounts(t, m)
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

func BenchmarkAcquireMounted(b *testing.B) {
	m := open(b, privateDir(b), 4)
	defer closeMounts(b, m)
	s := makeImage(b, b.TempDir(), "x")
	acquire(b, m, sandbox.NewID(edge), s)
	for b.Loop() {
		holder := sandbox.NewID(edge)
		acquire(b, m, holder, s)
		release(b, m, holder)
	}
}

// The layer failed when everybody who had asked for it was gone: whoever asks next is not told of it.
func TestAFailureIsForThoseWhoWaitedForIt(t *testing.T) {
	m := open(t, privateDir(t), 4)
	defer closeMounts(t, m)
	dir := t.TempDir()
	s := makeImage(t, dir, "x")
	if err := os.Rename(s.Data[0].Path, s.Data[0].Path+".away"); err != nil {
		t.Fatal(err)
	}
	l, err := m.take(s)
	if err != nil {
		t.Fatal(err)
	}
	<-l.ready
	if err := os.Rename(s.Data[0].Path+".away", s.Data[0].Path); err != nil {
		t.Fatal(err)
	}
	holder := sandbox.NewID(edge)
	acquire(t, m, holder, s) // while the one that failed has not gone yet
	m.drop(l)
	if len(mounted(t, m.dir)) != 1 || m.layers[l.key].users != 1 {
		t.Errorf("mounts %v, %d users", mounted(t, m.dir), m.layers[l.key].users)
	}
	release(t, m, holder)
}

// A blob is read once, and once more when its file has changed.
func TestBlobsAreVerifiedOnce(t *testing.T) {
	run := privateDir(t)
	m := open(t, run, 0)
	s := makeImage(t, t.TempDir(), "x")
	blob := s.Data[0].Path
	holder := sandbox.NewID(edge)
	acquire(t, m, holder, s)
	release(t, m, holder) // unmounted: nothing idle is kept
	m.Detach()
	m = open(t, run, 0)
	defer closeMounts(t, m)
	if !m.isVerified(t, s.Data[0]) {
		t.Error("a restart forgot that the blob was verified")
	}
	content, err := os.ReadFile(blob)
	if err != nil {
		t.Fatal(err)
	}
	content[len(content)/2] ^= 1
	st, err := os.Stat(blob)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(blob, content, 0o600), os.Chtimes(blob, st.ModTime(), st.ModTime())); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Acquire(t.Context(), holder, []rootfs.Source{s}); sandbox.ReasonOf(err) != "layer_corrupt" {
		t.Errorf("a blob that was changed after its first mount: %v", err)
	}
	content[len(content)/2] ^= 1
	if err := os.WriteFile(blob, content, 0o600); err != nil {
		t.Fatal(err)
	}
	acquire(t, m, holder, s)
	release(t, m, holder)
}

func (m *Mounts) isVerified(t *testing.T, f rootfs.File) bool {
	t.Helper()
	file, err := os.Open(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel() // what has to be read is not
	return m.checkBlob(cancelled, file, f) == nil
}

func BenchmarkVerifyBlob(b *testing.B) {
	path := filepath.Join(b.TempDir(), "blob")
	content := bytes.Repeat([]byte("0123456789abcdef"), 16<<20)
	sum := sha256.Sum256(content)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		b.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	b.SetBytes(int64(len(content)))
	for b.Loop() {
		if err := checkDigest(b.Context(), f, rootfs.File{Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(content))}); err != nil {
			b.Fatal(err)
		}
	}
}
