package guest

import (
	"math"
	"strings"
	"testing"
	"time"

	"dsec/sandbox"
)

func TestNoOutputTimeout(t *testing.T) {
	c := newWorld(t).connect()
	for _, terminal := range []*sandbox.Terminal{nil, {}} {
		cmd := shell("echo out; echo err >&2; sleep 1000 & sleep 1000")
		cmd.Terminal = terminal
		cmd.NoOutputTimeout = 50 * time.Millisecond
		r, out, errOut := run(t, c, cmd)
		for out == "" && r.NoOutput && cmd.NoOutputTimeout < time.Minute { // on a slow machine the shell gets no further
			cmd.NoOutputTimeout *= 5
			r, out, errOut = run(t, c, cmd)
		}
		if !r.NoOutput || !r.TimedOut || r.Signal != 9 || r.Killed || !strings.HasPrefix(out, "out") || !strings.Contains(out+errOut, "err") {
			t.Errorf("%+v %q %q", r, out, errOut)
		}
	}
}

// The longest times are not short ones.
func TestTimesWithoutEnd(t *testing.T) {
	c := newWorld(t).connect()
	cmd := shell("sleep 0.05; echo out")
	cmd.Timeout, cmd.NoOutputTimeout = math.MaxInt64, math.MaxInt64
	if r, out, _ := run(t, c, cmd); r.TimedOut || r.ExitCode != 0 || out != "out\n" {
		t.Errorf("%+v %q", r, out)
	}
	for d, want := range map[time.Duration]uint64{1: 1, time.Millisecond: 1, time.Millisecond + 1: 2, math.MaxInt64: math.MaxInt64/1_000_000 + 1} {
		if got := milliseconds(d); got != want {
			t.Errorf("%d ns are %d ms", d, got)
		}
	}
}

// Each byte, on either stream, is a sign of life.
func TestOutputPutsOffTheTimeout(t *testing.T) {
	c := newWorld(t).connect()
	limit := 300 * time.Millisecond
	for { // with room for a slow machine
		cmd := shell("for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; printf o; sleep 0.1; printf e >&2; done")
		cmd.NoOutputTimeout = limit
		r, out, errOut := run(t, c, cmd)
		if r.ExitCode == 0 && !r.NoOutput && out == "oooooooooo" && errOut == "eeeeeeeeee" {
			return
		}
		if limit *= 4; limit > 2*time.Minute {
			t.Fatalf("%+v %q %q", r, out, errOut)
		}
	}
}

// A command whose output nobody takes is held back by us: it is not silent.
func TestHeldBackIsNotSilent(t *testing.T) {
	c := newWorld(t).connect()
	c.spool.headCap, c.spool.tailCap = 1<<20, 1<<20
	for limit := 50 * time.Millisecond; ; limit *= 4 { // with room for a slow machine
		if limit > 2*time.Minute {
			t.Fatal("ended for want of output")
		}
		if heldBack(t, c, limit) {
			return
		}
	}
}

// heldBack reports whether a command that is held back for several times limit goes on.
func heldBack(t *testing.T, c *Client, limit time.Duration) bool {
	cmd := shell("yes")
	cmd.NoOutputTimeout = limit
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	out := follow(t, m, 1) // and is not read
	last := int64(-1)
	waitFor(t, "standstill", func() bool {
		time.Sleep(3 * limit)
		size := m.Result().Stdout.Size
		still := size == last && size > 0
		last = size
		return still || !m.Result().Running
	})
	r := m.Result()
	out.Close()
	if err := m.Kill(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	return r.Running && !r.NoOutput
}
