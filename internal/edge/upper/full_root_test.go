//go:build rootful

package upper

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"dsec/sandbox"
)

// smallDisk is a directory on an ext4 of its own, and what fills that.
func smallDisk(t *testing.T) (data string, full, empty func()) {
	t.Helper()
	image, dir := filepath.Join(t.TempDir(), "disk"), t.TempDir()
	for _, args := range [][]string{
		{"truncate", "-s", "640M", image}, {"mkfs.ext4", "-q", "-m", "0", image}, {"mount", "-o", "loop", image, dir},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v\n%s", err, out)
		}
	})
	filler := filepath.Join(dir, "filler")
	full = func() {
		f, err := os.Create(filler)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for size := 1 << 20; size >= 4096; size /= 2 {
			block := bytes.Repeat([]byte("x"), size)
			for {
				if _, err := f.Write(block); err != nil {
					break
				}
			}
		}
		if err := f.Sync(); err != nil {
			t.Log(err)
		}
	}
	return filepath.Join(dir, "data"), full, func() {
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
	}
}

// lose fills the disk below the pool and writes until the pool notices.
func lose(t *testing.T, p *Pool, dir string) {
	t.Helper()
	block := bytes.Repeat([]byte("y"), 1<<20)
	for end := time.Now().Add(2 * time.Minute); !p.readOnly(); {
		if time.Now().After(end) {
			t.Fatal("the pool did not become read-only")
		}
		f, err := os.OpenFile(filepath.Join(dir, "u", "data"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			continue
		}
		_, _ = f.Write(block)
		f.Close()
		syncDisk(p)
	}
}

func TestAFullDiskBelowThePool(t *testing.T) { eachKind(t, testAFullDiskBelowThePool) }

func testAFullDiskBelowThePool(t *testing.T, kind string) {
	data, full, empty := smallDisk(t)
	open := func() *Pool {
		p, err := Open(t.Context(), Options{DataDir: data, Bytes: minPool, Kind: kind})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := open()
	id, dir := create(t, p, 64*mib)
	if free, _, err := p.Free(); err != nil || free == 0 {
		t.Errorf("free at first: %d, %v", free, err)
	}
	full()
	if free, _, err := p.Free(); err != nil || free != 0 {
		t.Errorf("free on a full disk: %d, %v", free, err)
	}
	if kind == KindProject { // ext4 reports what is lost to who asks with fsync, and goes on
		empty()
		closePool(t, p)
		return
	}
	lose(t, p, dir)

	if _, err := p.Create(t.Context(), sandbox.NewID(edge), mib); sandbox.ReasonOf(err) != "node_disk_lost" {
		t.Errorf("Create: %v", err)
	}
	if err := p.Remove(t.Context(), id); err != nil {
		t.Errorf("Remove: %v", err)
	}
	if err := p.Detach(); err != nil {
		t.Fatal(err)
	}
	empty()
	p = open() // a restart of the edge
	if ids, err := p.list(); err != nil || len(ids) != 0 {
		t.Errorf("the new pool has %v, %v", ids, err)
	}
	_, dir = create(t, p, 64*mib)
	full()
	lose(t, p, dir)
	empty()
	closePool(t, p) // also of a lost one nothing is left
}
