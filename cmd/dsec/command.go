package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// A command is one word after `dsec`: it has either sub commands or a setup.
type command struct {
	name    string
	group   string    // heading in the list of commands; "" = not listed
	summary string    // one line without a full stop
	args    string    // what follows the flags on the usage line, for example "IMAGE [COMMAND ARG...]"
	details string    // further text and examples
	sub     []command // commands below this one, for example of `dsec image`
	// setup registers the flags and returns what runs once they are parsed.
	setup func(*flagSet) action
}

// An action does the work. args are the positional arguments. An error becomes a line on stderr and an exit code, see
// exitCode; an *exitError is silent.
type action func(ctx context.Context, c *console, args []string) error

// Headings of the list of commands.
const (
	groupPlatform     = "Platform"
	groupSandboxes    = "Sandboxes"
	groupInside       = "Inside a sandbox"
	groupEnvironments = "Environments"
	groupNetwork      = "Network"
	groupServers      = "Servers (started by `dsec up`, or by hand in a cluster)"
	groupDiagnosis    = "Diagnosis"
)

// A console is all that a command touches of its surroundings, so that tests run the real commands.
type console struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string
	forced         context.Context // ends when the user insists (a second Ctrl-C); nil = never
	screen         screen          // the terminal of stdin; nil = it is none
	raw            rawMode         // of the screen
	now            func() time.Time
	sleep          func(context.Context, time.Duration) error // between attempts to reach the platform; nil = as long as it takes
}

// newConsole makes a console whose stderr several goroutines may use.
func newConsole(stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) *console {
	return &console{stdin: stdin, stdout: stdout, stderr: &lockedWriter{to: stderr}, getenv: getenv, now: time.Now}
}

// pause waits for d, or until ctx ends.
func (c *console) pause(ctx context.Context, d time.Duration) error {
	if c.sleep != nil {
		return c.sleep(ctx, d)
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// A lockedWriter keeps lines whole: a command's stderr and our own notices share it.
type lockedWriter struct {
	mu sync.Mutex
	to io.Writer
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}

// execute finds the command that args name and runs it. It returns the exit code of the process.
func execute(ctx context.Context, c *console, table []command, args []string) int {
	cmd, path, rest := find(table, args)
	if cmd == nil || cmd.setup == nil {
		return overview(c, table, cmd, path, rest)
	}
	f := newFlagSet(path)
	run := cmd.setup(f)
	positional, err := f.parse(rest)
	if errors.Is(err, flag.ErrHelp) {
		return c.report(ctx, c.print("%s", cmd.helpText(path, f)), false)
	}
	unparsed := err != nil
	if err == nil {
		err = run(ctx, c, positional)
	}
	asJSON := f.on("json")
	if unparsed && f.commandAfter < 0 { // the flag may stand behind the one that is wrong
		asJSON = asJSON || f.Lookup("json") != nil && slices.Contains(rest, "--json")
	}
	code := c.report(ctx, err, asJSON)
	var usage *usageError
	if code == exitUsage && errors.As(err, &usage) && !asJSON { // a command's own exit code may be the same
		fmt.Fprintf(c.stderr, "Usage: %s\nSee `%s --help`.\n", cmd.usageLine(path), path)
	}
	return code
}

// find walks down the table as far as args name commands. It also says how the command was called and what is left.
func find(table []command, args []string) (*command, string, []string) {
	path := "dsec"
	var cmd *command
	for len(args) > 0 {
		i := slices.IndexFunc(table, func(k command) bool { return k.name == args[0] })
		if i < 0 {
			break
		}
		cmd, table = &table[i], table[i].sub
		path += " " + args[0]
		args = args[1:]
	}
	return cmd, path, args
}

// overview answers where no command was named: help, or what is wrong.
func overview(c *console, table []command, cmd *command, path string, rest []string) int {
	heading := "dsec runs sandboxes for agents: many, from composed environments.\n"
	if cmd != nil {
		table, heading = cmd.sub, sentence(cmd.summary)+"\n"
		if cmd.details != "" {
			heading += "\n" + cmd.details + "\n"
		}
	}
	switch {
	case len(rest) == 0:
		io.WriteString(c.stderr, overviewText(table, path, heading))
		return exitUsage
	case rest[0] == "help" && len(rest) > 1:
		return execute(context.Background(), c, table, append(slices.Clone(rest[1:]), "--help"))
	case rest[0] == "help" || isHelp(rest[0]):
		if _, err := io.WriteString(c.stdout, overviewText(table, path, heading)); err != nil {
			return exitFailure
		}
		return 0
	}
	if cmd == nil && (rest[0] == "--version" || rest[0] == "-v") {
		return c.report(context.Background(), c.print("dsec %s\n", version), false)
	}
	hint := fmt.Sprintf("`%s help` lists them", path)
	if ours := dockerHints[strings.TrimPrefix(path+" "+rest[0], "dsec ")]; ours != "" {
		hint = "use " + ours
	}
	c.say("there is no command `%s %s`; %s", path, rest[0], hint)
	return exitUsage
}

// dockerHints says what to use instead of a word that Docker's users try.
var dockerHints = map[string]string{
	"build":        hintCreate,
	"commit":       hintCreate,
	"container":    "`dsec run`, `dsec ps`, `dsec rm`",
	"create":       "`dsec run -d IMAGE`",
	"image build":  hintCreate,
	"image import": hintCreate,
	"image list":   "`dsec image ls`",
	"image load":   hintCreate,
	"image pull":   hintCreate,
	"images":       "`dsec image ls`",
	"import":       hintCreate,
	"info":         "`dsec doctor`",
	"list":         "`dsec ps`",
	"load":         hintCreate,
	"ls":           "`dsec ps`",
	"pull":         hintCreate,
	"restart":      hintRestart,
	"rmi":          "`dsec image rm NAME`",
	"start":        hintRestart,
	"stop":         "`dsec rm SANDBOX`: a sandbox that has stopped cannot be started again",
	"port":         "`dsec port-forward SANDBOX PORT`",
	"processes":    "`dsec top SANDBOX`",
	"sessions":     "`dsec session ls SANDBOX`",
	"ssh":          "`dsec shell SANDBOX`",
}

const (
	hintCreate  = "`dsec image create NAME --from-tar FILE` or `--from-dir DIR`"
	hintRestart = "`dsec run`: a sandbox that has stopped cannot be started again"
)

func overviewText(table []command, path, heading string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s COMMAND\n\n%s", path, heading)
	width := 0
	for _, k := range table {
		width = max(width, len(k.name))
	}
	group := ""
	for _, k := range table {
		if k.group == "" {
			continue
		}
		if heading := groupOf(k, path); heading != group {
			group = heading
			fmt.Fprintf(&b, "\n%s:\n", group)
		}
		fmt.Fprintf(&b, "  %-*s  %s\n", width, k.name, k.summary)
	}
	fmt.Fprintf(&b, "\n`%s COMMAND --help` says more.\n", path)
	return b.String()
}

// groupOf is the heading below which a command is listed: only the first list has several.
func groupOf(k command, path string) string {
	if path != "dsec" {
		return "Commands"
	}
	return k.group
}

// usageLine is the command's call in one line.
func (k *command) usageLine(path string) string {
	return strings.TrimRight(path+" [flags] "+k.args, " ")
}

func (k *command) helpText(path string, f *flagSet) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s\n\n%s\n", k.usageLine(path), sentence(k.summary))
	if k.details != "" {
		fmt.Fprintf(&b, "\n%s\n", k.details)
	}
	if flags := f.describe(); flags != "" {
		fmt.Fprintf(&b, "\nFlags:\n%s", flags)
	}
	return b.String()
}

// sentence makes a sentence of a summary.
func sentence(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

// wantArgs checks the number of positional arguments; most < 0 means any number.
func wantArgs(args []string, least, most int, what string) error {
	switch {
	case len(args) < least:
		return usagef("%s is missing", what)
	case most >= 0 && len(args) > most:
		return usagef("%q is one argument too many", args[most])
	}
	return nil
}
