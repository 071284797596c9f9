// Package startspec translates commands, and a sandbox's limits, start command, probe and network rules, between the wire and
// the domain, once for apiserver and edge. It checks nothing but what the domain's types cannot hold: their Validate does the rest.
package startspec

import (
	"math"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// FromWire sets s's limits, start command and probe.
func FromWire(p *dsecv1.SandboxSpec, s *sandbox.Spec) error {
	l := p.GetLimits()
	s.Limits = sandbox.Limits{
		Memory: l.GetMemoryBytes(), CPU: l.GetCpuCores(), PIDs: l.GetPids(), Disk: l.GetDiskBytes(), Inodes: l.GetInodes(),
		NetworkRate: l.GetNetworkBytesPerSecond(), NetworkConnections: l.GetNetworkConnections(),
	}
	if c := p.GetStart(); c != nil {
		start, err := Command(c)
		if err != nil {
			return err
		}
		s.Start = &start
	}
	w := p.GetReadyWhen()
	if w == nil {
		return nil
	}
	probe := &sandbox.Probe{TCPPort: int(w.GetTcpPort())}
	var err error
	if probe.Interval, err = duration("invalid_spec", "interval_seconds", w.GetIntervalSeconds()); err != nil {
		return err
	}
	if probe.TryTimeout, err = duration("invalid_spec", "try_timeout_seconds", w.GetTryTimeoutSeconds()); err != nil {
		return err
	}
	if c := w.GetExec(); c != nil {
		command, err := Command(c)
		if err != nil {
			return err
		}
		probe.Exec = &command
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

// ToWire sets p's limits, start command and probe.
func ToWire(s *sandbox.Spec, p *dsecv1.SandboxSpec) {
	l := s.Limits
	p.Limits = &dsecv1.Limits{
		MemoryBytes: l.Memory, CpuCores: l.CPU, Pids: l.PIDs, DiskBytes: l.Disk, Inodes: l.Inodes,
		NetworkBytesPerSecond: l.NetworkRate, NetworkConnections: l.NetworkConnections,
	}
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

// duration converts seconds of which 0 is none.
func duration(reason, what string, seconds float64) (time.Duration, error) {
	switch {
	case math.IsNaN(seconds) || seconds < 0:
		return 0, sandbox.Errorf(sandbox.InvalidArgument, reason, "%s must be greater than 0", what)
	case seconds == 0:
		return 0, nil
	case seconds >= time.Duration(math.MaxInt64).Seconds():
		return math.MaxInt64, nil
	}
	return max(time.Duration(seconds*float64(time.Second)), time.Millisecond), nil // aether counts in those
}

// Command converts a command from the wire; it is not checked yet.
func Command(p *dsecv1.Command) (sandbox.Command, error) {
	timeout, err := duration("invalid_command", "timeout", p.GetTimeoutSeconds())
	if err != nil {
		return sandbox.Command{}, err
	}
	silence, err := duration("invalid_command", "no_output_timeout", p.GetNoOutputTimeoutSeconds())
	if err != nil {
		return sandbox.Command{}, err
	}
	return sandbox.Command{
		Argv: p.GetArgv(), Shell: p.GetShell(), Cwd: p.GetCwd(), User: p.GetUser(), Env: p.GetEnv(), Timeout: timeout,
		NoOutputTimeout: silence, Stdin: p.GetStdin(), StdinFollows: p.GetStdinFollows(), Tag: p.GetTag(),
		Terminal: terminal(p.GetTerminal()), Trusted: p.GetTrusted(), Session: p.GetSession(),
	}, nil
}

func terminal(p *dsecv1.Terminal) *sandbox.Terminal {
	if p == nil {
		return nil
	}
	return &sandbox.Terminal{Rows: int(p.GetRows()), Cols: int(p.GetCols()), Term: p.GetTerm()}
}

func wireCommand(c *sandbox.Command) *dsecv1.Command {
	return &dsecv1.Command{
		Argv: c.Argv, Shell: c.Shell, Cwd: c.Cwd, User: c.User, Env: c.Env, TimeoutSeconds: c.Timeout.Seconds(),
		NoOutputTimeoutSeconds: c.NoOutputTimeout.Seconds(), Stdin: c.Stdin, Tag: c.Tag,
	}
}
