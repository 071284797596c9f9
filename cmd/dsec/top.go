package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
)

var topCommand = command{
	name: "top", group: groupInside, args: "SANDBOX",
	summary: "list the processes in a sandbox",
	details: `PID is inside the sandbox; COMMAND ID is the command that has started it, where that is known. With --json each is one line of JSON, as
the API gives it.

  dsec top s4k2
  dsec signal s4k2 $(dsec top --json s4k2 | jq -r 'select(.name=="python3").pid')`,
	setup: setupTop,
}

func setupTop(f *flagSet) action {
	contextName := contextFlag(f)
	var asJSON bool
	jsonFlag(f, &asJSON, "print one line of JSON for each process")
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 1, 1, "the sandbox"); err != nil {
			return err
		}
		sb, err := c.dialSandbox(ctx, *contextName, args[0])
		if err != nil {
			return err
		}
		all, err := sb.Processes(ctx)
		if err != nil {
			return err
		}
		t := newTable("PID", "PPID", "UID", "STATE", "CPU", "MEMORY", "THREADS", "COMMAND ID", "COMMAND")
		for _, p := range all {
			if asJSON {
				if err := c.printJSON(p); err != nil {
					return err
				}
				continue
			}
			t.row(strconv.Itoa(int(p.GetPid())), strconv.Itoa(int(p.GetParent())), strconv.FormatUint(uint64(p.GetUid()), 10), p.GetState(),
				seconds(p.GetCpuSeconds()).Round(10*time.Millisecond).String(), byteSize(p.GetMemoryBytes()), strconv.Itoa(int(p.GetThreads())),
				shortID(p.GetCommandId()), processText(p))
		}
		if asJSON {
			return nil
		}
		return t.print(c)
	}
}

func processText(p *dsecv1.Process) string {
	if len(p.GetArgv()) == 0 {
		return fmt.Sprintf("[%s]", clipText(p.GetName()))
	}
	return clipText(strings.Join(p.GetArgv(), " "))
}

var signalCommand = command{
	name: "signal", group: groupInside, args: "SANDBOX PID...",
	summary: "send a signal to processes in a sandbox",
	details: `PID is that inside, as ` + "`dsec top`" + ` lists it. ` + "`dsec kill`" + ` is for whole commands. The processes that got it are printed.

  dsec signal s4k2 17
  dsec signal -s HUP s4k2 17 18`,
	setup: setupSignal,
}

func setupSignal(f *flagSet) action {
	contextName := contextFlag(f)
	signal := f.String("signal", "TERM", "`SIGNAL` by name or number")
	f.letter("s", "signal")
	var asJSON bool
	jsonFlag(f, &asJSON, jsonHelp+`: {"pid": ...} for each`)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 2, -1, "sandbox or process"); err != nil {
			return err
		}
		number, err := signalNumber(*signal)
		if err != nil {
			return err
		}
		if number == 0 { // which kill takes as the whole tree
			number = signals["KILL"]
		}
		for _, text := range args[1:] {
			if n, err := strconv.ParseInt(text, 10, 32); err != nil || n < 1 {
				return usagef("%q is no process id", clipText(text))
			}
		}
		sb, err := c.dialSandbox(ctx, *contextName, args[0])
		if err != nil {
			return err
		}
		return c.eachOf(ctx, args[1:], "pid", asJSON, func(text string) error {
			pid, err := strconv.ParseInt(text, 10, 32)
			if err != nil {
				return err
			}
			return sb.Signal(ctx, int32(pid), number, 0)
		})
	}
}
