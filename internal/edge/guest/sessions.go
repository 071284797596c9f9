package guest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/sandbox"
)

const (
	maxSessions     = 128         // in a listing
	sessionPatience = time.Minute // for the end of a shell
	sessionAttempts = 8           // over connections that break; each of these requests may be made twice
	noSession       = "session_not_found"
)

// A Session is what aether tells of one.
type Session struct {
	Name             string
	Shell            string // bash or sh
	CreatedAt        time.Time
	Ended            bool
	ExitCode, Signal int
	Reason           string // of the end
	Running          string // the command's id, or ""
	Waiting          int    // commands behind it
}

// reasons are those of an end.
var reasons = map[string]bool{"exited": true, "killed": true, "deleted": true, "timeout": true, "broken": true, "unresponsive": true}

// CreateSession makes a session of spec's name, or finds it if it lives. User, working directory and environment are complete.
func (c *Client) CreateSession(ctx context.Context, spec sandbox.SessionSpec) (Session, error) {
	req := &aetherv1.CreateSession{Name: spec.Name, Cwd: spec.Cwd, User: spec.User}
	if req.Cwd == "" {
		req.Cwd = "/"
	}
	for _, k := range slices.Sorted(maps.Keys(spec.Env)) {
		req.Env = append(req.Env, k+"="+spec.Env[k])
	}
	call := &aetherv1.Call{Call: &aetherv1.Call_CreateSession{CreateSession: req}}
	if n := protoSize(call); n > maxStart {
		return Session{}, sandbox.Errorf(sandbox.InvalidArgument, "argument_list_too_long", "an environment of %d bytes is over the kernel's limit", n)
	}
	c.changed(true)
	reply, err := c.callAgain(ctx, call)
	if err != nil {
		return Session{}, err
	}
	s, ok := sessionOf(reply.GetSession())
	if !ok || s.Name != spec.Name {
		return Session{}, c.violated("an answer that is no session")
	}
	return s, nil
}

// Sessions lists all, those that have ended last.
func (c *Client) Sessions(ctx context.Context) ([]Session, error) {
	reply, err := c.callAgain(ctx, &aetherv1.Call{Call: &aetherv1.Call_ListSessions{ListSessions: &aetherv1.ListSessions{}}})
	if err != nil {
		return nil, err
	}
	list := reply.GetSessions().GetSessions()
	if len(list) > maxSessions {
		return nil, c.violated("too many sessions")
	}
	out := make([]Session, 0, len(list))
	for _, m := range list {
		s, ok := sessionOf(m)
		if !ok {
			return nil, c.violated("a session that cannot be")
		}
		out = append(out, s)
	}
	return out, nil
}

// DeleteSession ends a session with all that it started, and forgets it.
func (c *Client) DeleteSession(ctx context.Context, name string) error {
	c.changed(true)
	_, err := c.callAgain(ctx, &aetherv1.Call{Call: &aetherv1.Call_DeleteSession{DeleteSession: &aetherv1.DeleteSession{Name: name}}})
	return err
}

func (c *Client) callAgain(ctx context.Context, req *aetherv1.Call) (*aetherv1.Reply, error) {
	for attempt := 1; ; attempt++ {
		reply, err := c.call(ctx, req, noSession, sessionPatience)
		if attempt == sessionAttempts || !errors.Is(err, errBroken) {
			return reply, err
		}
		select { // until the loss of the connection was noticed
		case <-time.After(time.Millisecond << (2 * attempt)):
		case <-ctx.Done():
		}
	}
}

// sessionOf checks what aether says.
func sessionOf(m *aetherv1.Session) (Session, bool) {
	s := Session{
		Name: m.GetName(), Shell: m.GetShell(), Ended: m.GetEnded(), ExitCode: int(m.GetExitCode()), Signal: int(m.GetSignal()),
		Reason: m.GetReason(), Running: m.GetRunningCommand(), Waiting: int(m.GetWaitingCommands()), CreatedAt: time.Unix(0, m.GetCreatedNs()),
	}
	switch {
	case !sandbox.ValidSessionName(s.Name), s.Shell != "bash" && s.Shell != "sh", s.Running != "" && !sandbox.ValidCommandID(s.Running):
		return s, false
	case s.ExitCode < 0, s.ExitCode > 255, s.Signal < 0, s.Signal > 64, s.Waiting > maxKnown, m.GetCreatedNs() < 0:
		return s, false
	case s.Ended != reasons[s.Reason], !s.Ended && (s.Reason != "" || s.ExitCode != 0 || s.Signal != 0):
		return s, false
	}
	return s, true
}
