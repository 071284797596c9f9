package main

import (
	"context"
	"errors"
	"io"
	"os"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

const detachHelp = `With -it the command has a terminal: keys, Ctrl-C among them, go to it, and the window's size follows ours. ctrl-p,ctrl-q
leaves it running, see --detach-keys; ` + "`dsec attach`" + ` goes on with it. A connection that breaks is resumed.`

// replayed is how much of earlier output an attachment to a terminal begins with, in bytes.
const replayed = 64 << 10

// ttyFlags are the flags of a command that may have a terminal.
type ttyFlags struct {
	tty        bool
	detachKeys string
}

func (o *ttyFlags) register(f *flagSet) {
	f.BoolVar(&o.tty, "tty", false, "give the command a terminal; with -i it is ours")
	f.letter("t", "tty")
	registerDetachKeys(f, &o.detachKeys)
}

func registerDetachKeys(f *flagSet, to *string) {
	f.StringVar(to, "detach-keys", defaultDetachKeys, "`KEYS` that leave a terminal and let its command run; \"\" = none")
}

// keys checks that a terminal is possible.
func (o *ttyFlags) keys(c *console, interactive, asJSON bool) ([]byte, error) {
	switch {
	case o.tty && asJSON:
		return nil, usagef("-t contradicts --json: a terminal's output is for a screen")
	case o.tty && interactive && c.screen == nil:
		return nil, usagef("standard input is not a terminal, which -it needs; leave -t out to pass it on as it is")
	}
	return parseKeys(o.detachKeys)
}

// newTerminal is a terminal like ours.
func (c *console) newTerminal() *dsecv1.Terminal {
	t := &dsecv1.Terminal{Term: c.getenv("TERM")}
	s := c.screen
	if f, ok := c.stdout.(*os.File); ok && s == nil {
		s = screenOf(f)
	}
	if s != nil {
		rows, cols := s.size()
		t.Rows, t.Cols = uint32(rows), uint32(cols)
	}
	return t
}

// A terminalView is a command's terminal on our screen.
type terminalView struct {
	*console
	command *client.Command
	keys    []byte // that detach
	input   bool   // our keys are the command's
	from    int64  // first byte of the output
	typed   int64  // how much input it has had
}

// run shows the terminal until its command has ended, or the keys that detach are typed (errDetached), or ctx ends.
func (v *terminalView) run(ctx context.Context) (*dsecv1.CommandResult, error) {
	if v.input {
		if err := v.raw.enter(); err != nil {
			return nil, err
		}
		defer v.raw.leave()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	side, sideCtx := errgroup.WithContext(ctx)
	if v.input {
		v.sit(sideCtx, side, cancel)
	}
	err := v.raw.protect(func() error {
		return v.copyOutput(ctx, v.command, client.Stdout, client.OutputOptions{Offset: v.from, Follow: true})
	})
	var result *dsecv1.CommandResult
	if err == nil {
		result, err = v.command.Wait(ctx)
	}
	cause := context.Cause(ctx)
	cancel(nil)
	serr := side.Wait()
	switch {
	case result != nil:
		return result, nil
	case cause != nil:
		return nil, cause
	}
	return nil, errors.Join(err, serr)
}

// sit starts what goes on beside the output: keys, and the window's size. end ends the view.
func (v *terminalView) sit(ctx context.Context, side *errgroup.Group, end context.CancelCauseFunc) {
	k := newKeyboard(v.keys)
	beside := func(f func() error) { side.Go(func() error { return v.raw.protect(f) }) }
	beside(func() error { k.read(ctx, v.stdin); return nil })
	beside(func() error {
		select {
		case <-k.detached: // at once, whatever of the typing has not been taken
			end(errDetached)
		case <-ctx.Done():
		}
		return nil
	})
	beside(func() error {
		err := v.feed(ctx, k)
		if err != nil {
			end(err)
		}
		return nil
	})
	changes, stop := v.screen.resized()
	redraw := make(chan struct{}, 1)
	obeyed := v.raw.obey(func() { signalTo(redraw) })
	beside(func() error {
		defer stop()
		defer obeyed()
		v.follow(ctx, changes, redraw)
		return nil
	})
}

// feed passes on what is typed.
func (v *terminalView) feed(ctx context.Context, k *keyboard) error {
	in := v.command.Stdin(ctx, v.typed).Shared()
	for {
		p, end := k.take(ctx, client.StdinChunk)
		if len(p) > 0 {
			if _, err := in.Write(p); err != nil {
				if ctx.Err() != nil || client.RefusesInput(err) {
					return nil // its result says why
				}
				return err
			}
		}
		switch {
		case end == nil || isDetached(end) || ctx.Err() != nil:
		case errors.Is(end, io.EOF): // our terminal is gone, and a signal says so
		default:
			v.say("reading the terminal: %s", end)
		}
		if end != nil {
			return nil
		}
	}
}

// follow gives the terminal our window's size: now, with each change, and after a stop.
func (v *terminalView) follow(ctx context.Context, changes <-chan os.Signal, redraw <-chan struct{}) {
	for {
		rows, cols := v.screen.size()
		if rows > 0 && cols > 0 {
			// A failure is no reason to end: the output tells whether the command is there.
			_ = v.command.Resize(ctx, rows, cols)
		}
		select {
		case <-changes:
		case <-redraw:
		case <-ctx.Done():
			return
		}
	}
}

// atTerminal runs the command of an attachment that has a terminal, and says how to go on with one that was left.
func (a *attachment) atTerminal(ctx context.Context) (*dsecv1.CommandResult, error) {
	v := &terminalView{console: a.console, command: a.command, keys: a.keys, input: a.input}
	return a.sayLeft(v.run(ctx))
}

// sayLeft says what becomes of a command whose terminal was left or lost.
func (a *attachment) sayLeft(result *dsecv1.CommandResult, err error) (*dsecv1.CommandResult, error) {
	if isDetached(err) {
		a.say("left running; `dsec attach %s %s` goes on", shortID(a.sb.ID), shortID(a.command.ID))
	} else if sandbox.ClassOf(err) == sandbox.Unavailable {
		a.say("if the command still runs, `dsec attach %s %s` goes on", shortID(a.sb.ID), shortID(a.command.ID))
	}
	return result, err
}
