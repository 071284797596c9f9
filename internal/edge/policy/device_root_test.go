//go:build rootful

package policy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

const v2Here = "/sys/fs/cgroup/unified"

func group(t *testing.T) string {
	t.Helper()
	root := v2Here
	if _, err := os.Stat(root); errors.Is(err, os.ErrNotExist) {
		root = "/sys/fs/cgroup"
	}
	dir := filepath.Join(root, fmt.Sprintf("dsec-policy-%d", os.Getpid()))
	if err := os.MkdirAll(filepath.Join(dir, "below"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, d := range []string{filepath.Join(dir, "below"), dir} {
			if err := os.Remove(d); err != nil {
				t.Error(err)
			}
		}
	})
	return dir
}

// attempt opens a device in a process that was born in a group below.
func attempt(t *testing.T, dir, script string) error {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "below"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	return cmd.Run()
}

func attached(t *testing.T, dir string) int {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	q, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		t.Fatal(err)
	}
	return len(q.Programs)
}

func TestRootDevices(t *testing.T) {
	dir, scratch := group(t), t.TempDir()
	disk := filepath.Join(scratch, "disk")
	if err := syscall.Mknod(disk, syscall.S_IFBLK|0o666, 7<<8); err != nil { // /dev/loop0
		t.Fatal(err)
	}
	made := filepath.Join(scratch, "made")
	refused := map[string]string{
		"kmsg":  "true < /dev/kmsg",
		"disk":  "true < " + disk,
		"mknod": "mknod " + made + " c 1 3 && rm " + made,
	}
	for name, script := range refused {
		if err := attempt(t, dir, script); err != nil {
			t.Fatalf("%s without the program: %v", name, err)
		}
	}
	for range 2 {
		if err := AttachDevices(dir); err != nil {
			t.Fatal(err)
		}
	}
	if n := attached(t, dir); n != 1 {
		t.Errorf("%d programs after attaching twice", n)
	}
	for name, script := range refused {
		if attempt(t, dir, script) == nil {
			t.Errorf("%s is allowed", name)
		}
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "ptmx"} {
		if err := attempt(t, dir, "true < /dev/"+name); err != nil {
			t.Errorf("/dev/%s is refused: %v", name, err)
		}
	}
	for range 2 {
		if err := DetachDevices(dir); err != nil {
			t.Fatal(err)
		}
	}
	if n := attached(t, dir); n != 0 {
		t.Errorf("%d programs after detaching", n)
	}
	if err := DetachDevices(dir + "-no"); err != nil {
		t.Errorf("detach of nothing: %v", err)
	}
}
