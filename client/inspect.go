package client

import (
	"context"
	"iter"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// Metrics measures the sandbox now.
func (s *Sandbox) Metrics(ctx context.Context) (*dsecv1.Metrics, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.GetMetrics, &dsecv1.GetMetricsRequest{SandboxId: s.ID})
	return res.GetMetrics(), err
}

// WatchMetrics measures again and again, each interval, until ctx ends, the consumer stops or the sandbox ends. A connection that
// breaks is made again.
func (s *Sandbox) WatchMetrics(ctx context.Context, interval time.Duration) iter.Seq2[*dsecv1.Metrics, error] {
	req := &dsecv1.WatchMetricsRequest{SandboxId: s.ID, IntervalSeconds: interval.Seconds()}
	return func(yield func(*dsecv1.Metrics, error) bool) {
		var o outage
		for {
			stopped := false
			got, err := receiveOnce(ctx, s.c, s.c.sandboxes.WatchMetrics, req, silence+2*interval, func(r *dsecv1.GetMetricsResponse) bool {
				stopped = !yield(r.GetMetrics(), nil)
				return !stopped
			})
			if stopped || err == nil { // a stream that ends in order is at the sandbox's end
				return
			}
			if got {
				o.over()
			}
			if err := s.c.wait(ctx, &o, err); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// Processes lists what runs in the sandbox.
func (s *Sandbox) Processes(ctx context.Context) ([]*dsecv1.Process, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.ListProcesses, &dsecv1.ListProcessesRequest{SandboxId: s.ID})
	return res.GetProcesses(), err
}

// Signal sends a signal to one process; 0 = SIGTERM. It is sent once: an answer that got lost may have been to a signal that was
// sent, and another process may have the number by now. startedTicks, if not 0, names the process for good.
func (s *Sandbox) Signal(ctx context.Context, pid, signal int32, startedTicks uint64) error {
	req := &dsecv1.SignalProcessRequest{SandboxId: s.ID, Pid: pid, Signal: signal, StartedTicks: startedTicks}
	_, err := invokeOnce(ctx, s.c, s.c.sandboxes.SignalProcess, req)
	return err
}

// A Session is a shell that keeps its working directory, variables, functions and jobs between commands.
type Session struct {
	Name string
	sb   *Sandbox
}

// Session is the session of that name. Nothing is asked of the platform.
func (s *Sandbox) Session(name string) *Session { return &Session{name, s} }

// CreateSession starts a session, or finds the one of this name; without a name it gets a new one. Its fields are those of
// the request, whose sandbox_id is set here.
func (s *Sandbox) CreateSession(ctx context.Context, o *dsecv1.CreateSessionRequest) (*Session, error) {
	req := &dsecv1.CreateSessionRequest{SandboxId: s.ID, Name: o.GetName(), Cwd: o.GetCwd(), User: o.GetUser(), Env: o.GetEnv()}
	if req.Name == "" { // made here, so that a retry finds the first attempt's
		req.Name = "s-" + NewKey()[:16]
	}
	res, err := invoke(ctx, s.c, s.c.sandboxes.CreateSession, req)
	if err != nil {
		return nil, err
	}
	return &Session{res.GetSession().GetName(), s}, nil
}

// Sessions lists the sandbox's sessions.
func (s *Sandbox) Sessions(ctx context.Context) ([]*dsecv1.Session, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.ListSessions, &dsecv1.ListSessionsRequest{SandboxId: s.ID})
	return res.GetSessions(), err
}

// Start starts a script in the session; see Sandbox.Start.
func (n *Session) Start(ctx context.Context, script string) (*Command, error) {
	return n.sb.Start(ctx, &dsecv1.Command{Shell: script, Session: n.Name})
}

// Run runs a script in the session; see Sandbox.Run.
func (n *Session) Run(ctx context.Context, script string) (*dsecv1.CommandResult, error) {
	return n.sb.Run(ctx, &dsecv1.Command{Shell: script, Session: n.Name})
}

// Get is the session's present state.
func (n *Session) Get(ctx context.Context) (*dsecv1.Session, error) {
	all, err := n.sb.Sessions(ctx)
	if err != nil {
		return nil, err
	}
	for _, v := range all {
		if v.GetName() == n.Name {
			return v, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "session_not_found", "the sandbox has no session %q", clip(n.Name))
}

// Delete ends the session and all that runs in it.
func (n *Session) Delete(ctx context.Context) error {
	_, err := invoke(ctx, n.sb.c, n.sb.c.sandboxes.DeleteSession, &dsecv1.DeleteSessionRequest{SandboxId: n.sb.ID, Name: n.Name})
	return err
}
