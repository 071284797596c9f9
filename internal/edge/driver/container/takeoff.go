package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// startDeadline bounds a start whose context has no deadline.
const startDeadline = 30 * time.Second

// A takeoff follows stage's reports: the pid of the sandbox's PID 1, then the end of the socket, which says that it has become
// aether, or a failure.
type takeoff struct {
	driver  *Driver
	id      sandbox.ID
	rec     *record
	control *os.File
	process *linux.Process
}

func (t *takeoff) follow(ctx context.Context) error {
	if err := t.control.SetReadDeadline(time.Now().Add(startDeadline)); err != nil {
		return fmt.Errorf("set deadline: %w", err)
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = t.control.SetReadDeadline(time.Unix(1, 0))
		close(fired)
	})
	defer func() {
		if !stop() {
			<-fired // or it would cut short what is read later
		}
	}()
	for {
		r, err := readReport(t.control)
		switch {
		case errors.Is(err, io.EOF):
			return ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded):
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return sandbox.Errorf(sandbox.Internal, "start_stuck", "the sandbox did not start within %v; the node's log has the details", startDeadline)
		case err != nil:
			return err
		case r.kind == reportFailure:
			return r.failure()
		case r.kind == reportPid && t.process == nil:
			if err := t.clear(ctx, int(r.value)); err != nil {
				return err
			}
		default:
			return fmt.Errorf("stage reported %d out of turn", r.kind)
		}
	}
}

// clear records the process and lets it go. It is our child, so its number is its own until we reap it.
func (t *takeoff) clear(ctx context.Context, pid int) error {
	process, err := linux.OpenProcess(pid)
	if err != nil {
		return err
	}
	t.process = process
	t.driver.at("cloned")
	start, err := linux.StartTime(pid)
	if err != nil {
		return err
	}
	if err := linux.ChooseInOOM(pid); err != nil { // the edge is spared, what hostile code runs in is not
		return err
	}
	t.rec.Pid, t.rec.Start = pid, start
	if err := t.driver.records.update(t.id, *t.rec); err != nil {
		return err
	}
	t.driver.at("recorded")
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, err := t.control.Write([]byte{1}); err != nil && !linux.IsBrokenPipe(err) { // then it has failed, and said so
		return fmt.Errorf("let aether start: %w", err)
	}
	return nil
}

// giveUp ends a start that failed. stage's first process does not wait for anything and is not killed: it may have made PID 1 and
// not said so yet, and then nobody would reap that. PID 1 ends when nothing more can come from us. The error tells how it
// had ended before, if that was not by itself.
func (t *takeoff) giveUp(stagePid int) error {
	shutErr := linux.ShutdownWrite(t.control)
	exit, err := linux.Reap(stagePid)
	if err == nil && exit.Signal != 0 {
		err = fmt.Errorf("stage ended by signal %d", exit.Signal)
	}
	if t.process == nil {
		t.findProcess()
	}
	return errors.Join(shutErr, err, t.abort())
}

// findProcess reads what stage reported after nobody listened any more.
func (t *takeoff) findProcess() {
	const patience = time.Second
	if err := t.control.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return
	}
	for {
		r, err := readReport(t.control)
		if err != nil {
			return
		}
		if r.kind == reportPid {
			t.process, _ = linux.OpenProcess(int(r.value))
			return
		}
	}
}

func (t *takeoff) abort() error {
	if t.process == nil {
		return nil
	}
	defer t.process.Close()
	_ = linux.Kill(t.process.Pid) // our child, not reaped: the right one. Dead already, it keeps its status
	exit, err := linux.Reap(t.process.Pid)
	if err == nil && exit.Signal != 0 && exit.Signal != killSignal {
		err = fmt.Errorf("the sandbox's first process ended by signal %d", exit.Signal)
	}
	return err
}

// killSignal is SIGKILL, which is also what abort sends.
const killSignal = 9

// at tells tests that a point is reached.
func (d *Driver) at(point string) {
	if d.reached != nil {
		d.reached(point)
	}
}
