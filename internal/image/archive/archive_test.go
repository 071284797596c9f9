//go:build linux

package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/sandbox"
)

func pack(t testing.TB, dir string, o Options) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := WriteTar(t.Context(), &b, dir, o); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// contents reads an archive as "name type perm" with target or content.
func contents(t *testing.T, b []byte) []string {
	t.Helper()
	var lines []string
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return lines
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("%s %c %o", h.Name, h.Typeflag, h.Mode)
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		if len(body) > 0 {
			line += fmt.Sprintf(" %.20q", bytes.TrimLeft(body, "\x00"))
		}
		lines = append(lines, line)
	}
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// tree makes a directory, its names in the given order.
func tree(t *testing.T, order ...string) string {
	t.Helper()
	dir := t.TempDir()
	p := func(s string) string { return filepath.Join(dir, s) }
	must(t, os.Chmod(dir, 0o755), os.Mkdir(p("d"), 0o700))
	for _, name := range order {
		must(t, os.WriteFile(p(name), []byte("content of "+name), 0o640))
	}
	must(t, os.Link(p("a"), p("d/hard")), os.Symlink("/etc/passwd", p("sym")), os.Symlink("d", p("symdir")),
		syscall.Mkfifo(p("fifo"), 0o600), os.Chmod(p("b"), 0o600|os.ModeSetuid))
	f, err := os.Create(p("sparse"))
	must(t, err)
	_, err = f.WriteAt([]byte("data"), 1<<20)
	must(t, err, f.Truncate(8<<20), f.Close())
	for _, name := range []string{"sparse", "fifo", "b", "a", "d/c", "d", "."} {
		must(t, os.Chtimes(p(name), time.Time{}, time.Unix(1e9, 123)))
	}
	return dir
}

func TestWriteTar(t *testing.T) {
	b := pack(t, tree(t, "a", "b", "d/c"), Options{})
	want := []string{"./ 5 755", `a 0 640 "content of a"`, `b 0 4600 "content of b"`, "d/ 5 700", `d/c 0 640 "content of d/c"`, "d/hard 1 640 -> a",
		"fifo 6 600", `sparse 0 644 "data\x00\x00`, "sym 2 777 -> /etc/passwd", "symdir 2 777 -> d"}
	got := contents(t, b)
	for i, line := range got {
		if i >= len(want) || !strings.HasPrefix(line, want[i]) {
			t.Errorf("entry %d: %s", i, line)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d entries, want %d", len(got), len(want))
	}
	if len(b) > 40_000 {
		t.Errorf("archive of %d bytes: holes are spelt out", len(b))
	}
}

func TestSameTreeSameArchive(t *testing.T) {
	one, two := tree(t, "a", "b", "d/c"), tree(t, "d/c", "b", "a")
	for _, dir := range []string{one, two} { // the times of links cannot be set by the standard library
		must(t, os.Remove(filepath.Join(dir, "sym")), os.Remove(filepath.Join(dir, "symdir")), os.Chtimes(dir, time.Time{}, time.Unix(1e9, 0)))
	}
	if !bytes.Equal(pack(t, one, Options{RootOwner: true}), pack(t, two, Options{RootOwner: true})) {
		t.Error("the order of creation shows")
	}
}

func TestSparseContentIsExact(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, strings.Repeat("long-name", 20)))
	must(t, err)
	for i := range int64(300) {
		_, err := f.WriteAt([]byte(strings.Repeat("x", int(i*37%9000)+1)), i*70_000)
		must(t, err)
	}
	must(t, f.Truncate(300*70_000+5), f.Close())
	want, err := os.ReadFile(f.Name())
	must(t, err)
	r := tar.NewReader(bytes.NewReader(pack(t, dir, Options{})))
	_, err = r.Next()
	must(t, err)
	h, err := r.Next()
	must(t, err)
	got, err := io.ReadAll(r)
	if err != nil || h.Name != filepath.Base(f.Name()) || !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes, %v", h.Name, len(got), err)
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("after it: %v", err)
	}
}

func TestRootOwner(t *testing.T) {
	for r := tar.NewReader(bytes.NewReader(pack(t, tree(t, "a", "b", "d/c"), Options{RootOwner: true}))); ; {
		h, err := r.Next()
		if err == io.EOF {
			return
		}
		must(t, err)
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" {
			t.Errorf("%s belongs to %d:%d %s:%s", h.Name, h.Uid, h.Gid, h.Uname, h.Gname)
		}
	}
}

func TestSocketsAreSkippedAndTold(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	must(t, err)
	defer l.Close()
	skipped := ""
	got := contents(t, pack(t, dir, Options{Skipped: func(path, why string) { skipped += path + why }}))
	if len(got) != 1 || skipped != "sit is a socket" {
		t.Errorf("packed %q, skipped %q", got, skipped)
	}
}

func TestPackFailures(t *testing.T) {
	dir := tree(t, "a", "b", "d/c")
	if err := WriteTar(t.Context(), io.Discard, filepath.Join(dir, "a"), Options{}); sandbox.ReasonOf(err) != "bad_directory" {
		t.Errorf("a file: %v", err)
	}
	if err := WriteTar(t.Context(), io.Discard, filepath.Join(dir, "none"), Options{}); sandbox.ReasonOf(err) != "bad_directory" {
		t.Errorf("nothing: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := WriteTar(ctx, io.Discard, dir, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	broken := errors.New("broken pipe")
	if err := WriteTar(t.Context(), writerFunc(func([]byte) (int, error) { return 0, broken }), dir, Options{}); !errors.Is(err, broken) {
		t.Errorf("broken writer: %v", err)
	}
}

// TestFileThatShrinks truncates a file after its header was written.
func TestFileThatShrinks(t *testing.T) {
	dir := t.TempDir()
	big := filepath.Join(dir, "big")
	must(t, os.WriteFile(big, make([]byte, 20<<20), 0o644))
	w := writerFunc(func(p []byte) (int, error) { return len(p), os.Truncate(big, 1000) })
	if err := WriteTar(t.Context(), w, dir, Options{}); sandbox.ReasonOf(err) != "file_changed" {
		t.Errorf("got %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
