package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"dsec/internal/edge/journal"
	"dsec/sandbox"
)

// Shutdown ends every sandbox and removes everything that the edge and its parts made on the host, the journal too. An
// error says what is left; the next Recover finds it.
func (e *Edge) Shutdown(ctx context.Context) error {
	e.phase.Store(phaseDraining)
	e.index.close() // what is in by now is all
	for _, in := range e.index.all() {
		e.end(in, sandbox.ReasonNodeStopped, "the platform was stopped on this node")
	}
	var errs []error
	for _, in := range e.index.all() {
		select {
		case <-in.gone:
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("sandbox %s: %s", in.id, in.snapshot().life.trouble))
		}
	}
	if len(errs) > 0 {
		return errors.Join(append(errs, e.stop(ctx), e.journal.Close())...)
	}
	e.phase.Store(phaseClosed)
	errs = append(errs, e.stop(ctx), e.sweep(ctx, nil))
	for _, part := range []Sweeper{e.o.Cgroups, e.o.Networks, e.o.Layers, e.o.Uppers} {
		errs = append(errs, part.Close(ctx))
	}
	errs = append(errs, os.RemoveAll(filepath.Join(e.o.DataDir, "output")))
	if err := errors.Join(errs...); err != nil {
		return errors.Join(err, e.journal.Close())
	}
	e.names.Remove()
	return e.journal.Remove()
}

// Detach stops serving and leaves the sandboxes running for the next process. What is half made is ended, as far as ctx
// allows; the rest of that the next Recover does.
func (e *Edge) Detach(ctx context.Context) error {
	e.phase.Store(phaseClosed)
	e.index.close()
	for _, in := range e.index.all() {
		s := in.snapshot()
		if s.life.state == sandbox.Creating {
			e.fault(in, sandbox.ReasonInterrupted, nil, "the node's agent stopped while it was being made")
		}
	}
	for _, in := range e.index.all() {
		if !e.settleForDetach(ctx, in) {
			break
		}
	}
	errs := []error{e.stop(ctx)} // before the guests: their watchers would take a closed client for a dead one
	for _, in := range e.index.all() {
		if s := in.snapshot(); s.life.state == sandbox.Ready && s.guest != nil {
			errs = append(errs, s.guest.Close())
		}
	}
	return errors.Join(append(errs, e.journal.Close())...)
}

// settleForDetach waits for an end that is under way, and writes down when a live sandbox was last used. It reports
// whether ctx allows more.
func (e *Edge) settleForDetach(ctx context.Context, in *instance) bool {
	switch in.snapshot().life.state {
	case sandbox.Stopping:
		select {
		case <-in.gone:
		case <-ctx.Done():
			return false
		}
	case sandbox.Ready:
		last := time.Unix(0, in.lastUse.Load())
		if err := e.record(e.ctx, journal.Record{Op: journal.OpActivity, ID: in.id, At: last}); err != nil {
			e.log.Warn("activity is not recorded", "sandbox_id", in.id, "error", err)
		}
	}
	return true
}

// stop ends the edge's goroutines and waits for them as long as ctx lets it.
func (e *Edge) stop(ctx context.Context) error {
	e.spawnMu.Lock()
	e.stopped = true
	e.spawnMu.Unlock()
	e.cancel()
	done := make(chan struct{})
	go func() {
		e.wg.Wait()
		e.names.Close()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the edge's work to end: %w", ctx.Err())
	}
}
