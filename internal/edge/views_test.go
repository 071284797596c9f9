package edge

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// metricsStream is the caller's side of WatchMetrics.
type metricsStream struct {
	grpc.ServerStream
	ctx context.Context
	got chan *dsecv1.Metrics
}

func (s *metricsStream) Context() context.Context { return s.ctx }
func (s *metricsStream) Send(m *dsecv1.GetMetricsResponse) error {
	s.got <- m.GetMetrics()
	return nil
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := string(w.create())
		resp, err := w.s.GetMetrics(w.user(), &dsecv1.GetMetricsRequest{SandboxId: id})
		m := resp.GetMetrics()
		if err != nil || m.GetSandboxId() != id || m.GetCpuSeconds() != 1.5 || m.GetDiskLimitBytes() != 1<<30 || m.GetNetworkTxBytes() != 20 {
			t.Fatalf("%v, %v", m, err)
		}
		ctx, cancel := context.WithCancel(w.user())
		s := &metricsStream{ctx: ctx, got: make(chan *dsecv1.Metrics)}
		done := make(chan error, 1)
		go func() {
			done <- w.s.WatchMetrics(&dsecv1.WatchMetricsRequest{SandboxId: id, IntervalSeconds: 0.5}, s)
		}()
		began := time.Now()
		for range 4 {
			<-s.got
		}
		if took := time.Since(began); took != 1500*time.Millisecond {
			t.Errorf("four measurements half a second apart took %v", took)
		}
		cancel()
		if err := <-done; sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.Canceled {
			t.Errorf("the caller left: %v", err)
		}
		for _, bad := range []float64{-1, 0.01, 1e9} {
			err := w.s.WatchMetrics(&dsecv1.WatchMetricsRequest{SandboxId: id, IntervalSeconds: bad}, &metricsStream{ctx: w.user()})
			if reason := sandbox.ReasonOf(grpcerr.FromStatus(err)); reason != "invalid_interval" {
				t.Errorf("%v: %v", bad, err)
			}
		}
		w.close()
	})
}

// A watched sandbox idles like any other, and its end ends the stream.
func TestWatchingIsNoActivity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := string(w.create(idle(3 * time.Second)))
		s := &metricsStream{ctx: w.user(), got: make(chan *dsecv1.Metrics, 100)}
		err := w.s.WatchMetrics(&dsecv1.WatchMetricsRequest{SandboxId: id}, s)
		if reason := sandbox.ReasonOf(grpcerr.FromStatus(err)); reason != "sandbox_ended" {
			t.Errorf("%v", err)
		}
		synctest.Wait() // the stream ends as soon as the end begins
		w.expect(sandbox.ID(id), stopped, sandbox.ReasonIdle)
		w.close()
	})
}

func TestProcessesAndSignals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := string(w.create())
		if _, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: id, CommandId: "c", Command: &dsecv1.Command{Shell: "wait"}}); err != nil {
			t.Fatal(err)
		}
		list, err := w.s.ListProcesses(w.user(), &dsecv1.ListProcessesRequest{SandboxId: id})
		if err != nil || len(list.GetProcesses()) != 1 || list.GetProcesses()[0].GetCommandId() != "c" || list.GetProcesses()[0].GetCpuSeconds() != 2.5 {
			t.Fatalf("%v, %v", list, err)
		}
		pid := list.GetProcesses()[0].GetPid()
		for _, bad := range []*dsecv1.SignalProcessRequest{{Pid: 0}, {Pid: -1}, {Pid: pid, Signal: 65}, {Pid: pid, Signal: -1}} {
			bad.SandboxId = id
			if _, err := w.s.SignalProcess(w.user(), bad); sandbox.ReasonOf(grpcerr.FromStatus(err)) != "invalid_signal" {
				t.Errorf("%v: %v", bad, err)
			}
		}
		if _, err := w.s.SignalProcess(w.as("other", grant.RoleUser), &dsecv1.SignalProcessRequest{SandboxId: id, Pid: pid}); sandbox.ReasonOf(grpcerr.FromStatus(err)) != "sandbox_not_found" {
			t.Errorf("a foreign project: %v", err)
		}
		if _, err := w.s.SignalProcess(w.user(), &dsecv1.SignalProcessRequest{SandboxId: id, Pid: pid, Signal: 9}); err != nil {
			t.Fatal(err)
		}
		res, err := w.s.GetCommand(w.user(), &dsecv1.GetCommandRequest{SandboxId: id, CommandId: "c", WaitSeconds: -1})
		if err != nil || res.GetRunning() {
			t.Errorf("%v, %v", res, err)
		}
		w.close()
	})
}
