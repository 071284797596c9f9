//go:build rootful && linux

package store_test

import (
	"path/filepath"
	"syscall"
	"testing"

	"dsec/internal/image"
	"dsec/internal/image/store/storetest"
	"dsec/sandbox"
)

// TestPosixFull fills a small file system at every size: the error is typed and nothing is visible.
func TestPosixFull(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=4m,mode=755"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	p := open(t, filepath.Join(dir, "store"))
	defer p.Close()
	w, err := p.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 8 {
		if _, err = w.Write(make([]byte, 1<<20)); err != nil {
			break
		}
	}
	if sandbox.ClassOf(err) != sandbox.ResourceExhausted || sandbox.ReasonOf(err) != "store_full" {
		t.Fatalf("write: %v", err)
	}
	if _, err := w.Commit(t.Context()); sandbox.ReasonOf(err) != "store_full" {
		t.Errorf("commit: %v", err)
	}
	if err := p.List(t.Context(), func(b image.Blob) error { t.Errorf("%v is visible", b); return nil }); err != nil {
		t.Error(err)
	}
	storetest.Put(t, p, make([]byte, 2<<20)) // the space is free again
}
