package guest

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"dsec/sandbox"
)

func TestStdinRoundTrip(t *testing.T) {
	c := newWorld(t).connect()
	in := make([]byte, 16<<20)
	if _, err := rand.Read(in); err != nil {
		t.Fatal(err)
	}
	cmd := shell("cat")
	cmd.StdinFollows = true
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	out := follow(t, m, 1)
	defer out.Close()
	sum := make(chan [32]byte, 1)
	go func() {
		h := sha256.New()
		if _, err := io.Copy(h, out); err != nil {
			t.Error(err)
		}
		sum <- [32]byte(h.Sum(nil))
	}()
	half := len(in) / 2
	if n, err := m.WriteStdin(ctx, 0, bytes.NewReader(in[:half]), false); err != nil || n != int64(half) {
		t.Fatalf("first half: %d, %v", n, err)
	}
	if _, err := m.WriteStdin(ctx, int64(half)+1, bytes.NewReader(in[half+1:]), false); sandbox.ReasonOf(err) != "stdin_gap" {
		t.Errorf("a gap: %v", err)
	}
	if _, err := m.WriteStdinExactly(ctx, 1000, bytes.NewReader(in[1000:]), false); sandbox.ReasonOf(err) != "stdin_moved" || sandbox.AsError(err).Facts["offset"] != strconv.Itoa(half) {
		t.Fatalf("input at an offset that has passed: %v", err)
	}
	if n, err := m.WriteStdin(ctx, 1000, bytes.NewReader(in[1000:]), true); err != nil || n != int64(len(in)) {
		t.Fatalf("all from an earlier offset: %d, %v", n, err)
	}
	if got := <-sum; got != sha256.Sum256(in) {
		t.Error("cat changed its input")
	}
	if err := m.Wait(ctx); err != nil || m.Result().StdinBroken {
		t.Errorf("%v %+v", err, m.Result())
	}
}

func TestBrokenStdin(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	gate := filepath.Join(w.dir, "gate")
	// One that ends may be told of before the write has been tried again; one that only closes its stdin must have broken it.
	for _, script := range []string{"head -c 10 >/dev/null", "head -c 10 >/dev/null; exec </dev/null; until [ -e " + gate + " ]; do sleep 0.01; done"} {
		cmd := shell(script)
		cmd.StdinFollows = true
		m, err := c.Start(ctx, newID(), cmd)
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.WriteStdin(ctx, 0, bytes.NewReader(make([]byte, 4<<20)), true)
		if sandbox.ReasonOf(err) != "stdin_broken" {
			t.Errorf("writing to who does not read: %v", err)
		}
		if err := os.WriteFile(gate, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := m.Wait(ctx); err != nil || !m.Result().StdinBroken && strings.Contains(script, gate) {
			t.Errorf("%s: %v %+v", script, err, m.Result())
		}
		_ = os.Remove(gate)
	}
	m, err := c.Start(ctx, newID(), shell("true"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = m.WriteStdin(ctx, 0, strings.NewReader("x"), true); sandbox.ReasonOf(err) != "no_stdin" {
		t.Errorf("stdin of a command without: %v", err)
	}
	cmd := shell("cat")
	cmd.Stdin = bytes.Repeat([]byte("in"), 32<<10)
	if _, out, _ := run(t, c, cmd); out != string(cmd.Stdin) {
		t.Errorf("inline stdin: %d bytes back", len(out))
	}
}

// Input that filled the pipe, and whose end comes alone once all of it was written: the command sees the end.
func TestStdinEndComesLater(t *testing.T) {
	ctx := testContext(t)
	c := newWorld(t).connect()
	in := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	cmd := shell("sleep 0.1; wc -c")
	cmd.StdinFollows = true
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	n, err := m.WriteStdin(ctx, 0, bytes.NewReader(in), false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.WriteStdin(ctx, n, strings.NewReader(""), true); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(m.Head(1, 100))); got != fmt.Sprint(len(in)) {
		t.Errorf("wc says %q", got)
	}
}
