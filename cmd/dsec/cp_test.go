package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
)

// The rules are those of `docker cp`, as its manual has them.
func TestCpPlace(t *testing.T) {
	file, dir := cpSource{"/a/f", "f", false}, cpSource{"/a/d", "d", true}
	slash, content := cpSource{"/a/d/", "d", true}, cpSource{"/a/d/.", "d", true}
	root := cpSource{"/", "", true}
	for _, c := range []struct {
		from cpSource
		to   cpTarget
		want string // begins with ! where it is an error
	}{
		{file, cpTarget{"/t", false, false}, "/t"},
		{file, cpTarget{"/t/", false, false}, "!there is no directory /t/"},
		{file, cpTarget{"/t", true, false}, "/t"},
		{file, cpTarget{"/t/", true, false}, "!is no directory"},
		{file, cpTarget{"/t", true, true}, "/t/f"},
		{file, cpTarget{"/t/", true, true}, "/t/f"},
		{file, cpTarget{".", true, true}, "./f"},
		{dir, cpTarget{"/t", false, false}, "/t"},
		{dir, cpTarget{"/t/", false, false}, "/t/"},
		{dir, cpTarget{"/t", true, false}, "!is a file"},
		{dir, cpTarget{"/t", true, true}, "/t/d"},
		{slash, cpTarget{"/t", true, true}, "/t/d"},
		{slash, cpTarget{"/t", false, false}, "/t"},
		{content, cpTarget{"/t", true, true}, "/t"},
		{content, cpTarget{"/t", false, false}, "/t"},
		{content, cpTarget{"/t", true, false}, "!is a file"},
		{root, cpTarget{"/t", true, true}, "/t"},
		{cpSource{"/", "", false}, cpTarget{"/t", true, true}, "!no file name"},
	} {
		got, err := place(c.from, c.to)
		wrong, isError := strings.CutPrefix(c.want, "!")
		switch {
		case isError && (err == nil || !strings.Contains(err.Error(), wrong)):
			t.Errorf("%v to %v: %q, %v; want %q", c.from, c.to, got, err, wrong)
		case !isError && (err != nil || got != c.want):
			t.Errorf("%v to %v: %q, %v; want %q", c.from, c.to, got, err, c.want)
		}
	}
}

// A pipe that nobody writes to blocks who opens it; an interrupt ends the copy all the same.
func TestCpOfAPipeIsInterrupted(t *testing.T) {
	h := newHarness(t)
	h.f.add(func(s *dsecv1.Sandbox) { s.Spec.Name = "box" })
	pipe := filepath.Join(t.TempDir(), "pipe")
	if out, err := exec.Command("mkfifo", pipe).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	done := h.start("cp", pipe, "box:/srv/x")
	for h.f.called("StatFiles") == 0 {
		time.Sleep(time.Millisecond)
	}
	h.interrupt()
	if got := recv(t, done); got.code != 130 {
		t.Fatalf("%+v", got)
	}
	go func() { // lets go of the goroutine that was left behind
		if f, err := os.OpenFile(pipe, os.O_WRONLY, 0); err == nil {
			f.Close()
		}
	}()
}

func tarOf(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := "content of " + h.Name
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(content))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			io.WriteString(w, content)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func namesIn(t *testing.T, archive []byte) map[string]tar.Header {
	t.Helper()
	all := map[string]tar.Header{}
	r := tar.NewReader(bytes.NewReader(archive))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(h.Name, "./")] = *h
	}
}

func TestCpTreeOut(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.dirs = append(h.f.inside.dirs, "/srv", "/broken")
	at := testTime.Add(-time.Hour)
	archive := tarOf(t, tar.Header{Name: "sub/", Typeflag: tar.TypeDir, Mode: 0o4711, ModTime: at}, tar.Header{Name: "sub/ü\nn", Typeflag: tar.TypeReg, Mode: 0o6640, ModTime: at},
		tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"})
	h.f.inside.archives["/srv"], h.f.inside.archives["/broken"] = archive, archive
	dir := t.TempDir()
	for _, c := range []struct{ from, to, root string }{
		{"/srv", dir, "srv"}, {"/srv/.", dir, "."}, {"/srv", dir + "/new", "new"}, {"/srv/", dir + "/srv", "srv/srv"},
	} {
		got := h.run("cp", "box:"+c.from, c.to)
		if got.code != 0 || got.stderr != "dsec: 2 entries were left out: devices, sockets and the like are not copied\n" {
			t.Fatalf("%v: %+v", c, got)
		}
		root := filepath.Join(dir, c.root)
		st, err := os.Stat(filepath.Join(root, "sub/ü\nn"))
		sub, serr := os.Stat(filepath.Join(root, "sub"))
		link, lerr := os.Readlink(filepath.Join(root, "l"))
		if err := errors.Join(err, serr, lerr); err != nil || st.Mode() != 0o640 || !st.ModTime().Equal(at) || sub.Mode() != fs.ModeDir|0o711 || !sub.ModTime().Equal(at) || link != "/etc/passwd" {
			t.Fatalf("%v: %v, %v, %v, %q", c, err, st, sub, link)
		}
	}
	if st, err := os.Stat(dir + "/new"); err != nil || st.Mode().Perm() != 0o750 {
		t.Fatalf("%v, %v", st, err)
	}
	h.wantError(h.run("cp", "box:/broken", dir), 1, "cannot be read")
	h.wantError(h.run("cp", "box:/srv", writeFile(t, "f", "", 0o600)), 1, "is a file")
	h.want(h.run("cp", "box:/srv", "-"), string(archive), "", 0)
	left, err := filepath.Glob(dir + "/*/.dsec-cp-*")
	if err != nil || len(left) != 0 {
		t.Fatalf("%v, %v", left, err)
	}
}

func TestCpLinksOut(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.stats = map[string]*dsecv1.FileInfo{
		"/l": {Path: "/l", Type: dsecv1.FileType_FILE_TYPE_SYMLINK, LinkTarget: "../../etc/passwd", ModifiedAt: timestamppb.New(testTime)},
		"/p": {Path: "/p", Type: dsecv1.FileType_FILE_TYPE_FIFO},
	}
	dir := t.TempDir()
	for range 2 {
		h.want(h.run("cp", "box:/l", dir), "", "", 0)
	}
	if to, err := os.Readlink(dir + "/l"); err != nil || to != "../../etc/passwd" {
		t.Fatalf("%q, %v", to, err)
	}
	h.wantError(h.run("cp", "box:/p", dir), 1, "neither a file")
}

func TestCpTreeIn(t *testing.T) {
	h := newHarness(t)
	named(h)
	local := t.TempDir() + "/d"
	if err := errors.Join(os.MkdirAll(local+"/sub", 0o755), os.WriteFile(local+"/sub/f", []byte("x"), 0o600), os.Symlink("f", local+"/l"), os.Chmod(local, 0o711)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to, at string }{
		{local, "/tmp", "/tmp/d"}, {local + "/.", "/tmp", "/tmp"}, {local, "/tmp/other", "/tmp/other"}, {local + "/", "/tmp/", "/tmp/d"},
	} {
		clear(h.f.inside.archives)
		h.f.inside.changes = nil
		h.want(h.run("cp", "-q", c.from, "box:"+c.to), "", "", 0)
		got := namesIn(t, h.f.inside.archives["PUT "+c.at])
		if names := slices.Sorted(maps.Keys(got)); strings.Join(names, " ") != " l sub/ sub/f" || got["sub/f"].Uid != 0 {
			t.Fatalf("%v: %q in %v", c, names, slices.Collect(maps.Keys(h.f.inside.archives)))
		}
		if made := c.at != "/tmp"; made != (len(h.f.inside.changes) == 1 && h.f.inside.changes[0].GetSetMode().GetMode() == 0o711) {
			t.Fatalf("%v: %v", c, h.f.inside.changes)
		}
	}
	h.wantError(h.run("cp", local, "box:/no/where"), 1, "no directory /no in the sandbox", "--parents")
	h.want(h.run("cp", "--parents", "-a", local, "box:/no/where"), "", "", 0)
	last := h.f.queries[len(h.f.queries)-1]
	if !strings.Contains(last, "keep_owners=1") || !strings.Contains(last, "parents=1") || !strings.Contains(last, "no_replace_types=1") {
		t.Fatalf("%q", last)
	}
	h.want(h.run("cp", local+"/l", "box:/tmp"), "", "", 0)
	if l := namesIn(t, h.f.inside.archives["PUT /tmp"])["l"]; l.Linkname != "f" || l.Typeflag != tar.TypeSymlink {
		t.Fatalf("%+v", l)
	}
	h.want(h.run("cp", "-L", local+"/sub/f", "box:/tmp"), "", "", 0)
	h.wantError(h.run("cp", local+"/sub/f/", "box:/tmp"), 1, "not a directory")
}

func TestCpArchiveIn(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.stdin = strings.NewReader("some archive")
	h.want(h.run("cp", "-", "box:/tmp"), "", "", 0)
	h.stdin = strings.NewReader("another")
	h.want(h.run("cp", "--parents", "-", "box:/x/y"), "", "", 0)
	if a := h.f.inside.archives; string(a["PUT /tmp"]) != "some archive" || string(a["PUT /x/y"]) != "another" {
		t.Fatalf("%q", a)
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	if _, err := io.WriteString(z, "a third"); err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	h.stdin = &zipped
	h.want(h.run("cp", "-", "box:/tmp"), "", "", 0)
	if a := h.f.inside.archives["PUT /tmp"]; string(a) != "a third" {
		t.Fatalf("%q", a)
	}
	h.stdin = strings.NewReader("\x1f\x8bwhat is no gzip")
	h.wantError(h.run("cp", "-", "box:/tmp"), 1, "reading the input")
}

// Input that does not come ends with an interrupt, before its first byte and later.
func TestCpArchiveInIsInterrupted(t *testing.T) {
	for _, begin := range []string{"", "begin"} {
		h := newHarness(t)
		named(h)
		r, w := io.Pipe()
		h.stdin = r
		done := h.start("cp", "-", "box:/tmp")
		for h.f.called("StatFiles") == 0 {
			time.Sleep(time.Millisecond)
		}
		if _, err := w.Write([]byte(begin)); err != nil {
			t.Fatal(err)
		}
		h.interrupt()
		h.want(recv(t, done), "", "", 130)
		w.Close()
	}
}
