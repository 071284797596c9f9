package guest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image/treetest"
	"dsec/internal/linux"
	"dsec/internal/pax"
	"dsec/sandbox"
)

// pack returns the archive of a tree and what its end told.
func pack(t *testing.T, c *Client, r ArchiveRead) ([]byte, ArchiveResult) {
	t.Helper()
	a, err := c.ReadArchive(testContext(t), r)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := io.ReadAll(a)
	if err != nil {
		t.Fatal(err)
	}
	result, err := a.Result()
	if err != nil {
		t.Fatal(err)
	}
	if result.Bytes != int64(len(b)) {
		t.Errorf("%d bytes, and %d by its end", len(b), result.Bytes)
	}
	return b, result
}

// noError fails the test if one of the errors is one.
func noError(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// makeTree makes one of each kind that an ordinary user can make.
func makeTree(t *testing.T, dir string) {
	t.Helper()
	p := func(name string) string { return filepath.Join(dir, name) }
	long := strings.Repeat("long name ", 20)
	noError(t,
		os.MkdirAll(p("deep/"+long+"/"+long), 0o755),
		os.Mkdir(p("sticky"), 0o755),
		os.WriteFile(p("deep/"+long+"/"+long+"/file"), []byte("deep"), 0o600),
		os.WriteFile(p("empty"), nil, 0o644),
		os.WriteFile(p("odd\nname \xff\xfe\x80"), []byte("odd"), 0o640),
		os.WriteFile(p("suid"), []byte("#!/bin/sh\n"), 0o755),
		os.WriteFile(p("block"), bytes.Repeat([]byte("b"), 512), 0o644),
		os.WriteFile(p("large"), bytes.Repeat([]byte("0123456789abcdef"), 1<<16+1), 0o644),
		os.Symlink("/nowhere/"+long+long[:100], p("dangling")),
		os.Symlink("..", p("deep/up")),
		os.Link(p("suid"), p("deep/other name")),
		os.Symlink("x", p("twin1")),
		os.Link(p("twin1"), p("twin2")),
		syscall.Mkfifo(p("fifo"), 0o620),
		os.Chmod(p("suid"), 0o4711|os.ModeSetuid),
		os.Chmod(p("sticky"), 0o1777|os.ModeSticky|os.ModeSetgid),
		linux.Lsetxattr(p("large"), "user.origin", "a\x00\nb=c"),
		linux.Lsetxattr(p("sticky"), "user.dir", "d"),
		os.Chmod(p("block"), 0o444),
	)
	holes, err := os.Create(p("holes"))
	noError(t, err)
	noError(t, holes.Truncate(1<<26))
	for _, at := range []int64{0, 1 << 20, 1<<25 + 12345, 1<<26 - 5} {
		_, err := holes.WriteAt([]byte("datum"), at)
		noError(t, err)
	}
	noError(t, holes.Close(), os.WriteFile(p("hole"), nil, 0o644), os.Truncate(p("hole"), 1<<34))
	old := time.Date(1969, 7, 20, 20, 17, 40, 123456789, time.UTC)
	noError(t, os.Chtimes(p("empty"), old, old), os.Chtimes(p("deep/"+long), old, old), os.Chtimes(p("sticky"), time.Now(), time.Unix(1e9, 1)))
}

func scan(t *testing.T, dir string) map[string]treetest.Entry {
	t.Helper()
	tree, err := treetest.Scan(dir)
	noError(t, err)
	for name, e := range tree { // 16 GiB of zeros take long to read
		if e.Size == 1<<34 {
			t.Errorf("%s was read", name)
		}
	}
	delete(tree, ".") // the directory itself is not part of an archive of its content
	return tree
}

func TestArchiveRoundTrip(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "made/by/it")
	makeTree(t, from)
	noError(t, os.Remove(filepath.Join(from, "hole")))
	want := scan(t, from)
	b, result := pack(t, c, ArchiveRead{Path: from, User: me(), Content: true})
	if result.Entries != int64(len(want)) || result.Skipped != 0 || result.Changed != 0 || result.Problem != nil {
		t.Errorf("%d entries of %d, %+v", result.Entries, len(want), result)
	}
	if len(b) > 4<<20 {
		t.Errorf("%d bytes: holes were filled", len(b))
	}
	for range 2 { // the second time over what is there
		got, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me(), MakeParents: true}, bytes.NewReader(b))
		noError(t, err)
		if got.Entries != result.Entries || got.Bytes != result.Bytes {
			t.Errorf("unpacked %+v, packed %+v", got, result)
		}
		if diff := treetest.Diff(want, scan(t, to)); diff != "" {
			t.Error(diff)
		}
	}
	info, err := os.Stat(filepath.Join(to, "holes"))
	noError(t, err)
	if blocks := info.Sys().(*syscall.Stat_t).Blocks; blocks > 1024 {
		t.Errorf("%d blocks: holes were filled", blocks)
	}
	for _, dir := range []string{to} {
		left, err := filepath.Glob(filepath.Join(dir, ".dsec-*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}

// GNU tar and Python unpack what we pack, to the same tree.
func TestArchiveIsReadByOthers(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	from := t.TempDir()
	makeTree(t, from)
	noError(t, os.Remove(filepath.Join(from, "hole")))
	want := scan(t, from)
	b, _ := pack(t, c, ArchiveRead{Path: from, User: me(), Content: true})
	to := t.TempDir()
	cmd := exec.Command("tar", "-x", "-p", "--xattrs", "--xattrs-include=*", "-C", to)
	cmd.Stdin = bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got := scan(t, to)
	if diff := treetest.Diff(want, got); diff != "" {
		t.Errorf("GNU tar:\n%s", diff)
	}
	python := `
import sys, tarfile
seen = set()
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as t:
    for m in t:
        seen.add(m.type)
        if m.isreg():
            assert m.size == sum(len(b) for b in iter(lambda f=t.extractfile(m): f.read(1 << 20), b"")), m.name
        print(len(m.name), m.mode)
assert seen >= {b"0", b"5", b"2", b"1", b"6"}, seen
`
	cmd = exec.Command("python3", "-c", python)
	cmd.Stdin = bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil || bytes.Count(out, []byte("\n")) != len(want) {
		t.Errorf("python: %v\n%s", err, out)
	}
}

// What GNU tar packs is unpacked to the same tree.
func TestArchiveOfGNUTar(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	from := t.TempDir()
	makeTree(t, from)
	noError(t, os.Remove(filepath.Join(from, "hole")))
	want := scan(t, from)
	for _, format := range []string{"--format=posix", "--format=posix --sparse-version=0.1", "--format=gnu"} {
		args := append(strings.Fields(format), "-S", "--xattrs", "-c", "-C", from, ".")
		if format == "--format=gnu" { // which knows neither
			args = append(strings.Fields(format), "-S", "-c", "-C", from, ".")
		}
		b, err := exec.Command("tar", args...).Output()
		noError(t, err)
		to := t.TempDir()
		_, err = c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, bytes.NewReader(b))
		noError(t, err)
		got := scan(t, to)
		if format == "--format=gnu" {
			for _, tree := range []map[string]treetest.Entry{want, got} {
				for name, e := range tree {
					e.Mtime.Nsec, e.Xattrs = 0, nil
					if e.Mtime.Sec < 0 {
						e.Mtime.Sec = -1
					}
					tree[name] = e
				}
			}
		}
		if diff := treetest.Diff(want, got); diff != "" {
			t.Errorf("%s:\n%s", format, diff)
		}
	}
}

// A tree has the base of its path as first name, a file is one entry, a link is not followed.
func TestArchiveNames(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := t.TempDir()
	noError(t, os.MkdirAll(filepath.Join(dir, "tree/sub"), 0o755), os.WriteFile(filepath.Join(dir, "tree/file"), []byte("x"), 0o644), os.Symlink("tree", filepath.Join(dir, "link")), os.Symlink("link/file", filepath.Join(dir, "filelink")))
	for _, one := range []struct {
		path    string
		content bool
		want    string
	}{
		{"+link", false, "link/ link/file link/sub/"}, {"+filelink", false, "filelink"}, {"+tree/file", false, "file"},
		{"tree", false, "tree/ tree/file tree/sub/"}, {"tree/", true, "file sub/"}, {"tree/file", false, "file"},
		{"link", false, "link"}, {"link", true, "file sub/"}, {"tree/sub", true, ""},
	} {
		name, follow := strings.CutPrefix(one.path, "+")
		b, _ := pack(t, c, ArchiveRead{Path: filepath.Join(dir, name), User: me(), Content: one.content, Follow: follow})
		var names []string
		r := tar.NewReader(bytes.NewReader(b))
		for h, err := r.Next(); err == nil; h, err = r.Next() {
			names = append(names, h.Name)
		}
		if len(names) > 1 && names[len(names)-1] < names[len(names)-2] { // lists of directories have no order
			names[len(names)-1], names[len(names)-2] = names[len(names)-2], names[len(names)-1]
		}
		if got := strings.Join(names, " "); got != one.want {
			t.Errorf("%s: %q, want %q", one.path, got, one.want)
		}
	}
}

// reasonOf is an error's class and reason.
func reasonOf(err error) string {
	if err == nil {
		return "none"
	}
	e := sandbox.AsError(err)
	return e.Class.String() + " " + e.Reason
}

func TestArchiveOfNames(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := t.TempDir()
	noError(t, os.WriteFile(dir+"/a", []byte("of a"), 0o600), os.WriteFile(dir+"/\xff\n", []byte("odd"), 0o600), os.Symlink("a", dir+"/link"))
	names := [][]byte{[]byte("a"), []byte(dir + "/\xff\n"), []byte("link"), []byte("a")}
	b, result := pack(t, c, ArchiveRead{Path: dir, User: me(), Names: names})
	if result.Entries != 4 || result.Problem != nil {
		t.Errorf("%+v", result)
	}
	r := tar.NewReader(bytes.NewReader(b))
	for i, want := range []string{"of a", "odd", "of a", "of a"} {
		h, err := r.Next()
		noError(t, err)
		if got, err := io.ReadAll(r); string(got) != want || err != nil || h.Name != string(names[i]) {
			t.Errorf("%q: %q, %v", h.Name, got, err)
		}
	}
	names = [][]byte{[]byte("none"), []byte("a"), []byte("."), []byte("/proc/self/status"), []byte("/dev/null")}
	_, result = pack(t, c, ArchiveRead{Path: dir, User: me(), Names: names})
	if result.Entries != 1 || reasonOf(result.Problem) != "not_found file_not_found" || !strings.Contains(result.Problem.Message, "3 other entries") {
		t.Errorf("%+v", result)
	}
}

func TestArchiveOfWhatIsNoTree(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	noError(t, err)
	defer l.Close()
	noError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o644))
	for _, one := range []struct {
		r    ArchiveRead
		want string
	}{
		{ArchiveRead{Path: dir + "/none"}, "not_found file_not_found"},
		{ArchiveRead{Path: dir + "/none/none"}, "not_found file_not_found"},
		{ArchiveRead{Path: dir + "/s"}, "invalid_argument invalid_request"},
		{ArchiveRead{Path: dir + "/file", Content: true}, "failed_precondition not_directory"},
		{ArchiveRead{Path: "/proc/self"}, "invalid_argument invalid_request"},
		{ArchiveRead{Path: "/proc/self/root/etc", Content: true}, "invalid_argument invalid_request"},
		{ArchiveRead{Path: "a\x00b"}, "invalid_argument invalid_request"},
		{ArchiveRead{Path: dir, User: "nobody-here"}, "not_found user_not_found"},
	} {
		if one.r.User == "" {
			one.r.User = me()
		}
		if _, err := c.ReadArchive(testContext(t), one.r); reasonOf(err) != one.want {
			t.Errorf("%+v: %v, want %s", one.r, err, one.want)
		}
	}
	_, result := pack(t, c, ArchiveRead{Path: dir, User: me()})
	if result.Skipped != 1 || result.Entries != 2 {
		t.Errorf("with a socket: %+v", result)
	}
}

// What cannot be read is left out, and told.
func TestArchiveWithoutPermission(t *testing.T) {
	if readsEverything(t) {
		t.Skip("this process may read everything")
	}
	w := newWorld(t)
	c := w.connect()
	dir := t.TempDir()
	noError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o644), os.WriteFile(filepath.Join(dir, "secret"), []byte("x"), 0), os.Mkdir(filepath.Join(dir, "closed"), 0))
	_, result := pack(t, c, ArchiveRead{Path: dir, User: me(), Content: true})
	if reasonOf(result.Problem) != "permission_denied permission_denied" || !strings.Contains(result.Problem.Message, "1 other entry") || result.Entries != 1 {
		t.Errorf("%+v", result)
	}
}

// A file that shrinks or grows while it is read leaves a valid archive, and is told.
func TestArchiveOfAFileThatChanges(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := t.TempDir()
	for _, one := range []struct {
		name   string
		change func(path string) error
	}{
		{"shrinks", func(p string) error { return os.Truncate(p, 100) }},
		{"grows", func(p string) error { return os.Truncate(p, 8<<20) }},
	} {
		path := filepath.Join(dir, one.name)
		noError(t, os.WriteFile(path, bytes.Repeat([]byte("x"), 4<<20), 0o644))
		a, err := c.ReadArchive(testContext(t), ArchiveRead{Path: path, User: me()})
		noError(t, err)
		first := make([]byte, 1024)
		_, err = io.ReadFull(a, first)
		noError(t, err, one.change(path)) // at most the window has been read by now
		rest, err := io.ReadAll(a)
		noError(t, err)
		result, err := a.Result()
		noError(t, err, a.Close())
		r := tar.NewReader(io.MultiReader(bytes.NewReader(first), bytes.NewReader(rest)))
		h, err := r.Next()
		noError(t, err)
		if n, err := io.Copy(io.Discard, r); n != 4<<20 || err != nil || h.Size != 4<<20 {
			t.Errorf("%s: %d bytes, %v", one.name, n, err)
		}
		if one.name == "grows" && (result.Changed != 1 || result.Problem != nil) {
			t.Errorf("%s: %+v", one.name, result)
		}
		if one.name == "shrinks" && reasonOf(result.Problem) != "failed_precondition file_changed" {
			t.Errorf("%s: %+v", one.name, result)
		}
	}
}

// tarOf is an archive of headers, each file with the content "x".
func tarOf(t *testing.T, list ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range list {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = 1
		}
		h.Mode = 0o755
		noError(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := io.WriteString(w, "x")
			noError(t, err)
		}
	}
	noError(t, w.Close())
	return b.Bytes()
}

func TestArchivesThatLeadOut(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	outside := t.TempDir()
	noError(t, os.WriteFile(filepath.Join(outside, "victim"), []byte("whole"), 0o644))
	before := scan(t, outside)
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	hard := func(name, to string) tar.Header { return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeLink} }
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
	for name, list := range map[string][]tar.Header{
		"absolute":                {{Name: outside + "/victim"}},
		"upwards":                 {{Name: "../victim"}},
		"upwards inside":          {{Name: "a/../../victim"}},
		"its own link":            {link("l", outside), {Name: "l/victim"}},
		"its own relative link":   {link("l", ".."), {Name: "l/victim"}},
		"a link in the middle":    {dir("d"), link("d/l", outside), {Name: "d/l/victim"}},
		"a directory by a link":   {link("l", outside), dir("l/new")},
		"a hard link outside":     {hard("h", outside+"/victim")},
		"a hard link upwards":     {hard("h", "../victim")},
		"a hard link by a link":   {link("l", outside), hard("h", "l/victim")},
		"a link that was there":   {{Name: "was/victim"}},
		"a hard link by a former": {hard("h", "was/victim")},
	} {
		to := t.TempDir()
		noError(t, os.Symlink(outside, filepath.Join(to, "was")))
		_, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, bytes.NewReader(tarOf(t, list...)))
		if reasonOf(err) != "invalid_argument unsafe_entry" || !strings.Contains(err.Error(), "archive entry \"") {
			t.Errorf("%s: %v", name, err)
		}
		if diff := treetest.Diff(before, scan(t, outside)); diff != "" {
			t.Fatalf("%s: %s", name, diff)
		}
	}
	// A link is replaced, never written through.
	to := t.TempDir()
	noError(t, os.Symlink(outside, filepath.Join(to, "dir")), os.Symlink(outside+"/victim", filepath.Join(to, "file")))
	_, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()},
		bytes.NewReader(tarOf(t, dir("dir"), tar.Header{Name: "dir/victim"}, tar.Header{Name: "file"}, link("l", outside+"/victim"), tar.Header{Name: "l"})))
	noError(t, err)
	if diff := treetest.Diff(before, scan(t, outside)); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{"dir/victim", "file", "l"} {
		if b, err := os.ReadFile(filepath.Join(to, name)); string(b) != "x" || err != nil {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

func TestArchiveOverWhatIsThere(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	put := func(to string, keepTypes bool, list ...tar.Header) error {
		_, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me(), NoReplaceTypes: keepTypes}, bytes.NewReader(tarOf(t, list...)))
		return err
	}
	file, dir := tar.Header{Name: "it"}, tar.Header{Name: "it", Typeflag: tar.TypeDir}
	for _, one := range []struct {
		there     string // "file", "dir" or "full"
		keepTypes bool
		put       tar.Header
		want      string
	}{
		{"file", false, file, "none"}, {"file", true, file, "none"}, {"file", false, dir, "none"}, {"file", true, dir, "failed_precondition not_directory"},
		{"dir", false, file, "none"}, {"dir", true, file, "failed_precondition is_directory"}, {"dir", false, dir, "none"}, {"full", true, dir, "none"},
		{"full", false, file, "failed_precondition directory_not_empty"}, {"full", false, dir, "none"},
		{"full", false, tar.Header{Name: "it", Typeflag: tar.TypeSymlink, Linkname: "x"}, "failed_precondition directory_not_empty"},
		{"dir", false, tar.Header{Name: "it", Typeflag: tar.TypeFifo}, "none"}, {"file", true, tar.Header{Name: "it", Typeflag: tar.TypeFifo}, "none"},
	} {
		to := t.TempDir()
		it := filepath.Join(to, "it")
		switch one.there {
		case "file":
			noError(t, os.WriteFile(it, []byte("old"), 0o600))
		case "full":
			noError(t, os.MkdirAll(filepath.Join(it, "sub"), 0o755))
		default:
			noError(t, os.Mkdir(it, 0o755))
		}
		if err := put(to, one.keepTypes, one.put); reasonOf(err) != one.want {
			t.Errorf("%+v: %v", one, err)
		}
		if one.there == "full" {
			if _, err := os.Stat(filepath.Join(it, "sub")); err != nil {
				t.Errorf("%+v: %v", one, err)
			}
		}
		if left, _ := filepath.Glob(filepath.Join(to, ".dsec-*")); len(left) > 0 {
			t.Errorf("%+v: left %v", one, left)
		}
	}
}

func TestArchivesThatBreakOff(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	var list []tar.Header
	for i := range 20 {
		list = append(list, tar.Header{Name: fmt.Sprintf("f%02d", i)})
	}
	whole := tarOf(t, list...)
	to := t.TempDir()
	_, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, bytes.NewReader(whole[:10*1024+512]))
	if reasonOf(err) != "invalid_argument bad_archive" || !strings.Contains(err.Error(), "10 entries were unpacked") {
		t.Errorf("truncated: %v", err)
	}
	names, _ := os.ReadDir(to)
	if len(names) != 10 {
		t.Errorf("%d files", len(names))
	}
	for name, b := range map[string][]byte{"empty": nil, "no archive": bytes.Repeat([]byte("x"), 100_000), "gzip": {0x1f, 0x8b, 8, 0}} {
		if _, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, bytes.NewReader(b)); reasonOf(err) != "invalid_argument bad_archive" {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The sender breaks off: what came before stays, and no half file.
	to = t.TempDir()
	body := io.MultiReader(bytes.NewReader(whole[:1024]), bytes.NewReader(tarOf(t, tar.Header{Name: "half", Size: 1})[:512]), failingReader{})
	if _, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, body); reasonOf(err) != "canceled upload_interrupted" {
		t.Errorf("interrupted: %v", err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	pipe, feed := io.Pipe()
	go func() {
		_, _ = feed.Write(whole[:2048])
		cancel()
		_ = feed.Close()
	}()
	if _, err := c.WriteArchive(ctx, ArchiveWrite{Path: t.TempDir(), User: me()}, pipe); err == nil {
		t.Error("cancelled: no error")
	}
	a, err := c.ReadArchive(testContext(t), ArchiveRead{Path: "/usr/lib", User: me()})
	noError(t, err)
	_, err = io.CopyN(io.Discard, a, 100_000)
	noError(t, err, a.Close())
	// And the connection goes on to serve.
	b, _ := pack(t, c, ArchiveRead{Path: to, User: me(), Content: true})
	if len(b) < 1024 {
		t.Errorf("%d bytes", len(b))
	}
}

// Sizes that no file system takes cost nothing.
func TestArchiveOfImpossibleSize(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	from := t.TempDir()
	noError(t, os.WriteFile(filepath.Join(from, "f"), nil, 0o644), os.Truncate(filepath.Join(from, "f"), 1<<40))
	b, _ := pack(t, c, ArchiveRead{Path: filepath.Join(from, "f"), User: me()})
	to := t.TempDir()
	_, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, bytes.NewReader(b))
	noError(t, err)
	if info, err := os.Stat(filepath.Join(to, "f")); err != nil || info.Size() != 1<<40 {
		t.Errorf("%v, %v", info, err)
	}
	for _, size := range []int64{pax.MaxSize + 1, 9e18} {
		var b bytes.Buffer
		w := pax.NewWriter(&b)
		noError(t, w.Header(&pax.Header{Name: "f", Type: pax.File, Size: size, Data: []pax.Segment{}}), w.Close())
		if _, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, &b); reasonOf(err) != "invalid_argument bad_archive" {
			t.Errorf("%d bytes of holes: %v", size, err)
		}
	}
}
