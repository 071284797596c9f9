package edge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"dsec/internal/edge/failpoint"
	"dsec/internal/edge/journal"
	"dsec/internal/edge/steps"
	"dsec/sandbox"
)

// setupGrace is how long a teardown waits for a setup that was cancelled to return.
const setupGrace = 10 * time.Second

// Failpoints around the journal's writes.
var journalPoints = map[journal.Op]*failpoint.Point{
	journal.OpIntent:    failpoint.New("journal.intent"),
	journal.OpRunning:   failpoint.New("journal.running"),
	journal.OpNetwork:   failpoint.New("journal.network"),
	journal.OpActivity:  failpoint.New("journal.activity"),
	journal.OpEnding:    failpoint.New("journal.ending"),
	journal.OpEnded:     failpoint.New("journal.ended"),
	journal.OpForgotten: failpoint.New("journal.forgotten"),
}

func (e *Edge) record(ctx context.Context, r journal.Record) error {
	return journalPoints[r.Op].Around(ctx, func() error { return e.journal.Append(r) })
}

// event raises one on in's life and carries out what it demands. It returns when the record is written, not when the
// teardown is done.
func (e *Edge) event(in *instance, raise func(l *life, now time.Time) effects) {
	in.events.Lock()
	defer in.events.Unlock()
	in.mu.Lock()
	was := in.life.shown()
	fx := raise(&in.life, time.Now())
	if in.life.shown() != was && fx&recordEnded == 0 { // the end is told when it is recorded
		defer e.watchers.changed(in)
	}
	if fx&cancelSetup != 0 && in.cancel != nil {
		in.cancel()
	}
	if fx&beginTeardown != 0 {
		if in.tearing {
			fx &^= beginTeardown
		}
		in.tearing = true
		in.settleLocked()
	}
	reason, journaled := in.life.reason, in.journaled
	in.mu.Unlock()

	if fx&freeQuota != 0 {
		e.release(in)
	}
	if fx&recordEnding != 0 {
		e.log.Info("sandbox ends", "sandbox_id", in.id, "reason", reason.Code, "message", reason.Message)
		if journaled {
			if err := e.record(e.ctx, journal.Record{Op: journal.OpEnding, ID: in.id, Reason: &reason}); err != nil {
				// It is torn down all the same: after a restart it would be found dead.
				e.log.Error("ending is not recorded", "sandbox_id", in.id, "error", err)
			}
		}
	}
	if fx&beginTeardown != 0 {
		e.spawn(func() { e.teardown(in) })
	}
	if fx&forget != 0 {
		e.forget(in)
		return
	}
	e.schedule(in)
}

func (e *Edge) end(in *instance, code, message string) {
	e.event(in, func(l *life, now time.Time) effects { return l.end(now, code, message) })
}

func (e *Edge) fault(in *instance, code string, cause error, message string) {
	in.mu.Lock()
	if in.cause == nil && in.life.state == sandbox.Creating {
		in.cause = cause
	}
	in.mu.Unlock()
	e.event(in, func(l *life, now time.Time) effects { return l.fault(now, code, message) })
}

// setup makes the sandbox. It runs in a goroutine of its own; ctx ends at the create's deadline or when the sandbox
// shall be gone.
func (e *Edge) setup(ctx context.Context, in *instance) {
	err := e.setupSteps(ctx, in)
	if err == nil {
		e.becomeReady(in)
	}
	in.mu.Lock()
	close(in.setupDone)
	abandoned := in.abandoned
	in.mu.Unlock()
	if abandoned {
		e.tearLate(in)
		return
	}
	if err != nil {
		code, message := faultOf(err)
		if errors.Is(ctx.Err(), context.DeadlineExceeded) && code != sandbox.ReasonProbeFailed {
			code = sandbox.ReasonStartTimeout
		}
		e.log.Warn("sandbox failed to start", "sandbox_id", in.id, "error", err)
		e.fault(in, code, err, message)
	}
}

// becomeReady tells who waits; if the sandbox was ended in the meantime, its teardown is on its way.
func (e *Edge) becomeReady(in *instance) {
	e.event(in, func(l *life, now time.Time) effects {
		if l.ready(now) {
			in.lastUse.Store(now.UnixNano())
			in.recorded.Store(now.UnixNano())
			in.settleLocked()
		}
		return 0
	})
	e.refreshNetwork(in) // names may have changed while it was being made
}

// tearLate is for a setup that returned after teardown had given up waiting for it: what it made since is torn down once
// more, when the ordinary teardown is done.
func (e *Edge) tearLate(in *instance) {
	select {
	case <-in.gone:
	case <-e.ctx.Done():
		return // the next start sweeps it
	}
	in.progress.Assume(sandboxSteps.Len())
	for n := 1; ; n++ {
		ctx, cancel := detached(e.ctx, sandbox.StoppingDeadline)
		err := sandboxSteps.Teardown(ctx, &making{e: e, in: in}, &in.progress)
		cancel()
		if err == nil {
			return
		}
		e.log.Warn("late teardown failed", "sandbox_id", in.id, "attempt", n, "error", err)
		select {
		case <-time.After(teardownBackoff(n)):
		case <-e.ctx.Done():
			return
		}
	}
}

func (e *Edge) setupSteps(ctx context.Context, in *instance) error {
	if err := e.awaitNames(ctx, in, in.intent.Network, nil); err != nil { // others need not wait for name servers
		return err
	}
	if err := e.awaitPressure(ctx); err != nil {
		return err
	}
	select {
	case e.setups <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	leave := sync.OnceFunc(func() { <-e.setups })
	defer leave()
	return sandboxSteps.Setup(ctx, &making{e, in, leave}, &in.progress)
}

// faultOf is what a user is told of a failed setup.
func faultOf(err error) (code, message string) {
	if e := sandbox.AsError(err); e.Reason == sandbox.ReasonProbeFailed {
		return e.Reason, e.Message
	}
	where := "before its first step"
	var se *steps.Error
	if errors.As(err, &se) {
		where = "in step " + se.Step
	}
	return sandbox.ReasonStartFailed, fmt.Sprintf("it could not be started: %s: %s", where, sandbox.AsError(err).Message)
}

// teardown is one attempt, and the record of its outcome.
func (e *Edge) teardown(in *instance) {
	e.awaitSetup(in)
	e.teardowns <- struct{}{}
	ctx, cancel := detached(e.ctx, sandbox.StoppingDeadline)
	err := sandboxSteps.Teardown(ctx, &making{e: e, in: in}, &in.progress)
	cancel()
	<-e.teardowns
	trouble := ""
	if err != nil {
		trouble = troubleOf(err)
		e.log.Warn("teardown failed and will be repeated", "sandbox_id", in.id, "error", err)
	}
	var done bool
	e.event(in, func(l *life, now time.Time) effects {
		in.tearing = false
		fx := l.torn(now, trouble)
		done = fx&recordEnded != 0
		return fx
	})
	if done {
		e.finish(in)
	}
}

// awaitSetup gives a cancelled setup time to return. One that hangs cannot block the end of its sandbox.
func (e *Edge) awaitSetup(in *instance) {
	in.mu.Lock()
	done := in.setupDone
	in.mu.Unlock()
	if done == nil {
		return
	}
	t := time.NewTimer(setupGrace)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		in.mu.Lock()
		in.abandoned = true // or it returns just now, and tears down once more than needed
		in.mu.Unlock()
		e.log.Warn("setup hangs; tearing down beside it", "sandbox_id", in.id)
	}
}

func troubleOf(err error) string {
	var se *steps.Error
	if errors.As(err, &se) {
		return "step " + se.Step + ": " + sandbox.AsError(se.Err).Message
	}
	return sandbox.AsError(err).Message
}

// finish is for a sandbox of which nothing is left.
func (e *Edge) finish(in *instance) {
	in.mu.Lock()
	reason, journaled, cause := in.life.reason, in.journaled, in.cause
	in.made.handle = nil
	in.mu.Unlock()
	if g, ok := in.snapshot().guest.(keeper); ok {
		g.Archive() // before its end is recorded: after that, the next edge relies on it
	} else if !refusedByAdmission(cause) {
		e.findKept(in)
	}
	if journaled {
		if err := e.record(e.ctx, journal.Record{Op: journal.OpEnded, ID: in.id, Reason: &reason}); err != nil {
			e.log.Error("end is not recorded", "sandbox_id", in.id, "error", err)
		}
	}
	if refusedByAdmission(cause) {
		e.forget(in) // nothing was ever made, and a full node must not fill itself with records of refusals
	} else {
		for _, old := range e.index.ended(in) {
			e.forget(old)
		}
	}
	close(in.gone)
	e.watchers.changed(in)
	in.stop()
	in.closeInward()
}

// findKept gives a sandbox that has ended what an earlier edge kept of it.
func (e *Edge) findKept(in *instance) {
	if e.o.Ended == nil {
		return
	}
	g, err := e.o.Ended(GuestOptions{ID: in.id, OutputDir: e.outputDir(in.id), Log: e.log.With("sandbox_id", in.id)})
	if errors.Is(err, fs.ErrNotExist) {
		return // it had no commands
	}
	if err != nil {
		e.log.Warn("what is kept of an ended sandbox cannot be read", "sandbox_id", in.id, "error", err)
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.guest == nil && !in.forgotten {
		in.guest = g
	}
}

// A keeper is a Guest that keeps output.
type keeper interface {
	Archive() // the sandbox has ended: to where it costs less
	Forget()  // drop it
}

// forget drops a terminal record and the output that was kept with it. Its files are removed later: there may be many, and
// the one goroutine that waits for times is among those who call this.
func (e *Edge) forget(in *instance) {
	if e.index.remove(in) {
		defer e.later(debug.FreeOSMemory) // what thousands needed would stay with this process for minutes
	}
	e.index.prune()
	in.mu.Lock()
	journaled, g := in.journaled, in.guest
	in.guest = nil // with all that it remembers
	in.forgotten = true
	e.setWakeup(in.id, time.Time{})
	in.mu.Unlock()
	e.later(func() {
		if g, ok := g.(keeper); ok {
			g.Forget()
		}
		if err := os.RemoveAll(e.outputDir(in.id)); err != nil {
			e.log.Warn("kept output cannot be removed", "sandbox_id", in.id, "error", err)
		}
	})
	if !journaled {
		return
	}
	if err := e.record(e.ctx, journal.Record{Op: journal.OpForgotten, ID: in.id}); err != nil {
		e.log.Warn("forgetting is not recorded", "sandbox_id", in.id, "error", err)
	}
}

// prune lets go of those that were forgotten. Most are forgotten in the order of their end.
func (x *index) prune() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for len(x.terminal) > 0 && x.byID[x.terminal[0].id] != x.terminal[0] {
		x.terminal[0] = nil
		x.terminal = x.terminal[1:]
	}
}

// schedule sets when in's life must be looked at next.
func (e *Edge) schedule(in *instance) {
	u := in.use()
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.forgotten { // by another's end, since its own
		e.setWakeup(in.id, in.life.wake(time.Now(), u))
	}
}

func (e *Edge) setWakeup(id sandbox.ID, at time.Time) {
	e.wakeMu.Lock()
	changed := e.wakeups.set(id, at)
	e.wakeMu.Unlock()
	if changed {
		select {
		case e.woken <- struct{}{}:
		default:
		}
	}
}

// runWakeups is the one goroutine that waits for times.
func (e *Edge) runWakeups() {
	const batch = 256
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		e.wakeMu.Lock()
		due := e.wakeups.due(time.Now(), batch)
		next := e.wakeups.next()
		e.wakeMu.Unlock()
		for _, id := range due {
			e.wake(id)
		}
		if len(due) > 0 {
			continue
		}
		if next.IsZero() {
			timer.Reset(time.Hour)
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-timer.C:
		case <-e.woken:
		case <-e.ctx.Done():
			return
		}
	}
}

func (e *Edge) wake(id sandbox.ID) {
	e.index.mu.RLock()
	in := e.index.byID[id]
	e.index.mu.RUnlock()
	if in == nil {
		return
	}
	u := in.use()
	if late := in.probing.late(); late != nil {
		in.mu.Lock()
		over := in.life.state == sandbox.Creating && !time.Now().Before(in.life.createBy)
		in.mu.Unlock()
		if over {
			e.fault(in, late.Reason, late, late.Message)
			return
		}
	}
	e.event(in, func(l *life, now time.Time) effects { return l.tick(now, u) })
}
