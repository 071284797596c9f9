package main

import (
	"context"

	"dsec/internal/hostprep"
)

var hostCommand = command{
	name: "host", group: groupDiagnosis,
	summary: "prepare this host for many sandboxes, and take that back",
	sub:     []command{hostPrepareCommand, hostRestoreCommand},
}

var hostPrepareCommand = command{
	name: "prepare", group: groupDiagnosis,
	summary: "raise what this host has too little of for many sandboxes",
	details: `Sets sysctls that are lower than a node with some thousand sandboxes needs, loads modules, and with --swap makes a swap file.
Nothing else of the platform changes the host. What was before is noted first, and ` + "`dsec host restore`" + ` brings it back. A reset
of the machine takes back all but the file.

  dsec host prepare --dry-run
  dsec host prepare --swap 16g`,
	setup: setupHostPrepare,
}

var hostRestoreCommand = command{
	name: "restore", group: groupDiagnosis,
	summary: "undo what `dsec host prepare` changed",
	details: `Brings back each setting that still is as it was set; what somebody else has changed since is left and reported. It may be
called at any time, also after a prepare that was killed in the middle.`,
	setup: setupHostRestore,
}

func setupHostPrepare(f *flagSet) action {
	var o hostprep.Options
	var swap byteCount
	var dryRun, asJSON bool
	record := recordFlag(f)
	f.BoolVar(&dryRun, "dry-run", false, "only say what would be changed")
	f.Var(&swap, "swap", "make a swap file of this `SIZE`")
	f.StringVar(&o.SwapFile, "swap-file", "/var/lib/dsec-swap", "where that `FILE` is made, on a disk")
	jsonFlag(f, &asJSON, "print one line of JSON for each change")
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		if o.SwapBytes = int64(swap); swap == 0 {
			o.SwapFile = ""
		}
		h, err := hostprep.This(*record)
		if err != nil {
			return err
		}
		act, word := h.Prepare, "changed"
		if dryRun {
			act, word = h.Plan, "would change"
		}
		changes, err := act(ctx, o)
		return firstError(c.printChanges(word, changes, asJSON), err)
	}
}

func setupHostRestore(f *flagSet) action {
	var asJSON bool
	record := recordFlag(f)
	jsonFlag(f, &asJSON, "print one line of JSON for each change")
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		h, err := hostprep.This(*record)
		if err != nil {
			return err
		}
		changes, err := h.Restore(ctx)
		for i := range changes {
			changes[i].Before, changes[i].After = changes[i].After, changes[i].Before
		}
		return firstError(c.printChanges("restored", changes, asJSON), err)
	}
}

func recordFlag(f *flagSet) *string {
	return f.String("record", hostprep.DefaultRecord, "`FILE` with what was before")
}

// firstError prefers what went wrong with the host to what went wrong with saying so.
func firstError(printing, err error) error {
	if err != nil {
		return err
	}
	return printing
}

func (c *console) printChanges(word string, changes []hostprep.Change, asJSON bool) error {
	for _, ch := range changes {
		line, verb := ch.String(), word
		if ch.Left != "" {
			line, verb = ch.Name+": "+ch.Left, "left"
		} else if ch.Why != "" {
			line += "  (" + ch.Why + ")"
		}
		var err error
		if asJSON {
			err = c.printJSON(ch)
		} else {
			err = c.print("%s %s\n", verb, line)
		}
		if err != nil {
			return err
		}
	}
	if len(changes) == 0 && !asJSON {
		return c.print("nothing to do\n")
	}
	return nil
}
