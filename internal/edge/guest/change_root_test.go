//go:build rootful

package guest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"dsec/sandbox"
)

// newDisk is a small file system of its own.
func newDisk(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, options))
	t.Cleanup(func() { must(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

func TestFullDisksSayOfWhat(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	for _, disk := range []struct{ options, reason string }{{"size=256k", "no_space"}, {"size=16m,nr_inodes=20", "no_inodes"}} {
		dir := newDisk(t, disk.options)
		put := func(name string) error {
			_, _, err := c.WriteFile(testContext(t), FileWrite{Path: filepath.Join(dir, name), Size: -1}, strings.NewReader(strings.Repeat("x", 32<<10)))
			return err
		}
		var err error
		n := 0
		for ; err == nil; n++ {
			err = put(fmt.Sprint(n))
		}
		if sandbox.ClassOf(err) != sandbox.ResourceExhausted || sandbox.ReasonOf(err) != disk.reason {
			t.Errorf("%s: write: %v", disk.options, err)
		}
		for _, ch := range []Change{
			{Kind: CopyFile, Path: filepath.Join(dir, "0"), To: filepath.Join(dir, "copy")},
			{Kind: CopyFile, Path: "/usr/share/doc", To: filepath.Join(dir, "doc"), Recursive: true},
		} {
			if err := c.ChangeFiles(testContext(t), "", []Change{ch}); sandbox.ReasonOf(err) != disk.reason {
				t.Errorf("%s: %+v: %v", disk.options, ch, err)
			}
		}
		got, err := listing(t, c, dir, -1)
		if err != nil || len(got) != n-1 {
			t.Errorf("%s: %d entries of %d, %v", disk.options, len(got), n-1, err)
		}
		must(t, c.ChangeFiles(testContext(t), "", []Change{{Kind: RemoveFile, Path: filepath.Join(dir, "0")}}))
		must(t, put("again"))
	}
}

func TestMoveAcrossFileSystems(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	disk := newDisk(t, "size=16m")
	from, to := filepath.Join(w.dir, "from"), filepath.Join(disk, "to")
	script := `mkdir -p ` + from + `/sub && cd ` + from + ` && echo x > sub/f && ln sub/f hard && ln -s f sub/l && mkfifo p && chown -h 5:6 sub/l sub/f && chmod 2755 sub && touch -hd 2001-01-01 sub/f sub/l p sub .`
	if r, _, errOut := run(t, c, shell(script+" && cp -a . ../same && touch -d 2001-01-01 ../same")); r.ExitCode != 0 {
		t.Fatal(errOut)
	}
	must(t, os.MkdirAll(filepath.Join(disk, "full/x"), 0o755))
	if err := change(t, c, Change{Kind: MoveFile, Path: from, To: filepath.Join(disk, "full")}); sandbox.ReasonOf(err) != "directory_not_empty" {
		t.Errorf("over a full one: %v", err)
	}
	if err := change(t, c, Change{Kind: MoveFile, Path: from, To: filepath.Join(disk, "full"), Exclusive: true}); sandbox.ReasonOf(err) != "file_exists" {
		t.Errorf("exclusive: %v", err)
	}
	mustChange(t, c, Change{Kind: MoveFile, Path: from, To: to})
	compareTrees(t, c, filepath.Join(w.dir, "same"), to)
	if _, err := os.Lstat(from); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old one: %v", err)
	}
	// One that fails leaves what was.
	putFile(t, filepath.Join(w.dir, "big/a"), "x")
	must(t, os.Truncate(filepath.Join(w.dir, "big/a"), 0))
	must(t, os.WriteFile(filepath.Join(w.dir, "big/b"), make([]byte, 32<<20), 0o644))
	if err := change(t, c, Change{Kind: MoveFile, Path: filepath.Join(w.dir, "big"), To: filepath.Join(disk, "big")}); sandbox.ReasonOf(err) != "no_space" {
		t.Errorf("%v", err)
	}
	if got, err := listing(t, c, filepath.Join(w.dir, "big"), -1); err != nil || len(got) != 2 {
		t.Errorf("%v, %v", got, err)
	}
	waitNoTemp(t, disk)
	// A mount point is not removed, and nothing below it.
	under := filepath.Join(w.dir, "above")
	must(t, os.MkdirAll(filepath.Join(under, "mount"), 0o755))
	must(t, syscall.Mount(disk, filepath.Join(under, "mount"), "", syscall.MS_BIND, ""))
	defer syscall.Unmount(filepath.Join(under, "mount"), syscall.MNT_DETACH)
	if err := change(t, c, Change{Kind: RemoveFile, Path: under, Recursive: true}); sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(filepath.Join(to, "sub/f")); err != nil {
		t.Error(err)
	}
}

// TestFilesOfOthers runs in the real aether with its real users.
func TestFilesOfOthers(t *testing.T) {
	j := newJail(t)
	ctx := testContext(t)
	dir, err := os.MkdirTemp("/var/tmp", "guest-files")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chown(dir, idBase, idBase))
	must(t, os.Chmod(dir, 0o755))
	root := []Change{
		{Kind: MakeDirectory, Path: dir + "/closed/in", Recursive: true}, {Kind: SetMode, Path: dir + "/closed/in", Mode: 0o700},
		{Kind: MakeDirectory, Path: dir + "/theirs"}, {Kind: SetOwner, Path: dir + "/theirs", Owner: "1000:1001"},
	}
	must(t, j.client.ChangeFiles(ctx, "", root))
	user := func(ch Change) error { return j.client.ChangeFiles(ctx, "1000:1001", []Change{ch}) }
	must(t, user(Change{Kind: MakeDirectory, Path: dir + "/theirs/a/b", Recursive: true}))
	must(t, user(Change{Kind: SetMode, Path: dir + "/theirs/a", Mode: 0o400, Recursive: true})) // content first
	must(t, user(Change{Kind: SetMode, Path: dir + "/theirs/a", Mode: 0o700}))
	must(t, user(Change{Kind: SetMode, Path: dir + "/theirs/a", Mode: 0o755, Recursive: true}))
	stats, err := j.client.StatFiles(ctx, "1000:1001", []string{dir + "/theirs/a/b", dir + "/closed/in/x"}, false)
	must(t, err)
	if e := stats[0].Entry; e.UID != 1000 || e.GID != 1001 || e.Mode&0o777 != 0o755 {
		t.Errorf("%+v, %v", e, stats[0].Err)
	}
	if sandbox.ReasonOf(stats[1].Err) != "permission_denied" {
		t.Errorf("%v", stats[1].Err)
	}
	for _, ch := range []Change{
		{Kind: SetOwner, Path: dir + "/theirs", Owner: "0"}, {Kind: SetMode, Path: dir + "/closed", Mode: 0o777},
		{Kind: RemoveFile, Path: dir + "/closed", Recursive: true}, {Kind: MoveFile, Path: dir + "/closed", To: dir + "/theirs/x"},
		{Kind: CopyFile, Path: dir + "/closed", To: dir + "/theirs/x", Recursive: true}, {Kind: MakeLink, Path: dir + "/x", To: "y"},
	} {
		if err := user(ch); sandbox.ReasonOf(err) != "permission_denied" {
			t.Errorf("%+v: %v", ch, err)
		}
	}
	if err := j.client.ChangeFiles(ctx, "", []Change{{Kind: SetOwner, Path: dir + "/theirs", Owner: "70000"}}); sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("an id that the sandbox does not have: %v", err)
	}
	l, err := j.client.ListFiles(ctx, dir, "1000:1001", -1)
	must(t, err)
	defer l.Close()
	for err == nil {
		_, err = l.Next()
	}
	if errors.Is(err, io.EOF) || sandbox.ReasonOf(err) != "permission_denied" {
		t.Errorf("a listing with something that may not be read: %v", err)
	}
	if err := j.client.ChangeFiles(ctx, "", []Change{{Kind: MakeDirectory, Path: "/dev/shm/x"}}); sandbox.ClassOf(err) != sandbox.InvalidArgument {
		t.Errorf("in memory: %v", err)
	}
	e, err := j.client.WatchFiles(ctx, dir, "1000:1001", true)
	must(t, err)
	defer e.Close()
	must(t, j.client.ChangeFiles(ctx, "", []Change{{Kind: MakeDirectory, Path: dir + "/closed/in/x"}, {Kind: MakeDirectory, Path: dir + "/theirs/seen"}}))
	for {
		ev, err := e.Next()
		must(t, err)
		if strings.HasPrefix(string(ev.Path), "closed/in") && string(ev.Path) != "closed/in" {
			t.Errorf("an event of what the user may not read: %+v", ev)
		}
		if string(ev.Path) == "theirs/seen" {
			break
		}
	}
}
