//go:build rootful

package container

import (
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux"
)

// A lock on a device of one sandbox is none on that of another: were they the same files, it would tell and keep something.
func TestRootDevicesAreEachOnesOwn(t *testing.T) {
	b := newBench(t)
	for n := range 2 {
		rec, err := parseHandle(b.start())
		must(t, err)
		for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
			f, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(rec.Pid), "root/dev", name), os.O_RDWR, 0)
			must(t, err)
			defer f.Close()
			if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
				t.Errorf("sandbox %d cannot lock its %s: %v", n, name, err)
			}
		}
	}
}

func BenchmarkDevTree(b *testing.B) {
	t := newBench(b)
	slot, err := t.driver.ranges.acquire(b.Context(), "x")
	must(b, err)
	defer t.driver.ranges.release(slot, "x")
	start := cpuTime()
	for b.Loop() {
		fd, err := devTree(int(t.driver.ranges.first(slot)))
		must(b, err)
		linux.Close(fd)
	}
	b.ReportMetric(float64((cpuTime()-start).Microseconds())/float64(b.N), "cpu-µs/op")
}

func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
