package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
)

var rmCommand = command{
	name: "rm", group: groupSandboxes, args: "[SANDBOX...]",
	summary: "remove sandboxes, whatever they do",
	details: `Everything that runs in them is killed. It returns when nothing is left of them. The ids of those removed are printed.

  dsec rm s4k2 s4m7
  dsec rm -l job=17
  dsec rm --all`,
	setup: setupRm,
}

// parallel is how many requests a command has under way at once.
const parallel = 16

type rmOptions struct {
	all, force, asJSON bool
	labels             list
	context            *string
}

func setupRm(f *flagSet) action {
	o := &rmOptions{context: contextFlag(f)}
	f.BoolVar(&o.all, "all", false, "remove all sandboxes of the project")
	f.Var(&o.labels, "label", "remove sandboxes with this label `KEY=VALUE`; may be repeated, all must match")
	f.letter("l", "label")
	f.BoolVar(&o.force, "force", false, "as it is without: a sandbox is removed in any state")
	f.letter("f", "force")
	f.BoolVar(&o.asJSON, "json", false, "print one line of JSON for each removed sandbox")
	return o.run
}

func (o *rmOptions) run(ctx context.Context, c *console, args []string) error {
	labels, err := pairs(o.labels, "label")
	switch {
	case err != nil:
		return err
	case len(args) == 0 && len(labels) == 0 && !o.all:
		return usagef("name sandboxes, or give -l or --all")
	case o.all && (len(args) > 0 || len(labels) > 0), len(args) > 0 && len(labels) > 0:
		return usagef("SANDBOX, -l and --all exclude each other")
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	ids, failed := o.targets(ctx, c, cl, args, labels)
	var mu sync.Mutex
	g := new(errgroup.Group)
	g.SetLimit(parallel)
	for _, id := range ids {
		g.Go(func() error {
			res, err := invoke(ctx, cl, cl.sandboxes.DeleteSandbox, &dsecv1.DeleteSandboxRequest{Id: id, Wait: true})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil && ctx.Err() == nil:
				c.sayError(err, o.asJSON)
				failed = true
				return nil
			case err != nil:
				return err
			case o.asJSON:
				return c.printJSON(res.GetSandbox())
			}
			return c.print("%s\n", id)
		})
	}
	err = g.Wait()
	if err == nil && failed {
		return &exitError{code: exitFailure}
	}
	return err
}

// targets are the ids to remove. What cannot be found is said.
func (o *rmOptions) targets(ctx context.Context, c *console, cl *client, args []string, labels map[string]string) (ids []string, failed bool) {
	if len(args) == 0 {
		all, err := cl.list(ctx, labels, nil)
		if err != nil {
			c.sayError(err, o.asJSON)
			return nil, true
		}
		for _, s := range all {
			ids = append(ids, s.GetId())
		}
		return ids, false
	}
	for _, ref := range args {
		id, err := cl.resolve(ctx, ref)
		if err != nil {
			c.sayError(err, o.asJSON)
			failed = true
			continue
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, failed
}

var killCommand = command{
	name: "kill", group: groupSandboxes, args: "SANDBOX [COMMAND...]",
	summary: "kill commands in a sandbox; the sandbox stays",
	details: `COMMAND is a command's id as ` + "`dsec logs SANDBOX --list`" + ` shows it; without one, all running commands are meant. SIGKILL goes to the
whole tree of processes, another signal to the command's process group. The ids of the commands are printed.

  dsec kill s4k2
  dsec kill -s INT s4k2 5f3a`,
	setup: setupKill,
}

func setupKill(f *flagSet) action {
	contextName := contextFlag(f)
	signal := f.String("signal", "KILL", "`SIGNAL` by name or number")
	f.letter("s", "signal")
	f.Bool("json", false, jsonHelp+`: {"id": ...} for each command`)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 1, -1, "the sandbox"); err != nil {
			return err
		}
		number, err := signalNumber(*signal)
		if err != nil {
			return err
		}
		cl, err := c.dial(*contextName)
		if err != nil {
			return err
		}
		id, err := cl.resolve(ctx, args[0])
		if err != nil {
			return err
		}
		commands, err := cl.commandsToKill(ctx, id, args[1:])
		if err != nil {
			return err
		}
		return killAll(ctx, c, cl, id, commands, number, f.on("json"))
	}
}

func killAll(ctx context.Context, c *console, cl *client, sandboxID string, commands []string, signal int32, asJSON bool) error {
	failed := false
	for _, command := range commands {
		_, err := invoke(ctx, cl, cl.sandboxes.KillCommand, &dsecv1.KillCommandRequest{SandboxId: sandboxID, CommandId: command, Signal: signal})
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			c.sayError(err, asJSON)
			failed = true
			continue
		}
		if asJSON {
			err = c.printJSON(map[string]string{"id": command})
		} else {
			err = c.print("%s\n", command)
		}
		if err != nil {
			return err
		}
	}
	if failed {
		return &exitError{code: exitFailure}
	}
	return nil
}

// commandsToKill resolves the named commands, or all that run.
func (cl *client) commandsToKill(ctx context.Context, sandboxID string, refs []string) ([]string, error) {
	all, err := cl.commands(ctx, sandboxID)
	if err != nil {
		return nil, err
	}
	var ids []string
	if len(refs) == 0 {
		for _, r := range all {
			if r.GetRunning() {
				ids = append(ids, r.GetCommandId())
			}
		}
		return ids, nil
	}
	for _, ref := range refs {
		r, err := matchCommand(all, ref)
		if err != nil {
			return nil, err
		}
		ids = append(ids, r.GetCommandId())
	}
	return ids, nil
}

// signals are Linux's numbers: they are meant for the sandbox, whatever dsec runs on.
var signals = map[string]int32{
	"HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "USR1": 10, "SEGV": 11, "USR2": 12, "PIPE": 13, "ALRM": 14,
	"TERM": 15, "CHLD": 17, "CONT": 18, "STOP": 19, "TSTP": 20, "WINCH": 28,
}

// signalNumber parses "TERM", "sigterm" and "15". SIGKILL is 0, which to the API means the whole tree.
func signalNumber(s string) (int32, error) {
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	n, ok := signals[name]
	if !ok {
		if _, err := fmt.Sscanf(name+"\n", "%d\n", &n); err != nil || n < 1 || n > 64 {
			return 0, usagef("%q is not a signal", s)
		}
	}
	if n == signals["KILL"] {
		return 0, nil
	}
	return n, nil
}
