//go:build rootful

package container

import (
	"context"
	"testing"
)

func TestRootLifeCycle(t *testing.T) {
	b := newBench(t)
	h := b.start()
	if got := b.ask(h, request{Probe: "write tmp", Command: true}); got != "ok" {
		t.Errorf("write in the sandbox: %s", got)
	}
	if got := b.ask(h, request{Probe: "sh:id -u; hostname; cat /etc/hosts; cat /proc/mounts; ls -la / /dev; nproc; cat /proc/self/cgroup", Command: true}); got != "" {
		t.Log(got)
	}
	caps, err := b.driver.Probe(context.Background())
	must(t, err)
	t.Log(caps)
}
