package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

const (
	// pollWait is how long one request waits for the end of a command, in seconds: short enough for a vanished
	// connection to be noticed.
	pollWait = 20
	// captureLimit is how much of a stream --json prints, in bytes: the most that the API inlines.
	captureLimit = 1 << 20
	// killLimit bounds ending a command after an interrupt.
	killLimit = 10 * time.Second
)

// An attachment is one command that we start and stay with until it ends.
type attachment struct {
	*console
	cl        *client
	sandboxID string
	commandID string
	command   *dsecv1.Command
	capture   bool // collect the output in the result instead of passing it on
}

// run starts the command, passes input and output through, and returns its result. If ctx ends, or nobody reads our output
// any more, the command and all that it started are killed.
func (a *attachment) run(ctx context.Context) (*dsecv1.CommandResult, error) {
	started := false
	res, err := invoke(ctx, a.cl, a.cl.sandboxes.Exec, &dsecv1.ExecRequest{
		SandboxId: a.sandboxID, CommandId: a.commandID, Command: a.command, InlineLimit: 1,
	})
	var result *dsecv1.CommandResult
	if err == nil {
		started = true
		result = res.GetResult()
		if id := result.GetCommandId(); id != "" {
			a.commandID = id
		}
		result, err = a.follow(ctx, result)
	}
	if err != nil && (ctx.Err() != nil || started || sandbox.ClassOf(err) == sandbox.Unavailable) {
		a.kill(started)
	}
	if !started {
		err = asStartFailure(err)
	}
	return result, err
}

// follow stays with a command that has been started.
func (a *attachment) follow(ctx context.Context, result *dsecv1.CommandResult) (*dsecv1.CommandResult, error) {
	g, gctx := errgroup.WithContext(ctx)
	ended := make(chan struct{})
	stdout := a.stream("stdout")
	stderr := a.stream("stderr")
	if a.command.GetStdinFollows() {
		g.Go(func() error { return a.feed(gctx, ended) })
	}
	g.Go(func() error {
		defer close(ended)
		if !a.capture {
			streams, sctx := errgroup.WithContext(gctx)
			streams.Go(func() error { return a.copyAll(sctx, stdout, true) })
			streams.Go(func() error { return a.copyAll(sctx, stderr, true) })
			if err := streams.Wait(); err != nil {
				return err
			}
		}
		var err error
		result, err = a.awaitEnd(gctx)
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	if a.capture {
		return result, nil
	}
	// A stream that something between closed early looks like one that ended. The sizes tell.
	return result, errors.Join(a.complete(ctx, stdout, result.GetStdout()), a.complete(ctx, stderr, result.GetStderr()))
}

func (a *attachment) stream(name string) *outputStream {
	s := &outputStream{sandboxID: a.sandboxID, commandID: a.commandID, name: name, to: a.stdout}
	if name == "stderr" {
		s.to = a.stderr
	}
	return s
}

// awaitEnd waits until the command has ended.
func (a *attachment) awaitEnd(ctx context.Context) (*dsecv1.CommandResult, error) {
	for {
		res, err := a.get(ctx, pollWait)
		if err != nil {
			return nil, err
		}
		if !res.GetRunning() {
			return res, nil
		}
	}
}

func (a *attachment) get(ctx context.Context, wait float64) (*dsecv1.CommandResult, error) {
	limit := int32(1)
	if a.capture {
		limit = captureLimit
	}
	res, err := invoke(ctx, a.cl, a.cl.sandboxes.GetCommand, &dsecv1.GetCommandRequest{
		SandboxId: a.sandboxID, CommandId: a.commandID, WaitSeconds: wait, InlineLimit: limit,
	})
	return res.GetResult(), err
}

// copyAll copies a stream. Of an output over the platform's cap the middle is dropped: that is said, and the copy goes on at
// what is kept of the end.
func (a *attachment) copyAll(ctx context.Context, s *outputStream, follow bool) error {
	for {
		err := s.copy(ctx, a.cl, follow)
		next, dropped := droppedUntil(err)
		if !dropped || next <= s.offset {
			return err
		}
		a.say("%d bytes of %s are missing here: of a long output only the beginning and the end are kept", next-s.offset, s.name)
		s.offset = next
	}
}

// complete fetches what a stream lacks of its size.
func (a *attachment) complete(ctx context.Context, s *outputStream, out *dsecv1.Output) error {
	if s.offset >= out.GetSize() {
		return nil
	}
	if err := a.copyAll(ctx, s, false); err != nil {
		return err
	}
	if s.offset < out.GetSize() {
		return sandbox.Errorf(sandbox.DataLoss, "output_incomplete",
			"%d of %d bytes of the command's %s could not be had; `dsec logs` may still have them", out.GetSize()-s.offset, out.GetSize(), s.name)
	}
	return nil
}

// kill ends the command. If it may not have been started yet, it is tried again for a while: the request that starts it
// may still be on its way. Failures are said but change nothing: the sandbox's lifetime ends it.
func (a *attachment) kill(started bool) {
	ctx, cancel := a.cleanup(killLimit)
	defer cancel()
	for attempt := 0; ; attempt++ {
		_, err := invokeOnce(ctx, a.cl, a.cl.sandboxes.KillCommand, &dsecv1.KillCommandRequest{SandboxId: a.sandboxID, CommandId: a.commandID})
		if err == nil {
			return
		}
		if sandbox.ClassOf(err) != sandbox.NotFound {
			a.say("the command could not be killed: %s; it ends with the sandbox: `dsec rm %s`", userMessage(err), a.sandboxID)
			return
		}
		if started || attempt == 3 || a.cl.sleep(ctx, firstDelay) != nil {
			return // it has ended, or never began
		}
	}
}

// outcome says what is special about the end of a command and makes dsec's exit code of it.
func (a *attachment) outcome(ctx context.Context, r *dsecv1.CommandResult) error {
	switch {
	case r.GetOomKilled():
		a.say("the command was killed because it ran out of memory; give the sandbox more with --memory")
	case r.GetTimedOut():
		a.say("the command was killed after its time-out of %v", time.Duration(a.command.GetTimeoutSeconds()*float64(time.Second)))
	case r.GetKilled():
		a.say("%s", a.whyKilled(ctx))
	}
	switch {
	case r.GetTimedOut():
		return &exitError{code: exitTimeout}
	case r.GetExitCode() != 0:
		return &exitError{code: int(r.GetExitCode()) & 0xff}
	}
	return nil
}

// whyKilled asks for the fate of the sandbox.
func (a *attachment) whyKilled(ctx context.Context) string {
	res, err := invokeOnce(ctx, a.cl, a.cl.sandboxes.GetSandbox, &dsecv1.GetSandboxRequest{Id: a.sandboxID})
	if err != nil || res.GetSandbox().GetState() == dsecv1.State_STATE_READY {
		return "the command was killed by a request"
	}
	return fmt.Sprintf("the command was killed because the sandbox is %s", stateText(res.GetSandbox()))
}
