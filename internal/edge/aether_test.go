package edge

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/aether"
	"dsec/internal/aether/config"
	"dsec/sandbox"
)

// aethers are real ones, in this process and without any isolation: one for each sandbox of the fake driver.
type aethers struct {
	t  *testing.T
	mu sync.Mutex
	of map[sandbox.ID]*aether.Server
}

func (a *aethers) serve(conn net.Conn, id sandbox.ID, key []byte) {
	a.mu.Lock()
	srv := a.of[id]
	if srv == nil {
		var err error
		srv, err = aether.New(aether.Options{Config: config.Config{Key: key, Cgroup: config.CgroupNone}, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			a.mu.Unlock()
			a.t.Error(err)
			conn.Close()
			return
		}
		a.of[id] = srv
	}
	a.mu.Unlock()
	srv.ServeConn(conn)
}

// die ends the processes of a sandbox and its aether, as a kernel would.
func (a *aethers) die(id sandbox.ID) {
	a.mu.Lock()
	srv := a.of[id]
	delete(a.of, id)
	a.mu.Unlock()
	if srv != nil {
		srv.Close()
	}
}

func newAetherWorld(t *testing.T) *byteWorld {
	a := &aethers{t: t, of: make(map[sandbox.ID]*aether.Server)}
	w := &byteWorld{world: newWorld(t, func(o *Options) { o.Guests = ConnectAether })}
	w.host.Serve = a.serve
	w.host.On("driver.Stop:after", func(_ context.Context, id sandbox.ID) error { a.die(id); return nil })
	w.srv = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.e.ByteHandler().ServeHTTP(rw, r) }))
	w.id = w.create(func(c *edgev1.CreateSandbox) { c.Spec.User, c.Spec.Workdir = me(), "" })
	t.Cleanup(func() {
		w.srv.Close()
		w.close()
	})
	return w
}

// me is the user of these tests: an aether that is not root can be nobody else.
func me() string { return fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()) }

func TestWithRealAether(t *testing.T) {
	w := newAetherWorld(t)
	r, err := w.exec(w.id, "echo out; echo err >&2; echo $A; exit 3", -1)
	if err != nil || r.ExitCode != 3 || string(r.Stdout.Data) != "out\nspec\n" || string(r.Stderr.Data) != "err\n" || r.Running {
		t.Fatalf("%v %v", r, err)
	}
	const size = 3 << 20
	big, err := w.exec(w.id, fmt.Sprintf("head -c %d /dev/zero", size), -1)
	if err != nil || big.Stdout.Size != size || len(big.Stdout.Data) != defaultInline {
		t.Fatalf("%v %d bytes inline: %v", big.GetStdout().GetSize(), len(big.GetStdout().GetData()), err)
	}
	if _, body := w.do(w.request("GET", "/commands/"+big.CommandId+"/stdout?offset=1000", "")); len(body) != size-1000 {
		t.Errorf("%d bytes by the route", len(body))
	}
	path := t.TempDir() + "/f"
	if resp, body := w.do(w.request("PUT", "/files?path="+path+"&mode=0600&user="+me(), strings.Repeat("x", 1<<20))); resp.StatusCode != 200 {
		t.Errorf("PUT: %s", body)
	}
	if resp, body := w.do(w.request("GET", "/files?path="+path+"&user="+me(), "", "Range", "bytes=-5")); resp.StatusCode != 206 || body != "xxxxx" || resp.Header.Get("Dsec-Mode") != "0600" {
		t.Errorf("GET: %s %q %v", resp.Status, body, resp.Header)
	}
	w.run("cat", "cat", 0)
	input := strings.Repeat("0123456789abcdef", 1<<16)
	if resp, body := w.do(w.request("PUT", "/commands/cat/stdin?offset=0&close=1", input)); resp.StatusCode != 200 {
		t.Errorf("stdin: %s", body)
	}
	if _, body := w.do(w.request("GET", "/commands/cat/stdout?follow=1", "")); body != input {
		t.Errorf("cat gave %d bytes of %d", len(body), len(input))
	}
}

// A command goes on while the edge restarts, and its result and output are whole.
func TestCommandLivesOverRestart(t *testing.T) {
	w := newAetherWorld(t)
	w.run("c1", "echo before; read line; echo after $line; exit 5", 0)
	stdin := &dsecv1.ExecRequest{SandboxId: string(w.id), CommandId: "c2", Command: &dsecv1.Command{Shell: "echo before; read line; echo after $line; exit 5", StdinFollows: true}}
	if _, err := w.s.Exec(w.user(), stdin); err != nil {
		t.Fatal(err)
	}
	w.again()
	eventually(t, "a command runs", func() bool { return w.get(w.id).RunningCommands >= 1 })
	if resp, body := w.do(w.request("PUT", "/commands/c2/stdin?offset=0&close=1", "words\n")); resp.StatusCode != 200 {
		t.Fatalf("stdin: %s", body)
	}
	r, err := w.s.GetCommand(w.user(), &dsecv1.GetCommandRequest{SandboxId: string(w.id), CommandId: "c2", WaitSeconds: 20})
	if err != nil || r.ExitCode != 5 || string(r.Stdout.Data) != "before\nafter words\n" {
		t.Errorf("%v %v", r, err)
	}
	// the client that retries its exec finds the same command
	if again, err := w.s.Exec(w.user(), stdin); err != nil || again.ExitCode != 5 {
		t.Errorf("%v %v", again, err)
	}
}

// Delete while a command runs: its follower and its result end, as killed.
func TestDeleteEndsRunningCommands(t *testing.T) {
	w := newAetherWorld(t)
	w.run("c1", "echo started; sleep 1000", 0)
	resp, err := http.DefaultClient.Do(w.request("GET", "/commands/c1/stdout?follow=1", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	started := make([]byte, len("started\n"))
	if _, err := io.ReadFull(resp.Body, started); err != nil || string(started) != "started\n" {
		t.Fatalf("followed %q, %v", started, err)
	}
	waiting := make(chan *dsecv1.CommandResult, 1)
	go func() {
		r, _ := w.s.GetCommand(w.user(), &dsecv1.GetCommandRequest{SandboxId: string(w.id), CommandId: "c1", WaitSeconds: -1})
		waiting <- r
	}()
	start := time.Now()
	w.delete(w.id, true)
	if d := time.Since(start); d > time.Minute {
		t.Errorf("delete took %v", d)
	}
	if rest, _ := io.ReadAll(resp.Body); len(rest) > 0 { // it ends; whether cleanly depends on what was first
		t.Errorf("followed %q", rest)
	}
	if r := <-waiting; r == nil || r.Running || !r.Killed {
		t.Errorf("result: %v", r)
	}
	if _, body := w.do(w.request("GET", "/commands/c1/stdout", "")); body != "started\n" {
		t.Errorf("kept: %q", body)
	}
}
