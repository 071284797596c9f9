package launch

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/owner"
	"dsec/internal/control/placement"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// A flight is one admitted create. Its fields are guarded by Launcher.mu, but for those set before it starts and, after
// done is closed, sandbox and err.
type flight struct {
	key      flightKey
	request  Request
	deadline time.Time

	waiters   int
	delivered bool
	found     bool // the edge had it already: somebody else was given it, so it is never taken back

	done    chan struct{} // the answer is known
	ended   chan struct{} // and nothing of it remains to be undone
	sandbox *dsecv1.Sandbox
	err     error

	ctx    context.Context // ends when it is abandoned
	cancel context.CancelCauseFunc
}

func (l *Launcher) startLocked(r Request, t owner.Ticket, deadline time.Time) *flight {
	f := &flight{key: flightKey{rootOf(r.Caller.Project), t}, request: r, deadline: deadline, waiters: 1, done: make(chan struct{}), ended: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancelCause(l.ctx)
	l.flights[f.key] = f
	l.running.Go(func() { l.fly(f) })
	return f
}

// abandonLocked makes the flight end. The owner is told under the same lock.
func (f *flight) abandonLocked(cause error) { f.cancel(cause) }

// wait waits for the answer as one of the flight's waiters.
func (l *Launcher) wait(ctx context.Context, f *flight) (*dsecv1.Sandbox, Release, error) {
	select {
	case <-f.done:
	case <-ctx.Done():
		l.leave(f, false)
		return nil, released, sandbox.AsError(ctx.Err())
	}
	if f.err != nil || f.found {
		l.leave(f, true)
		return f.sandbox, released, f.err
	}
	return f.sandbox, func(delivered bool) { l.leave(f, delivered) }, nil
}

// leave takes a waiter away. The last one decides: an answer that was given to nobody is taken back.
func (l *Launcher) leave(f *flight, delivered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.waiters--
	f.delivered = f.delivered || delivered
	if f.waiters > 0 {
		return
	}
	own := l.ownerLocked(f.request.Caller.Project)
	select {
	case <-f.done:
	default:
		own.Abandon(f.key.ticket)
		f.abandonLocked(context.Canceled)
		return
	}
	if f.err != nil {
		return // what it left is already being undone
	}
	id := sandbox.ID(f.sandbox.GetId())
	delete(l.answered, id)
	f.cancel(context.Canceled)
	if f.delivered || f.found || !own.Recall(f.key.ticket, id) {
		return
	}
	l.flights[f.key] = f
	if l.closed { // too late for Close to wait: its caller has let this request outlive the server
		l.o.Log.Warn("an answer reached nobody during shutdown; the sandbox's lifetime will end it", "sandbox_id", id)
		return
	}
	l.running.Go(func() { l.rollBack(f, id) })
}

// fly creates the sandbox and publishes the answer.
func (l *Launcher) fly(f *flight) {
	id, sb, err := l.attempt(f)
	l.mu.Lock()
	own := l.ownerLocked(f.request.Caller.Project)
	f.found = err == nil && id == ""
	if err == nil && own.Ready(f.key.ticket, sandbox.ID(sb.GetId())) {
		f.sandbox = sb
		delete(l.flights, f.key)
		l.answered[sandbox.ID(sb.GetId())] = f
		close(f.done)
		l.mu.Unlock()
		return
	}
	if err == nil {
		err = errUnwanted
	}
	cause := context.Cause(f.ctx)
	if cause != nil {
		err = sandbox.AsError(cause)
	}
	f.err = err
	if f.found && errors.Is(cause, errCancelled) { // who cancels a key means what has the key
		id = sandbox.ID(sb.GetId())
	}
	if id != "" {
		own.Abandon(f.key.ticket)
		f.abandonLocked(err)
	}
	close(f.done)
	l.mu.Unlock()
	if id != "" {
		l.rollBack(f, id)
		return
	}
	l.finish(f)
}

var errUnwanted = sandbox.Errorf(sandbox.Canceled, sandbox.ReasonCanceled, "the sandbox was deleted while it was being created")

// finish forgets a flight of which nothing is left.
func (l *Launcher) finish(f *flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ownerLocked(f.request.Caller.Project).Ended(f.key.ticket)
	delete(l.flights, f.key)
	f.cancel(nil)
	close(f.ended)
}

// attempt tries edges until one takes it. An id that comes back is one that this flight minted and under which something may
// exist; with an error it is to be rolled back. A sandbox without an id is one that the edge had.
func (l *Launcher) attempt(f *flight) (sandbox.ID, *dsecv1.Sandbox, error) {
	exclude := make(map[sandbox.EdgeCode]bool)
	var refusal error
	for range maxPlaces {
		if f.ctx.Err() != nil {
			return "", nil, context.Cause(f.ctx)
		}
		code, id, err := l.place(f, exclude)
		if err != nil {
			if refusal != nil { // what the last edge said is more exact
				err = refusal
			}
			return "", nil, err
		}
		res, sent, err := l.ask(f, code, id)
		switch {
		case err != nil && !sent && sandbox.ClassOf(err) == sandbox.Unavailable:
			refusal = err
		case err != nil && !sent:
			return "", nil, err
		case err != nil:
			return id, nil, err
		case res.GetFailure() != nil && res.GetRetryElsewhere():
			refusal = grpcerr.FromFailure(res.GetFailure())
		case res.GetFailure() != nil:
			return "", nil, grpcerr.FromFailure(res.GetFailure())
		case res.GetSandbox() == nil:
			return id, nil, sandbox.Errorf(sandbox.Internal, "no_result", "node %s answered a create with nothing", code)
		default:
			got, err := sandbox.ParseID(res.GetSandbox().GetId())
			if err != nil || got.Edge() != code {
				return id, nil, sandbox.Errorf(sandbox.Internal, "wrong_result", "node %s answered a create with a sandbox that is not its own", code).WithCause(err)
			}
			if got != id { // it knew the key, from before a list of what it has could be had
				return "", res.GetSandbox(), nil
			}
			return id, res.GetSandbox(), nil
		}
		exclude[code] = true
		l.refused(code)
	}
	return "", nil, refusal
}

func (l *Launcher) refused(code sandbox.EdgeCode) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.overlay.Refused(code)
}

// place chooses an edge and mints the id.
func (l *Launcher) place(f *flight, exclude map[sandbox.EdgeCode]bool) (sandbox.EdgeCode, sandbox.ID, error) {
	nodes := l.o.Nodes()
	l.mu.Lock()
	defer l.mu.Unlock()
	code, err := placement.Choose(nodes, placement.Request{Backend: f.request.Spec.GetBackend(), Exclude: exclude}, placement.K, l.overlay.Pending, l.o.Rand)
	if err != nil {
		return "", "", err
	}
	id := sandbox.NewID(code)
	l.overlay.Place(code, l.o.Now())
	l.ownerLocked(f.request.Caller.Project).Placed(f.key.ticket, id)
	return code, id, nil
}

// ask sends the create. If the flight is abandoned meanwhile, a delete hurries the edge's answer along; the answer is
// waited for all the same, since only after it is certain what there is to undo.
func (l *Launcher) ask(f *flight, code sandbox.EdgeCode, id sandbox.ID) (*edgev1.CreateResult, bool, error) {
	e, err := l.edge(code)
	if err != nil {
		return nil, false, err
	}
	signed, err := l.o.Grants.Grant(f.request.Caller, code)
	if err != nil {
		return nil, false, err
	}
	hurried := make(chan struct{})
	stop := context.AfterFunc(f.ctx, func() {
		defer close(hurried)
		_ = l.recall(e, f, id, false) // the rollback does it again and looks at the result
	})
	defer func() {
		if !stop() {
			<-hurried
		}
	}()
	ctx, cancel := context.WithDeadline(l.ctx, f.deadline.Add(answerGrace))
	defer cancel()
	return e.Create(ctx, &edgev1.CreateSandbox{
		Id: string(id), Spec: f.request.Spec, Layers: f.request.Layers, Network: f.request.Network, IdempotencyKey: f.request.Key, SpecDigest: f.request.Digest,
		Deadline: timestamppb.New(f.deadline), OwnerEpoch: ownerEpoch, Grant: signed,
	})
}

// recall asks the edge once to delete what a flight may have made; with wait it returns when nothing is left.
func (l *Launcher) recall(e Edge, f *flight, id sandbox.ID, wait bool) error {
	ctx, cancel := context.WithTimeout(l.ctx, rollbackCall)
	defer cancel()
	signed, err := l.o.Grants.Grant(f.request.Caller, id.Edge())
	if err != nil {
		return err
	}
	_, err = e.DeleteSandbox(ctx, signed, &edgev1.DeleteSandboxRequest{Id: string(id), Wait: wait, ReasonCode: sandbox.ReasonCanceled})
	return err
}

// rollBack deletes what may be there until the edge confirms that nothing is left: a delete by key waits for that.
func (l *Launcher) rollBack(f *flight, id sandbox.ID) {
	defer l.finish(f)
	e, err := l.edge(id.Edge())
	if err != nil {
		return
	}
	until := time.NewTimer(rollbackFor)
	defer until.Stop()
	for pause := rollbackWait; ; pause = min(2*pause, 2*time.Second) {
		err := l.recall(e, f, id, true)
		if err == nil || sandbox.ClassOf(err) == sandbox.NotFound {
			return
		}
		again := time.NewTimer(pause)
		select {
		case <-again.C:
			continue
		case <-until.C:
		case <-l.ctx.Done():
		}
		again.Stop()
		l.o.Log.Warn("create was not undone; the sandbox's lifetime will end it", "sandbox_id", id, "error", err)
		return
	}
}
