//go:build rootful

package container

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/internal/edge/guest"
	"dsec/sandbox"
)

// The real aether under this driver: its table fits, and root inside cannot touch it.
func TestRootRealAether(t *testing.T) {
	b := newBench(t)
	b.driver.Detach()
	b.opts.Aether = filepath.Join(b.dir, "aether")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", b.opts.Aether, "dsec/cmd/aether")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build aether: %v\n%s", err, out)
	}
	b.open()
	// The edge is spared by the OOM killer; what it starts must not inherit that. A higher score can be set by everybody.
	const score = "/proc/self/oom_score_adj"
	must(t, os.WriteFile(score, []byte("7"), 0))
	h := b.start()
	must(t, os.WriteFile(score, []byte("0"), 0))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	client, err := guest.Connect(ctx, guest.Options{
		ID: h.ID, Key: make([]byte, 32), OutputDir: filepath.Join(b.dir, "output"), Log: b.opts.Log,
		Dial: func(ctx context.Context) (net.Conn, error) { return b.driver.DialGuest(ctx, h) },
	})
	must(t, err)
	defer client.Close()
	sh := func(id, script string) string {
		t.Helper()
		m, err := client.Start(ctx, id, sandbox.Command{Shell: script, User: "root", Cwd: "/", Timeout: time.Minute})
		must(t, err)
		must(t, m.Wait(ctx))
		return string(m.Head(1, 1<<16)) + string(m.Head(2, 1<<16))
	}
	if got := sh("one", "id -u; hostname; grep CapEff /proc/self/status"); got != "0\nbox\nCapEff:\t00000000a80405fb\n" {
		t.Errorf("a command: %q", got)
	}
	if got := sh("slack", "cat /proc/$$/timerslack_ns"); got != "50000\n" {
		t.Errorf("timers of a command may be late by %q ns", got)
	}
	if got := sh("score", "cat /proc/self/oom_score_adj /proc/1/oom_score_adj; echo -1 >/proc/self/oom_score_adj || echo refused"); !strings.HasPrefix(got, "0\n0\n") || !strings.Contains(got, "refused") {
		t.Errorf("what the OOM killer thinks of commands: %q", got)
	}
	// What is written there stays in the user namespace, which others get.
	if got := sh("projects", "wc -l </proc/self/projid_map; echo 5 5 5 >/proc/self/projid_map || wc -l </proc/self/projid_map"); !strings.HasPrefix(got, "1\n1\n") {
		t.Errorf("the map of project ids could be written: %q", got)
	}
	for name, want := range hostile {
		if !strings.Contains(name, "pid 1") {
			continue
		}
		got := sh("h"+strings.ReplaceAll(name, " ", "-"), "exec -a command /opt/probe '"+name+"'")
		if !strings.Contains(strings.Join(want, " "), got) || got == "" {
			t.Errorf("%s: %s, want %v", name, got, want)
		}
	}
	if got := sh("two", "echo alive"); got != "alive\n" {
		t.Errorf("after all that: %q", got)
	}
}
