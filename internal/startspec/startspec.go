// Package startspec translates a sandbox's start command and probe between the wire and the domain, once for apiserver and
// edge. It checks nothing but what the domain's types cannot hold: Spec.Validate does the rest.
package startspec

import (
	"math"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// FromWire sets s's start command and probe.
func FromWire(p *dsecv1.SandboxSpec, s *sandbox.Spec) error {
	if c := p.GetStart(); c != nil {
		start, err := command(c)
		if err != nil {
			return err
		}
		s.Start = start
	}
	w := p.GetReadyWhen()
	if w == nil {
		return nil
	}
	probe := &sandbox.Probe{TCPPort: int(w.GetTcpPort())}
	var err error
	if probe.Interval, err = duration("interval_seconds", w.GetIntervalSeconds()); err != nil {
		return err
	}
	if probe.TryTimeout, err = duration("try_timeout_seconds", w.GetTryTimeoutSeconds()); err != nil {
		return err
	}
	if c := w.GetExec(); c != nil {
		if probe.Exec, err = command(c); err != nil {
			return err
		}
	}
	if h := w.GetHttp(); h != nil {
		probe.HTTP = &sandbox.HTTPProbe{Port: int(h.GetPort()), Path: h.GetPath(), Status: int(h.GetStatus())}
	}
	s.ReadyWhen = probe
	return nil
}

// Unknown reports whether the wire form has fields that this version does not know.
func Unknown(p *dsecv1.SandboxSpec) bool {
	w := p.GetReadyWhen()
	for _, b := range [][]byte{
		p.GetStart().ProtoReflect().GetUnknown(), w.ProtoReflect().GetUnknown(), w.GetExec().ProtoReflect().GetUnknown(), w.GetHttp().ProtoReflect().GetUnknown(),
	} {
		if len(b) > 0 {
			return true
		}
	}
	return false
}

// ToWire sets p's start command and probe.
func ToWire(s *sandbox.Spec, p *dsecv1.SandboxSpec) {
	if s.Start != nil {
		p.Start = wireCommand(s.Start)
	}
	w := s.ReadyWhen
	if w == nil {
		return
	}
	p.ReadyWhen = &dsecv1.Probe{TcpPort: int32(w.TCPPort), IntervalSeconds: w.Interval.Seconds(), TryTimeoutSeconds: w.TryTimeout.Seconds()}
	if w.Exec != nil {
		p.ReadyWhen.Exec = wireCommand(w.Exec)
	}
	if w.HTTP != nil {
		p.ReadyWhen.Http = &dsecv1.HttpProbe{Port: int32(w.HTTP.Port), Path: w.HTTP.Path, Status: int32(w.HTTP.Status)}
	}
}

func duration(what string, seconds float64) (time.Duration, error) {
	switch {
	case math.IsNaN(seconds) || seconds < 0:
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_spec", "%s must be greater than 0", what)
	case seconds >= time.Duration(math.MaxInt64).Seconds():
		return math.MaxInt64, nil
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

func command(p *dsecv1.Command) (*sandbox.Command, error) {
	timeout, err := duration("timeout_seconds", p.GetTimeoutSeconds())
	if err != nil {
		return nil, err
	}
	silence, err := duration("no_output_timeout_seconds", p.GetNoOutputTimeoutSeconds())
	if err != nil {
		return nil, err
	}
	if p.GetSession() != "" {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_spec", "a command that the platform runs before the sandbox is ready has no session")
	}
	c := &sandbox.Command{
		Argv: p.GetArgv(), Shell: p.GetShell(), Cwd: p.GetCwd(), User: p.GetUser(), Env: p.GetEnv(), Timeout: timeout, NoOutputTimeout: silence,
		Stdin: p.GetStdin(), StdinFollows: p.GetStdinFollows(), Tag: p.GetTag(), Trusted: p.GetTrusted(),
	}
	if p.GetTerminal() != nil {
		c.Terminal = &sandbox.Terminal{} // refused whatever it says
	}
	return c, nil
}

func wireCommand(c *sandbox.Command) *dsecv1.Command {
	return &dsecv1.Command{
		Argv: c.Argv, Shell: c.Shell, Cwd: c.Cwd, User: c.User, Env: c.Env, TimeoutSeconds: c.Timeout.Seconds(),
		NoOutputTimeoutSeconds: c.NoOutputTimeout.Seconds(), Stdin: c.Stdin, Tag: c.Tag,
	}
}
