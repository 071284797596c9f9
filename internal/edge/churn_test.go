package edge

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// Ten thousand sandboxes come and go; what the edge holds returns to where it was.
func TestChurnReturnsToBase(t *testing.T) {
	if testing.Short() {
		t.Skip("10,000 sandboxes: not with -short")
	}
	w := newWorld(t, func(o *Options) { o.MaxTerminal = 100; o.Admission.MaxSandboxes = 1 << 30 })
	round := func(n int) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range n / 8 {
					c := w.spec()
					all, err := w.createAll(w.user(), c)
					if err != nil || all[c.Id].GetFailure() != nil {
						t.Errorf("create: %v %v", all, err)
						return
					}
					if _, err := w.exec(sandbox.ID(c.Id), "echo x", -1); err != nil {
						t.Errorf("exec: %v", err)
					}
					w.delete(sandbox.ID(c.Id), true)
					w.guests.Delete(sandbox.ID(c.Id))
				}
			})
		}
		wg.Wait()
	}
	measure := func() (goroutines int, heap uint64) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return runtime.NumGoroutine(), m.HeapAlloc
	}
	round(1000) // the terminal records and every cache are full
	g0, h0 := measure()
	round(10_000)
	eventually(t, "goroutines return", func() bool { return runtime.NumGoroutine() <= g0+2 })
	if _, h1 := measure(); h1 > h0+h0/4+(1<<20) {
		t.Errorf("heap grew from %d to %d bytes", h0, h1)
	}
	w.nothingLeft("after the churn")
	if n := len(w.e.index.all()); n > 100 {
		t.Errorf("%d records", n)
	}
	w.e.wakeMu.Lock()
	if n := len(w.e.wakeups.entry); n > 100 {
		t.Errorf("%d wakeups", n)
	}
	w.e.wakeMu.Unlock()
	w.close()
}

// An idle sandbox costs few goroutines and no file descriptor of the edge's own.
func TestIdleSandboxIsCheap(t *testing.T) {
	w := newWorld(t)
	w.create()
	g0 := runtime.NumGoroutine()
	const n = 200
	for range n {
		w.create()
	}
	eventually(t, "2.1 goroutines for each idle sandbox", func() bool { return float64(runtime.NumGoroutine()-g0)/n <= 2.1 })
	w.close()
}

// serve puts the edge behind real gRPC on a Unix socket.
func serve(tb testing.TB, w *world) edgev1.EdgeServiceClient {
	tb.Helper()
	sock := filepath.Join(tb.TempDir(), "s")
	l, err := net.Listen("unix", sock)
	if err != nil {
		tb.Fatal(err)
	}
	srv := grpc.NewServer(w.e.ServerOptions()...)
	w.e.RegisterGRPC(srv)
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+sock, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { conn.Close(); srv.Stop(); <-done })
	return edgev1.NewEdgeServiceClient(conn)
}

func (w *world) out(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, grant.MetadataKey, w.grant("default", grant.RoleUser))
}

func TestOverRealGRPC(t *testing.T) {
	w := newWorld(t)
	client := serve(t, w)
	ctx, cancel := context.WithCancel(w.out(t.Context()))
	defer cancel()
	c := w.spec()
	st, err := client.CreateSandboxes(ctx, &edgev1.CreateSandboxesRequest{Creates: []*edgev1.CreateSandbox{c}})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := st.Recv(); err != nil || r.GetSandbox().GetState() != ready {
		t.Fatalf("%v %v", r, err)
	}
	if r, err := client.Exec(ctx, &dsecv1.ExecRequest{SandboxId: c.Id, Command: &dsecv1.Command{Shell: "exit 3"}, WaitSeconds: -1}); err != nil || r.ExitCode != 3 {
		t.Errorf("%v %v", r, err)
	}
	_, err = client.Exec(ctx, &dsecv1.ExecRequest{SandboxId: c.Id, Command: &dsecv1.Command{Shell: "a\x00b"}})
	var se *sandbox.Error
	if !errors.As(grpcerr.FromStatus(err), &se) || se.Class != sandbox.InvalidArgument || se.Reason != "invalid_command" {
		t.Errorf("%v", err)
	}
	// a client that vanishes in the middle of a create
	restore, _ := w.arm("network:before:block")
	c2 := w.spec()
	cctx, ccancel := context.WithCancel(ctx)
	if _, err = client.CreateSandboxes(cctx, &edgev1.CreateSandboxesRequest{Creates: []*edgev1.CreateSandbox{c2}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the create is under way", func() bool { return w.status().Creating == 1 })
	ccancel()
	eventually(t, "it is rolled back", func() bool { return w.get(sandbox.ID(c2.Id)).State == stopped })
	w.expect(sandbox.ID(c2.Id), stopped, sandbox.ReasonCanceled)
	restore()
	w.delete(sandbox.ID(c.Id), true)
	w.close()
}

// BenchmarkCreateDelete is the edge's own share of a sandbox's life: no driver, no network.
func BenchmarkCreateDelete(b *testing.B) {
	w := newWorld(b, func(o *Options) { o.MaxTerminal = 100 })
	b.SetParallelism(4)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			c := w.spec()
			if all, err := w.createAll(w.user(), c); err != nil || all[c.Id].GetFailure() != nil {
				b.Errorf("%v %v", all, err)
			}
			w.delete(sandbox.ID(c.Id), true)
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
	w.close()
}

// BenchmarkExec is the edge's own share of an exec, through the handler and without gRPC; the fake guest's goroutine and
// maps are in it.
func BenchmarkExec(b *testing.B) {
	w := newWorld(b)
	id := w.create()
	ctx := w.user()
	g := w.guest(id)
	req := &dsecv1.ExecRequest{SandboxId: string(id), Command: &dsecv1.Command{Shell: "true"}, WaitSeconds: -1}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.s.Exec(ctx, req); err != nil {
			b.Fatal(err)
		}
		g.mu.Lock()
		clear(g.commands)
		g.mu.Unlock()
	}
	w.close()
}
