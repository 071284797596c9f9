package guest

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/sandbox"
)

func TestFiles(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	for _, size := range []int{0, 1, 18 << 10, 64<<10 + 1, 4 << 20, 16 << 20, 16<<20 + 4097} {
		content := make([]byte, size)
		if _, err := rand.Read(content); err != nil {
			t.Fatal(err)
		}
		want := sha256.Sum256(content)
		p := filepath.Join(w.dir, "deep", "er", fmt.Sprint(size))
		n, sum, err := c.WriteFile(ctx, FileWrite{Path: p, User: me(), Mode: 0o640, MakeParents: true, Size: int64(size), SHA256: want[:]}, bytes.NewReader(content))
		if err != nil || n != int64(size) || !bytes.Equal(sum, want[:]) {
			t.Fatalf("write %d: %d %v", size, n, err)
		}
		info, r, err := c.ReadFile(ctx, FileRead{Path: p, User: me()})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		r.Close()
		if err != nil || !bytes.Equal(got, content) || info.Size != int64(size) || info.Mode != 0o640 || info.UID != uint32(os.Getuid()) {
			t.Errorf("read %d: %d bytes, %v, %+v", size, len(got), err, info)
		}
	}
	_, r, err := c.ReadFile(ctx, FileRead{Path: filepath.Join(w.dir, "deep/er/18432"), User: me(), Offset: 18000, Length: 10})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || len(b) != 10 {
		t.Errorf("a range: %d bytes, %v", len(b), err)
	}
	r.Close()
}

func TestNamesOfFilesAreBytes(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	for _, name := range []string{"bad\xff\xfe", "new\nline", " ", "日本語", "%00"} {
		p := filepath.Join(w.dir, name)
		if _, _, err := c.WriteFile(testContext(t), FileWrite{Path: p, User: me(), Size: -1}, strings.NewReader(name)); err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		_, r, err := c.ReadFile(testContext(t), FileRead{Path: p, User: me()})
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if b, err := io.ReadAll(r); err != nil || string(b) != name {
			t.Errorf("%q: %q, %v", name, b, err)
		}
		r.Close()
		if _, _, err := c.ReadFile(testContext(t), FileRead{Path: p + "\xff", User: me()}); sandbox.ReasonOf(err) != "file_not_found" {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestFileErrors(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	fifo := filepath.Join(w.dir, "fifo")
	if r, _, errOut := run(t, c, shell("mkfifo "+fifo)); r.ExitCode != 0 {
		t.Fatal(errOut)
	}
	existing := filepath.Join(w.dir, "existing")
	if err := os.WriteFile(existing, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	for p, reason := range map[string]string{
		"/no/such": "file_not_found", w.dir: "is_directory", fifo: "invalid_request", "/dev/zero": "invalid_request",
		"/proc/self/environ": "invalid_request", "": "invalid_request", existing + "/x": "not_directory",
	} {
		_, _, err := c.ReadFile(ctx, FileRead{Path: p, User: me()})
		if sandbox.ReasonOf(err) != reason {
			t.Errorf("read %q: %v, want %s", p, err, reason)
		}
	}
	sum := sha256.Sum256([]byte("other"))
	for name, tc := range map[string]struct {
		w      FileWrite
		reason string
	}{
		"exclusive": {FileWrite{Path: existing, Exclusive: true, Size: -1}, "file_exists"},
		"directory": {FileWrite{Path: w.dir, Size: -1}, "is_directory"},
		"slash":     {FileWrite{Path: w.dir + "/new/", Size: -1}, "is_directory"},
		"parent":    {FileWrite{Path: w.dir + "/no/such/file", Size: -1}, "file_not_found"},
		"short":     {FileWrite{Path: existing, Size: 100}, "content_mismatch"},
		"long":      {FileWrite{Path: existing, Size: 1}, "content_mismatch"},
		"digest":    {FileWrite{Path: existing, Size: -1, SHA256: sum[:]}, "content_mismatch"},
		"fifo":      {FileWrite{Path: fifo, Size: -1}, "invalid_request"},
	} {
		tc.w.User = me()
		if _, _, err := c.WriteFile(ctx, tc.w, strings.NewReader("content")); sandbox.ReasonOf(err) != tc.reason {
			t.Errorf("%s: %v, want %s", name, err, tc.reason)
		}
	}
	broken := io.MultiReader(strings.NewReader("half"), failingReader{})
	if _, _, err := c.WriteFile(ctx, FileWrite{Path: existing, User: me(), Size: -1}, broken); sandbox.ReasonOf(err) != "upload_interrupted" {
		t.Errorf("a source that fails: %v", err)
	}
	if b, err := os.ReadFile(existing); err != nil || string(b) != "old" {
		t.Errorf("the old file is %q, %v", b, err)
	}
	waitNoTemp(t, w.dir)
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errors.New("source failed") }

// waitNoTemp waits until nothing half-written is left: a cancelled write is undone in the background.
func waitNoTemp(t *testing.T, dir string) {
	t.Helper()
	ctx := testContext(t)
	for {
		left, err := filepath.Glob(filepath.Join(dir, ".dsec-*"))
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("left behind: %v", left)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestWriteEndsWithConnection(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	pr, pw := io.Pipe()
	result := make(chan error, 1)
	go func() {
		_, _, err := c.WriteFile(testContext(t), FileWrite{Path: filepath.Join(w.dir, "f"), User: me(), Size: -1}, pr)
		result <- err
	}()
	if _, err := pw.Write(make([]byte, 100_000)); err != nil {
		t.Fatal(err)
	}
	w.cut()
	go pw.Write(make([]byte, 100_000))
	if err := <-result; sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("%v", err)
	}
	pr.Close()
	waitNoTemp(t, w.dir)
}
