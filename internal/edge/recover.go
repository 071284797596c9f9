package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dsec/internal/edge/journal"
	"dsec/sandbox"
)

// parallelRecovery is of what asks the host only, never aether.
const parallelRecovery = 16

// Recover finds again what an earlier process left, and serves from then on. Sandboxes that were ready and still run are
// reconnected, in the background; all others are ended, with the reason in their terminal record; then each part sweeps what belongs to
// nobody. Errors of single sandboxes are theirs; an error of Recover means that the host is not known.
func (e *Edge) Recover(ctx context.Context) error {
	found := e.found
	e.found = journal.Found{}
	if found.Torn || found.Discarded {
		e.log.Warn("journal was not whole; what it lost is swept", "torn", found.Torn, "foreign", found.Discarded)
	}
	sem, turns := make(chan struct{}, parallelRecovery), make(chan struct{}, parallelLinks)
	var wg sync.WaitGroup
	for id, entry := range found.Entries {
		sem <- struct{}{}
		wg.Go(func() {
			defer func() { <-sem }()
			e.recoverOne(ctx, id, entry, found.SameBoot, turns)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("recovering: %w", err)
	}
	if err := e.sweep(ctx, e.known()); err != nil {
		return err
	}
	e.sweepOutput()
	e.phase.CompareAndSwap(phaseNew, phaseServing)
	e.log.Info("edge serves", "sandboxes", len(e.index.all()), "same_boot", found.SameBoot)
	return nil
}

// recoverOne enters one sandbox of the journal.
func (e *Edge) recoverOne(ctx context.Context, id sandbox.ID, entry *journal.Entry, sameBoot bool, turns chan struct{}) {
	d := e.drivers[entry.Intent.Spec.Backend]
	if d == nil { // the wiring changed: any driver's teardown by id is harmless, the sweep does the rest
		d = e.o.Drivers[0]
	}
	in := e.newInstance(id, entry.Intent, d)
	in.journaled, in.delivered = true, true
	in.life.createBy = entry.Intent.CreatedAt.Add(sandbox.MaxCreateTimeout)
	in.progress.Assume(sandboxSteps.Len())
	if r := entry.Running; r != nil {
		in.made = made{handle: &r.Handle, cgroups: r.Cgroups, network: r.Network, rootfs: r.Rootfs, took: r.Took}
		in.life.state, in.life.readyAt = sandbox.Ready, r.ReadyAt
		in.settleLocked()
	}
	if entry.Network != nil {
		in.net.network = *entry.Network
	}
	e.restoreActivity(in, entry)
	e.index.mu.Lock()
	e.index.enterLocked(in)
	e.index.mu.Unlock()
	switch {
	case entry.Ended != nil:
		e.restoreTerminal(in, *entry.Ended)
	case !sameBoot:
		e.lost(in, entry, sandbox.ReasonHostReset, "the machine restarted")
	case entry.Ending != nil:
		e.lost(in, entry, entry.Ending.Code, entry.Ending.Message)
	case entry.Running == nil:
		e.lost(in, entry, sandbox.ReasonInterrupted, "the node's agent restarted while it was being made")
	default:
		e.reconnect(ctx, in, entry.Network != nil, turns)
	}
}

// restoreActivity continues the idle time where it was: the journal knows the last activity to within a grain, and the
// doubt goes to the sandbox.
func (e *Edge) restoreActivity(in *instance, entry *journal.Entry) {
	last := entry.Activity
	if entry.Running != nil && entry.Running.ReadyAt.After(last) {
		last = entry.Running.ReadyAt
	}
	if last.IsZero() {
		return
	}
	in.recorded.Store(last.UnixNano())
	last = earlier(last.Add(activityGrain(in.intent.Spec.IdleTimeout)), time.Now())
	in.lastUse.Store(last.UnixNano())
}

// lost ends a sandbox that does not live on. What was decided before the restart stays decided.
func (e *Edge) lost(in *instance, entry *journal.Entry, code, message string) {
	if entry.Ending != nil {
		code, message = entry.Ending.Code, entry.Ending.Message
	}
	if sandbox.Ended(code) {
		e.end(in, code, message)
		return
	}
	e.fault(in, code, sandbox.Errorf(sandbox.Unavailable, code, "%s", message), message)
}

// restoreTerminal keeps a terminal record for the rest of its time.
func (e *Edge) restoreTerminal(in *instance, r journal.Reason) {
	in.mu.Lock()
	in.life.reason, in.life.gone = r, sandbox.Ended(r.Code)
	in.life.endedAt = r.At
	in.life.state = sandbox.Failed
	if in.life.gone {
		in.life.state = sandbox.Stopped
	}
	in.settleLocked()
	close(in.gone)
	in.mu.Unlock()
	in.stop()
	e.findKept(in)
	for _, old := range e.index.ended(in) {
		e.forget(old)
	}
	e.schedule(in)
}

// reconnect takes a running sandbox over, or ends it if it does not run any more. replaced: its network rules are not those that
// it was made with.
func (e *Edge) reconnect(ctx context.Context, in *instance, replaced bool, turns chan struct{}) {
	h := *in.made.handle
	status, err := in.driver.Recover(ctx, h)
	if err != nil {
		e.log.Warn("sandbox cannot be found again", "sandbox_id", in.id, "error", err)
		e.fault(in, sandbox.ReasonGuestDied, err, "it could not be found again after the node's agent restarted")
		return
	}
	if !status.Running {
		code, message := e.verdict(in, status.Exit)
		if status.Exit.Code == -1 && status.Exit.Signal == 0 { // nobody was there to see how
			code, message = sandbox.ReasonKilled, "its processes ended while the node's agent was away"
		}
		e.fault(in, code, nil, message)
		return
	}
	if _, err := e.o.Layers.Acquire(ctx, in.id, in.intent.Sources); err != nil { // hold what it stands on
		e.fault(in, sandbox.ReasonGuestDied, err, "its layers could not be found again after the node's agent restarted")
		return
	}
	e.admission.adopt(in)
	if len(in.net.network.Rules) > 0 || replaced {
		e.restoreNetwork(ctx, in)
	}
	e.spawn(func() { e.watchProcess(in, h) })
	e.beginLink(in, h, turns)
	e.schedule(in)
}

// known is every id that has or may have something on the host: live ones, and those whose teardown is under way.
func (e *Edge) known() map[sandbox.ID]bool {
	keep := make(map[sandbox.ID]bool)
	for _, in := range e.index.all() {
		if !in.snapshot().life.state.Terminal() {
			keep[in.id] = true
		}
	}
	return keep
}

// sweep removes from the host what belongs to nobody: processes first, then what they stood on.
func (e *Edge) sweep(ctx context.Context, keep map[sandbox.ID]bool) error {
	var errs []error
	run := func(part string, f func(context.Context, map[sandbox.ID]bool) ([]sandbox.ID, error)) {
		ids, err := f(ctx, keep)
		if len(ids) > 0 {
			e.log.Info("swept what belonged to nobody", "part", part, "sandboxes", len(ids))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sweeping %s: %w", part, err))
		}
	}
	for _, d := range e.o.Drivers {
		run("driver "+d.Name(), d.Sweep)
	}
	run("control groups", e.o.Cgroups.Sweep)
	run("network", e.o.Networks.Sweep)
	run("uppers", e.o.Uppers.Sweep)
	run("layers", e.o.Layers.Sweep)
	return errors.Join(errs...)
}

// sweepOutput removes kept output whose sandbox is not known, or has ended without a record of its commands.
func (e *Edge) sweepOutput() {
	dir := filepath.Join(e.o.DataDir, "output")
	entries, err := os.ReadDir(dir)
	if err != nil {
		e.log.Warn("kept output cannot be listed", "error", err)
		return
	}
	keep := e.known()
	for _, in := range e.index.all() {
		keep[in.id] = keep[in.id] || in.snapshot().guest != nil
	}
	for _, d := range entries {
		if keep[sandbox.ID(d.Name())] {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, d.Name())); err != nil {
			e.log.Warn("kept output cannot be removed", "name", d.Name(), "error", err)
		}
	}
}
