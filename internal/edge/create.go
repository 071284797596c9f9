package edge

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"dsec/internal/edge/journal"
	"dsec/sandbox"
)

// An order is one create, checked.
type order struct {
	id       sandbox.ID
	intent   *journal.Intent
	deadline time.Time // ready by then; zero = DefaultCreateTimeout
}

// create enters the sandbox and begins to make it, or finds the one that answers the same create. The caller counts as one
// that waits for the outcome: it must call leave.
func (e *Edge) create(o order) (*instance, error) {
	if e.phase.Load() != phaseServing {
		return nil, errStoppingFull()
	}
	d := e.drivers[o.intent.Spec.Backend]
	if d == nil {
		return nil, sandbox.Errorf(sandbox.Unsupported, "unknown_backend", "backend %q is not offered by this node", o.intent.Spec.Backend)
	}
	now := time.Now()
	o.intent.CreatedAt = now
	o.intent.GuestKey = make([]byte, 32)
	rand.Read(o.intent.GuestKey) // never fails
	in := e.newInstance(o.id, o.intent, d)
	in.life.createBy = createBy(now, o.deadline)
	ctx, cancel := context.WithDeadline(in.ctx, in.life.createBy)
	in.cancel = cancel
	in.callers = 1
	in.setupDone = make(chan struct{})
	found, err := e.index.add(in)
	if err != nil || found != nil {
		cancel()
		in.stop()
		return found, err
	}
	e.watchers.changed(in)
	e.schedule(in)
	e.spawn(func() {
		defer cancel()
		e.setup(ctx, in)
	})
	return in, nil
}

// errStoppingFull refuses a create in the way that lets it go to another node.
func errStoppingFull() error {
	return sandbox.Errorf(sandbox.ResourceExhausted, reasonFull, "the node is stopping and takes no more sandboxes; another node may")
}

func createBy(now, deadline time.Time) time.Time {
	if deadline.IsZero() {
		return now.Add(sandbox.DefaultCreateTimeout)
	}
	return earlier(deadline, now.Add(sandbox.MaxCreateTimeout))
}

// outcome waits until the sandbox is ready (nil), or has failed and nothing of it is left. A teardown that takes longer
// than its deadline is not waited for: the failure is known.
func (e *Edge) outcome(ctx context.Context, in *instance) error {
	select {
	case <-in.settled:
	case <-ctx.Done():
		return ctx.Err()
	}
	if s := in.snapshot(); s.life.state == sandbox.Ready || !s.life.readyAt.IsZero() {
		return nil // or it was ready, and has ended since: the caller sees its state
	}
	t := time.NewTimer(sandbox.StoppingDeadline)
	defer t.Stop()
	select {
	case <-in.gone:
	case <-t.C:
	case <-ctx.Done():
	}
	return createError(in)
}

// createError is what the callers of a create are told when it did not become ready.
func createError(in *instance) error {
	s := in.snapshot()
	r := s.life.reason
	var known *sandbox.Error
	switch {
	case r.Code == sandbox.ReasonStartTimeout:
		known = sandbox.Errorf(sandbox.DeadlineExceeded, r.Code, "the sandbox failed: %s; allow more time or try again", r.Message)
	case sandbox.Ended(r.Code):
		known = sandbox.Errorf(sandbox.Canceled, r.Code, "the sandbox was ended before it was ready: %s", r.Message)
	case errors.As(s.cause, &known):
	case sandbox.ReasonOf(s.cause) == sandbox.ReasonNoDescriptors: // it may succeed later
		known = sandbox.AsError(s.cause)
	default:
		known = sandbox.Errorf(sandbox.Internal, r.Code, "the sandbox failed: %s", r.Message)
	}
	return known.WithFact("sandbox_id", string(in.id))
}

// leave says that a caller of the create no longer waits. If nobody was told of the sandbox and nobody waits for it any
// more, it is rolled back.
func (e *Edge) leave(in *instance, told bool) {
	in.mu.Lock()
	in.callers--
	in.delivered = in.delivered || told
	abandoned := in.callers == 0 && !in.delivered && in.life.holdsQuota()
	in.undone = in.undone || abandoned
	in.mu.Unlock()
	if abandoned {
		e.end(in, sandbox.ReasonCanceled, "whoever asked for it went away before it was ready")
	}
}

// delete ends a sandbox in whatever state it is. With wait it returns when nothing of it is left.
func (e *Edge) delete(ctx context.Context, in *instance, code string, wait bool) error {
	message := "it was deleted"
	if code == sandbox.ReasonCanceled {
		message = "its create was cancelled"
	}
	e.end(in, code, message)
	if !wait {
		return nil
	}
	select {
	case <-in.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the sandbox to be gone: %w", ctx.Err())
	}
}
