package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/internal/ports"
	"dsec/sandbox"
)

// A sandbox with a start command or a probe is not ready before its step "probe" is done. It may take as long as the create:
// meanwhile the setup's place is another's.

const probeTail = 2 << 10 // of a command's output in an error

// probing is what is known of a probe under way, for the create's deadline: whatever notices it first says the same.
type probing struct {
	mu   sync.Mutex
	on   bool
	last string // what the last try saw
	n    int
}

func (p *probing) saw(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.n = what, p.n+1
}

func (p *probing) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.on = true
}

// late is the error of a probe that did not succeed in time; nil if none is under way.
func (p *probing) late() *sandbox.Error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.on {
		return nil
	}
	last := p.last
	if last == "" {
		last = "its first try had no answer yet"
	}
	return sandbox.Errorf(sandbox.DeadlineExceeded, sandbox.ReasonProbeFailed,
		"ready_when did not succeed in time; the last of %d tries: %s; allow more time, or look at what it asks", p.n, last).
		WithFact("tries", strconv.Itoa(p.n)).WithFact("last", last)
}

func setupProbe(ctx context.Context, m *making) error {
	spec := &m.in.intent.Spec
	if spec.Start == nil && spec.ReadyWhen == nil {
		return nil
	}
	m.leave()
	g := m.in.snapshot().guest
	start, err := m.startCommand(ctx, g)
	if err != nil {
		return err
	}
	if spec.ReadyWhen == nil {
		return nil
	}
	m.in.probing.begin()
	return m.probe(ctx, g, start)
}

// startCommand starts the sandbox's own command; nil if it has none.
func (m *making) startCommand(ctx context.Context, g Guest) (GuestCommand, error) {
	cmd := m.in.intent.Spec.Start
	if cmd == nil {
		return nil, nil
	}
	m.e.oomBegin(m.in, sandbox.StartCommand)
	stop := m.e.watchStart(m.in)
	c, err := g.Start(ctx, sandbox.StartCommand, m.in.withDefaults(*cmd))
	stop()
	if err != nil {
		m.in.oom.drop(sandbox.StartCommand)
		return nil, fmt.Errorf("starting its start command: %w", err)
	}
	m.e.follow(m.in, c)
	return c, nil
}

// probe tries until it succeeds, the start command ends, or ctx does.
func (m *making) probe(ctx context.Context, g Guest, start GuestCommand) error {
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if start != nil {
		m.e.spawn(func() {
			if start.Wait(ctx) == nil {
				close(ended)
				cancel() // the try under way is of no use
			}
		})
	}
	p := m.in.intent.Spec.ReadyWhen
	for n := 1; ; n++ {
		began := time.Now()
		what, ok := m.try(ctx, g, p, n)
		select {
		case <-ended:
			return startEnded(start)
		default:
		}
		if ok {
			return nil
		}
		if until, ok := ctx.Deadline(); ctx.Err() == nil && (!ok || time.Now().Before(until)) { // else it was cut short, and saw nothing
			m.in.probing.saw(what)
		}
		select {
		case <-ended:
			return startEnded(start)
		case <-ctx.Done():
			select {
			case <-ended:
				return startEnded(start)
			default:
			}
			return m.in.probing.late().WithCause(ctx.Err())
		case <-time.After(max(p.Interval-time.Since(began), sandbox.MinProbeInterval)):
		}
	}
}

func startEnded(c GuestCommand) error {
	r := c.Result()
	return sandbox.Errorf(sandbox.FailedPrecondition, sandbox.ReasonProbeFailed, "the start command ended before ready_when succeeded: %s; it must run for as long as it is needed", outcomeOf(c, r)).
		WithFact("exit_code", strconv.Itoa(r.ExitCode))
}

// outcomeOf says how a command ended and what it wrote last.
func outcomeOf(c GuestCommand, r CommandResult) string {
	how := fmt.Sprintf("exit code %d", r.ExitCode)
	switch {
	case r.TimedOut:
		how = "it was ended by its timeout"
	case r.Signal != 0:
		how = "ended by " + signalName(r.Signal)
	}
	for stream, name := range []string{1: "stdout", 2: "stderr"} {
		if name == "" {
			continue
		}
		if tail := tailOf(c, stream); tail != "" {
			how += fmt.Sprintf(", %s: %q", name, tail)
		}
	}
	return how
}

func tailOf(c GuestCommand, stream int) string {
	most := int64(probeTail)
	out, err := c.Output(stream, OutputQuery{Tail: &most})
	if err != nil {
		return ""
	}
	defer out.Close()
	b, _ := io.ReadAll(io.LimitReader(out, probeTail)) // what there is
	return strings.TrimSpace(strings.ToValidUTF8(string(b), "\uFFFD"))
}

// try asks once, and says what it saw.
func (m *making) try(ctx context.Context, g Guest, p *sandbox.Probe, n int) (saw string, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, p.TryTimeout)
	defer cancel()
	switch {
	case p.Exec != nil:
		return m.tryExec(ctx, g, p, n)
	case p.HTTP != nil:
		return tryHTTP(ctx, g, p.HTTP)
	}
	c, err := g.Dial(ctx, "", p.TCPPort, p.TryTimeout)
	if err != nil {
		return sawError(ctx, err), false
	}
	_ = c.Close() // it was there
	return "", true
}

func sawError(ctx context.Context, err error) string {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return "no answer within the time of one try"
	}
	return sandbox.AsError(err).Message
}

func (m *making) tryExec(ctx context.Context, g Guest, p *sandbox.Probe, n int) (string, bool) {
	cmd := m.in.withDefaults(*p.Exec)
	if cmd.Timeout == 0 || cmd.Timeout > p.TryTimeout {
		cmd.Timeout = max(p.TryTimeout, time.Millisecond)
	}
	c, err := g.Start(ctx, "ready-"+strconv.Itoa(n), cmd)
	if err != nil {
		return sawError(ctx, err), false
	}
	defer g.ForgetCommand(c.ID())
	if err := c.Wait(ctx); err != nil {
		_ = c.Kill(context.WithoutCancel(ctx), 0) // its own timeout does it otherwise
		return "it did not end within the time of one try", false
	}
	r := c.Result()
	return outcomeOf(c, r), !r.Running && r.ExitCode == 0 && r.Signal == 0
}

func tryHTTP(ctx context.Context, g Guest, p *sandbox.HTTPProbe) (string, bool) {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return g.Dial(ctx, "", p.Port, sandbox.MaxTryTimeout) // ctx is shorter
		},
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: ports.MaxHead,
	}
	defer t.CloseIdleConnections()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort("localhost", strconv.Itoa(p.Port))+p.Path, nil)
	if err != nil {
		return "the path is not one of a URL", false
	}
	r.Header.Set("User-Agent", "dsec-probe")
	res, err := t.RoundTrip(r)
	if err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return sawError(ctx, err), false
		}
		return portError(ctx, err).Message, false
	}
	_ = res.Body.Close() // nothing of it matters
	ok := res.StatusCode == p.Status || (p.Status == 0 && res.StatusCode >= 200 && res.StatusCode < 400)
	return fmt.Sprintf("HTTP status %d", res.StatusCode), ok
}
