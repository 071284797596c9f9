package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/internal/image"
	"dsec/internal/image/archive"
	"dsec/sandbox"
)

var (
	imageCommand     = environmentCommand("image", image.KindBase, "base images: the operating system that a sandbox starts from")
	workspaceCommand = environmentCommand("workspace", image.KindWorkspace, "workspaces: a task's files, layered over an image")
	toolkitCommand   = environmentCommand("toolkit", image.KindToolkit, "toolkits: tools, layered over image and workspace")
)

// An environmentKind is one of image, workspace and toolkit, whose commands are alike.
type environmentKind struct{ word, kind string }

func environmentCommand(word, kind, summary string) command {
	k := environmentKind{word, kind}
	return command{
		name: word, group: groupEnvironments, summary: summary,
		sub: []command{k.createCommand(), k.lsCommand(), k.inspectCommand(), k.rmCommand()},
	}
}

func (k environmentKind) createCommand() command {
	return command{
		name: "create", group: groupEnvironments, args: "NAME[:TAG]",
		summary: "make a new " + k.word + " of a directory or tar archive",
		details: fmt.Sprintf(`The directory's or archive's root becomes the root of the layer. A name that exists is replaced; running sandboxes keep what
they have. Device nodes are left out and reported. An archive may be compressed with gzip.
Of a directory packed by root, files keep their owners; packed by others, they belong to root.

  dsec %[1]s create mine:1 --from-dir ./rootfs
  curl -s https://example.org/rootfs.tar.gz | dsec %[1]s create mine:2 --from-tar - --workdir /src -e LANG=C.UTF-8`, k.word),
		setup: k.setupCreate,
	}
}

type createOptions struct {
	kind          environmentKind
	dir, tar      string
	user, workdir string
	env           list
	rootOwner     bool
	oneFileSystem bool
	asJSON        bool
	context       *string
}

func (k environmentKind) setupCreate(f *flagSet) action {
	o := &createOptions{kind: k, context: contextFlag(f)}
	f.StringVar(&o.dir, "from-dir", "", "pack this directory `DIR`")
	f.StringVar(&o.tar, "from-tar", "", "send this `FILE`, a tar archive; - is standard input")
	f.BoolVar(&o.rootOwner, "root-owner", os.Geteuid() != 0, "all that is packed belongs to root; the default unless root packs")
	f.BoolVar(&o.oneFileSystem, "one-file-system", false, "leave out what is mounted below the directory")
	f.StringVar(&o.user, "user", "", "default `USER` of commands")
	f.letter("u", "user")
	f.StringVar(&o.workdir, "workdir", "", "default working directory `DIR` of commands")
	f.letter("w", "workdir")
	f.Var(&o.env, "env", "environment variable `KEY=VALUE` of commands; may be repeated")
	f.letter("e", "env")
	jsonFlag(f, &o.asJSON, jsonHelp)
	return o.run
}

func (o *createOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 1, 1, "the name"); err != nil {
		return err
	}
	if (o.dir == "") == (o.tar == "") {
		return usagef("give one of --from-dir and --from-tar")
	}
	ref, err := sandbox.ParseEnvRef(args[0])
	if err != nil {
		return err
	}
	if ref.Digest != "" {
		return usagef("a new %s is named by a tag; its digest follows from its content", o.kind.word)
	}
	env, err := environment(o.env, c.getenv)
	if err != nil {
		return err
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	body, err := o.open(ctx, c)
	if err != nil {
		return err
	}
	bar := newProgress(c.stderr, body.size)
	made, err := cl.CreateEnvironment(ctx, o.kind.kind, ref.String(), client.Archive{
		Tar: body.Reader, Size: body.size, Progress: bar.report, Config: &dsecv1.EnvironmentConfig{Env: env, User: o.user, Workdir: o.workdir},
	})
	bar.done()
	if cerr := body.close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return o.print(c, made)
}

// An archiveSource is the tar archive to send.
type archiveSource struct {
	io.Reader
	size  int64        // -1 = unknown
	close func() error // also says what went wrong with packing
}

func (o *createOptions) open(ctx context.Context, c *console) (*archiveSource, error) {
	switch {
	case o.dir != "":
		info, err := os.Stat(o.dir)
		if err != nil {
			return nil, err
		}
		if !info.IsDir() {
			return nil, usagef("%s is no directory; an archive is given with --from-tar", o.dir)
		}
		return packDirectory(ctx, c, o.dir, archive.Options{RootOwner: o.rootOwner, OneFileSystem: o.oneFileSystem}), nil
	case o.tar == "-":
		return &archiveSource{Reader: client.Piped(c.stdin), size: -1, close: func() error { return nil }}, nil
	}
	f, err := os.Open(o.tar)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	size := int64(-1)
	if info.Mode().IsRegular() {
		size = info.Size()
	}
	return &archiveSource{Reader: f, size: size, close: f.Close}, nil
}

func (o *createOptions) print(c *console, made *dsecv1.Environment) error {
	if o.asJSON {
		return c.printJSON(made)
	}
	if n := len(made.GetDropped()); n > 0 {
		c.say("%d entries were left out, for example %s", n, made.GetDropped()[0])
	}
	return c.print("%s %s  %s  %d entries, %s in files, %s stored\n", o.kind.word, printable(made.GetName()), printable(made.GetDigest()),
		made.GetEntries(), byteSize(made.GetFileBytes()), byteSize(made.GetSize()))
}

func (k environmentKind) lsCommand() command {
	return command{
		name: "ls", group: groupEnvironments, summary: "list " + k.word + "s",
		details: fmt.Sprintf("With --json each is one line of JSON, as the API gives it.\n\n  dsec %s ls -q", k.word),
		setup: func(f *flagSet) action {
			contextName := contextFlag(f)
			quiet := f.Bool("quiet", false, "print names only")
			f.letter("q", "quiet")
			noTrunc := f.Bool("no-trunc", false, "do not shorten digests")
			var asJSON bool
			jsonFlag(f, &asJSON, "print one line of JSON for each")
			return func(ctx context.Context, c *console, args []string) error {
				if err := wantArgs(args, 0, 0, ""); err != nil {
					return err
				}
				cl, err := c.dial(*contextName)
				if err != nil {
					return err
				}
				all, err := client.Collect(cl.ListEnvironments(ctx, k.kind))
				if err != nil {
					return err
				}
				return printEnvironments(c, all, c.now(), asJSON, *quiet, *noTrunc)
			}
		},
	}
}

func printEnvironments(c *console, all []*dsecv1.Environment, now time.Time, asJSON, quiet, noTrunc bool) error {
	t := newTable("NAME", "DIGEST", "SIZE", "ENTRIES", "CREATED")
	for _, e := range all {
		var err error
		switch {
		case asJSON:
			err = c.printJSON(e)
		case quiet:
			err = c.print("%s\n", printable(e.GetName()))
		}
		if err != nil {
			return err
		}
		digest := e.GetDigest()
		if !noTrunc {
			digest = shortID(strings.TrimPrefix(digest, "sha256:"))
		}
		t.row(e.GetName(), digest, byteSize(e.GetSize()), strconv.FormatInt(e.GetEntries(), 10), age(now, e.GetCreatedAt()))
	}
	if asJSON || quiet {
		return nil
	}
	return t.print(c)
}

func (k environmentKind) inspectCommand() command {
	return command{
		name: "inspect", group: groupEnvironments, args: "NAME[:TAG]...",
		summary: "show all that is known of " + k.word + "s",
		details: "Prints a JSON array, or with --json one line for each.",
		setup: inspectEach("the name", func(ctx context.Context, cl *client.Client, name string) (*dsecv1.Environment, error) {
			return cl.GetEnvironment(ctx, k.kind, name)
		}),
	}
}

func (k environmentKind) rmCommand() command {
	return command{
		name: "rm", group: groupEnvironments, args: "NAME[:TAG]...",
		summary: "remove names of " + k.word + "s",
		details: "Sandboxes that use it go on. The names of those removed are printed.",
		setup: func(f *flagSet) action {
			contextName := contextFlag(f)
			var asJSON bool
			jsonFlag(f, &asJSON, jsonHelp+`: {"name": ...} for each`)
			return func(ctx context.Context, c *console, args []string) error {
				if err := wantArgs(args, 1, -1, "the name"); err != nil {
					return err
				}
				cl, err := c.dial(*contextName)
				if err != nil {
					return err
				}
				return c.eachOf(ctx, args, "name", asJSON, func(name string) error { return cl.RemoveEnvironment(ctx, k.kind, name) })
			}
		},
	}
}
