package aether

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/pax"
)

// deepTree makes n directories below each other, with names as long as there are.
func deepTree(t *testing.T, n int) string {
	t.Helper()
	top := t.TempDir()
	at, err := unix.Open(top, unix.O_PATH|unix.O_CLOEXEC, 0)
	for range n {
		if err == nil {
			err = unix.Mkdirat(at, strings.Repeat("d", 255), 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		below, e := unix.Openat(at, strings.Repeat("d", 255), unix.O_PATH|unix.O_CLOEXEC, 0)
		unix.Close(at)
		at, err = below, e
	}
	unix.Close(at)
	return top
}

type writeFunc func([]byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A level of a deep tree costs its name, not its path.
func TestPackedPathsAreNotKept(t *testing.T) {
	const depth = maxDepth - 2
	top := deepTree(t, depth)
	before, most, sent := heap(), uint64(0), 0
	of := new(names)
	done, err := packTree(context.Background(), &aetherv1.ReadArchive{Path: []byte(top), Content: true}, writeFunc(func(p []byte) (int, error) {
		if sent += len(p); sent > depth*depth*250/2 { // near the bottom, where one path is 128 KiB
			most = max(most, heap())
		}
		return len(p), nil
	}), func() {}, of)
	if err != nil || done.Entries != depth {
		t.Fatal(done, err)
	}
	if most == 0 || most > before+8<<20 {
		t.Errorf("%d MiB are held", (most-before)>>20)
	}
	if n := of.held.Load(); n != 0 {
		t.Errorf("%d bytes of names were not given back", n)
	}
}

// What all requests hold of hostile trees is bounded together, and given back.
func TestNamesHeldTogether(t *testing.T) {
	top := t.TempDir()
	for _, name := range []string{"a/b/c", "d/e/f", "g"} {
		if err := os.MkdirAll(filepath.Join(top, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	walk := func(of *names) error {
		fd, err := unix.Open(top, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		w := &walker{ctx: context.Background(), held: share{of: of}, visit: func(*treeDir, string) (bool, error) { return true, nil }}
		return w.run(fd)
	}
	for _, left := range []int64{10, levelCost + 10, levelCost + 3*(nameCost+1) + 10, maxNamesHeld} {
		of := new(names)
		of.held.Store(maxNamesHeld - left)
		if err := walk(of); (err == nil) != (left == maxNamesHeld) || err != nil && !errors.Is(err, errNames) {
			t.Errorf("%d bytes left: %v", left, err)
		}
		if n := of.held.Load(); n != maxNamesHeld-left {
			t.Errorf("%d bytes left: %d were not given back", left, n-maxNamesHeld+left)
		}
	}
}

// Attributes of directories wait until these are complete; a hostile archive nests them.
func TestNestedAttributesAreBounded(t *testing.T) {
	var b bytes.Buffer
	w := pax.NewWriter(&b)
	name := ""
	for range 30 {
		name += "d/"
		h := &pax.Header{Name: name, Type: pax.Dir, Mode: 0o755, Xattrs: []pax.Xattr{{Name: "user.x", Value: strings.Repeat("x", 100<<10)}}}
		if err := w.Header(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	u, err := newUnpacker(&aetherv1.WriteArchive{Path: []byte(t.TempDir())}, account{uid: uint32(os.Geteuid()), gid: uint32(os.Getegid())}, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer u.close()
	var f *failure
	if _, err := u.run(&b); !errors.As(err, &f) || f.code != aetherv1.Code_CODE_INVALID || len(u.dirs) > 2+maxHeldAttrs/(100<<10) {
		t.Errorf("%v, with %d directories open", err, len(u.dirs))
	}
}

// Whoever writes without end into the pipes of a session stops nobody.
func TestPipesThatAreAlwaysFull(t *testing.T) {
	open := func() int {
		fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	p := &shellPipes{script: open()}
	defer unix.Close(p.script)
	if fd, err := p.openScript(); err == nil {
		unix.Close(fd)
		t.Error("a script would follow what another has written")
	}
	x := &chronus{statuses: os.NewFile(uintptr(open()), "status")}
	defer x.statuses.Close()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.hearRest()
	if len(x.report) > 1<<10 {
		t.Errorf("%d bytes of a report are kept", len(x.report))
	}
}

func TestRememberedEventsAreBounded(t *testing.T) {
	w := &watcher{topWD: 1, last: make(map[string]uint32), out: records{w: io.Discard}}
	for i := range 1000 {
		if err := w.tell(1, strings.Repeat("x", 4000)+string(rune('0'+i)), eventChanged, false); err != nil {
			t.Fatal(err)
		}
	}
	if w.lastBytes > maxLast+8<<10 || len(w.last) > maxLast/4000+1 {
		t.Errorf("%d paths, %d bytes", len(w.last), w.lastBytes)
	}
}

// Names that a request brings count as those that a tree has.
func TestNamesOfArchivesAreHeld(t *testing.T) {
	of := new(names)
	of.held.Store(maxNamesHeld - 100)
	r := &aetherv1.ReadArchive{Path: []byte("/"), Names: [][]byte{[]byte("a"), []byte("b"), []byte("c"), []byte("d")}}
	if _, err := packTree(context.Background(), r, io.Discard, func() { t.Error("opened") }, of); !errors.Is(err, errNames) || of.held.Load() != maxNamesHeld-100 {
		t.Error(err, of.held.Load())
	}
}

// TestLinksThatAreForgotten: what an archive made is followed no more than what could be remembered.
func TestLinksThatAreForgotten(t *testing.T) {
	dir := t.TempDir()
	for name, target := range map[string]string{"was": "d", "mine": "d"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	of := new(names)
	u, err := newUnpacker(&aetherv1.WriteArchive{Path: []byte(dir)}, account{uid: uint32(os.Geteuid()), gid: uint32(os.Getegid())}, false, of)
	if err != nil {
		t.Fatal(err)
	}
	follows := func(name string) bool {
		d, err := u.directory(name, false)
		if err == nil {
			_ = unix.Close(d.fd)
		}
		return err == nil
	}
	if err := u.made("mine"); err != nil || !follows("was") || follows("mine") || of.held.Load() != madeCost {
		t.Errorf("%v, %d held", err, of.held.Load())
	}
	of.held.Store(maxNamesHeld)
	if err := u.made("was"); err != nil || follows("was") || follows("mine") {
		t.Error(err)
	}
	if u.close(); of.held.Load() != maxNamesHeld-madeCost {
		t.Errorf("%d held", of.held.Load())
	}
}
