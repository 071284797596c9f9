package main

import (
	"context"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

var execCommand = command{
	name: "exec", group: groupSandboxes, args: "SANDBOX COMMAND ARG...",
	summary: "run a command in a sandbox",
	details: `SANDBOX is an id, a beginning of one that only one sandbox has, or a name that only one has. The exit code is the command's,
see ` + "`dsec run --help`" + `. Ctrl-C kills the command and all that it started; the sandbox stays.

  dsec exec s4k2 ls -l /
  dsec exec -i -u nobody -w /tmp s4k2 sh < script.sh
  dsec exec --timeout 30s --shell 'cd /src && make test' s4k2
  dsec logs -f s4k2 $(dsec exec -d s4k2 make test)`,
	setup: setupExec,
}

func setupExec(f *flagSet) action {
	f.commandAfter = 1
	var o specFlags
	contextName := contextFlag(f)
	o.registerCommand(f)
	detach := f.Bool("detach", false, "start the command, print its id and leave it")
	f.letter("d", "detach")
	return func(ctx context.Context, c *console, args []string) error {
		return asPlatformFailure(ctx, runExec(ctx, c, f, &o, *contextName, *detach, args))
	}
}

func runExec(ctx context.Context, c *console, f *flagSet, o *specFlags, contextName string, detach bool, args []string) error {
	if err := wantArgs(args, 1, -1, "the sandbox"); err != nil {
		return err
	}
	cmd, err := o.command(f, args[1:])
	if err != nil {
		return err
	}
	switch {
	case cmd == nil:
		return usagef("the command is missing")
	case detach && o.interactive:
		return usagef("-i contradicts --detach: nobody stays to pass the input")
	}
	if cmd.Env, err = environment(o.env, c.getenv); err != nil {
		return err
	}
	cmd.User, cmd.Cwd = o.user, o.workdir
	sb, err := c.dialSandbox(ctx, contextName, args[0])
	if err != nil {
		return err
	}
	if detach {
		return startDetached(ctx, c, sb, cmd, o.asJSON)
	}
	a := c.attach(sb, cmd, o.asJSON)
	result, err := a.run(ctx)
	if err != nil {
		return err
	}
	outcome := a.outcome(ctx, result)
	if o.asJSON {
		if err := c.printJSON(result); err != nil {
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
