package main

import (
	"context"
	"strings"

	"dsec/client"
)

var cpCommand = command{
	name: "cp", group: groupInside, args: "SANDBOX:PATH LOCAL|-   or   LOCAL|- SANDBOX:PATH",
	summary: "copy files and directories out of or into a sandbox",
	details: `As docker's: a target that is a directory is copied into; one that does not exist becomes what is copied; of DIR/. the content alone is
copied. - is a tar archive: on our standard output, or from our standard input, to be unpacked in the directory PATH. A local name
with a colon is written ./a:b.

A file appears whole or not at all. Modes, times, links, holes and attributes are kept; owners are not, unless -a is given: here
what is copied is ours, inside it is the sandbox's user's, or --user's. Links are copied as links, unless -L is given. What
comes out of a sandbox cannot leave the target, whatever it is, and gets no set-user-id bits; devices, sockets and pipes are
left out.

  dsec cp s4k2:/etc/os-release .
  dsec cp ./src s4k2:/srv
  dsec cp s4k2:/srv/out/. ./out
  dsec cp s4k2:/srv - | tar t
  tar c src | dsec cp --parents - s4k2:/srv/new`,
	setup: setupCp,
}

type cpOptions struct {
	user                     string
	parents, archive, follow bool
	quiet, asJSON            bool
	context                  *string
}

// copied is what `dsec cp --json` prints.
type copied struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Bytes int64  `json:"bytes"`
}

func setupCp(f *flagSet) action {
	o := &cpOptions{context: contextFlag(f)}
	f.StringVar(&o.user, "user", "", "`USER` with whose rights the sandbox's files are read or written")
	f.letter("u", "user")
	f.BoolVar(&o.parents, "parents", false, "make missing directories of the target in the sandbox")
	f.BoolVar(&o.archive, "archive", false, "keep owners, by their numbers; needs root on the side that is written")
	f.letter("a", "archive")
	f.BoolVar(&o.follow, "follow-link", false, "of a link as source, copy what it leads to")
	f.letter("L", "follow-link")
	f.BoolVar(&o.quiet, "quiet", false, "show no progress")
	f.letter("q", "quiet")
	jsonFlag(f, &o.asJSON, jsonHelp+`: {"from","to","bytes"}; not together with - as target`)
	return o.run
}

func (o *cpOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 2, 2, "source or target"); err != nil {
		return err
	}
	fromRef, fromPath, out := splitRemote(args[0])
	toRef, toPath, in := splitRemote(args[1])
	switch {
	case out == in:
		return usagef("exactly one of source and target must be SANDBOX:PATH")
	case fromPath+toPath == "":
		return usagef("the path in the sandbox is empty")
	case out && args[1] == "-" && o.asJSON:
		return usagef("--json and - both want standard output")
	case !out && args[0] == "", !in && args[1] == "":
		return usagef("the local path is empty")
	}
	sb, err := c.dialSandbox(ctx, *o.context, fromRef+toRef)
	if err != nil {
		return err
	}
	t := &transfer{cpOptions: o, console: c, files: sb.Files(o.user)}
	t.bar = newProgress(c.stderr, -1)
	if o.quiet || o.asJSON {
		t.bar = newProgress(nil, -1)
	}
	if out {
		err = t.download(ctx, fromPath, args[1])
	} else {
		err = t.upload(ctx, args[0], toPath)
	}
	t.bar.done()
	if err != nil || !o.asJSON {
		return err
	}
	return c.printJSON(copied{args[0], args[1], t.bytes})
}

// splitRemote takes SANDBOX:PATH apart. Local names have no colon, or a slash before it.
func splitRemote(s string) (ref, path string, ok bool) {
	ref, path, ok = strings.Cut(s, ":")
	if !ok || ref == "" || strings.Contains(ref, "/") {
		return "", "", false
	}
	return ref, path, true
}

// A transfer is one copy.
type transfer struct {
	*cpOptions
	*console
	files *client.Files
	bar   *progress
	bytes int64
}
