package unpack

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/internal/linux"
	"dsec/internal/pax"
	"dsec/sandbox"
)

func archive(t testing.TB, entries ...pax.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	w := pax.NewWriter(&out)
	for _, h := range entries {
		content := strings.Repeat("x", int(h.Stored()))
		if err := w.Header(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// outside is a directory with a file that nothing may touch, beside the target.
func outside(t testing.TB) (target string, untouched func() bool) {
	base := t.TempDir()
	target = base + "/target"
	secret := base + "/secret"
	if err := errors.Join(os.Mkdir(target, 0o755), os.WriteFile(secret, []byte("secret"), 0o640)); err != nil {
		t.Fatal(err)
	}
	return target, func() bool {
		got, err := os.ReadFile(secret)
		st, serr := os.Stat(secret)
		list, lerr := os.ReadDir(base)
		return errors.Join(err, serr, lerr) == nil && string(got) == "secret" && st.Mode() == 0o640 && len(list) == 2
	}
}

func TestHostileArchives(t *testing.T) {
	for name, entries := range map[string][]pax.Header{
		"parent":               {{Name: "../secret", Type: pax.File, Size: 3}},
		"parent within":        {{Name: "a/../../secret", Type: pax.File, Size: 3}},
		"absolute":             {{Name: "/etc/dsec-test", Type: pax.File, Size: 3}},
		"through a link":       {{Name: "l", Link: "..", Type: pax.Symlink}, {Name: "l/secret", Type: pax.File, Size: 3}},
		"through an absolute":  {{Name: "l", Link: "/tmp", Type: pax.Symlink}, {Name: "l/dsec-test", Type: pax.File, Size: 3}},
		"directory in a link":  {{Name: "l", Link: "..", Type: pax.Symlink}, {Name: "l/new/", Type: pax.Dir, Mode: 0o777}},
		"link to outside":      {{Name: "h", Link: "../secret", Type: pax.Link}},
		"link through a link":  {{Name: "l", Link: "..", Type: pax.Symlink}, {Name: "h", Link: "l/secret", Type: pax.Link}},
		"directory is a link":  {{Name: "l", Link: "../secret", Type: pax.Symlink}, {Name: "l/", Type: pax.Dir, Mode: 0o777}},
		"empty name":           {{Name: "", Type: pax.File}},
		"the directory itself": {{Name: ".", Type: pax.File}},
		"replaces a directory": {{Name: "d/", Type: pax.Dir, Mode: 0o755}, {Name: "d/x", Type: pax.File}, {Name: "d", Type: pax.File}},
		"under a file":         {{Name: "f", Type: pax.File}, {Name: "f/x", Type: pax.File}},
	} {
		target, untouched := outside(t)
		if _, err := Tree(target, bytes.NewReader(archive(t, entries...)), Options{}); err == nil {
			t.Errorf("%s: no error", name)
		}
		if !untouched() {
			t.Errorf("%s: something outside has changed", name)
		}
	}
	if _, err := os.Lstat("/tmp/dsec-test"); err == nil {
		t.Error("a file was made in /tmp")
	}
}

// A link that was in the target before is followed no further than the target.
func TestLinksThatWereThere(t *testing.T) {
	target, untouched := outside(t)
	if err := errors.Join(os.Symlink("../secret", target+"/f"), os.Symlink("..", target+"/d")); err != nil {
		t.Fatal(err)
	}
	if _, err := Tree(target, bytes.NewReader(archive(t, pax.Header{Name: "f", Type: pax.File, Size: 3, Mode: 0o600})), Options{}); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Lstat(target + "/f"); err != nil || st.Mode() != 0o600 || !untouched() {
		t.Fatalf("%v, %v: the link was written through", st, err)
	}
	if _, err := Tree(target, bytes.NewReader(archive(t, pax.Header{Name: "d/secret", Type: pax.File, Size: 3})), Options{}); err == nil || !untouched() {
		t.Fatalf("%v", err)
	}
}

// A link that is there already, or to itself, leaves nothing else behind.
func TestLinkThatIsThere(t *testing.T) {
	target, _ := outside(t)
	link := pax.Header{Name: "h", Link: "f", Type: pax.Link}
	_, err := Tree(target, bytes.NewReader(archive(t, pax.Header{Name: "f", Type: pax.File, Size: 3, Mode: 0o600}, link, link,
		pax.Header{Name: "f", Link: "f", Type: pax.Link})), Options{})
	list, lerr := os.ReadDir(target)
	if err != nil || lerr != nil || len(list) != 2 {
		t.Fatalf("%v, %v: %v", err, lerr, list)
	}
}

func TestTree(t *testing.T) {
	target, _ := outside(t)
	got, err := Tree(target, bytes.NewReader(archive(t,
		pax.Header{Name: "ro/", Type: pax.Dir, Mode: 0o500, Sec: 1000}, pax.Header{Name: "ro/f", Type: pax.File, Size: 5, Mode: 0o6755, Sec: 2000, Nsec: 7},
		pax.Header{Name: "ro/h", Link: "ro/f", Type: pax.Link}, pax.Header{Name: "hole", Type: pax.File, Size: 1 << 30, Mode: 0o600, Data: []pax.Segment{{Off: 1 << 29, Len: 3}}},
		pax.Header{Name: "fifo", Type: pax.FIFO}, pax.Header{Name: "dev", Type: pax.Char}, pax.Header{Name: "s", Link: "/x\ny", Type: pax.Symlink},
	)), Options{})
	if err != nil || got.Entries != 7 || got.Bytes != 8 || got.Skipped != 2 || got.AttributesLost != 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	dir, derr := os.Stat(target + "/ro")
	f, ferr := os.Stat(target + "/ro/f")
	h, herr := os.Stat(target + "/ro/h")
	hole, oerr := os.Stat(target + "/hole")
	if err := errors.Join(derr, ferr, herr, oerr); err != nil || dir.Mode().Perm() != 0o500 || dir.ModTime().Unix() != 1000 || f.Mode() != 0o755 ||
		f.ModTime().UnixNano() != 2000e9+7 || !os.SameFile(f, h) || hole.Size() != 1<<30 {
		t.Fatalf("%v: %v %v %v", err, dir, f, hole)
	}
	left, err := filepath.Glob(target + "/*/.dsec-cp-*")
	if err != nil || len(left) > 0 {
		t.Fatalf("%v, %v", left, err)
	}
	_ = os.Chmod(target+"/ro", 0o700) // to be removed
}

// A cut anywhere is an error, and never a file that is not whole.
func TestCutArchive(t *testing.T) {
	all := archive(t, pax.Header{Name: "f", Type: pax.File, Size: 700, Mode: 0o600})
	for n := 0; n < len(all)-512; n += 37 {
		target, _ := outside(t)
		if _, err := Tree(target, bytes.NewReader(all[:n]), Options{}); err == nil {
			t.Fatalf("cut at %d: no error", n)
		}
		list, err := os.ReadDir(target)
		if err != nil || len(list) > 1 || len(list) == 1 && list[0].Name() != "f" {
			t.Fatalf("cut at %d: %v, %v", n, list, err)
		}
		if st, err := os.Stat(target + "/f"); err == nil && st.Size() != 700 {
			t.Fatalf("cut at %d: a file of %d bytes", n, st.Size())
		}
	}
}

func FuzzTree(f *testing.F) {
	f.Add(archive(f, pax.Header{Name: "a/f", Type: pax.File, Size: 5, Mode: 0o600}, pax.Header{Name: "l", Link: "..", Type: pax.Symlink}))
	f.Add(archive(f, pax.Header{Name: "l", Link: "../..", Type: pax.Symlink}, pax.Header{Name: "l/x", Type: pax.File, Size: 5}))
	f.Add(archive(f, pax.Header{Name: "d/", Type: pax.Dir, Mode: 0o777}, pax.Header{Name: "h", Link: "d", Type: pax.Link}))
	target, untouched := outside(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := Tree(target, bytes.NewReader(data[:min(len(data), 1<<20)]), Options{})
		if !untouched() {
			t.Fatalf("something outside has changed; %v", err)
		}
		var known *sandbox.Error
		if errors.As(err, &known) && known.Message == "" {
			t.Fatal("an error without words")
		}
		_ = filepath.WalkDir(target, func(p string, d os.DirEntry, err error) error { // to be removed
			if err == nil && d.IsDir() {
				_ = os.Chmod(p, 0o700)
			}
			return nil
		})
		if err := errors.Join(os.RemoveAll(target), os.Mkdir(target, 0o755)); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAttributes(t *testing.T) {
	target, _ := outside(t)
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(target, "d"), 0o700) }) // or the directory cannot be removed
	list := []pax.Xattr{{Name: "security.capability", Value: "x"}, {Name: "trusted.x", Value: "x"}, {Name: "user.mine", Value: "a\x00b"}}
	got, err := Tree(target, bytes.NewReader(archive(t, pax.Header{Name: "d/", Type: pax.Dir, Mode: 0o500, Xattrs: list},
		pax.Header{Name: "d/f", Type: pax.File, Mode: 0o400, Size: 3, Xattrs: list})), Options{})
	if err != nil {
		t.Fatal(err)
	}
	kept := int64(0)
	for _, name := range []string{"d", "d/f"} {
		attrs, err := linux.Lxattrs(filepath.Join(target, name))
		if value, ok := attrs["user.mine"]; err != nil || ok && value != "a\x00b" || attrs["trusted.x"]+attrs["security.capability"] != "" {
			t.Errorf("%s: %q, %v", name, attrs, err)
		} else if ok { // else the file system has none
			kept++
		}
	}
	if got.AttributesLost != 6-kept || got.LostNames[0] != "security.capability" || len(got.LostNames) > 3 {
		t.Errorf("%+v with %d kept", got, kept)
	}
}
