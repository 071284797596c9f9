package sandbox

import (
	"strings"
	"time"
)

// StartCommand is the id of a Spec's start command.
const StartCommand = "start"

// A Probe says when a sandbox is ready: exactly one of Exec, HTTP and TCPPort is asked again and again until it succeeds.
type Probe struct {
	Exec       *Command   `json:",omitempty"` // exits with 0
	HTTP       *HTTPProbe `json:",omitempty"`
	TCPPort    int        `json:",omitempty"` // accepts a connection on the loopback
	Interval   time.Duration
	TryTimeout time.Duration // of one try
}

// An HTTPProbe asks a server on the loopback.
type HTTPProbe struct {
	Port   int
	Path   string
	Status int // 0 = any of 200 to 399
}

// Defaults and bounds of a Probe.
const (
	DefaultProbeInterval = 250 * time.Millisecond
	MinProbeInterval     = 50 * time.Millisecond
	MaxProbeInterval     = time.Minute
	DefaultTryTimeout    = 5 * time.Second
	MinTryTimeout        = 10 * time.Millisecond
	MaxTryTimeout        = 5 * time.Minute

	maxProbePath = 4096
)

func (p Probe) withDefaults() *Probe {
	setDefault(&p.Interval, DefaultProbeInterval)
	setDefault(&p.TryTimeout, DefaultTryTimeout)
	if p.HTTP != nil {
		h := *p.HTTP
		setDefault(&h.Path, "/")
		p.HTTP = &h
	}
	return &p
}

// validateStart checks what runs before a sandbox is ready.
func (s Spec) validateStart() error {
	if s.Start != nil {
		if err := validateOwn("start command", *s.Start); err != nil {
			return err
		}
	}
	if s.ReadyWhen == nil {
		return nil
	}
	return s.ReadyWhen.validate()
}

// validateOwn checks a command that the platform itself runs: nobody is there to give it input.
func validateOwn(what string, c Command) error {
	if c.StdinFollows || c.Terminal != nil || c.Trusted || c.Session != "" {
		return Errorf(InvalidArgument, "invalid_spec", "the %s has neither input that follows nor a terminal nor a session, and is not trusted", what)
	}
	return c.Validate()
}

func (p Probe) validate() error {
	bad := func(format string, args ...any) error {
		return Errorf(InvalidArgument, "invalid_spec", "ready_when: "+format, args...)
	}
	kinds := 0
	for _, given := range []bool{p.Exec != nil, p.HTTP != nil, p.TCPPort != 0} {
		if given {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return bad("exactly one of exec, http and tcp_port must be given")
	case p.Interval < MinProbeInterval || p.Interval > MaxProbeInterval:
		return bad("an interval of %v; it must be between %v and %v", p.Interval, MinProbeInterval, MaxProbeInterval)
	case p.TryTimeout < MinTryTimeout || p.TryTimeout > MaxTryTimeout:
		return bad("%v for one try; it must be between %v and %v", p.TryTimeout, MinTryTimeout, MaxTryTimeout)
	case p.Exec != nil:
		return validateOwn("command of ready_when", *p.Exec)
	case p.HTTP == nil && !validPort(p.TCPPort):
		return bad("port %d is not 1 to 65535", p.TCPPort)
	case p.HTTP == nil:
		return nil
	case !validPort(p.HTTP.Port):
		return bad("port %d is not 1 to 65535", p.HTTP.Port)
	case p.HTTP.Status != 0 && (p.HTTP.Status < 200 || p.HTTP.Status > 599):
		return bad("status %d is not 200 to 599", p.HTTP.Status)
	case len(p.HTTP.Path) > maxProbePath || !strings.HasPrefix(p.HTTP.Path, "/") || strings.ContainsFunc(p.HTTP.Path, func(c rune) bool { return c <= ' ' || c >= 0x7f || c == '#' }):
		return bad("the path %q must begin with a slash and be as it stands in a URL", clip(p.HTTP.Path))
	}
	return nil
}

func validPort(n int) bool { return n >= 1 && n <= 65535 }
