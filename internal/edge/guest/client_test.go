package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dsec/internal/aether"
	"dsec/internal/aether/config"
	"dsec/sandbox"
)

func TestSameIDIsTheSameCommand(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	file := filepath.Join(w.dir, "count")
	cmd := shell("echo x >> " + file)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			m, err := c.Start(ctx, "once", cmd)
			if err == nil {
				err = m.Wait(ctx)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	c.Close()
	again := w.connect() // another edge
	if _, err := again.Start(ctx, "once", cmd); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(file); string(b) != "x\n" {
		t.Errorf("it ran %d times", len(b)/2)
	}
}

func TestReconnect(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	cmd := shell("cat; echo end")
	cmd.StdinFollows = true
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	in := make([]byte, 8<<20)
	if _, err := rand.Read(in); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range maxShort / 2 {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				w.cut()
			}
		}
	})
	n, err := m.WriteStdin(ctx, 0, bytes.NewReader(in), true)
	if err != nil || n != int64(len(in)) {
		t.Fatalf("%d, %v; client: %v; %+v", n, err, c.Err(), m.Result())
	}
	close(stop)
	wg.Wait()
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, m, 1); got != string(in)+"end\n" {
		t.Errorf("%d bytes of %d came back, or others", len(got), len(in)+4)
	}
}

// A command that is asked for while its connection is replaced is started on the new one.
func TestStartAgainstAReconnect(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	old, err := c.current(ctx)
	if err != nil {
		t.Fatal(err)
	}
	w.cut()
	for l := old; l == old; {
		if l, err = c.current(ctx); err != nil {
			t.Fatal(err)
		}
	}
	m, l, err := c.reserve(newID(), shell("true"))
	if err != nil || l == old || l == nil {
		t.Fatalf("to be started on %p, the old connection is %p: %v", l, old, err)
	}
	m.resume(l)
	l.conn.Flush()
	if err := m.Wait(ctx); err != nil {
		t.Error(err)
	}
}

func TestEdgeRestart(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	gate := filepath.Join(w.dir, "gate")
	script := fmt.Sprintf("head -c 3000000 /dev/zero | tr '\\0' a; echo small >&2; while [ ! -e %s ]; do sleep 0.01; done; head -c 3000000 /dev/zero | tr '\\0' b", gate)
	m, err := c.Start(ctx, "long", shell(script))
	if err != nil {
		t.Fatal(err)
	}
	r := follow(t, m, 1)
	if _, err := io.CopyN(io.Discard, r, 3_000_000); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := m.Wait(ctx); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("wait at a closed client: %v", err)
	}
	if err := os.WriteFile(gate, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	again := w.connect()
	m, ok := again.Command("long")
	if !ok {
		t.Fatal("the command is not known to the next edge")
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("a", 3_000_000) + strings.Repeat("b", 3_000_000)
	if got := readAll(t, m, 1); got != want {
		t.Errorf("stdout has %d bytes, or other ones", len(got))
	}
	if got := readAll(t, m, 2); got != "small\n" {
		t.Errorf("stderr %q", got)
	}
}

// In a bubble: time passes only while everybody waits, so that no attempt is slow.
func TestWrongKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		key := bytes.Repeat([]byte{1}, config.KeyLen)
		srv, err := aether.New(aether.Options{Config: config.Config{Key: key, Cgroup: config.CgroupNone}, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Close()
		dial := func(context.Context) (net.Conn, error) {
			ours, its := net.Pipe()
			srv.ServeConn(its)
			return ours, nil
		}
		o := Options{ID: "test", Dial: dial, Key: make([]byte, config.KeyLen), OutputDir: t.TempDir()}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if _, err := Connect(ctx, o); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errKey) {
			t.Errorf("connect with a wrong key: %v", err)
		}
		o.Key = key
		c, err := Connect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	})
}

// A connection that has ended and was not noticed yet is no fault of the platform's: who asks may ask again.
func TestRequestsOnADeadConnection(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	c := &Client{linked: make(chan struct{}), commands: make(map[string]*Command)}
	c.link = newLink(c, a)
	c.link.conn.Fail(io.EOF)
	ctx := testContext(t)
	running := newCommand(c, "running")
	running.started, running.link = true, c.link
	for name, ask := range map[string]func() error{
		"read":   func() error { _, _, err := c.ReadFile(ctx, FileRead{Path: "/x"}); return err },
		"write":  func() error { _, _, err := c.WriteFile(ctx, FileWrite{Path: "/x"}, strings.NewReader("")); return err },
		"dial":   func() error { _, err := c.Dial(ctx, "", 80, time.Minute); return err },
		"call":   func() error { _, _, err := c.Processes(ctx); return err },
		"signal": func() error { return running.Kill(ctx, 2) },
	} {
		if err := ask(); !errors.Is(err, errBroken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := running.Kill(ctx, 0); err != nil || len(running.killed) != 1 {
		t.Errorf("the kill of a tree waits for the next connection: %v", err)
	}
}
