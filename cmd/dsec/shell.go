package main

import (
	"context"

	dsecv1 "dsec/api/dsec/v1"
)

var shellCommand = command{
	name: "shell", group: groupInside, args: "SANDBOX [COMMAND ARG...]",
	summary: "open a shell in a sandbox",
	details: `Like ssh: at a terminal the shell, or COMMAND, has a terminal of its own; otherwise our standard input is its input. It is bash, or
sh where there is none. The exit code is the shell's. Keys, Ctrl-C among them, go to it; its window's size follows ours.
ctrl-p,ctrl-q leaves it running, see --detach-keys, and ` + "`dsec attach`" + ` goes on with it. A connection that breaks is resumed.

  dsec shell s4k2
  dsec shell s4k2 -- vim /etc/hosts
  dsec shell s4k2 < script.sh`,
	setup: setupShell,
}

func setupShell(f *flagSet) action {
	f.commandAfter = 1
	var o specFlags
	contextName := contextFlag(f)
	f.Var(&o.env, "env", "environment variable `KEY=VALUE`, or KEY for its value here; may be repeated")
	f.letter("e", "env")
	f.StringVar(&o.user, "user", "", "`USER`: name, uid, name:group or uid:gid")
	f.letter("u", "user")
	f.StringVar(&o.workdir, "workdir", "", "working directory `DIR`")
	f.letter("w", "workdir")
	f.StringVar(&o.tag, "tag", "", "`TAG` to find it again by, with attach")
	registerDetachKeys(f, &o.detachKeys)
	jsonFlag(f, &o.asJSON, "print the result as JSON at the end, output included up to 1 MiB a stream; there is no terminal then")
	return func(ctx context.Context, c *console, args []string) error {
		return asPlatformFailure(ctx, o.runShell(ctx, c, *contextName, args))
	}
}

func (o *specFlags) runShell(ctx context.Context, c *console, contextName string, args []string) error {
	if err := wantArgs(args, 1, -1, "the sandbox"); err != nil {
		return err
	}
	keys, err := parseKeys(o.detachKeys)
	if err != nil {
		return err
	}
	cmd := o.complete(&dsecv1.Command{Argv: args[1:], User: o.user, Cwd: o.workdir})
	cmd.StdinFollows = true
	if len(cmd.Argv) == 0 {
		cmd.Argv = shellArgv()
	}
	if cmd.Env, err = environment(o.env, c.getenv); err != nil {
		return err
	}
	if c.screen != nil && !o.asJSON {
		cmd.Terminal = c.newTerminal()
	}
	sb, err := c.dialSandbox(ctx, contextName, args[0])
	if err != nil {
		return err
	}
	a := c.attach(sb, cmd, o.asJSON)
	a.keys, a.input = keys, true
	return a.finish(ctx)
}
