package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

var logsCommand = command{
	name: "logs", group: groupInside, args: "SANDBOX [COMMAND]",
	summary: "print the kept output of a command",
	details: `COMMAND is a command's id or a beginning of it; without one, the command that started last is meant. What the command wrote to
stdout and stderr goes to ours. Output is kept for a while after the sandbox has ended; of a long one the middle is dropped.
--tail and --since count for each stream by itself.

  dsec logs --list s4k2
  dsec logs -f --tail 100 s4k2
  dsec logs --since 10m --tag training s4k2
  dsec logs --stderr s4k2 5f3a 2> errors`,
	setup: setupLogs,
}

type logsOptions struct {
	follow, list, asJSON bool
	stdout, stderr       bool
	stream, tag          string
	tail, since          string
	want                 client.OutputOptions
	context              *string
}

func setupLogs(f *flagSet) action {
	o := &logsOptions{context: contextFlag(f)}
	f.BoolVar(&o.follow, "follow", false, "go on until the command ends")
	f.letter("f", "follow")
	f.StringVar(&o.stream, "stream", "both", "`STREAM`: stdout, stderr or both")
	f.BoolVar(&o.stdout, "stdout", false, "only what went to stdout")
	f.BoolVar(&o.stderr, "stderr", false, "only what went to stderr")
	f.StringVar(&o.tail, "tail", "all", "only the last `LINES`")
	f.letter("n", "tail")
	f.StringVar(&o.since, "since", "", "only what was written since `TIME`: how long ago, like 10m, or a time like 2026-01-02T15:04:05Z")
	f.StringVar(&o.tag, "tag", "", "the newest command with this `TAG`")
	f.BoolVar(&o.list, "list", false, "list the commands instead")
	jsonFlag(f, &o.asJSON, "print the command's result, or one line for each with --list, as JSON without output")
	return o.run
}

func (o *logsOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 1, 2, "the sandbox"); err != nil {
		return err
	}
	if err := o.check(c.now()); err != nil {
		return err
	}
	if o.list && len(args) > 1 {
		return usagef("--list is of all commands; leave %q out", clipText(args[1]))
	}
	sb, err := c.dialSandbox(ctx, *o.context, args[0])
	if err != nil {
		return err
	}
	if o.list {
		all, err := commandsOf(ctx, sb, &dsecv1.ListCommandsRequest{Tag: o.tag})
		if err != nil {
			return err
		}
		return o.printList(c, all)
	}
	result, err := pickCommand(ctx, sb, args[1:], o.tag, false)
	if err != nil {
		return err
	}
	if o.asJSON {
		return c.printJSON(result)
	}
	return o.copy(ctx, c, sb.Command(result.GetCommandId()))
}

// check reads what the flags say together.
func (o *logsOptions) check(now time.Time) error {
	switch {
	case o.stream != "stdout" && o.stream != "stderr" && o.stream != "both":
		return usagef("--stream must be stdout, stderr or both")
	case o.stream != "both" && (o.stdout || o.stderr):
		return usagef("--stream contradicts --stdout and --stderr")
	case o.stdout != o.stderr:
		o.stream = map[bool]string{true: client.Stdout, false: client.Stderr}[o.stdout]
	}
	o.want.Follow = o.follow
	if o.tail != "all" {
		n, err := strconv.ParseInt(o.tail, 10, 64)
		if err != nil || n < 0 {
			return usagef("--tail %q is neither a number of lines nor all", o.tail)
		}
		if o.want.TailLines = n; n == 0 {
			o.want.TailLines = -1
		}
	}
	if o.since == "" {
		return nil
	}
	if o.tail != "all" {
		return usagef("give --tail or --since, not both")
	}
	if ago, err := parsePeriod(o.since); err == nil {
		o.want.Since = now.Add(-ago)
	} else if o.want.Since, err = time.Parse(time.RFC3339, o.since); err != nil {
		return usagef("--since %q is neither a duration like 10m nor a time like 2026-01-02T15:04:05Z", o.since)
	}
	return nil
}

// copy prints one stream, or both at once.
func (o *logsOptions) copy(ctx context.Context, c *console, k *client.Command) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, name := range []string{"stdout", "stderr"} {
		if o.stream == name || o.stream == "both" {
			g.Go(func() error { return c.copyOutput(gctx, k, name, o.want) })
		}
	}
	return g.Wait()
}

func (o *logsOptions) printList(c *console, all []*dsecv1.CommandResult) error {
	t := newTable("COMMAND ID", "STATUS", "STARTED", "STDOUT", "STDERR", "COMMAND")
	now := c.now()
	for _, r := range all {
		if o.asJSON {
			if err := c.printJSON(r); err != nil {
				return err
			}
			continue
		}
		t.row(r.GetCommandId(), commandStatus(r), age(now, r.GetStartedAt()),
			byteSize(r.GetStdout().GetSize()), byteSize(r.GetStderr().GetSize()), clipText(r.GetDescription()))
	}
	if o.asJSON {
		return nil
	}
	return t.print(c)
}

func commandStatus(r *dsecv1.CommandResult) string {
	switch {
	case r.GetRunning():
		return "running"
	case r.GetOomKilled():
		return "out of memory"
	case r.GetTimedOut():
		return "timed out"
	case r.GetSignalName() != "":
		return r.GetSignalName()
	}
	return fmt.Sprintf("exit %d", r.GetExitCode())
}

// commandsOf lists the sandbox's commands, the newest first.
func commandsOf(ctx context.Context, sb *client.Sandbox, filter *dsecv1.ListCommandsRequest) ([]*dsecv1.CommandResult, error) {
	all, err := sb.Commands(ctx, filter)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(all, func(a, b *dsecv1.CommandResult) int {
		return cmp.Or(b.GetStartedAt().AsTime().Compare(a.GetStartedAt().AsTime()), cmp.Compare(a.GetCommandId(), b.GetCommandId()))
	})
	return all, nil
}

// matchCommand finds the one command whose id begins with ref, or is ref; the newest if ref is "".
func matchCommand(all []*dsecv1.CommandResult, ref string) (*dsecv1.CommandResult, error) {
	if ref == "" && len(all) > 0 {
		return all[0], nil
	}
	var found *dsecv1.CommandResult
	for _, r := range all {
		switch {
		case r.GetCommandId() == ref:
			return r, nil
		case !strings.HasPrefix(r.GetCommandId(), ref):
		case found != nil:
			return nil, sandbox.Errorf(sandbox.InvalidArgument, "ambiguous_command", "%q means more than one command; write more of the id", clipText(ref))
		default:
			found = r
		}
	}
	if ref == "" {
		return nil, sandbox.Errorf(sandbox.NotFound, "command_not_listed", "no command has been run in the sandbox")
	}
	if found == nil {
		return nil, sandbox.Errorf(sandbox.NotFound, "command_not_listed", "the sandbox has no such command; `dsec logs --list SANDBOX` lists them")
	}
	return found, nil
}
