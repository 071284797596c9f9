//go:build rootful

package cgroup

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux"
)

// What runs aether's program in a command's group and is stopped goes; what is busy, or runs another program, stays.
func TestRootKillStuck(t *testing.T) {
	tree := open(t, uniqueName())
	id, cg := create(t, tree, limits)
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	start := func(dir, program string, args ...string) *exec.Cmd {
		cmd := exec.Command(program, args...)
		must(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		join(t, dir, cmd.Process.Pid)
		return cmd
	}
	start(cg.V2Aether, "/bin/sh", "-c", "kill -STOP $$")
	stopped := start(cg.V2User, "/bin/sh", "-c", "kill -STOP $$")
	busy := start(cg.V2User, "/bin/sh", "-c", "while :; do :; done")
	other := start(cg.V2User, "/bin/sleep", "1000")
	for _, cmd := range []*exec.Cmd{stopped, other} {
		waitFor(t, func() bool {
			held, err := linux.IsHeld(cmd.Process.Pid, 0)
			must(t, err)
			return held
		})
	}
	if n, err := tree.KillStuck(cg, time.Hour); n != 0 || err != nil {
		t.Errorf("none is an hour old: %d, %v", n, err)
	}
	if n, err := tree.KillStuck(cg, 0); n != 1 || err != nil {
		t.Errorf("killed %d, %v", n, err)
	}
	_ = stopped.Wait()
	if status := stopped.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
		t.Errorf("the stopped one ended with %v", status)
	}
	for _, cmd := range []*exec.Cmd{busy, other} {
		if held, err := linux.IsHeld(cmd.Process.Pid, 0); err != nil || held != (cmd == other) {
			t.Errorf("%s: held %v, %v", cmd.Path, held, err)
		}
	}
	must(t, tree.Remove(t.Context(), id))
}
