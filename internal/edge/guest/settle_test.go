package guest

import (
	"testing"

	"dsec/sandbox"
)

// A command that only computes is reported as started, and what it wrote comes, though its pipes are left alone at first.
func TestBusyCommand(t *testing.T) {
	c := newWorld(t).connect()
	ctx := testContext(t)
	m, err := c.Start(ctx, "busy", sandbox.Command{Shell: "printf early; while :; do :; done", Cwd: "/"})
	if err != nil {
		t.Fatal(err)
	}
	out := follow(t, m, 1)
	defer out.Close()
	buf := make([]byte, 16)
	if n, err := out.Read(buf); string(buf[:n]) != "early" || err != nil {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if err := m.Kill(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(ctx); err != nil || m.Result().Signal != 9 {
		t.Errorf("%+v, %v", m.Result(), err)
	}
}
