package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strconv"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

var filesCommand = command{
	name: "files", group: groupInside,
	summary: "look at files in a sandbox and change them, without a shell inside",
	details: `Content is copied with ` + "`dsec cp`" + `.

  dsec files ls s4k2 /src
  dsec files mkdir -p s4k2 /data/in /data/out
  dsec files watch -r s4k2 /src`,
	sub: []command{
		filesLsCommand, filesStatCommand, filesWatchCommand,
		filesChangeCommand("mkdir", "SANDBOX DIR...", "make directories", "  dsec files mkdir -p s4k2 /data/in", setupMkdir),
		filesChangeCommand("mv", "SANDBOX FROM TO", "rename a file or directory", "TO is the new name itself, or ends with / and is a directory to move into.\n\n  dsec files mv s4k2 /tmp/a /srv/b", setupMv),
		filesChangeCommand("cp", "SANDBOX FROM TO", "copy a file or directory within the sandbox", "  dsec files cp -r s4k2 /src /src.orig", setupCopy),
		filesChangeCommand("rm", "SANDBOX PATH...", "remove files", "  dsec files rm -r s4k2 /data/in", setupRemove),
		filesChangeCommand("chmod", "SANDBOX MODE PATH...", "change the mode of files", "MODE is octal.\n\n  dsec files chmod -R s4k2 755 /srv", setupChmod),
		filesChangeCommand("chown", "SANDBOX OWNER PATH...", "change the owner of files", "OWNER is a name, a uid, name:group or uid:gid.\n\n  dsec files chown -R s4k2 nobody:nogroup /srv", setupChown),
		filesChangeCommand("ln", "SANDBOX TARGET PATH", "make a link at PATH to TARGET", "  dsec files ln -s s4k2 /opt/tool/bin/x /usr/local/bin/x", setupLn),
	},
}

// userFlag adds -u.
func userFlag(f *flagSet) *string {
	user := f.String("user", "", "`USER` with whose rights it is done; the sandbox's if it is not given")
	f.letter("u", "user")
	return user
}

var filesLsCommand = command{
	name: "ls", group: groupInside, args: "SANDBOX [DIR]",
	summary: "list a directory",
	details: "Sorted by name; with -U or --json in the order in which they come, and then there may be millions. What is not text in a name\nis escaped: \\n, \\xff, and \\\\ for a backslash.\n\n  dsec files ls -l s4k2 /src\n  dsec files ls -R --json s4k2 /src",
	setup: func(f *flagSet) action {
		contextName, user := contextFlag(f), userFlag(f)
		long := f.Bool("long", false, "also show type, mode, owner, size and time")
		f.letter("l", "long")
		deep := f.Bool("recursive", false, "also all below")
		f.letter("R", "recursive")
		unsorted := f.Bool("unsorted", false, "in the order in which they come, at once")
		f.letter("U", "unsorted")
		var asJSON bool
		jsonFlag(f, &asJSON, "print one line of JSON for each")
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 1, 2, "the sandbox"); err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			depth := 1
			if *deep {
				depth = -1
			}
			l := listing{c: c, long: *long, json: asJSON, sorted: !*unsorted && !asJSON}
			return l.show(sb.Files(*user).List(ctx, cmp.Or(at(args, 1), "/"), depth))
		}
	},
}

// A listing is shown sorted, which holds all of it, or as it comes, which holds a few hundred entries.
type listing struct {
	c                  *console
	long, json, sorted bool
	held               []*dsecv1.FileInfo
}

// aligned is how many entries that come unsorted are aligned with each other.
const aligned = 256

func (l *listing) show(entries iter.Seq2[*dsecv1.FileInfo, error]) error {
	for e, err := range entries {
		if err != nil {
			return errors.Join(l.flush(), err)
		}
		l.held = append(l.held, e)
		if l.sorted || l.long && len(l.held) < aligned {
			continue
		}
		if err := l.flush(); err != nil {
			return err
		}
	}
	return l.flush()
}

func (l *listing) flush() error {
	held := l.held
	l.held = l.held[:0]
	if l.sorted {
		slices.SortFunc(held, func(a, b *dsecv1.FileInfo) int { return strings.Compare(pathOf(a), pathOf(b)) })
	}
	if l.long && !l.json && len(held) > 0 {
		return l.c.printLong(held)
	}
	for _, e := range held {
		var err error
		if l.json {
			err = l.c.printJSON(e)
		} else {
			err = l.c.print("%s\n", escaped(pathOf(e)))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *console) printLong(all []*dsecv1.FileInfo) error {
	t := newTable()
	for _, e := range all {
		name := escaped(pathOf(e))
		if to := linkOf(e); to != "" {
			name += " -> " + escaped(to)
		}
		t.row(modeText(e), strconv.FormatUint(uint64(e.GetUid()), 10)+":"+strconv.FormatUint(uint64(e.GetGid()), 10),
			strconv.FormatInt(e.GetSize(), 10), e.GetModifiedAt().AsTime().UTC().Format("2006-01-02 15:04:05"), name)
	}
	return t.print(c)
}

// pathOf is the path of a file or event, as it is inside.
func pathOf(e interface {
	GetPath() string
	GetRawPath() []byte
}) string {
	if len(e.GetRawPath()) > 0 {
		return string(e.GetRawPath())
	}
	return e.GetPath()
}

func linkOf(e *dsecv1.FileInfo) string {
	if len(e.GetRawLinkTarget()) > 0 {
		return string(e.GetRawLinkTarget())
	}
	return e.GetLinkTarget()
}

var typeLetters = map[dsecv1.FileType]string{
	dsecv1.FileType_FILE_TYPE_REGULAR: "-", dsecv1.FileType_FILE_TYPE_DIRECTORY: "d", dsecv1.FileType_FILE_TYPE_SYMLINK: "l",
	dsecv1.FileType_FILE_TYPE_FIFO: "p", dsecv1.FileType_FILE_TYPE_SOCKET: "s",
	dsecv1.FileType_FILE_TYPE_CHARACTER_DEVICE: "c", dsecv1.FileType_FILE_TYPE_BLOCK_DEVICE: "b",
}

// modeText is type and mode as ls has them.
func modeText(e *dsecv1.FileInfo) string {
	m := []byte("rwxrwxrwx")
	for i := range m {
		if e.GetMode()&(1<<(8-i)) == 0 {
			m[i] = '-'
		}
	}
	for i, special := range []struct {
		bit  uint32
		with string // the letters with and without x
	}{{0o4000, "sS"}, {0o2000, "sS"}, {0o1000, "tT"}} {
		if at := 3*i + 2; e.GetMode()&special.bit != 0 {
			m[at] = special.with[bytes.IndexByte([]byte("x-"), m[at])]
		}
	}
	return cmp.Or(typeLetters[e.GetType()], "?") + string(m)
}

var filesStatCommand = command{
	name: "stat", group: groupInside, args: "SANDBOX PATH...",
	summary: "tell about files",
	details: "The exit code is 1 if one of them is missing.\n\n  dsec files stat s4k2 /etc/passwd /etc/shadow",
	setup: func(f *flagSet) action {
		contextName, user := contextFlag(f), userFlag(f)
		follow := f.Bool("dereference", false, "of a link, tell about what it leads to")
		f.letter("L", "dereference")
		var asJSON bool
		jsonFlag(f, &asJSON, "print one line of JSON for each")
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 2, -1, "sandbox or path"); err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			results, err := sb.Files(*user).Stat(ctx, *follow, args[1:]...)
			if err != nil {
				return err
			}
			return c.printStats(results, asJSON)
		}
	},
}

func (c *console) printStats(results []*dsecv1.StatResult, asJSON bool) error {
	var found []*dsecv1.FileInfo
	failed := false
	for _, r := range results {
		switch err := client.FailureError(r.GetFailure()); {
		case err != nil:
			c.sayError(err, asJSON)
			failed = true
		case asJSON:
			if err := c.printJSON(r.GetFile()); err != nil {
				return err
			}
		default:
			found = append(found, r.GetFile())
		}
	}
	if len(found) > 0 {
		if err := c.printLong(found); err != nil {
			return err
		}
	}
	if failed {
		return &exitError{code: exitFailure}
	}
	return nil
}

var filesWatchCommand = command{
	name: "watch", group: groupInside, args: "SANDBOX DIR",
	summary: "show what happens to files below a directory, until Ctrl-C",
	details: "With --json each event is one line of JSON, after a line with \"ready\".\n\n  dsec files watch -r s4k2 /src",
	setup: func(f *flagSet) action {
		contextName, user := contextFlag(f), userFlag(f)
		deep := f.Bool("recursive", false, "also in directories below")
		f.letter("r", "recursive")
		var asJSON bool
		jsonFlag(f, &asJSON, "print one line of JSON for each event")
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 2, 2, "sandbox or directory"); err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			for m, err := range sb.Files(*user).Watch(ctx, args[1], *deep) {
				if err == nil {
					err = c.printFileEvents(m, asJSON)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}
	},
}

func (c *console) printFileEvents(m *dsecv1.WatchFilesResponse, asJSON bool) error {
	if m.GetOverflow() {
		c.say("events were lost: there were too many at once")
	}
	if m.GetReady() && asJSON {
		if err := c.print("{\"ready\":true}\n"); err != nil {
			return err
		}
	}
	for _, e := range m.GetEvents() {
		var err error
		if asJSON {
			err = c.printJSON(e)
		} else {
			kind := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(e.GetKind().String(), "FILE_EVENT_KIND_"), "_", " "))
			path := pathOf(e)
			if e.GetDirectory() {
				path += "/"
			}
			err = c.print("%-10s  %s\n", kind, escaped(path))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// filesChangeCommand is a command that changes files. setup registers its flags, and says how many arguments it takes after the
// sandbox, and what makes changes of them.
func filesChangeCommand(name, args, summary, details string, setup func(*flagSet) (least, most int, make changeMaker)) command {
	return command{
		name: name, group: groupInside, args: args, summary: summary, details: strings.TrimLeft(details, "\n"),
		setup: func(f *flagSet) action {
			contextName, user := contextFlag(f), userFlag(f)
			least, most, change := setup(f)
			var asJSON bool
			jsonFlag(f, &asJSON, "print nothing, and errors as JSON")
			return func(ctx context.Context, c *console, args []string) error {
				if most >= 0 {
					most++
				}
				if err := wantArgs(args, least+1, most, "sandbox or path"); err != nil {
					return err
				}
				changes, err := change(args[1:])
				if err != nil {
					return err
				}
				sb, err := c.dialSandbox(ctx, *contextName, args[0])
				if err != nil {
					return err
				}
				return sb.Files(*user).Change(ctx, changes...)
			}
		},
	}
}

type changeMaker = func([]string) ([]*dsecv1.FileChange, error)

// each makes one change of each argument.
func each(paths []string, change func(path string) *dsecv1.FileChange) []*dsecv1.FileChange {
	var all []*dsecv1.FileChange
	for _, p := range paths {
		all = append(all, change(p))
	}
	return all
}

func setupMkdir(f *flagSet) (int, int, changeMaker) {
	parents := f.Bool("parents", false, "also make missing directories above; no error if it exists")
	f.letter("p", "parents")
	mode := f.String("mode", "755", "octal `MODE` of new directories")
	f.letter("m", "mode")
	return 1, -1, func(args []string) ([]*dsecv1.FileChange, error) {
		bits, err := parseMode(*mode)
		if err != nil {
			return nil, err
		}
		return each(args, func(p string) *dsecv1.FileChange {
			return &dsecv1.FileChange{Change: &dsecv1.FileChange_MakeDirectory{MakeDirectory: &dsecv1.MakeDirectory{Path: p, Mode: bits, Parents: *parents}}}
		}), nil
	}
}

// into is the name that a file has in to, which is a directory if it ends with a slash.
func into(from, to string) string {
	if strings.HasSuffix(to, "/") {
		from = strings.TrimRight(from, "/")
		return to + from[strings.LastIndexByte(from, '/')+1:]
	}
	return to
}

func setupMv(f *flagSet) (int, int, changeMaker) {
	exclusive := f.Bool("no-clobber", false, "refuse to replace what is there")
	f.letter("n", "no-clobber")
	return 2, 2, func(args []string) ([]*dsecv1.FileChange, error) {
		m := &dsecv1.MoveFile{From: args[0], To: into(args[0], args[1]), Exclusive: *exclusive}
		return []*dsecv1.FileChange{{Change: &dsecv1.FileChange_Move{Move: m}}}, nil
	}
}

func setupCopy(f *flagSet) (int, int, changeMaker) {
	recursive := f.Bool("recursive", false, "copy a directory and all below it")
	f.letter("r", "recursive")
	exclusive := f.Bool("no-clobber", false, "refuse to replace what is there")
	f.letter("n", "no-clobber")
	return 2, 2, func(args []string) ([]*dsecv1.FileChange, error) {
		m := &dsecv1.CopyFile{From: args[0], To: into(args[0], args[1]), Recursive: *recursive, Exclusive: *exclusive}
		return []*dsecv1.FileChange{{Change: &dsecv1.FileChange_Copy{Copy: m}}}, nil
	}
}

func setupRemove(f *flagSet) (int, int, changeMaker) {
	recursive := f.Bool("recursive", false, "also directories and all below them")
	f.letter("r", "recursive")
	force := f.Bool("force", false, "no error if one is missing")
	f.letter("f", "force")
	return 1, -1, func(args []string) ([]*dsecv1.FileChange, error) {
		return each(args, func(p string) *dsecv1.FileChange {
			return &dsecv1.FileChange{Change: &dsecv1.FileChange_Remove{Remove: &dsecv1.RemoveFile{Path: p, Recursive: *recursive, MissingOk: *force}}}
		}), nil
	}
}

func parseMode(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 8, 12)
	if err != nil {
		return 0, usagef("%q is no octal mode like 644", clipText(s))
	}
	return uint32(n), nil
}

func setupChmod(f *flagSet) (int, int, changeMaker) {
	recursive := f.Bool("recursive", false, "also all below")
	f.letter("R", "recursive")
	return 2, -1, func(args []string) ([]*dsecv1.FileChange, error) {
		bits, err := parseMode(args[0])
		if err != nil {
			return nil, err
		}
		return each(args[1:], func(p string) *dsecv1.FileChange {
			return &dsecv1.FileChange{Change: &dsecv1.FileChange_SetMode{SetMode: &dsecv1.SetMode{Path: p, Mode: bits, Recursive: *recursive}}}
		}), nil
	}
}

func setupChown(f *flagSet) (int, int, changeMaker) {
	recursive := f.Bool("recursive", false, "also all below")
	f.letter("R", "recursive")
	return 2, -1, func(args []string) ([]*dsecv1.FileChange, error) {
		return each(args[1:], func(p string) *dsecv1.FileChange {
			return &dsecv1.FileChange{Change: &dsecv1.FileChange_SetOwner{SetOwner: &dsecv1.SetOwner{Path: p, Owner: args[0], Recursive: *recursive}}}
		}), nil
	}
}

func setupLn(f *flagSet) (int, int, changeMaker) {
	symbolic := f.Bool("symbolic", false, "a symbolic link; without, another name of the same file")
	f.letter("s", "symbolic")
	return 2, 2, func(args []string) ([]*dsecv1.FileChange, error) {
		l := &dsecv1.MakeLink{Target: args[0], Path: args[1], Hard: !*symbolic}
		return []*dsecv1.FileChange{{Change: &dsecv1.FileChange_MakeLink{MakeLink: l}}}, nil
	}
}
