package edge

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"dsec/internal/edge/driver"
	"dsec/sandbox"
)

// How running sandboxes are spoken to again after a restart. It happens while the edge serves already: an aether is not to
// be trusted, and one that is silent must cost nobody but its own sandbox.
const (
	parallelLinks    = 64
	linkTurn         = time.Second      // what takes longer goes on beside the next
	reconnectTimeout = 15 * time.Second // for one sandbox's aether to answer
	linkPatience     = 30 * time.Second // of a request to a sandbox that is not spoken to yet
)

// reconnecting is the Guest of a sandbox that is not spoken to yet: who asks it waits. It takes the place of the real one
// for as long as that, and is replaced in the instance; Done and Err are of the connecting only.
type reconnecting struct {
	cancel context.CancelFunc
	once   sync.Once
	over   chan struct{}
	g      Guest // written before over is closed
	err    error // the same
}

// settle gives the outcome to all who wait, unless there was one.
func (p *reconnecting) settle(g Guest, err error) (first bool) {
	p.once.Do(func() {
		p.g, p.err, first = g, err, true
		close(p.over)
	})
	return first
}

func (p *reconnecting) await(ctx context.Context) (Guest, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, linkPatience, sandbox.Errorf(sandbox.Unavailable, "guest_unresponsive",
		"the sandbox has not answered since the node's agent restarted; try again"))
	defer cancel()
	select {
	case <-p.over:
		return p.g, p.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// settled is the real one if it is there.
func (p *reconnecting) settled() Guest {
	select {
	case <-p.over:
		return p.g
	default:
		return nil
	}
}

func (p *reconnecting) Done() <-chan struct{} { return p.over }

func (p *reconnecting) Err() error {
	select {
	case <-p.over:
		return p.err
	default:
		return nil
	}
}

// Close ends the connecting, or closes what came of it.
func (p *reconnecting) Close() error {
	p.cancel()
	if p.settle(nil, sandbox.Errorf(sandbox.Unavailable, "guest_disconnected", "the sandbox is no longer spoken to; try again")) || p.g == nil {
		return nil
	}
	return p.g.Close()
}

func (p *reconnecting) Start(ctx context.Context, id string, cmd sandbox.Command) (GuestCommand, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.Start(ctx, id, cmd)
}

// Command waits until it is known which commands there are: to say that there is none would be a wrong answer.
func (p *reconnecting) Command(id string) (GuestCommand, bool) {
	<-p.over
	if p.g == nil {
		return nil, false
	}
	return p.g.Command(id)
}

// ForgetCommand has nothing to drop yet.
func (p *reconnecting) ForgetCommand(id string) {
	if g := p.settled(); g != nil {
		g.ForgetCommand(id)
	}
}

func (p *reconnecting) Commands() []GuestCommand {
	<-p.over
	if p.g == nil {
		return nil
	}
	return p.g.Commands()
}

// Running knows of none yet. That does not make the sandbox idle: see link.
func (p *reconnecting) Running() int {
	if g := p.settled(); g != nil {
		return g.Running()
	}
	return 0
}

func (p *reconnecting) Processes(ctx context.Context) ([]Process, bool, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, false, err
	}
	return g.Processes(ctx)
}

func (p *reconnecting) Trust(ctx context.Context, grounds Grounds) error {
	g, err := p.await(ctx)
	if err != nil {
		return err
	}
	return g.Trust(ctx, grounds)
}

func (p *reconnecting) Signal(ctx context.Context, pid, signal int, startedTicks uint64) error {
	g, err := p.await(ctx)
	if err != nil {
		return err
	}
	return g.Signal(ctx, pid, signal, startedTicks)
}

func (p *reconnecting) CreateSession(ctx context.Context, spec sandbox.SessionSpec) (GuestSession, error) {
	g, err := p.await(ctx)
	if err != nil {
		return GuestSession{}, err
	}
	return g.CreateSession(ctx, spec)
}

func (p *reconnecting) Sessions(ctx context.Context) ([]GuestSession, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.Sessions(ctx)
}

func (p *reconnecting) DeleteSession(ctx context.Context, name string) error {
	g, err := p.await(ctx)
	if err != nil {
		return err
	}
	return g.DeleteSession(ctx, name)
}

func (p *reconnecting) ReadFile(ctx context.Context, f FileRead) (FileInfo, io.ReadCloser, error) {
	g, err := p.await(ctx)
	if err != nil {
		return FileInfo{}, nil, err
	}
	return g.ReadFile(ctx, f)
}

func (p *reconnecting) WriteFile(ctx context.Context, f FileWrite, r io.Reader) (int64, []byte, error) {
	g, err := p.await(ctx)
	if err != nil {
		return 0, nil, err
	}
	return g.WriteFile(ctx, f, r)
}

func (p *reconnecting) ReadArchive(ctx context.Context, a ArchiveRead) (GuestArchive, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.ReadArchive(ctx, a)
}

func (p *reconnecting) WriteArchive(ctx context.Context, a ArchiveWrite, r io.Reader) (ArchiveResult, error) {
	g, err := p.await(ctx)
	if err != nil {
		return ArchiveResult{}, err
	}
	return g.WriteArchive(ctx, a, r)
}

func (p *reconnecting) Dial(ctx context.Context, host string, port int, timeout time.Duration) (GuestConn, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.Dial(ctx, host, port, timeout)
}

// beginLink puts a stand-in into in, and speaks to its aether in the background, in turn with others.
func (e *Edge) beginLink(in *instance, h driver.Handle, turns chan struct{}) {
	ctx, cancel := context.WithCancel(in.ctx)
	p := &reconnecting{cancel: cancel, over: make(chan struct{})}
	in.mu.Lock()
	in.guest = p
	in.mu.Unlock()
	in.requests.Add(1) // commands may run: nobody knows that it is idle
	e.spawn(func() {
		defer cancel()
		e.link(ctx, in, h, p, turns)
		in.requests.Add(-1)
		e.schedule(in)
	})
}

func (e *Edge) link(ctx context.Context, in *instance, h driver.Handle, p *reconnecting, turns chan struct{}) {
	g, err := e.linkInTurn(ctx, in, h, turns)
	in.mu.Lock()
	if in.guest == p {
		in.guest = g // what it knows stays readable, also if the sandbox is ending
	}
	in.mu.Unlock()
	switch {
	case err == nil && !p.settle(g, nil): // it is ending
		if err := g.Close(); err != nil {
			e.log.Warn("guest client did not close cleanly", "sandbox_id", in.id, "error", err)
		}
	case err == nil:
		e.spawn(func() { e.watchGuest(in, g) })
		for _, c := range g.Commands() {
			if c.Result().Running {
				e.oomBegin(in, c.ID())
				e.follow(in, c)
			}
		}
	case ctx.Err() != nil: // the sandbox is ending, or the edge
		p.settle(nil, ctx.Err())
	default:
		e.log.Warn("sandbox does not answer", "sandbox_id", in.id, "error", err)
		code, message := sandbox.ReasonGuestDied, "its first process did not answer after the node's agent restarted"
		var known *sandbox.Error
		if errors.As(err, &known) && known.Reason == "guest_protocol" {
			code, message = known.Reason, known.Message
		}
		e.fault(in, code, err, message)
		_, err = in.live()
		p.settle(nil, err)
	}
}

func (e *Edge) linkInTurn(ctx context.Context, in *instance, h driver.Handle, turns chan struct{}) (Guest, error) {
	select {
	case turns <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	leave := sync.OnceFunc(func() { <-turns })
	defer leave()
	t := time.AfterFunc(linkTurn, leave)
	defer t.Stop()
	ctx, cancel := context.WithTimeout(ctx, reconnectTimeout)
	defer cancel()
	return e.connectGuest(ctx, in, h)
}
