package edge

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// A session lives in aether: the edge asks, and keeps nothing. It is activity only while a command runs in it.

func (s *server) CreateSession(ctx context.Context, req *dsecv1.CreateSessionRequest) (*dsecv1.CreateSessionResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "CreateSession", err)
	}
	defer s.e.begin(in)()
	session, err := s.e.createSession(ctx, in, req)
	if err != nil {
		return nil, s.wire(ctx, "CreateSession", err)
	}
	return &dsecv1.CreateSessionResponse{Session: session}, nil
}

func (e *Edge) createSession(ctx context.Context, in *instance, req *dsecv1.CreateSessionRequest) (*dsecv1.Session, error) {
	g, err := in.live()
	if err != nil {
		return nil, err
	}
	spec := sandbox.SessionSpec{Name: req.GetName(), Cwd: req.GetCwd(), User: req.GetUser(), Env: req.GetEnv()}
	if spec.Name == "" {
		spec.Name = strings.ToLower(rand.Text())
	}
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	whole := in.withDefaults(sandbox.Command{Cwd: spec.Cwd, User: spec.User, Env: spec.Env})
	spec.Cwd, spec.User, spec.Env = whole.Cwd, whole.User, whole.Env
	stop := e.watchStart(in)
	defer stop()
	session, err := g.CreateSession(ctx, spec)
	if err != nil {
		return nil, err
	}
	return sessionTo(session, g), nil
}

func (s *server) ListSessions(ctx context.Context, req *dsecv1.ListSessionsRequest) (*dsecv1.ListSessionsResponse, error) {
	_, g, err := s.guest(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "ListSessions", err)
	}
	list, err := g.Sessions(ctx)
	if err != nil {
		return nil, s.wire(ctx, "ListSessions", err)
	}
	resp := &dsecv1.ListSessionsResponse{}
	for _, session := range list {
		resp.Sessions = append(resp.Sessions, sessionTo(session, g))
	}
	return resp, nil
}

func (s *server) DeleteSession(ctx context.Context, req *dsecv1.DeleteSessionRequest) (*dsecv1.DeleteSessionResponse, error) {
	in, g, err := s.guest(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "DeleteSession", err)
	}
	defer s.e.begin(in)()
	if err = (sandbox.SessionSpec{Name: req.GetName()}).Validate(); err == nil {
		err = g.DeleteSession(ctx, req.GetName())
	}
	if err != nil {
		return nil, s.wire(ctx, "DeleteSession", err)
	}
	return &dsecv1.DeleteSessionResponse{}, nil
}

// sessionTo is a session as its project sees it. aether does not know of the kernel's out-of-memory kills: that the last command
// of a session, whose shell was killed, suffered one is told in its result.
func sessionTo(m GuestSession, g Guest) *dsecv1.Session {
	if m.Ended && m.Reason == "killed" && diedOfMemory(m, g) {
		m.Reason = "oom"
	}
	return &dsecv1.Session{
		Name: m.Name, Ended: m.Ended, ExitCode: int32(m.ExitCode), Signal: int32(m.Signal), Reason: m.Reason, CreatedAt: timeTo(m.CreatedAt),
		RunningCommand: m.Running, WaitingCommands: int32(m.Waiting), Shell: m.Shell,
	}
}

func diedOfMemory(m GuestSession, g Guest) bool {
	var last CommandResult
	for _, c := range g.Commands() {
		if r := c.Result(); r.Session == m.Name && !r.Running && r.EndedAt.After(last.EndedAt) {
			last = r
		}
	}
	return last.OOMKilled && last.EndedAt.After(m.CreatedAt)
}

// neverEnded is the error of a command that ended without a result: its session ended before its turn, or the sandbox no longer
// knows of it.
func neverEnded(ctx context.Context, c GuestCommand) error {
	if err := c.Wait(ctx); err != nil {
		var told *sandbox.Error
		if errors.As(err, &told) {
			return told
		}
	}
	return nil
}
