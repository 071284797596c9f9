package main

import (
	"context"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

var attachCommand = command{
	name: "attach", group: groupInside, args: "SANDBOX [COMMAND]",
	summary: "go on with a command that was left running",
	details: `COMMAND is a command's id or a beginning of it, as ` + "`dsec logs --list`" + ` shows them; without one and without --tag the running
command that started last is meant, or if none runs the last one. First comes the end of its earlier output, then what it writes
from here on. The exit code is the command's. At a terminal, keys go to a command that has one, and ctrl-p,ctrl-q leaves it again,
see --detach-keys; other commands are left with Ctrl-C. They all run on.

  dsec attach s4k2
  dsec attach s4k2 5f3a
  dsec attach --tag training --no-stdin s4k2`,
	setup: setupAttach,
}

type attachOptions struct {
	tag, detachKeys string
	noStdin, asJSON bool
	context         *string
}

func setupAttach(f *flagSet) action {
	o := &attachOptions{context: contextFlag(f)}
	f.StringVar(&o.tag, "tag", "", "the newest command with this `TAG`")
	f.BoolVar(&o.noStdin, "no-stdin", false, "only look: keys do not go to the command, and Ctrl-C leaves it")
	registerDetachKeys(f, &o.detachKeys)
	jsonFlag(f, &o.asJSON, "print the result as JSON at its end instead of the output, which it includes up to 1 MiB a stream")
	return func(ctx context.Context, c *console, args []string) error {
		return asPlatformFailure(ctx, o.run(ctx, c, args))
	}
}

func (o *attachOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 1, 2, "the sandbox"); err != nil {
		return err
	}
	keys, err := parseKeys(o.detachKeys)
	if err != nil {
		return err
	}
	sb, err := c.dialSandbox(ctx, *o.context, args[0])
	if err != nil {
		return err
	}
	found, err := pickCommand(ctx, sb, args[1:], o.tag, true)
	if err != nil {
		return err
	}
	if !found.GetRunning() && len(args) == 1 && o.tag == "" && !o.asJSON {
		c.say("no command is running; this is what the last one, which has ended, wrote:")
	}
	k := sb.Command(found.GetCommandId())
	a := &attachment{console: c, sb: sb, command: k, what: &dsecv1.Command{}, capture: o.asJSON, keys: keys}
	a.input = found.GetTerminal() && found.GetRunning() && !o.noStdin && c.screen != nil
	return a.goOn(ctx, found)
}

// goOn stays with a command that somebody else has started.
func (a *attachment) goOn(ctx context.Context, found *dsecv1.CommandResult) error {
	var result *dsecv1.CommandResult
	var err error
	switch {
	case a.capture:
		if result, err = a.command.Wait(ctx); err == nil {
			result, err = a.command.Get(ctx, 0, client.CaptureLimit)
		}
	case found.GetTerminal():
		v := &terminalView{
			console: a.console, command: a.command, keys: a.keys, input: a.input, typed: found.GetStdinSize(),
			from: max(0, found.GetStdout().GetSize()-replayed),
		}
		result, err = a.sayLeft(v.run(ctx))
	default:
		if err = a.watchStreams(ctx, found); err == nil {
			result, err = a.command.Wait(ctx)
		}
	}
	return a.tell(ctx, result, err)
}

func (a *attachment) watchStreams(ctx context.Context, found *dsecv1.CommandResult) error {
	g, gctx := errgroup.WithContext(ctx)
	for name, out := range map[string]*dsecv1.Output{client.Stdout: found.GetStdout(), client.Stderr: found.GetStderr()} {
		g.Go(func() error {
			return a.copyOutput(gctx, a.command, name, client.OutputOptions{Offset: max(0, out.GetSize()-replayed), Follow: true})
		})
	}
	return g.Wait()
}

// pickCommand finds the command that is meant: by an id or its beginning, by a tag, or the newest; a running one first, if that
// is preferred.
func pickCommand(ctx context.Context, sb *client.Sandbox, refs []string, tag string, running bool) (*dsecv1.CommandResult, error) {
	if len(refs) > 0 && tag != "" {
		return nil, usagef("give a command or a --tag, not both")
	}
	all, err := commandsOf(ctx, sb, &dsecv1.ListCommandsRequest{Tag: tag})
	if err != nil {
		return nil, err
	}
	if len(refs) > 0 {
		return matchCommand(all, refs[0])
	}
	if tag != "" && len(all) == 0 {
		return nil, sandbox.Errorf(sandbox.NotFound, "command_not_listed", "the sandbox has no command with the tag %q", clipText(tag))
	}
	for _, r := range all {
		if running && r.GetRunning() {
			return r, nil
		}
	}
	return matchCommand(all, "")
}
