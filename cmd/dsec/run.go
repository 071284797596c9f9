package main

import (
	"context"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

// removeLimit bounds the removal of a sandbox when we leave.
const removeLimit = 30 * time.Second

var runCommand = command{
	name: "run", group: groupSandboxes, args: "IMAGE [COMMAND ARG...]",
	summary: "create a sandbox and run a command in it",
	details: `The sandbox is removed when the command ends, unless --keep or --detach is given. The exit code is the command's; 124 if
its --timeout passed, 125 if the platform failed, 126 or 127 if the command is not executable or not found.
Ctrl-C kills the command, removes the sandbox and ends dsec, shown by shells as 130; a second one does not wait for that.
An image has no command of its own: without one, -d or --keep creates a sandbox and prints its id.

Flags go before the command: what follows its first word belongs to it.

` + detachHelp + ` The sandbox stays then.

  dsec run -it debian
  dsec run python:3.12 python3 -c 'print(6*7)'
  dsec run -m 512m --cpus 0.5 --timeout 10s debian --shell 'make -j4 2>&1 | tail'
  dsec run -i debian sha256sum < archive.tar
  id=$(dsec run -d --ttl 10m --workspace sphinx:9658 --toolkit agent:7 debian)
  dsec exec $id pytest -q; dsec rm $id`,
	setup: setupRun,
}

type runOptions struct {
	specFlags
	context              *string
	detach, keep, remove bool
	flags                *flagSet
}

func setupRun(f *flagSet) action {
	f.commandAfter = 1
	o := &runOptions{context: contextFlag(f), flags: f}
	o.registerSpec(f)
	o.registerCommand(f)
	f.BoolVar(&o.detach, "detach", false, "start the command, print the sandbox's id and leave both")
	f.letter("d", "detach")
	f.BoolVar(&o.keep, "keep", false, "keep the sandbox when the command ends")
	f.BoolVar(&o.remove, "rm", false, "remove the sandbox when the command ends; this is the default")
	return func(ctx context.Context, c *console, args []string) error {
		return asPlatformFailure(ctx, o.run(ctx, c, args))
	}
}

func (o *runOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 1, -1, "the image"); err != nil {
		return err
	}
	cmd, err := o.command(o.flags, args[1:])
	if err != nil {
		return err
	}
	if cmd == nil && o.tty && (o.interactive || o.detach) { // else nobody could ever type at it
		cmd = o.complete(&dsecv1.Command{Argv: shellArgv()})
	}
	keys, err := o.keys(c, o.interactive && !o.detach, o.asJSON)
	if err != nil {
		return err
	}
	if o.tty && cmd != nil {
		cmd.Terminal = c.newTerminal()
	}
	switch {
	case o.remove && (o.keep || o.detach):
		return usagef("--rm contradicts --keep and --detach: nobody stays to remove the sandbox; it ends by its --ttl")
	case o.detach && o.interactive && !o.tty:
		return usagef("-i contradicts --detach: nobody stays to pass the input")
	case cmd == nil && o.interactive:
		return usagef("-i needs a command")
	case cmd == nil && !o.detach && !o.keep:
		return usagef("the command is missing: images have none of their own; give one, or -d to create a sandbox and print its id")
	case cmd == nil && o.timeout > 0:
		return usagef("--timeout is the command's, and there is none; a sandbox ends by its --ttl or --lifetime")
	}
	if o.flags.given("start") && o.start == "" {
		return usagef("the script of --start is empty")
	}
	spec, err := o.spec(args[0], c.getenv)
	if err != nil {
		return err
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	sb, err := cl.Create(ctx, spec)
	if err != nil {
		return err
	}
	if cmd == nil || o.detach {
		return o.leave(ctx, c, cl, sb, cmd)
	}
	return o.stay(ctx, c, cl, sb, cmd, keys)
}

// leave prints the id of a sandbox that stays, with its command running.
func (o *runOptions) leave(ctx context.Context, c *console, cl *client.Client, sb *dsecv1.Sandbox, cmd *dsecv1.Command) error {
	var result *dsecv1.CommandResult
	if cmd != nil {
		k, err := cl.Sandbox(sb.GetId()).Start(ctx, cmd)
		if err == nil {
			result, err = k.Get(ctx, 0, 1)
		}
		if err != nil {
			c.remove(cl, sb)
			return asStartFailure(err)
		}
	}
	var err error
	if o.asJSON {
		err = c.printRun(sb, result)
	} else {
		err = c.print("%s\n", sb.GetId())
	}
	if err != nil { // nobody learned the id
		c.remove(cl, sb)
	}
	return err
}

// stay runs the command to its end and removes the sandbox.
func (o *runOptions) stay(ctx context.Context, c *console, cl *client.Client, sb *dsecv1.Sandbox, cmd *dsecv1.Command, keys []byte) error {
	a := c.attach(cl.Sandbox(sb.GetId()), cmd, o.asJSON)
	a.keys, a.input = keys, o.interactive
	result, err := a.run(ctx)
	if isDetached(err) {
		return nil // and it stays
	}
	var outcome error
	if err == nil {
		outcome = a.outcome(ctx, result)
	}
	if o.keep {
		c.say("sandbox %s is kept; remove it with `dsec rm %s`", sb.GetId(), sb.GetId())
	} else {
		c.remove(cl, sb)
	}
	if err == nil && o.asJSON {
		err = c.printRun(sb, result)
	}
	if err != nil {
		return err
	}
	return outcome
}

// printRun prints {"sandbox": ..., "result": ...}.
func (c *console) printRun(sb *dsecv1.Sandbox, result *dsecv1.CommandResult) error {
	sandboxJSON, err := encode(sb)
	if err != nil {
		return err
	}
	if result == nil {
		return c.print("{\"sandbox\":%s}\n", sandboxJSON)
	}
	resultJSON, err := encode(result)
	if err != nil {
		return err
	}
	return c.print("{\"sandbox\":%s,\"result\":%s}\n", sandboxJSON, resultJSON)
}

// remove deletes the sandbox whatever has become of the command's context. A failure is said, with what to do.
func (c *console) remove(cl *client.Client, sb *dsecv1.Sandbox) {
	ctx, cancel := c.cleanup(removeLimit)
	defer cancel()
	_, err := cl.Sandbox(sb.GetId()).Delete(ctx)
	if err != nil && sandbox.ClassOf(err) != sandbox.NotFound {
		c.say("sandbox %s may still be there: %s; remove it with `dsec rm %s`", sb.GetId(), userMessage(err), sb.GetId())
	}
}
