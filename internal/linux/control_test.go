package linux

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

func TestControlFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := WriteControl(path, "1"); !errors.Is(err, fs.ErrNotExist) || !IsGone(err) {
		t.Errorf("writing makes a file: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WriteControl(path, "value"); err != nil {
		t.Fatal(err)
	}
	var buf [6]byte
	if b, err := ReadControl(path, buf[:]); string(b) != "value" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
	if b, err := ReadControl(path, buf[:5]); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("a file that may be longer than the buffer gives %q, %v", b, err)
	}
	link := path + ".link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := WriteControl(link, "x"); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a link was followed: %v", err)
	}
}

func TestRemoveDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a")
	if err := os.MkdirAll(filepath.Join(dir, "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := RemoveDir(dir); !IsBusy(err) {
		t.Errorf("removing a full directory: %v", err)
	}
	for _, d := range []string{filepath.Join(dir, "b"), dir, dir} {
		if err := RemoveDir(d); err != nil {
			t.Error(err)
		}
	}
}

func TestKillIfSparesWhatIsNotMeant(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := KillIf(cmd.Process.Pid, func() bool { return false }); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("a process that was not meant was killed: %v", err)
	}
	if err := KillIf(cmd.Process.Pid, func() bool { return true }); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	if err := KillIf(cmd.Process.Pid, func() bool { return true }); err != nil {
		t.Errorf("a process that is gone: %v", err)
	}
	for _, pid := range []int{-1, 0, 1, os.Getpid()} {
		if err := KillIf(pid, func() bool { t.Errorf("pid %d is asked about", pid); return false }); err == nil {
			t.Errorf("pid %d is not refused", pid)
		}
	}
}

func TestHostFacts(t *testing.T) {
	id, err := BootID()
	if err != nil || len(id) != 36 || strings.Count(id, "-") != 4 {
		t.Errorf("boot id %q, %v", id, err)
	}
	cpus, err := AllowedCPUs()
	if err != nil || len(cpus) != runtime.NumCPU() {
		t.Errorf("CPUs %v, %v; the runtime counts %d", cpus, err, runtime.NumCPU())
	}
	total, free, err := DiskSpace(t.TempDir())
	if err != nil || free < 0 || total <= 0 || free > total {
		t.Errorf("%d of %d bytes free, %v", free, total, err)
	}
	if _, err := FSMagic("/no/such/path"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("magic of nothing: %v", err)
	}
	if m, err := FSMagic("/sys"); err != nil || m != MagicSysfs {
		t.Errorf("/sys is on file system %x, %v", m, err)
	}
}

func TestSubvolumeNamesAreBounded(t *testing.T) {
	for _, name := range []string{"", strings.Repeat("x", 256)} {
		if err := BtrfsSubvolCreate(nil, name); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%d bytes: %v", len(name), err)
		}
	}
}
