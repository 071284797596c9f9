package control_test

import (
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/internal/control"
)

var quiet = slog.New(slog.DiscardHandler)

// cpu is what this process has used: client, control plane and edge together, since they are one process here.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func perOp(b *testing.B, before time.Duration) {
	b.ReportMetric(float64((cpu()-before).Microseconds())/float64(b.N), "cpu-µs/op")
}

// BenchmarkCreate is through apiserver, owner, placement and edgeclient to an edge in memory.
func BenchmarkCreate(b *testing.B) {
	p := start(b, func(o *control.Options) { o.Log, o.Poll = quiet, time.Second })
	p.publish("base", "base:latest", "")
	b.SetParallelism(32)
	before := cpu()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		c := p.sandboxes()
		for pb.Next() {
			if _, err := c.CreateSandbox(b.Context(), connect.NewRequest(&dsecv1.CreateSandboxRequest{Spec: &dsecv1.SandboxSpec{Image: "base"}})); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.StopTimer()
	perOp(b, before)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
}

// BenchmarkCreateMany is the same with one request for all.
func BenchmarkCreateMany(b *testing.B) {
	p := start(b, func(o *control.Options) { o.Log, o.Poll = quiet, time.Second })
	p.publish("base", "base:latest", "")
	before := cpu()
	b.ResetTimer()
	for left := b.N; left > 0; left -= 10_000 {
		s, err := p.sandboxes().CreateSandboxes(b.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Spec: &dsecv1.SandboxSpec{Image: "base"}, Count: int32(min(left, 10_000))}))
		ok(b, err)
		for s.Receive() {
			if f := s.Msg().GetFailure(); f != nil {
				b.Fatal(f)
			}
		}
		ok(b, s.Err())
	}
	b.StopTimer()
	perOp(b, before)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
}

func benchExec(b *testing.B, client dsecv1connect.SandboxServiceClient, p *platform) {
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	req := func() *connect.Request[dsecv1.ExecRequest] {
		return connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, CommandId: "c", Command: &dsecv1.Command{Argv: []string{"/bin/true"}}, WaitSeconds: -1})
	}
	b.SetParallelism(4)
	before := cpu()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := client.Exec(b.Context(), req()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.StopTimer()
	perOp(b, before)
}

// BenchmarkExec is the pass-through, with the CPU of a Connect client and of the edge's gRPC server in it.
func BenchmarkExec(b *testing.B) {
	for _, codec := range []string{"proto", "json"} {
		b.Run(codec, func(b *testing.B) {
			p := start(b, func(o *control.Options) { o.Log = quiet })
			var opts []connect.ClientOption
			if codec == "json" {
				opts = append(opts, connect.WithProtoJSON())
			}
			benchExec(b, dsecv1connect.NewSandboxServiceClient(p.client, p.url, opts...), p)
		})
	}
}

// BenchmarkBytes copies a file of 64 MiB through the control plane.
func BenchmarkBytes(b *testing.B) {
	p := start(b, func(o *control.Options) { o.Log = quiet })
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	if code, body := p.do("PUT", "/v1/sandboxes/"+id+"/files?path=/f", strings.NewReader(strings.Repeat("x", 64<<20)), nil); code != 200 {
		b.Fatalf("%d %s", code, body)
	}
	b.SetBytes(64 << 20)
	b.ResetTimer()
	for range b.N {
		if code, body := p.do("GET", "/v1/sandboxes/"+id+"/files?path=/f", nil, nil); code != 200 || len(body) != 64<<20 {
			b.Fatal(code)
		}
	}
}
