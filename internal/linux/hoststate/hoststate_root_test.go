//go:build rootful

package hoststate

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
)

func snapshot(t *testing.T, dirs ...string) State {
	t.Helper()
	s, err := Snapshot(dirs...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestEveryKindIsNoticed makes one thing of each kind and looks for it in the difference, and then for its absence.
func TestEveryKindIsNoticed(t *testing.T) {
	snapshot(t) // whatever the first one opens and keeps
	dir := t.TempDir()
	before := snapshot(t, dir)
	var undo []func()
	later := func(f func()) { undo = append(undo, f) }

	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	later(func() { _ = syscall.Unmount(dir, 0) })
	mounts, err := mountinfo.Self()
	if err != nil {
		t.Fatal(err)
	}
	group := ""
	for _, m := range mounts {
		if m.Type == "cgroup2" {
			group = filepath.Join(m.Point, filepath.Base(filepath.Dir(dir)))
		}
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	later(func() { _ = os.Remove(group) })
	backing, err := os.Create(filepath.Join(t.TempDir(), "backing"))
	if err != nil {
		t.Fatal(err)
	}
	if err := backing.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	device, err := linux.AttachLoop(backing, linux.LoopOptions{})
	if err != nil {
		t.Fatal(err)
	}
	later(func() { _ = device.Close(); _ = backing.Close() })
	sleep := exec.Command("/bin/sleep", "100")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	later(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "hoststate", Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	later(func() { _ = program.Close() })

	diff := strings.Join(Diff(before, snapshot(t, dir)), "\n")
	for _, want := range []string{"+ mount " + dir, "+ cgroup " + group, "+ loop " + filepath.Base(device.Name()), "sleep started", "SocketFilter hoststate", "+ fd "} {
		if !strings.Contains(diff, want) {
			t.Errorf("the difference has no %q:\n%s", want, diff)
		}
	}
	for _, f := range undo {
		f()
	}
	mine := func(i Item) bool {
		return strings.Contains(i.Name, dir) || strings.Contains(i.Name, group) || strings.Contains(i.Name, "hoststate") || i.Kind == FD
	}
	if left := Diff(before.Only(mine), snapshot(t, dir).Only(mine)); len(left) > 0 {
		t.Errorf("after everything was undone:\n%s", strings.Join(left, "\n"))
	}
}
