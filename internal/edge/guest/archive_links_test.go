package guest

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"dsec/internal/image/treetest"
)

// TestArchivesFollowLinksThatWereThere: a link to a directory within the target is as good as one, and stays.
func TestArchivesFollowLinksThatWereThere(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	top := t.TempDir()
	outside, to := filepath.Join(top, "outside"), filepath.Join(top, "to")
	for _, d := range []string{"usr/bin", "usr/lib", "deep/er"} {
		noError(t, os.MkdirAll(filepath.Join(to, d), 0o750))
	}
	noError(t, os.Mkdir(outside, 0o755), os.WriteFile(outside+"/victim", []byte("whole"), 0o644), os.WriteFile(to+"/file", []byte("whole"), 0o644))
	for name, target := range map[string]string{
		"bin": "usr/bin", "lib": "/usr/lib", "chain": "bin", "deep/er/up": "../../usr/lib", "clamped": "../../../usr/bin", "out": outside, "up": "../outside",
		"loop": "loop", "dangling": "none", "tofile": "file", "self": ".",
	} {
		noError(t, os.Symlink(target, filepath.Join(to, name)))
	}
	before := scan(t, outside)
	put := func(list ...tar.Header) error {
		_, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me(), NoReplaceTypes: true}, bytes.NewReader(tarOf(t, list...)))
		return err
	}
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o700} }
	noError(t, put(dir("bin"), tar.Header{Name: "bin/a"}, tar.Header{Name: "lib/b"}, tar.Header{Name: "chain/c"}, tar.Header{Name: "deep/er/up/new/d"},
		tar.Header{Name: "clamped/e"}, dir("lib/sub"), tar.Header{Name: "self/bin/f"}))
	for _, name := range []string{"usr/bin/a", "usr/lib/b", "usr/bin/c", "usr/lib/new/d", "usr/bin/e", "usr/lib/sub"} {
		if _, err := os.Lstat(filepath.Join(to, name)); err != nil {
			t.Error(err)
		}
	}
	if st, err := os.Lstat(to + "/bin"); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link: %v, %v", st, err)
	}
	if st, err := os.Lstat(to + "/usr/bin"); err != nil || st.Mode().Perm() != 0o750 {
		t.Errorf("what the link leads to: %v, %v", st, err)
	}
	noError(t, put(tar.Header{Name: "bin/hard", Typeflag: tar.TypeLink, Linkname: "chain/a"}))
	if b, err := os.ReadFile(to + "/usr/bin/hard"); string(b) != "x" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	for _, list := range [][]tar.Header{
		{{Name: "out/victim"}}, {{Name: "up/victim"}}, {{Name: "loop/x"}}, {{Name: "dangling/x"}}, {{Name: "tofile/x"}},
		{{Name: "h", Typeflag: tar.TypeLink, Linkname: "out/victim"}}, {{Name: "h", Typeflag: tar.TypeLink, Linkname: "up/victim"}},
		// Its own links are not followed: neither as such, nor in the place of one that was there, nor on the way of one.
		{{Name: "mine", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"}, {Name: "mine/x"}},
		{{Name: "mine", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"}, {Name: "h", Typeflag: tar.TypeLink, Linkname: "mine/a"}},
		{{Name: "self", Typeflag: tar.TypeSymlink, Linkname: "."}, {Name: "self/x"}},
		{{Name: "none", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"}, {Name: "dangling/x"}},
		{{Name: "twin", Typeflag: tar.TypeLink, Linkname: "bin"}, {Name: "twin/x"}},
	} {
		if err := put(list...); reasonOf(err) != "invalid_argument unsafe_entry" {
			t.Errorf("%v: %v", list, err)
		}
		os.Remove(to + "/none")
	}
	if diff := treetest.Diff(before, scan(t, outside)); diff != "" {
		t.Error(diff)
	}
}
