package main

import (
	"context"
	"slices"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

var watchCommand = command{
	name: "watch", group: groupSandboxes, args: "[SANDBOX...]",
	summary: "show what becomes of sandboxes, as it happens",
	details: `First the present state of all that have not ended (or are named; with -a all), then each change, and with --commands the ends of
their commands, until Ctrl-C. With --json each is one line of JSON, as the API gives it; after a line with "synced" all were told once.

  dsec watch -l job=17 --commands
  dsec watch --json s4k2 | jq -r 'select(.sandbox) | .sandbox.state'`,
	setup: setupWatch,
}

type watchOptions struct {
	labels           list
	all              bool
	commands, asJSON bool
	noTrunc          bool
	context          *string
}

func setupWatch(f *flagSet) action {
	o := &watchOptions{context: contextFlag(f)}
	f.BoolVar(&o.all, "all", false, "also begin with sandboxes that have ended, as long as they are remembered")
	f.letter("a", "all")
	f.Var(&o.labels, "label", "only sandboxes with this label `KEY=VALUE`; may be repeated, all must match")
	f.letter("l", "label")
	f.BoolVar(&o.commands, "commands", false, "also show the ends of their commands")
	f.BoolVar(&o.noTrunc, "no-trunc", false, "do not shorten ids")
	jsonFlag(f, &o.asJSON, "print one line of JSON for each event")
	return o.run
}

func (o *watchOptions) run(ctx context.Context, c *console, args []string) error {
	labels, err := pairs(o.labels, "label")
	if err != nil {
		return err
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	req := &dsecv1.WatchSandboxesRequest{Labels: labels, Commands: o.commands}
	for _, ref := range args {
		sb, err := resolve(ctx, cl, ref)
		if err != nil {
			return err
		}
		if !slices.Contains(req.Ids, sb.ID) {
			req.Ids = append(req.Ids, sb.ID)
		}
	}
	told := missing{ids: slices.Clone(req.Ids)}
	old := past{all: o.all || len(req.Ids) > 0}
	for m, err := range cl.Watch(ctx, req) {
		if err != nil {
			return err
		}
		if err := told.check(m); err != nil {
			return err
		}
		switch {
		case old.skips(m):
		case o.asJSON:
			err = c.printJSON(m)
		default:
			err = o.print(c, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// missing are the sandboxes that were asked for and not told yet.
type missing struct {
	ids    []string
	synced bool
}

// check refuses, once all were told that there are, what nothing will ever be told about.
func (w *missing) check(m *dsecv1.WatchSandboxesResponse) error {
	if w.synced {
		return nil
	}
	switch e := m.GetEvent().(type) {
	case *dsecv1.WatchSandboxesResponse_Sandbox:
		w.ids = slices.DeleteFunc(w.ids, func(id string) bool { return id == e.Sandbox.GetId() })
	case *dsecv1.WatchSandboxesResponse_EdgeLost: // they may be there
		w.synced = true
	case *dsecv1.WatchSandboxesResponse_Synced:
		if w.synced = true; len(w.ids) > 0 {
			return sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "there is no sandbox %s; it may have ended and been forgotten", w.ids[0])
		}
	}
	return nil
}

// past is what had ended before anybody watched.
type past struct{ all, synced bool }

// skips reports whether m tells of a sandbox that is not to be shown: one that had ended already.
func (p *past) skips(m *dsecv1.WatchSandboxesResponse) bool {
	p.synced = p.synced || m.GetSynced()
	s := m.GetSandbox()
	return s != nil && !p.all && !p.synced && slices.Contains(endedStates, s.GetState())
}

func (o *watchOptions) print(c *console, m *dsecv1.WatchSandboxesResponse) error {
	id := func(id string) string {
		if o.noTrunc {
			return id
		}
		return shortID(id)
	}
	now := c.now().Format("15:04:05")
	switch e := m.GetEvent().(type) {
	case *dsecv1.WatchSandboxesResponse_Sandbox:
		return c.print("%s  %s  %s  %s\n", now, id(e.Sandbox.GetId()), printable(stateText(e.Sandbox)), printable(e.Sandbox.GetSpec().GetName()))
	case *dsecv1.WatchSandboxesResponse_Command:
		r := e.Command.GetResult()
		return c.print("%s  %s  command %s  %s  %s\n", now, id(e.Command.GetSandboxId()), id(r.GetCommandId()), commandStatus(r), clipText(r.GetDescription()))
	case *dsecv1.WatchSandboxesResponse_EdgeLost:
		return c.print("%s  node %s is away; its sandboxes are told anew when it is back\n", now, printable(e.EdgeLost.GetNode()))
	}
	return nil
}
