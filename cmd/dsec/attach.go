package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

const (
	// killLimit bounds ending a command after an interrupt.
	killLimit = 10 * time.Second
	// killDelay is between attempts to kill a command that may not have been started yet.
	killDelay = 100 * time.Millisecond
)

// An attachment is one command that we start and stay with until it ends.
type attachment struct {
	*console
	sb      *client.Sandbox
	command *client.Command
	what    *dsecv1.Command
	capture bool   // collect the output in the result instead of passing it on
	keys    []byte // that leave a terminal
	input   bool   // of ours goes to the terminal
}

func (c *console) attach(sb *client.Sandbox, what *dsecv1.Command, capture bool) *attachment {
	return &attachment{console: c, sb: sb, command: sb.Command(client.NewKey()), what: what, capture: capture}
}

func (a *attachment) start(ctx context.Context) error {
	k, err := a.sb.StartWithID(ctx, a.what, a.command.ID)
	if err == nil {
		a.command = k
	}
	return err
}

// run starts the command, passes input and output through, and returns its result. If ctx ends, or nobody reads our output
// any more, the command and all that it started are killed.
func (a *attachment) run(ctx context.Context) (*dsecv1.CommandResult, error) {
	err := a.start(ctx)
	started := err == nil
	var result *dsecv1.CommandResult
	switch {
	case !started:
	case a.what.GetTerminal() != nil:
		result, err = a.atTerminal(ctx)
		if isDetached(err) || ctx.Err() == nil && sandbox.ClassOf(err) == sandbox.Unavailable {
			return nil, err // it stays
		}
	default:
		result, err = a.follow(ctx)
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
func (a *attachment) follow(ctx context.Context) (result *dsecv1.CommandResult, err error) {
	g, gctx := errgroup.WithContext(ctx)
	ended := make(chan struct{})
	if a.what.GetStdinFollows() {
		g.Go(func() error { return a.feed(gctx, ended) })
	}
	g.Go(func() (err error) {
		defer close(ended)
		if !a.capture {
			if err := a.copyStreams(gctx); err != nil {
				return err
			}
		}
		result, err = a.command.Wait(gctx)
		return err
	})
	if err := g.Wait(); err != nil || !a.capture {
		return result, err
	}
	return a.command.Get(ctx, 0, client.CaptureLimit)
}

func (a *attachment) copyStreams(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, name := range []string{client.Stdout, client.Stderr} {
		g.Go(func() error { return a.copyOutput(gctx, a.command, name, client.OutputOptions{Follow: true}) })
	}
	return g.Wait()
}

// copyOutput copies a stream of a command to our own of that name. Of an output over the platform's cap the middle is
// dropped: that is said, and the copy goes on at what is kept of the end.
func (c *console) copyOutput(ctx context.Context, k *client.Command, name string, o client.OutputOptions) error {
	to := c.stdout
	if name == client.Stderr {
		to = c.stderr
	}
	o.Gap = func(missing int64) {
		c.say("%d bytes of %s are missing here: of a long output only the beginning and the end are kept", missing, name)
	}
	out := k.Output(ctx, name, o)
	defer out.Close()
	_, err := io.Copy(to, out)
	return err
}

// kill ends the command. If it may not have been started yet, it is tried again for a while: the request that starts it
// may still be on its way. Failures are said but change nothing: the sandbox's lifetime ends it.
func (a *attachment) kill(started bool) {
	ctx, cancel := a.cleanup(killLimit)
	defer cancel()
	for attempt := 0; ; attempt++ {
		err := a.command.KillOnce(ctx, 0)
		if err == nil {
			return
		}
		if sandbox.ClassOf(err) != sandbox.NotFound {
			a.say("the command could not be killed: %s; it ends with the sandbox: `dsec rm %s`", userMessage(err), a.sb.ID)
			return
		}
		if started || attempt == 3 || a.pause(ctx, killDelay) != nil {
			return // it has ended, or never began
		}
	}
}

// feed passes our standard input to the command until it ends. A command that does not want its input ends the feed, not
// the attachment.
//
// The goroutine that reads our standard input is not waited for: a read of a terminal cannot be interrupted.
func (a *attachment) feed(ctx context.Context, ended <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() { // ends the request that waits for a command which has ended
		select {
		case <-ended:
			cancel()
		case <-stop:
		}
	}()
	pieces := make(chan piece)
	go readPieces(ctx, a.stdin, pieces)
	in := a.command.Stdin(ctx, 0)
	for {
		select {
		case <-ctx.Done():
			return nil // whoever ended it says why
		case p := <-pieces:
			closing := p.err != nil
			if closing && !errors.Is(p.err, io.EOF) {
				// Before it is closed: a command that ends at once cancels us, and nobody would hear of it.
				a.say("reading standard input: %s; the command sees its end here", p.err)
			}
			var err error
			if closing {
				err = in.Finish(p.data)
			} else {
				_, err = in.Write(p.data)
			}
			switch {
			case ctx.Err() != nil || client.RefusesInput(err):
				return nil
			case err != nil:
				return err
			case closing:
				return nil
			}
		}
	}
}

// A piece is what one read of our standard input gave.
type piece struct {
	data []byte
	err  error // io.EOF at the end
}

// readPieces reads r to its end or until ctx ends.
func readPieces(ctx context.Context, r io.Reader, to chan<- piece) {
	for {
		buf := make([]byte, client.StdinChunk)
		n, err := r.Read(buf)
		if n == 0 && err == nil {
			continue
		}
		select {
		case to <- piece{buf[:n], err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// outcome says what is special about the end of a command and makes dsec's exit code of it.
func (a *attachment) outcome(ctx context.Context, r *dsecv1.CommandResult) error {
	switch {
	case r.GetOomKilled():
		a.say("the command was killed because it ran out of memory; give the sandbox more with --memory")
	case r.GetTimedOut() && r.GetNoOutput() && a.what.GetNoOutputTimeoutSeconds() == 0:
		a.say("the command was killed because it had written nothing for too long")
	case r.GetTimedOut() && r.GetNoOutput():
		a.say("the command was killed because it had written nothing for %v", seconds(a.what.GetNoOutputTimeoutSeconds()))
	case r.GetTimedOut() && a.what.GetTimeoutSeconds() == 0:
		a.say("the command was killed after its time-out")
	case r.GetTimedOut():
		a.say("the command was killed after its time-out of %v", seconds(a.what.GetTimeoutSeconds()))
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

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// whyKilled asks for the fate of the sandbox.
func (a *attachment) whyKilled(ctx context.Context) string {
	sb, err := a.sb.Get(ctx)
	if err != nil || sb.GetState() == dsecv1.State_STATE_READY {
		return "the command was killed by a request"
	}
	return fmt.Sprintf("the command was killed because the sandbox is %s", stateText(sb))
}
