package main

import (
	"context"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"dsec/client"
	"dsec/sandbox"
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
	jsonFlag(f, &o.asJSON, "print one line of JSON for each removed sandbox")
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
	ids, failed, err := o.targets(ctx, c, cl, args, labels)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	g := new(errgroup.Group)
	g.SetLimit(parallel)
	for _, id := range ids {
		g.Go(func() error {
			gone, err := cl.Sandbox(id).Delete(ctx)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil && !concernsAll(ctx, err):
				c.sayError(err, o.asJSON)
				failed = true
				return nil
			case err != nil:
				return err
			case o.asJSON:
				return c.printJSON(gone)
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

// concernsAll reports whether err is not about the one thing that was asked for: nothing else will go better.
func concernsAll(ctx context.Context, err error) bool {
	switch sandbox.ReasonOf(err) {
	case "platform_unreachable", "platform_unavailable", "not_a_platform":
		return true
	}
	return ctx.Err() != nil || sandbox.ClassOf(err) == sandbox.Unauthenticated
}

// targets are the ids to remove. What cannot be found is said.
func (o *rmOptions) targets(ctx context.Context, c *console, cl *client.Client, args []string, labels map[string]string) (ids []string, failed bool, err error) {
	if len(args) == 0 {
		all, err := client.Collect(cl.List(ctx, labels))
		for _, s := range all {
			ids = append(ids, s.GetId())
		}
		return ids, false, err
	}
	for _, ref := range args {
		sb, err := resolve(ctx, cl, ref)
		switch {
		case err != nil && concernsAll(ctx, err):
			return nil, false, err
		case err != nil:
			c.sayError(err, o.asJSON)
			failed = true
			continue
		}
		if !slices.Contains(ids, sb.ID) {
			ids = append(ids, sb.ID)
		}
	}
	return ids, failed, nil
}
