package main

import (
	"context"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

var execCommand = command{
	name: "exec", group: groupInside, args: "SANDBOX COMMAND ARG...",
	summary: "run a command in a sandbox",
	details: `SANDBOX is an id, a beginning of one that only one sandbox has, or a name that only one has. The exit code is the command's,
see ` + "`dsec run --help`" + `. Ctrl-C kills the command and all that it started; the sandbox stays.

` + detachHelp + `

  dsec exec s4k2 ls -l /
  dsec exec -it s4k2 bash
  dsec exec -i -u nobody -w /tmp s4k2 sh < script.sh
  dsec exec --timeout 30s --shell 'cd /src && make test' s4k2
  dsec logs -f s4k2 $(dsec exec -d s4k2 make test)`,
	setup: setupExec,
}

type execOptions struct {
	specFlags
	context *string
	detach  bool
	session string
	flags   *flagSet
}

func setupExec(f *flagSet) action {
	f.commandAfter = 1
	o := &execOptions{context: contextFlag(f), flags: f}
	o.registerCommand(f)
	f.BoolVar(&o.detach, "detach", false, "start the command, print its id and leave it")
	f.letter("d", "detach")
	f.StringVar(&o.session, "session", "", "run it in the session of this `NAME`, see `dsec session`")
	return func(ctx context.Context, c *console, args []string) error {
		return asPlatformFailure(ctx, o.run(ctx, c, args))
	}
}

func (o *execOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 1, -1, "the sandbox"); err != nil {
		return err
	}
	cmd, err := o.command(o.flags, args[1:])
	if err != nil {
		return err
	}
	switch {
	case cmd == nil:
		return usagef("the command is missing")
	case o.detach && o.interactive && !o.tty:
		return usagef("-i contradicts --detach: nobody stays to pass the input")
	}
	keys, err := o.keys(c, o.interactive && !o.detach, o.asJSON)
	if err != nil {
		return err
	}
	if cmd.Env, err = environment(o.env, c.getenv); err != nil {
		return err
	}
	cmd.User, cmd.Cwd = o.user, o.workdir
	if o.session != "" {
		if err := inSession(cmd, o.session, o.tty, o.interactive, o.user+o.workdir != "" || len(cmd.Env) > 0); err != nil {
			return err
		}
	}
	if o.tty {
		cmd.Terminal = c.newTerminal()
	}
	sb, err := c.dialSandbox(ctx, *o.context, args[0])
	if err != nil {
		return err
	}
	if o.detach {
		return startDetached(ctx, c, sb, cmd, o.asJSON)
	}
	a := c.attach(sb, cmd, o.asJSON)
	a.keys, a.input = keys, o.interactive
	return a.finish(ctx)
}

// inSession makes it a command of a session.
func inSession(cmd *dsecv1.Command, session string, tty, interactive, settings bool) error {
	switch {
	case tty || interactive:
		return usagef("--session contradicts -i and -t: its commands have no input of ours; `dsec shell` is for typing")
	case settings:
		return usagef("--session contradicts -u, -w and -e: a session has its own, see `dsec session create`")
	case cmd.Trusted:
		return usagef("--session contradicts --trusted")
	}
	cmd.Session = session
	if len(cmd.Argv) > 0 {
		cmd.Shell, cmd.Argv = quoteArgs(cmd.Argv), nil
	}
	return nil
}

// quoteArgs is a line of shell that runs argv.
func quoteArgs(argv []string) string {
	words := make([]string, len(argv))
	for i, a := range argv {
		if words[i] = a; a == "" || strings.Trim(a, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:,+@%") != "" {
			words[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}

// finish stays with the command to its end, and gives its result.
func (a *attachment) finish(ctx context.Context) error {
	result, err := a.run(ctx)
	return a.tell(ctx, result, err)
}

// tell says how a command ended, or why we left it.
func (a *attachment) tell(ctx context.Context, result *dsecv1.CommandResult, err error) error {
	if isDetached(err) {
		return nil
	}
	if err != nil {
		return err
	}
	outcome := a.outcome(ctx, result)
	if a.capture {
		if err := a.printJSON(result); err != nil {
			return err
		}
	}
	return outcome
}

// startDetached starts a command and prints its id.
func startDetached(ctx context.Context, c *console, sb *client.Sandbox, cmd *dsecv1.Command, asJSON bool) error {
	a := c.attach(sb, cmd, false)
	err := a.start(ctx)
	switch {
	case err != nil && (ctx.Err() != nil || sandbox.ClassOf(err) == sandbox.Unavailable): // it may have been started
		a.kill(false)
		return err
	case err != nil:
		return asStartFailure(err)
	case asJSON:
		result, err := a.command.Get(ctx, 0, 1)
		if err != nil {
			return err
		}
		return c.printJSON(result)
	}
	return c.print("%s\n", a.command.ID)
}
