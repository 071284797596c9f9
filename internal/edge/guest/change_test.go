package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"dsec/sandbox"
)

func change(t *testing.T, c *Client, changes ...Change) error {
	t.Helper()
	return c.ChangeFiles(testContext(t), me(), changes)
}

func mustChange(t *testing.T, c *Client, changes ...Change) {
	t.Helper()
	if err := change(t, c, changes...); err != nil {
		t.Fatalf("%+v: %v", changes, err)
	}
}

func putFile(t *testing.T, p, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func content(p string) string {
	b, err := os.ReadFile(p)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func listing(t *testing.T, c *Client, p string, depth int) (map[string]FileEntry, error) {
	t.Helper()
	l, err := c.ListFiles(testContext(t), p, me(), depth)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	out := make(map[string]FileEntry)
	for {
		e, err := l.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if _, twice := out[string(e.Path)]; twice {
			t.Errorf("%q is listed twice", e.Path)
		}
		out[string(e.Path)] = e
	}
}

func TestChanges(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	at := func(name string) string { return filepath.Join(w.dir, name) }
	mustChange(t, c,
		Change{Kind: MakeDirectory, Path: at("a/b/c"), Mode: 0o2770, Recursive: true},
		Change{Kind: MakeDirectory, Path: at("a/b/c"), Recursive: true}, // is there
		Change{Kind: MakeDirectory, Path: at("plain")},
		Change{Kind: MakeLink, Path: at("a/link"), To: "b/c"},
	)
	if st, err := os.Stat(at("a/link")); err != nil || st.Mode() != fs.ModeDir|fs.ModeSetgid|0o770 {
		t.Fatalf("%v, %v", st, err)
	}
	if st, err := os.Stat(at("a/b")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("a parent: %v, %v", st, err)
	}
	putFile(t, at("a/file"), "content")
	mustChange(t, c,
		Change{Kind: MakeLink, Path: at("a/hard"), To: at("a/file"), Hard: true},
		Change{Kind: MoveFile, Path: at("a/file"), To: at("a/b/moved")},
		Change{Kind: CopyFile, Path: at("a/b/moved"), To: at("copy")},
		Change{Kind: SetMode, Path: at("copy"), Mode: 0o4711},
		Change{Kind: SetOwner, Path: at("copy"), Owner: me()},
		Change{Kind: MoveFile, Path: at("a/hard"), To: at("copy")}, // replaces
		Change{Kind: RemoveFile, Path: at("plain")},
		Change{Kind: RemoveFile, Path: at("plain"), MissingOK: true},
		Change{Kind: RemoveFile, Path: at("no/such/parent"), MissingOK: true},
	)
	if content(at("a/b/moved")) != "content" || content(at("copy")) != "content" {
		t.Errorf("%q, %q", content(at("a/b/moved")), content(at("copy")))
	}
	mustChange(t, c, Change{Kind: RemoveFile, Path: at("a") + "/", Recursive: true})
	if left, err := os.ReadDir(w.dir); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestChangesFailWithTheirReason(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	at := func(name string) string { return filepath.Join(w.dir, name) }
	putFile(t, at("dir/file"), "x")
	putFile(t, at("file"), "y")
	for name, tc := range map[string]struct {
		c      Change
		reason string
	}{
		"make without parents":   {Change{Kind: MakeDirectory, Path: at("no/such")}, "file_not_found"},
		"make what is there":     {Change{Kind: MakeDirectory, Path: at("dir")}, "file_exists"},
		"make what is a file":    {Change{Kind: MakeDirectory, Path: at("file"), Recursive: true}, "not_directory"},
		"make the root":          {Change{Kind: MakeDirectory, Path: "/"}, "invalid_request"},
		"make below a file":      {Change{Kind: MakeDirectory, Path: at("file/x"), Recursive: true}, "not_directory"},
		"long name":              {Change{Kind: MakeDirectory, Path: at(strings.Repeat("n", 256))}, "name_too_long"},
		"remove nothing":         {Change{Kind: RemoveFile, Path: at("none")}, "file_not_found"},
		"remove a full one":      {Change{Kind: RemoveFile, Path: at("dir")}, "directory_not_empty"},
		"remove the root":        {Change{Kind: RemoveFile, Path: "/", Recursive: true}, "invalid_request"},
		"remove a dot":           {Change{Kind: RemoveFile, Path: at("dir") + "/.", Recursive: true}, "invalid_request"},
		"move nothing":           {Change{Kind: MoveFile, Path: at("none"), To: at("x")}, "file_not_found"},
		"move over, exclusive":   {Change{Kind: MoveFile, Path: at("file"), To: at("dir/file"), Exclusive: true}, "file_exists"},
		"move over a full one":   {Change{Kind: MoveFile, Path: at("dir"), To: at("dir2")}, "directory_not_empty"},
		"move file on dir":       {Change{Kind: MoveFile, Path: at("file"), To: at("dir")}, "is_directory"},
		"move into itself":       {Change{Kind: MoveFile, Path: at("dir"), To: at("dir/dir")}, "invalid_request"},
		"copy a directory":       {Change{Kind: CopyFile, Path: at("dir"), To: at("x")}, "is_directory"},
		"copy into itself":       {Change{Kind: CopyFile, Path: at("dir"), To: at("dir/a"), Recursive: true}, "invalid_request"},
		"copy over, exclusive":   {Change{Kind: CopyFile, Path: at("file"), To: at("dir/file"), Exclusive: true}, "file_exists"},
		"copy dir on file":       {Change{Kind: CopyFile, Path: at("dir"), To: at("file"), Recursive: true}, "not_directory"},
		"copy file on dir":       {Change{Kind: CopyFile, Path: at("file"), To: at("dir")}, "is_directory"},
		"copy what is made up":   {Change{Kind: CopyFile, Path: "/proc/self/status", To: at("x")}, "invalid_request"},
		"copy a tree of proc":    {Change{Kind: CopyFile, Path: "/proc/self", To: at("x"), Recursive: true}, "invalid_request"},
		"copy a device":          {Change{Kind: CopyFile, Path: "/dev/null", To: at("x")}, "invalid_request"},
		"a link of the kernel":   {Change{Kind: SetMode, Path: "/proc/self/fd/0", Mode: 0o777}, "invalid_request"},
		"below one":              {Change{Kind: RemoveFile, Path: "/proc/self/cwd/x"}, "invalid_request"},
		"link there":             {Change{Kind: MakeLink, Path: at("file"), To: "x"}, "file_exists"},
		"hard link to none":      {Change{Kind: MakeLink, Path: at("x"), To: at("none"), Hard: true}, "file_not_found"},
		"hard link to a dir":     {Change{Kind: MakeLink, Path: at("x"), To: at("dir"), Hard: true}, "permission_denied"},
		"hard link across":       {Change{Kind: MakeLink, Path: at("x"), To: "/proc/version", Hard: true}, "cross_device"},
		"mode of none":           {Change{Kind: SetMode, Path: at("none"), Mode: 1}, "file_not_found"},
		"owner who is nobody":    {Change{Kind: SetOwner, Path: at("file"), Owner: "no-such-user"}, "user_not_found"},
		"NUL":                    {Change{Kind: RemoveFile, Path: "/a\x00b"}, "invalid_request"},
		"too long":               {Change{Kind: RemoveFile, Path: strings.Repeat("/a", 2100)}, "invalid_request"},
		"unknown kind of change": {Change{Path: at("x")}, "invalid_request"},
	} {
		if err := os.MkdirAll(at("dir2/full"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := change(t, c, tc.c); sandbox.ReasonOf(err) != tc.reason {
			t.Errorf("%s: %v (%s), want %s", name, err, sandbox.ReasonOf(err), tc.reason)
		}
	}
	err := change(t, c, Change{Kind: MakeDirectory, Path: at("one")}, Change{Kind: MakeDirectory, Path: at("one")}, Change{Kind: MakeDirectory, Path: at("two")})
	if e := sandbox.AsError(err); e == nil || e.Facts["index"] != "1" || e.Reason != "file_exists" {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(at("one")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(at("two")); err == nil {
		t.Error("a change after the one that failed was made")
	}
	if content(at("file")) != "y" || content(at("dir/file")) != "x" {
		t.Errorf("what was there changed")
	}
	waitNoTemp(t, w.dir)
}

func TestManyChangesAreOneRequest(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	var changes []Change
	for i := range 3 * maxBatch {
		changes = append(changes, Change{Kind: MakeDirectory, Path: filepath.Join(w.dir, "d", fmt.Sprint(i)), Recursive: true})
	}
	mustChange(t, c, changes...)
	changes = append(changes, Change{Kind: RemoveFile, Path: "/no/such"})
	err := change(t, c, changes...)
	if e := sandbox.AsError(err); e == nil || e.Facts["index"] != fmt.Sprint(3*maxBatch) {
		t.Errorf("%v", err)
	}
	paths := make([]string, 1000)
	for i := range paths {
		paths[i] = filepath.Join(w.dir, "d", fmt.Sprint(i))
	}
	stats, err := c.StatFiles(testContext(t), me(), paths, false)
	if err != nil || len(stats) != len(paths) {
		t.Fatal(len(stats), err)
	}
	for i, s := range stats {
		if (s.Err == nil) != (i < 3*maxBatch) || (s.Err != nil && sandbox.ReasonOf(s.Err) != "file_not_found") {
			t.Fatalf("%d: %+v", i, s)
		}
	}
}

// readsEverything reports whether permissions bind this process: they bind root, too, without its capabilities.
func readsEverything(t *testing.T) bool {
	t.Helper()
	p := filepath.Join(t.TempDir(), "closed")
	if err := os.WriteFile(p, nil, 0); err != nil {
		t.Fatal(err)
	}
	_, err := os.ReadFile(p)
	return err == nil
}

// TestCopyIsExact copies a tree with everything in it.
func TestCopyIsExact(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	from, to := filepath.Join(w.dir, "from"), filepath.Join(w.dir, "to")
	putFile(t, filepath.Join(from, "sub/file"), "content")
	putFile(t, filepath.Join(from, "sub/closed"), "c")
	script := `cd ` + from + ` && ln sub/file hard && ln -s /etc/passwd link && ln -s nowhere broken && mkfifo fifo &&
		truncate -s 64M holes && printf x | dd of=holes bs=1 seek=40000000 conv=notrunc status=none && chmod 4755 sub/file && chmod 400 sub/closed &&
		mkdir empty && chmod 1777 empty && : > 'new
line' && : > "$(printf 'b\377d')" && touch -hd '2001-02-03 04:05:06.789' sub/file link holes fifo && touch -d 1999-01-01 sub empty . &&
		{ python3 -c 'import os; os.setxattr("sub/file", "user.note", b"\x00v"); os.setxattr("empty", "user.dir", b"d")' || true; }`
	if r, _, errOut := run(t, c, shell(script)); r.ExitCode != 0 {
		t.Fatal(errOut)
	}
	mustChange(t, c, Change{Kind: CopyFile, Path: from, To: to, Recursive: true})
	compareTrees(t, c, from, to)
	if st, err := os.Stat(filepath.Join(to, "holes")); err != nil || st.Sys().(*syscall.Stat_t).Blocks*512 > 4<<20 {
		t.Errorf("the holes are filled: %+v, %v", st, err)
	}
	a, errA := os.Stat(filepath.Join(to, "hard"))
	b, errB := os.Stat(filepath.Join(to, "sub/file"))
	if errA != nil || errB != nil || !os.SameFile(a, b) {
		t.Errorf("two names of one file became two files: %v %v", errA, errB)
	}
	// Into a directory that is there it is merged; what is in the way of the same kind is replaced.
	putFile(t, filepath.Join(to, "sub/more"), "stays")
	if err := os.Chmod(filepath.Join(to, "sub/closed"), 0o600); err != nil {
		t.Fatal(err)
	}
	putFile(t, filepath.Join(to, "sub/closed"), "longer than before")
	mustChange(t, c, Change{Kind: CopyFile, Path: from, To: to, Recursive: true})
	if content(filepath.Join(to, "sub/more")) != "stays" || content(filepath.Join(to, "sub/closed")) != "c" {
		t.Error("merging lost or kept the wrong thing")
	}
	if err := os.Remove(filepath.Join(to, "sub/more")); err != nil {
		t.Fatal(err)
	}
	mustChange(t, c, Change{Kind: CopyFile, Path: from, To: to, Recursive: true}) // the times of sub
	compareTrees(t, c, from, to)
	waitNoTemp(t, to)
	// A link at the top is copied with recursive, and followed without.
	mustChange(t, c, Change{Kind: CopyFile, Path: filepath.Join(from, "link"), To: filepath.Join(w.dir, "l"), Recursive: true},
		Change{Kind: CopyFile, Path: filepath.Join(from, "link"), To: filepath.Join(w.dir, "f")})
	if target, err := os.Readlink(filepath.Join(w.dir, "l")); err != nil || target != "/etc/passwd" {
		t.Errorf("%q, %v", target, err)
	}
	if st, err := os.Lstat(filepath.Join(w.dir, "f")); err != nil || !st.Mode().IsRegular() || st.Size() == 0 {
		t.Errorf("%v, %v", st, err)
	}
}

// compareTrees compares by another way: find and a digest of everything.
func compareTrees(t *testing.T, c *Client, from, to string) {
	t.Helper()
	script := `cd %s && find . -printf '%%P|%%y|%%m|%%U:%%G|%%s|%%n|%%T@|%%l\n' | grep -v '|d|.*|' | LC_ALL=C sort; ` +
		`find . -type d -printf '%%P|%%m|%%U:%%G|%%T@\n' | LC_ALL=C sort; find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum; ` +
		`python3 -c 'import os
for r, d, f in sorted(os.walk(b".")):
    for n in sorted(d + f):
        p = os.path.join(r, n)
        print(p, [(x, os.getxattr(p, x, follow_symlinks=False)) for x in os.listxattr(p, follow_symlinks=False) if x.startswith("user.")])'`
	_, a, _ := run(t, c, shell(fmt.Sprintf(script, from)))
	_, b, _ := run(t, c, shell(fmt.Sprintf(script, to)))
	if a != b || a == "" {
		la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
		for i := range min(len(la), len(lb)) {
			if la[i] != lb[i] {
				t.Errorf("%q became %q", la[i], lb[i])
			}
		}
		t.Errorf("%d lines, %d in the copy", len(la), len(lb))
	}
}

const deep = 10_000

// makeDeep makes a chain of directories that is far longer than a path may be.
func makeDeep(t *testing.T, dir string, n int) {
	t.Helper()
	r, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := r.Mkdir("d", 0o755); err != nil {
			t.Fatal(i, err)
		}
		if i%1000 == 7 {
			f, err := r.Create("file")
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		below, err := r.OpenRoot("d")
		r.Close()
		if err != nil {
			t.Fatal(i, err)
		}
		r = below
	}
	r.Close()
}

func TestDeepTrees(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	top := filepath.Join(w.dir, "deep")
	if err := os.Mkdir(top, 0o755); err != nil {
		t.Fatal(err)
	}
	makeDeep(t, top, deep)
	before := openFiles(t)
	files, err := listing(t, c, top, -1)
	if err != nil || len(files) != deep+deep/1000 {
		t.Fatalf("%d entries, %v", len(files), err)
	}
	mustChange(t, c,
		Change{Kind: SetMode, Path: top, Mode: 0o750, Recursive: true},
		Change{Kind: SetOwner, Path: top, Owner: me(), Recursive: true},
		Change{Kind: CopyFile, Path: top, To: top + "2", Recursive: true},
	)
	copied, err := listing(t, c, top+"2", -1)
	if err != nil || len(copied) != len(files) {
		t.Fatalf("%d entries of %d were copied, %v", len(copied), len(files), err)
	}
	for p, e := range copied {
		if e.Mode&0o777 != 0o750 {
			t.Fatalf("%d levels down: mode %o", strings.Count(p, "/"), e.Mode)
		}
	}
	mustChange(t, c, Change{Kind: RemoveFile, Path: top, Recursive: true}, Change{Kind: RemoveFile, Path: top + "2", Recursive: true})
	if left, err := os.ReadDir(w.dir); err != nil || len(left) > 1 {
		t.Errorf("%v, %v", left, err)
	}
	if after := openFiles(t); after > before+3 {
		t.Errorf("%d files are open, %d before", after, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func TestListing(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	names := []string{"a b", "new\nline", "ünïcödé", "bad\xff\xfe", strings.Repeat("n", 255), "-rf", "#", "'\"\\", "日本語"}
	for _, n := range names {
		putFile(t, filepath.Join(w.dir, "l/sub", n), n)
	}
	if err := os.Symlink("bad\xff/target\n", filepath.Join(w.dir, "l/link")); err != nil {
		t.Fatal(err)
	}
	got, err := listing(t, c, filepath.Join(w.dir, "l"), -1)
	if err != nil || len(got) != len(names)+2 {
		t.Fatalf("%d, %v", len(got), err)
	}
	for _, n := range names {
		e, ok := got["sub/"+n]
		if !ok || e.Size != int64(len(n)) || e.Mode != 0o100644 || e.UID != uint32(os.Getuid()) || time.Since(e.MTime).Abs() > time.Hour {
			t.Errorf("%q: %+v", n, e)
		}
	}
	if e := got["link"]; string(e.LinkTarget) != "bad\xff/target\n" || e.Mode&typeMask != typeLink {
		t.Errorf("%+v", e)
	}
	if got, err := listing(t, c, filepath.Join(w.dir, "l"), 1); err != nil || len(got) != 2 {
		t.Errorf("its own entries: %v, %v", got, err)
	}
	for p, reason := range map[string]string{
		filepath.Join(w.dir, "none"): "file_not_found", filepath.Join(w.dir, "l/sub/#"): "not_directory", "/proc/self/fd": "invalid_request",
		"/proc": "invalid_request", "/sys": "invalid_request",
	} {
		if _, err := listing(t, c, p, -1); sandbox.ReasonOf(err) != reason {
			t.Errorf("%s: %v, want %s", p, err, reason)
		}
	}
}

// TestNamesOfAnyBytes: every operation takes names that are not UTF-8, and its errors can be told.
func TestNamesOfAnyBytes(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := filepath.Join(w.dir, "d\xff")
	at := func(name string) string { return filepath.Join(dir, name+"\xfe\n") }
	mustChange(t, c, Change{Kind: MakeDirectory, Path: at("sub"), Recursive: true})
	e := watch(t, c, dir, true)
	if _, _, err := c.WriteFile(testContext(t), FileWrite{Path: at("a"), User: me(), Size: 1}, strings.NewReader("a")); err != nil {
		t.Fatal(err)
	}
	await(t, e, "a\xfe\n", created)
	mustChange(t, c,
		Change{Kind: CopyFile, Path: at("a"), To: at("b")}, Change{Kind: MoveFile, Path: at("b"), To: at("c")}, Change{Kind: SetMode, Path: at("c"), Mode: 0o600},
		Change{Kind: SetOwner, Path: at("c"), Owner: me()}, Change{Kind: MakeLink, Path: at("h"), To: at("a"), Hard: true}, Change{Kind: MakeLink, Path: at("l"), To: at("a")},
		Change{Kind: CopyFile, Path: dir, To: at("../copy"), Recursive: true}, Change{Kind: RemoveFile, Path: at("../copy"), Recursive: true})
	await(t, e, "c\xfe\n", movedTo)
	stats, err := c.StatFiles(testContext(t), me(), []string{at("a"), at("l"), at("c"), at("none")}, false)
	if err != nil || stats[0].Entry.Links != 2 || string(stats[1].Entry.LinkTarget) != at("a") || stats[2].Entry.Mode != 0o100600 {
		t.Fatalf("%+v, %v", stats, err)
	}
	if err := stats[3].Err; sandbox.ReasonOf(err) != "file_not_found" || !utf8.ValidString(err.Error()) {
		t.Errorf("%q", err)
	}
	if got, err := listing(t, c, dir, 1); err != nil || len(got) != 5 {
		t.Errorf("%v, %v", got, err)
	}
	var tar bytes.Buffer
	r, err := c.ReadArchive(testContext(t), ArchiveRead{Path: dir, User: me(), Content: true})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := tar.ReadFrom(r); err != nil {
		t.Fatal(err)
	}
	if _, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: at("sub"), User: me()}, &tar); err != nil || content(filepath.Join(at("sub"), "a\xfe\n")) != "a" {
		t.Error(err)
	}
	mustChange(t, c, Change{Kind: RemoveFile, Path: at("a")})
	await(t, e, "a\xfe\n", removed)
	if err := change(t, c, Change{Kind: RemoveFile, Path: at("a")}); sandbox.ReasonOf(err) != "file_not_found" || !utf8.ValidString(err.Error()) {
		t.Errorf("%q", err)
	}
}

func TestListingOfManyHoldsLittle(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	dir := filepath.Join(w.dir, "many")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const n = 30_000
	for i := range n {
		if err := os.Symlink("x", filepath.Join(dir, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	got, err := listing(t, c, dir, 1)
	if err != nil || len(got) != n {
		t.Fatalf("%d, %v", len(got), err)
	}
	// One that nobody reads ends with its reader.
	l, err := c.ListFiles(testContext(t), dir, me(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Next(); err != nil {
		t.Fatal(err)
	}
	l.Close()
	for range 2 * 8 { // more than go on at once
		if _, err := listing(t, c, w.dir, 1); err != nil {
			t.Fatal(err)
		}
	}
	mustChange(t, c, Change{Kind: RemoveFile, Path: dir, Recursive: true})
}

// TestListingFailsAsAWhole: what cannot be read is no reason to leave it out.
func TestListingFailsAsAWhole(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	putFile(t, filepath.Join(w.dir, "l/closed/file"), "x")
	if err := os.Chmod(filepath.Join(w.dir, "l/closed"), 0); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(filepath.Join(w.dir, "l/closed"), 0o755)
	got, err := listing(t, c, filepath.Join(w.dir, "l"), -1)
	if readsEverything(t) { // the rootful test asks as another user
		if err != nil || len(got) != 2 {
			t.Errorf("%v, %v", got, err)
		}
	} else if sandbox.ReasonOf(err) != "permission_denied" {
		t.Errorf("%v, %v", got, err)
	}
}

func TestWritesInPlace(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	p := filepath.Join(w.dir, "deep/file")
	put := func(f FileWrite, content string) error {
		f.Path, f.User, f.Size = p, me(), int64(len(content))
		_, _, err := c.WriteFile(testContext(t), f, strings.NewReader(content))
		return err
	}
	if err := put(FileWrite{Append: true}, "x"); sandbox.ReasonOf(err) != "file_not_found" {
		t.Errorf("without its directory: %v", err)
	}
	steps := []struct {
		f       FileWrite
		content string
		want    string
	}{
		{FileWrite{Append: true, MakeParents: true, Mode: 0o600}, "0123456789", "0123456789"},
		{FileWrite{Append: true}, "ab", "0123456789ab"},
		{FileWrite{InPlace: true, Offset: 2}, "--", "01--456789ab"},
		{FileWrite{InPlace: true, Offset: 4, Truncate: true}, "==", "01--=="}, // no old tail
		{FileWrite{InPlace: true, Offset: 8}, "!", "01--==\x00\x00!"},
		{FileWrite{InPlace: true, Truncate: true}, "", ""},
		{FileWrite{Append: true}, "", ""},
		{FileWrite{Append: true}, "longer than what follows", "longer than what follows"},
		{FileWrite{}, "whole", "whole"}, // no old tail
	}
	for i, s := range steps {
		if err := put(s.f, s.content); err != nil || content(p) != s.want {
			t.Errorf("%d: %v, %q, want %q", i, err, content(p), s.want)
		}
	}
	if st, err := os.Stat(p); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if err := put(FileWrite{Append: true, Exclusive: true}, "x"); sandbox.ReasonOf(err) != "file_exists" {
		t.Errorf("exclusive: %v", err)
	}
	if err := put(FileWrite{InPlace: true, Offset: 1 << 62}, "x"); sandbox.ReasonOf(err) != "file_too_large" {
		t.Errorf("beyond what a file can be: %v", err)
	}
	for _, bad := range []string{"/proc/self/comm", "/dev/null", w.dir} {
		if _, _, err := c.WriteFile(testContext(t), FileWrite{Path: bad, User: me(), Append: true, Size: 1}, strings.NewReader("x")); err == nil {
			t.Errorf("%s was written to", bad)
		}
	}
	long := strings.Repeat("0123456789abcdef", 1<<16)
	if err := put(FileWrite{Append: true}, long); err != nil || content(p) != "whole"+long {
		t.Errorf("a long one: %v", err)
	}
}

func TestEntriesAreNames(t *testing.T) {
	var names []string
	for _, p := range []string{"", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\x00b", strings.Repeat("a/", 40_000) + "a"} {
		if checkRelative([]byte(p)) == nil {
			names = append(names, p)
		}
	}
	if len(names) > 0 {
		t.Errorf("accepted: %q", names)
	}
	for _, p := range []string{"a", "a/b", "...", ".a", "a..", "a\nb", "\xff", " "} {
		if err := checkRelative([]byte(p)); err != nil {
			t.Errorf("%q: %v", p, err)
		}
	}
}
