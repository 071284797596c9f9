//go:build rootful

package linux

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

func eventually(t *testing.T, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen within 10 s")
		}
	}
}

func backing(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "backing"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	return f
}

// attached is how many loop devices have that file behind them.
func attached(t *testing.T, path string) (n int) {
	t.Helper()
	devices, err := LoopDevices()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range devices {
		if b == path {
			n++
		}
	}
	return n
}

func TestLoopDevicesEndWithTheirLastUser(t *testing.T) {
	f := backing(t)
	var mu sync.Mutex
	var devices []*os.File
	var wg sync.WaitGroup
	for range 8 { // all want the same free device
		wg.Go(func() {
			d, err := AttachLoop(f, LoopOptions{ReadOnly: true, DirectIO: true})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			devices = append(devices, d)
			mu.Unlock()
		})
	}
	wg.Wait()
	if n := attached(t, f.Name()); n != 8 {
		t.Errorf("%d devices, want 8", n)
	}
	for _, d := range devices {
		if _, err := d.Write(make([]byte, 512)); err == nil {
			t.Error("a read-only device was written to")
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, func() bool { return attached(t, f.Name()) == 0 })
}

func TestLoopDeviceWritesThrough(t *testing.T) {
	f := backing(t)
	d, err := AttachLoop(f, LoopOptions{BlockSize: 4096})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.WriteAt([]byte("through"), 0); err != nil {
		t.Error(err)
	}
	if err := d.Sync(); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	b := make([]byte, 7)
	if _, err := f.ReadAt(b, 0); err != nil || string(b) != "through" {
		t.Errorf("backing file holds %q, %v", b, err)
	}
}
