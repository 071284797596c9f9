package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/sandbox"
)

// The kernel's own links lead to what aether has open, so that no path of a request may go through one, also not behind a
// link that the sandbox made.
func TestLinksOfTheKernel(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	dir, err := os.Open(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := os.WriteFile(filepath.Join(w.dir, "file"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	held := fmt.Sprintf("/proc/self/fd/%d", dir.Fd()) // aether is in this process
	link := filepath.Join(w.dir, "link")
	if err := os.Symlink(held, link); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{held, link, "/proc/self/cwd", "/proc/self/root"} {
		if _, _, err := c.ReadFile(ctx, FileRead{Path: p + "/file", User: me()}); sandbox.ReasonOf(err) != "invalid_request" {
			t.Errorf("read below %s: %v", p, err)
		}
		for _, parents := range []bool{false, true} {
			write := FileWrite{Path: p + "/new/file", User: me(), Size: -1, MakeParents: parents}
			if _, _, err := c.WriteFile(ctx, write, strings.NewReader("x")); sandbox.ReasonOf(err) != "invalid_request" {
				t.Errorf("write below %s, with parents %v: %v", p, parents, err)
			}
		}
		cmd := shell("pwd")
		cmd.Cwd = p
		if _, err := c.Start(ctx, newID(), cmd); sandbox.ReasonOf(err) != "workdir_not_found" {
			t.Errorf("work in %s: %v", p, err)
		}
	}
	if _, err := os.Stat(filepath.Join(w.dir, "new")); err == nil {
		t.Error("a directory was made")
	}
}
