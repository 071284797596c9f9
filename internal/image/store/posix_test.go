package store_test

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dsec/internal/image"
	"dsec/internal/image/store"
	"dsec/internal/image/store/storetest"
	"dsec/sandbox"
)

func open(t *testing.T, dir string) *store.Posix {
	t.Helper()
	p, err := store.OpenPosix(dir)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPosix(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store {
		dir := t.TempDir()
		p := open(t, dir)
		t.Cleanup(func() {
			if left := files(t, filepath.Join(dir, "tmp", "*", "*")); len(left) > 0 {
				t.Errorf("temporary files are left: %v", left)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if left := files(t, filepath.Join(dir, "tmp", "*")); len(left) > 0 {
				t.Errorf("a closed store leaves %v", left)
			}
		})
		return p
	}, func(t *testing.T, st store.Store, digest string) {
		damage(t, st.(*store.Posix).Path(digest), func(b []byte) []byte { b[0] ^= 1; return b })
	})
}

func files(t *testing.T, pattern string) []string {
	t.Helper()
	list, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func damage(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, change(b), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestPosixFilesAreImmutable(t *testing.T) {
	p := open(t, t.TempDir())
	defer p.Close()
	b := storetest.Put(t, p, []byte("x"))
	st, err := os.Lstat(p.Path(b.Digest))
	if err != nil || st.Mode() != 0o444 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func TestPosixHealsBlobOfWrongSize(t *testing.T) {
	p := open(t, t.TempDir())
	defer p.Close()
	b := storetest.Put(t, p, []byte("whole content"))
	damage(t, p.Path(b.Digest), func(b []byte) []byte { return b[:5] })
	storetest.Put(t, p, []byte("whole content"))
	if err := store.Verify(t.Context(), p, b.Digest); err != nil {
		t.Error(err)
	}
}

func TestPosixIgnoresForeignFiles(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir)
	defer p.Close()
	b := storetest.Put(t, p, []byte("x"))
	hash := strings.TrimPrefix(b.Digest, image.DigestPrefix)
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := errors.Join(os.WriteFile(filepath.Join(blobs, hash[:2], "README"), nil, 0o644), os.WriteFile(filepath.Join(blobs, "README"), nil, 0o644),
		os.Mkdir(filepath.Join(blobs, "zz"), 0o755), os.WriteFile(filepath.Join(blobs, "zz", hash), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	n := 0
	if err := p.List(t.Context(), func(image.Blob) error { n++; return nil }); err != nil || n != 1 {
		t.Errorf("%d blobs, %v", n, err)
	}
}

func TestPosixNeedsADirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := store.OpenPosix(file); err == nil {
		t.Error("a file is opened as a store")
	}
}

// TestHelperWriter is the other process of the next test: it starts a blob and waits to be killed.
func TestHelperWriter(t *testing.T) {
	dir := os.Getenv("STORE_HELPER_DIR")
	if dir == "" {
		return // only a helper
	}
	p, err := store.OpenPosix(dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := p.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, 3<<20)); err != nil {
		t.Fatal(err)
	}
	os.Stdout.WriteString("READY\n")
	select {}
}

func TestPosixStartSweepsOnlyDeadWriters(t *testing.T) {
	dir := t.TempDir()
	alive := open(t, dir)
	w, err := alive.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, 3<<20)); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run=^TestHelperWriter$")
	child.Env = append(os.Environ(), "STORE_HELPER_DIR="+dir)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "READY\n" {
		t.Fatalf("child said %q, %v", line, err)
	}
	open(t, dir).Close()
	if n := len(files(t, filepath.Join(dir, "tmp", "*", "*"))); n != 2 {
		t.Fatalf("%d temporary files while both writers live, want 2", n)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait()
	open(t, dir).Close()
	if left := files(t, filepath.Join(dir, "tmp", "*", "*")); len(left) != 1 {
		t.Errorf("temporary files %v, want the living writer's", left)
	}
	if b, err := w.Commit(t.Context()); err != nil || store.Verify(t.Context(), alive, b.Digest) != nil {
		t.Errorf("commit of the living writer: %v", err)
	}
	if err := alive.Close(); err != nil {
		t.Error(err)
	}
	if left := files(t, filepath.Join(dir, "tmp", "*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestPosixAfterItsDirectoryVanished(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	_, createErr := p.Create(t.Context())
	for _, err := range []error{createErr, p.List(t.Context(), func(image.Blob) error { return nil })} {
		if sandbox.ClassOf(err) != sandbox.Unavailable || sandbox.ReasonOf(err) != "store_unavailable" {
			t.Errorf("got %v", err)
		}
	}
}
