package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

const (
	created = iota + 1
	changed
	removed
	movedFrom
	movedTo
	attributes
)

// await reads events until one is ev.
func await(t *testing.T, w *FileWatch, path string, kind int32) {
	t.Helper()
	for {
		ev, err := w.Next()
		if err != nil {
			t.Fatalf("waiting for %q %d: %v", path, kind, err)
		}
		if string(ev.Path) == path && ev.Kind == kind {
			return
		}
	}
}

func watch(t *testing.T, c *Client, dir string, recursive bool) *FileWatch {
	t.Helper()
	w, err := c.WatchFiles(testContext(t), dir, me(), recursive)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// TestWatchHidesTemporaryNames: what is made under a temporary name is told under its own, as created or changed; what
// somebody else calls alike is theirs.
func TestWatchHidesTemporaryNames(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := filepath.Join(w.dir, "watched")
	at := func(name string) string { return filepath.Join(dir, name) }
	putFile(t, at("old"), "x")
	putFile(t, filepath.Join(w.dir, "tree/a/b"), "x")
	var tar bytes.Buffer
	r, err := c.ReadArchive(testContext(t), ArchiveRead{Path: w.dir + "/tree", User: me(), Content: true})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := tar.ReadFrom(r); err != nil {
		t.Fatal(err)
	}
	packed := tar.Bytes()
	e := watch(t, c, dir, true)
	put := func(name string, size int64) error {
		_, _, err := c.WriteFile(testContext(t), FileWrite{Path: at(name), User: me(), Size: size}, strings.NewReader("content"))
		return err
	}
	unpack := func() {
		if _, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: dir, User: me()}, bytes.NewReader(packed)); err != nil {
			t.Fatal(err)
		}
	}
	similar := ".dsec-" + strings.Repeat("A", 24)
	steps := []struct {
		do   func()
		want map[string]int32 // the first event of each path
	}{
		{func() { must(t, put("new", 7)) }, map[string]int32{"new": created}},
		{func() { must(t, put("old", 7)) }, map[string]int32{"old": changed}},
		{func() {
			if put("failed", 5) == nil {
				t.Error("too long and no error")
			}
		}, nil},
		{unpack, map[string]int32{"a": created, "a/b": created}},
		{unpack, map[string]int32{"a": attributes, "a/b": changed}},
		{func() { mustChange(t, c, Change{Kind: CopyFile, Path: at("old"), To: at("copy")}) }, map[string]int32{"copy": created}},
		{func() { mustChange(t, c, Change{Kind: CopyFile, Path: at("old"), To: at("copy")}) }, map[string]int32{"copy": changed}},
		{func() {
			mustChange(t, c, Change{Kind: CopyFile, Path: w.dir + "/tree", To: at("tree"), Recursive: true})
		},
			map[string]int32{"tree": created, "tree/a": created, "tree/a/b": created}},
		{func() { putFile(t, at("tree/a/b"), "y") }, map[string]int32{"tree/a/b": changed}}, // it is watched
		{func() { putFile(t, at(similar), "mine") }, map[string]int32{similar: created}},
		{func() { must(t, os.Rename(at(similar), at("mine"))) }, map[string]int32{similar: movedFrom, "mine": movedTo}},
	}
	for i, s := range steps {
		s.do()
		end := fmt.Sprint("end", i)
		putFile(t, at(end), "")
		if got := firstEvents(t, e, end); !maps.Equal(got, s.want) {
			t.Errorf("step %d: %v, want %v", i, got, s.want)
		}
	}
}

// firstEvents is the first kind of each path's events until end is told.
func firstEvents(t *testing.T, w *FileWatch, end string) map[string]int32 {
	t.Helper()
	got := make(map[string]int32)
	for {
		ev, err := w.Next()
		if err != nil {
			t.Fatal(err)
		}
		p := string(ev.Path)
		if p == end {
			return got
		}
		if got[p] == 0 && p != "" && !strings.HasPrefix(p, "end") {
			got[p] = ev.Kind
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWatchTellsWhatHappens(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := filepath.Join(w.dir, "watched")
	at := func(name string) string { return filepath.Join(dir, name) }
	putFile(t, at("old/below/file"), "x")
	e := watch(t, c, dir, true)
	putFile(t, at("new\nline\xff"), "content")
	await(t, e, "new\nline\xff", created)
	await(t, e, "new\nline\xff", changed)
	putFile(t, at("old/below/file"), "changed")
	await(t, e, "old/below/file", changed)
	if err := os.Rename(at("old/below"), at("under")); err != nil {
		t.Fatal(err)
	}
	await(t, e, "old/below", movedFrom)
	await(t, e, "under", movedTo)
	putFile(t, at("under/file"), "seen at its new place")
	await(t, e, "under/file", changed)
	if err := os.Rename(at("under"), filepath.Join(w.dir, "outside")); err != nil {
		t.Fatal(err)
	}
	await(t, e, "under", movedFrom)
	putFile(t, filepath.Join(w.dir, "outside/file"), "not ours")
	putFile(t, at("made/at/once/file"), "x") // faster than watches can be added
	await(t, e, "made/at/once/file", created)
	putFile(t, at("made/at/once/file"), "y")
	await(t, e, "made/at/once/file", changed)
	if err := os.RemoveAll(at("made")); err != nil {
		t.Fatal(err)
	}
	await(t, e, "made", removed)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for {
		ev, err := e.Next()
		if err != nil {
			if sandbox.ReasonOf(err) != "file_not_found" {
				t.Errorf("%v", err)
			}
			break
		}
		if bytes.HasPrefix(ev.Path, []byte("under/")) {
			t.Errorf("an event of what was moved away: %+v", ev)
		}
	}
}

func TestWatchOfOneDirectory(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := filepath.Join(w.dir, "watched")
	putFile(t, filepath.Join(dir, "sub/file"), "x")
	e := watch(t, c, dir, false)
	putFile(t, filepath.Join(dir, "sub/file"), "not told")
	putFile(t, filepath.Join(dir, "file"), "told")
	ev, err := e.Next()
	if err != nil || string(ev.Path) != "file" || ev.Kind != created || ev.Directory {
		t.Errorf("%+v, %v", ev, err)
	}
	for p, reason := range map[string]string{filepath.Join(dir, "none"): "file_not_found", filepath.Join(dir, "file"): "not_directory", "/proc/self": "invalid_request"} {
		if _, err := c.WatchFiles(testContext(t), p, me(), true); sandbox.ReasonOf(err) != reason {
			t.Errorf("%s: %v, want %s", p, err, reason)
		}
	}
	if err := os.Rename(dir, dir+"2"); err != nil {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, err = e.Next()
	}
	if sandbox.ReasonOf(err) != "file_not_found" {
		t.Errorf("moved away: %v", err)
	}
}

// TestWatchOfManyEvents: a reader that stops costs a bound, and is told that it missed something; after that it sees again.
func TestWatchOfManyEvents(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	e := watch(t, c, w.dir, true)
	queue, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Fatal(err)
	}
	most, err := strconv.Atoi(strings.TrimSpace(string(queue)))
	if err != nil {
		t.Fatal(err)
	}
	// More than the kernel keeps, and as much again as may be under way with names of this length; nobody reads meanwhile.
	p := filepath.Join(w.dir, "flood", strings.Repeat("n", 250))
	for range most/3 + wire.Window/250 + 1000 { // three events, at least, of each
		putFile(t, p, "x")
		if err := os.Remove(p); err != nil {
			t.Fatal(err)
		}
	}
	for {
		ev, err := e.Next()
		if err != nil {
			t.Fatal(err)
		}
		if ev.Overflow {
			break
		}
	}
	putFile(t, filepath.Join(w.dir, "after/it"), "x")
	await(t, e, "after/it", created) // also where it was there before "after" was watched
}

func TestWatchLeavesNothing(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	for i := range 50 {
		putFile(t, filepath.Join(w.dir, fmt.Sprint(i), "f"), "x")
	}
	watch(t, c, w.dir, true).Close()
	files, routines := openFiles(t), runtime.NumGoroutine()
	for range 30 { // more than there may be at once
		ctx, cancel := context.WithCancel(testContext(t))
		for {
			e, err := c.WatchFiles(ctx, w.dir, me(), true)
			if sandbox.ReasonOf(err) == "sandbox_resources" { // the one before is on its way out
				runtime.Gosched()
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			if _, err := e.Next(); sandbox.ClassOf(err) != sandbox.Canceled {
				t.Fatal(err)
			}
			e.Close()
			break
		}
	}
	deadline := time.Now().Add(time.Minute)
	for openFiles(t) > files || runtime.NumGoroutine() > routines+2 {
		if time.Now().After(deadline) {
			t.Fatalf("%d files of %d, %d goroutines of %d", openFiles(t), files, runtime.NumGoroutine(), routines)
		}
		time.Sleep(time.Millisecond)
	}
	var open []*FileWatch
	for range 100 {
		e, err := c.WatchFiles(testContext(t), w.dir, me(), false)
		if err != nil {
			if sandbox.ReasonOf(err) != "sandbox_resources" {
				t.Fatal(err)
			}
			break
		}
		open = append(open, e)
	}
	if len(open) == 0 || len(open) > 8 {
		t.Errorf("%d watches at once", len(open))
	}
	for _, e := range open {
		e.Close()
	}
}

// FuzzFileRecords: what aether says of files is checked before it becomes anything else.
func FuzzFileRecords(f *testing.F) {
	for _, m := range []proto.Message{
		&aetherv1.FileEntry{Path: []byte("a/b"), Mode: 0o100644, Size: 5}, &aetherv1.FileEntry{Path: []byte(".."), Mode: 0o120777, LinkTarget: []byte("x")},
		&aetherv1.FileEvent{Path: []byte("a"), Kind: 1}, &aetherv1.FileEvent{Overflow: true},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(binary.AppendUvarint(nil, uint64(len(b))), b...))
	}
	f.Add(binary.AppendUvarint(nil, 1<<40))
	f.Add(bytes.Repeat([]byte{0xff}, 20))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := &records{r: bufio.NewReader(bytes.NewReader(b))}
		for {
			m := new(aetherv1.FileEntry)
			err := r.next(m)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				if !errors.Is(err, wire.ErrProtocol) {
					t.Fatal(err)
				}
				break
			}
			if e, err := entryFrom(m); err == nil && (e.Size < 0 || e.Blocks < 0 || len(e.LinkTarget) > maxTarget) {
				t.Errorf("%+v", e)
			}
			if checkRelative(m.Path) == nil && !filepath.IsLocal(string(m.Path)) {
				t.Errorf("%q", m.Path)
			}
		}
		ev := new(aetherv1.FileEvent)
		if proto.Unmarshal(b, ev) == nil {
			if e, err := eventFrom(ev); err == nil && !e.Overflow && (e.Kind < 1 || e.Kind > lastEventKind) {
				t.Errorf("%+v", e)
			}
		}
	})
}
