package guest

import (
	"os"
	"strings"
	"testing"

	aetherv1 "dsec/api/aether/v1"
	"dsec/sandbox"
)

func TestProcesses(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	m, err := c.Start(ctx, "sleeper", sandbox.Command{Argv: []string{"sleep", "1000"}, Cwd: "/"})
	if err != nil {
		t.Fatal(err)
	}
	find := func() *Process {
		list, more, err := c.Processes(ctx)
		if err != nil || more {
			t.Fatal(more, err)
		}
		for _, p := range list {
			if p.Parent == os.Getpid() && strings.Join(p.Argv, " ") == "sleep 1000" {
				return &p
			}
		}
		return nil
	}
	var p *Process
	for p == nil { // until it has executed
		p = find()
	}
	if p.Name != "sleep" || p.UID != uint32(os.Getuid()) || p.Memory <= 0 || p.Threads != 1 || p.StartedTicks == 0 {
		t.Errorf("%+v", p)
	}
	if err := c.Signal(ctx, p.PID, 15, p.StartedTicks+1); sandbox.AsError(err).Reason != processGone {
		t.Errorf("another start: %v", err)
	}
	if err := c.Signal(ctx, p.PID, 15, p.StartedTicks); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(ctx); err != nil || m.Result().Signal != 15 {
		t.Errorf("%v, %+v", err, m.Result())
	}
	if err := c.Signal(ctx, 1<<30, 15, 0); sandbox.AsError(err).Reason != processGone {
		t.Errorf("nobody: %v", err)
	}
}

func TestProcessOfTrustsNothing(t *testing.T) {
	long := make([][]byte, 100_000)
	for i := range long {
		long[i] = []byte("\xff")
	}
	p := processOf(&aetherv1.Process{Name: []byte(strings.Repeat("\xff", 1000)), Argv: long, CommandId: "../x", State: strings.Repeat("S", 100), MemoryBytes: 1 << 63})
	if len(p.Name) > 64*3 || len(p.Argv) > maxArgv || p.Command != "" || len(p.State) > 4 || p.Memory < 0 {
		t.Errorf("%d %d %q %q %d", len(p.Name), len(p.Argv), p.Command, p.State, p.Memory)
	}
}

// Each argument costs the edge something, empty ones too.
func TestProcessWithEmptyArguments(t *testing.T) {
	p := processOf(&aetherv1.Process{Argv: make([][]byte, 100_000)})
	if len(p.Argv) > maxArgv/argCost {
		t.Errorf("%d arguments", len(p.Argv))
	}
}
