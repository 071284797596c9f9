package edge

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

const (
	defaultInterval = time.Second
	minInterval     = 100 * time.Millisecond
	maxInterval     = time.Hour
	ticksPerSecond  = 100 // USER_HZ: what the kernel counts in for user space, on every architecture that we know
)

func (s *server) GetMetrics(ctx context.Context, req *dsecv1.GetMetricsRequest) (*dsecv1.GetMetricsResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "GetMetrics", err)
	}
	m, err := s.e.metrics(in)
	if err != nil {
		return nil, s.wire(ctx, "GetMetrics", err)
	}
	return &dsecv1.GetMetricsResponse{Metrics: m}, nil
}

// WatchMetrics measures until the caller leaves or the sandbox ends. To look at a sandbox is no activity of it.
func (s *server) WatchMetrics(req *dsecv1.WatchMetricsRequest, out grpc.ServerStreamingServer[dsecv1.GetMetricsResponse]) error {
	ctx := out.Context()
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return s.wire(ctx, "WatchMetrics", err)
	}
	every, err := intervalOf(req.GetIntervalSeconds())
	if err != nil {
		return s.wire(ctx, "WatchMetrics", err)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		m, err := s.e.metrics(in)
		if err != nil {
			return s.wire(ctx, "WatchMetrics", err)
		}
		if err := out.Send(&dsecv1.GetMetricsResponse{Metrics: m}); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return grpcerr.ToStatus(ctx.Err())
		case <-in.gone:
		case <-s.e.ctx.Done():
			return grpcerr.ToStatus(errStopping)
		}
	}
}

func intervalOf(seconds float64) (time.Duration, error) {
	switch {
	case seconds == 0:
		return defaultInterval, nil
	case seconds >= minInterval.Seconds() && seconds <= maxInterval.Seconds():
		return time.Duration(seconds * float64(time.Second)), nil
	}
	return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_interval", "an interval of %v s; it must be %v to %v", seconds, minInterval, maxInterval)
}

// metrics measures a sandbox that is live. What the host cannot tell is named in the answer; a failure to measure is an error.
func (e *Edge) metrics(in *instance) (*dsecv1.Metrics, error) {
	if _, err := in.live(); err != nil {
		return nil, err
	}
	made := in.snapshot().made
	stats, err := e.o.Cgroups.Stats(made.cgroups)
	if err == nil {
		var m *dsecv1.Metrics
		if m, err = e.measured(in, made); err == nil {
			m.CpuSeconds, m.CpuThrottledPeriods, m.CpuThrottledSeconds = stats.CPU, stats.ThrottledPeriods, stats.Throttled
			m.MemoryBytes, m.MemoryAnonBytes, m.MemoryPeakBytes = stats.Memory, stats.MemoryAnon, stats.MemoryPeak
			m.MemoryLimitBytes, m.MemoryLimitHits, m.OomKills = stats.MemoryLimit, stats.MemoryHits, stats.OOMKills
			m.Pids, m.PidsLimit, m.PidsLimitHits = stats.PIDs, stats.PIDsLimit, stats.PIDsHits
			m.AetherMemoryBytes = stats.AetherMemory
			m.Unavailable = append(m.Unavailable, stats.Unavailable...)
			return m, nil
		}
	}
	if _, gone := in.live(); gone != nil { // it ended while it was measured
		return nil, gone
	}
	return nil, err
}

// measured is what is not of the control groups.
func (e *Edge) measured(in *instance, made made) (*dsecv1.Metrics, error) {
	traffic, err := e.o.Networks.Traffic(made.network)
	if err != nil {
		return nil, err
	}
	used, limit, err := e.o.Uppers.Usage(in.id)
	if err != nil {
		return nil, err
	}
	refused, err := e.refused(in, made)
	if err != nil {
		return nil, err
	}
	return &dsecv1.Metrics{
		NetworkRefusedPackets: refused.Packets, NetworkConnections: int64(refused.Connections),
		SandboxId: string(in.id), At: timestamppb.Now(), Generation: 1, CpuLimitCores: in.intent.Spec.Limits.CPU,
		DiskBytes: used, DiskLimitBytes: limit,
		NetworkRxBytes: traffic.RxBytes, NetworkRxPackets: traffic.RxPackets, NetworkTxBytes: traffic.TxBytes, NetworkTxPackets: traffic.TxPackets,
	}, nil
}

func (s *server) ListProcesses(ctx context.Context, req *dsecv1.ListProcessesRequest) (*dsecv1.ListProcessesResponse, error) {
	_, g, err := s.guest(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "ListProcesses", err)
	}
	list, more, err := g.Processes(ctx)
	if err != nil {
		return nil, s.wire(ctx, "ListProcesses", err)
	}
	resp := &dsecv1.ListProcessesResponse{Truncated: more}
	for _, p := range list {
		resp.Processes = append(resp.Processes, &dsecv1.Process{
			Pid: int32(p.PID), Parent: int32(p.Parent), Uid: p.UID, Name: p.Name, Argv: p.Argv, State: p.State, CommandId: p.Command,
			CpuSeconds: float64(p.CPUTicks) / ticksPerSecond, MemoryBytes: p.Memory, StartedTicks: p.StartedTicks, Threads: int32(p.Threads),
		})
	}
	return resp, nil
}

func (s *server) SignalProcess(ctx context.Context, req *dsecv1.SignalProcessRequest) (*dsecv1.SignalProcessResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "SignalProcess", err)
	}
	if err := s.e.signal(ctx, in, req); err != nil {
		return nil, s.wire(ctx, "SignalProcess", err)
	}
	return &dsecv1.SignalProcessResponse{}, nil
}

const sigterm = 15

func (e *Edge) signal(ctx context.Context, in *instance, req *dsecv1.SignalProcessRequest) error {
	signal := int(req.GetSignal())
	if signal == 0 {
		signal = sigterm
	}
	if req.GetPid() < 1 || signal < 1 || signal > maxSignal {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_signal", "process %d, signal %d: a pid is at least 1, a signal 1 to %d", req.GetPid(), signal, maxSignal)
	}
	g, err := in.live()
	if err != nil {
		return err
	}
	defer e.begin(in)()
	return g.Signal(ctx, int(req.GetPid()), signal, req.GetStartedTicks())
}
