package guest

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"dsec/internal/aether"
	"dsec/internal/aether/config"
	"dsec/sandbox"
)

// A world is an aether in this process, without control groups, and how to reach it.
type world struct {
	t      *testing.T
	key    []byte
	socket string
	dir    string

	mu    sync.Mutex
	conns []net.Conn
}

func newWorld(t *testing.T, change ...func(*aether.Options)) *world {
	t.Helper()
	w := &world{t: t, key: make([]byte, config.KeyLen), dir: t.TempDir()}
	if _, err := rand.Read(w.key); err != nil {
		t.Fatal(err)
	}
	// The test's own directory may be too long for a socket.
	short, err := os.MkdirTemp("", "ae")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(short) })
	w.socket = filepath.Join(short, "s")
	o := aether.Options{Config: config.Config{Key: w.key, Cgroup: config.CgroupNone}, Log: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&o)
	}
	srv, err := aether.New(o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", w.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		srv.Close()
	})
	return w
}

func (w *world) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", w.socket)
	if err == nil {
		w.mu.Lock()
		w.conns = append(w.conns, nc)
		w.mu.Unlock()
	}
	return nc, err
}

// cut breaks every connection so far.
func (w *world) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		c.Close()
	}
	w.conns = nil
}

func (w *world) options() Options {
	return Options{ID: "test", Dial: w.dial, Key: w.key, OutputDir: filepath.Join(w.dir, "out"), Log: slog.New(slog.NewTextHandler(w.t.Output(), nil))}
}

func (w *world) connect() *Client {
	w.t.Helper()
	c, err := Connect(testContext(w.t), w.options())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // ends what hangs; a busy machine takes its time
	t.Cleanup(cancel)
	return ctx
}

func shell(script string) sandbox.Command {
	return sandbox.Command{Shell: script, Cwd: "/", Env: map[string]string{"PATH": os.Getenv("PATH")}, User: me()}
}

func me() string { return fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()) }

var ids struct {
	sync.Mutex
	n int
}

func newID() string {
	ids.Lock()
	defer ids.Unlock()
	ids.n++
	return fmt.Sprintf("c%d", ids.n)
}

// run runs cmd to its end and returns all of its output.
func run(t testing.TB, c *Client, cmd sandbox.Command) (Result, string, string) {
	t.Helper()
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatalf("start %q: %v", describe(cmd), err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatalf("wait for %q: %v", describe(cmd), err)
	}
	return m.Result(), readAll(t, m, 1), readAll(t, m, 2)
}

// follow reads a stream from its start to its end.
func follow(t testing.TB, m *Command, stream int) OutputReader {
	t.Helper()
	r, err := m.Output(stream, OutputQuery{Follow: true})
	if err != nil {
		t.Fatalf("output %d: %v", stream, err)
	}
	return r
}

func readAll(t testing.TB, m *Command, stream int) string {
	t.Helper()
	r := follow(t, m, stream)
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read output %d: %v", stream, err)
	}
	return string(b)
}
