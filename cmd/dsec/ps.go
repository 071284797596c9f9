package main

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

var psCommand = command{
	name: "ps", group: groupSandboxes,
	summary: "list sandboxes",
	details: `Without -a only those that are not ended are listed. With --json each is one line of JSON, as the API gives it.

  dsec ps -l job=17
  dsec ps -q -l job=17 | xargs dsec rm
  dsec ps -a --json | jq -r 'select(.state=="STATE_FAILED") | .id+" "+.reason.message'`,
	setup: setupPs,
}

type psOptions struct {
	all, quiet, asJSON, noTrunc bool
	labels                      list
	context                     *string
}

func setupPs(f *flagSet) action {
	o := &psOptions{context: contextFlag(f)}
	f.BoolVar(&o.all, "all", false, "also list sandboxes that have ended, as long as they are remembered")
	f.letter("a", "all")
	f.BoolVar(&o.quiet, "quiet", false, "print whole ids only")
	f.letter("q", "quiet")
	f.Var(&o.labels, "label", "only sandboxes with this label `KEY=VALUE`; may be repeated, all must match")
	f.letter("l", "label")
	f.BoolVar(&o.noTrunc, "no-trunc", false, "do not shorten ids and digests")
	jsonFlag(f, &o.asJSON, "print one line of JSON for each sandbox")
	return o.run
}

func (o *psOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 0, 0, ""); err != nil {
		return err
	}
	labels, err := pairs(o.labels, "label")
	if err != nil {
		return err
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	var states []dsecv1.State
	if o.all {
		states = allStates
	}
	all, err := client.Collect(cl.List(ctx, labels, states...))
	if err != nil {
		return err
	}
	newestFirst(all)
	return o.print(c, all, c.now())
}

func newestFirst(all []*dsecv1.Sandbox) {
	slices.SortStableFunc(all, func(a, b *dsecv1.Sandbox) int {
		return cmp.Or(b.GetCreatedAt().AsTime().Compare(a.GetCreatedAt().AsTime()), cmp.Compare(a.GetId(), b.GetId()))
	})
}

func (o *psOptions) print(c *console, all []*dsecv1.Sandbox, now time.Time) error {
	t := newTable("ID", "IMAGE", "STATUS", "CREATED", "COMMANDS", "NAME")
	for _, s := range all {
		var err error
		switch {
		case o.asJSON:
			err = c.printJSON(s)
		case o.quiet:
			err = c.print("%s\n", s.GetId())
		}
		if err != nil {
			return err
		}
		id, image := s.GetId(), s.GetSpec().GetImage()
		if !o.noTrunc {
			id, image = shortID(id), shortRef(image)
		}
		t.row(id, image, stateText(s), age(now, s.GetCreatedAt()), strconv.FormatInt(s.GetRunningCommands(), 10), s.GetSpec().GetName())
	}
	if o.asJSON || o.quiet {
		return nil
	}
	return t.print(c)
}

const shortLen = 12

// shortID is as much of an id as docker shows.
func shortID(id string) string {
	return id[:min(len(id), shortLen)]
}

// shortRef leaves out the digest of a name with a tag, and shortens that of a name without.
func shortRef(ref string) string {
	name, digest, pinned := strings.Cut(ref, "@sha256:")
	switch {
	case !pinned:
		return ref
	case strings.Contains(name[strings.LastIndexByte(name, '/')+1:], ":"):
		return name
	}
	return name + "@" + digest[:min(len(digest), shortLen)]
}
