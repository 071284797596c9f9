package guest

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"dsec/sandbox"
)

// TestTreesUnderAttack: somebody exchanges directories and links in a tree while whole trees are changed. Nothing outside of it
// may change, whatever they do.
func TestTreesUnderAttack(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	outside, tree := filepath.Join(w.dir, "outside"), filepath.Join(w.dir, "tree")
	putFile(t, filepath.Join(outside, "dir/file"), "keep")
	if err := os.Chmod(filepath.Join(outside, "dir/file"), 0o640); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var attackers sync.WaitGroup
	for _, exchange := range []func(){
		func() { // a directory becomes a link to another, and the reverse
			_ = os.MkdirAll(filepath.Join(tree, "a/b/c"), 0o755)
			_ = os.WriteFile(filepath.Join(tree, "a/b/c/file"), nil, 0o644)
			_ = os.Rename(filepath.Join(tree, "a/b"), filepath.Join(tree, "a/was"))
			_ = os.Symlink(outside, filepath.Join(tree, "a/b"))
			_ = os.RemoveAll(filepath.Join(tree, "a/was"))
			_ = os.Remove(filepath.Join(tree, "a/b"))
		},
		func() { // so does the top
			_ = os.Rename(tree, tree+"-was")
			_ = os.Symlink(outside, tree)
			_ = os.Remove(tree)
			_ = os.Rename(tree+"-was", tree)
		},
	} {
		attackers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					exchange()
				}
			}
		})
	}
	for range 150 {
		for _, ch := range []Change{
			{Kind: SetMode, Path: tree, Mode: 0o777, Recursive: true},
			{Kind: CopyFile, Path: tree, To: filepath.Join(w.dir, "copy"), Recursive: true},
			{Kind: RemoveFile, Path: filepath.Join(w.dir, "copy"), Recursive: true, MissingOK: true},
			{Kind: RemoveFile, Path: tree, Recursive: true, MissingOK: true},
		} {
			if err := change(t, c, ch); err != nil && sandbox.ClassOf(err) == sandbox.Internal && !strings.Contains(err.Error(), "moved away") {
				t.Errorf("%+v: %v", ch, err)
			}
		}
		if _, err := listing(t, c, w.dir, -1); err != nil && sandbox.ClassOf(err) == sandbox.Internal {
			t.Errorf("list: %v", err)
		}
	}
	close(stop)
	attackers.Wait()
	st, err := os.Stat(filepath.Join(outside, "dir/file"))
	if err != nil || st.Mode() != 0o640 || content(filepath.Join(outside, "dir/file")) != "keep" {
		t.Errorf("outside: %v, %v", st, err)
	}
	for _, d := range []string{outside, filepath.Join(outside, "dir")} { // they may hold more by now: it went through its own links
		if st, err := os.Stat(d); err != nil || st.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %v", d, st, err)
		}
	}
	waitNoTemp(t, w.dir)
}

// TestChangesEndWithTheirCaller: a copy that nobody waits for is undone.
func TestChangesEndWithTheirCaller(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	from := filepath.Join(w.dir, "from")
	for _, d := range strings.Split("abcdefghijklmnopqrstuvwxyz", "") {
		for _, e := range strings.Split("abcdefghijklmnopqrstuvwxyz", "") {
			putFile(t, filepath.Join(from, d, e, "file"), d+e)
		}
	}
	result := make(chan error, 1)
	go func() {
		for {
			err := c.ChangeFiles(testContext(t), me(), []Change{{Kind: CopyFile, Path: from, To: filepath.Join(w.dir, "to"), Recursive: true, Exclusive: true},
				{Kind: RemoveFile, Path: filepath.Join(w.dir, "to"), Recursive: true}})
			if err != nil {
				result <- err
				return
			}
		}
	}()
	for len(mustGlob(t, filepath.Join(w.dir, ".dsec-*"))) == 0 {
	}
	w.cut()
	if err := <-result; sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("%v", err)
	}
	waitNoTemp(t, w.dir)
	if got, err := listing(t, c, from, -1); err != nil || len(got) != 26+2*26*26 {
		t.Errorf("%d, %v", len(got), err)
	}
}

func mustGlob(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return found
}
