package main

import "context"

var execCommand = command{
	name: "exec", group: groupSandboxes, args: "SANDBOX COMMAND ARG...",
	summary: "run a command in a sandbox",
	details: `SANDBOX is an id, a beginning of one that only one sandbox has, or a name that only one has. The exit code is the command's,
see ` + "`dsec run --help`" + `. Ctrl-C kills the command and all that it started; the sandbox stays.

  dsec exec s4k2 ls -l /
  dsec exec -i -u nobody -w /tmp s4k2 sh < script.sh
  dsec exec --timeout 30s --shell 'cd /src && make test' s4k2`,
	setup: setupExec,
}

func setupExec(f *flagSet) action {
	f.commandAfter = 1
	var o specFlags
	contextName := contextFlag(f)
	o.registerCommand(f)
	return func(ctx context.Context, c *console, args []string) error {
		return asPlatformFailure(ctx, runExec(ctx, c, f, &o, *contextName, args))
	}
}

func runExec(ctx context.Context, c *console, f *flagSet, o *specFlags, contextName string, args []string) error {
	if err := wantArgs(args, 1, -1, "the sandbox"); err != nil {
		return err
	}
	cmd, err := o.command(f, args[1:])
	if err != nil {
		return err
	}
	if cmd == nil {
		return usagef("the command is missing")
	}
	if cmd.Env, err = environment(o.env, c.getenv); err != nil {
		return err
	}
	cmd.User, cmd.Cwd = o.user, o.workdir
	cl, err := c.dial(contextName)
	if err != nil {
		return err
	}
	id, err := cl.resolve(ctx, args[0])
	if err != nil {
		return err
	}
	a := &attachment{console: c, cl: cl, sandboxID: id, commandID: newKey(), command: cmd, capture: o.asJSON}
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
