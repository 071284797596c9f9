package main

import (
	"context"
	"fmt"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

var killCommand = command{
	name: "kill", group: groupInside, args: "SANDBOX [COMMAND...]",
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
	tag := f.String("tag", "", "all running commands with this `TAG`")
	var asJSON bool
	jsonFlag(f, &asJSON, jsonHelp+`: {"id": ...} for each command`)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 1, -1, "the sandbox"); err != nil {
			return err
		}
		if *tag != "" && len(args) > 1 {
			return usagef("give commands or a --tag, not both")
		}
		number, err := signalNumber(*signal)
		if err != nil {
			return err
		}
		sb, err := c.dialSandbox(ctx, *contextName, args[0])
		if err != nil {
			return err
		}
		commands, err := commandsToKill(ctx, sb, args[1:], *tag)
		if err != nil {
			return err
		}
		return c.eachOf(ctx, commands, "id", asJSON, func(id string) error { return sb.Command(id).Kill(ctx, number) })
	}
}

// commandsToKill resolves the named commands, or all that run and have the tag.
func commandsToKill(ctx context.Context, sb *client.Sandbox, refs []string, tag string) ([]string, error) {
	all, err := commandsOf(ctx, sb, &dsecv1.ListCommandsRequest{Tag: tag})
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
