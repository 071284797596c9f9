package aether

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A dialect is how a kind of shell is driven. It reads its commands from a pipe, two lines for each command of the session:
// the first sources the script, which it finds in another pipe, and the second tells the status. The script is data: no part of
// it is ever on those lines.
//
// The descriptors have the highest numbers that the shell can redirect. While a script runs they are closed to it and to what it
// starts; the shell has them saved meanwhile, to be closed by an exec.
type dialect struct {
	name, path string
	argv       []string

	script int // read end of the pipe of scripts
	source int // the same, open only while it is sourced
	stdin  int // a file with the input of a command that has some
	status int // write end of the pipe of statuses
	null   int // the null device
	lines  int // the pipe of lines, until the shell has it at another place

	initial string
	enter   string      // begins each script: closes source to it
	jobs    bool        // it has job control without a terminal
	abort   unix.Signal // makes it give up the script; 0 = cannot be asked
}

// abortSignal is one that nothing else uses.
const abortSignal = unix.Signal(62)

// bashAbort is run on that signal, and on SIGINT: bash returns from whatever it is sourcing or calling, level by level. The
// last level has no BASH_SOURCE[1]: there the shell waits for lines. Without a trap of SIGINT it would end when a program dies
// of one, as it does when it has job control and no terminal.
const bashAbort = `trap 'if [[ ${BASH_SOURCE[1]+x} ]]; then ` +
	`\command \trap "if [[ \${BASH_SOURCE[1]+x} ]]; then \command \return 130; fi; \command \trap - DEBUG" DEBUG; ` +
	`\command \return 130; fi' 62 INT`

var dialects = []dialect{
	{
		name: "bash", path: "/bin/bash", argv: []string{"bash", "/proc/self/fd/254"},
		script: 250, source: 249, stdin: 251, status: 252, null: 253, lines: 254,
		initial: "{ exec 254<&-; BASH_ARGV0=bash; set -m; shopt -s execfail; " + bashAbort + "; } 2>&253\n",
		enter:   `\command \exec 249<&-; `, // exec may be a function
		jobs:    true, abort: abortSignal,
	},
	{ // POSIX gives a shell no descriptors over 9
		name: "sh", path: "/bin/sh", argv: []string{"sh", "-c", ". /proc/self/fd/4", "sh"},
		script: 9, source: 6, stdin: 8, status: 7, null: 5, lines: 4,
		initial: `exec 4<&-; trap '\return 130' 62` + "\n", // from the script, or one of its functions
		enter:   `\exec 6<&-; `,
		abort:   abortSignal,
	},
}

// drive is the lines that run one command.
func (d *dialect) drive(seq uint64, stdin bool, last outcome) string {
	var b strings.Builder
	if d.jobs && (last.status == 126 || last.status == 127) && !strings.Contains(last.flags, "m") {
		fmt.Fprintf(&b, "{ set -m; } 2>&%d\n", d.null) // a failed exec of bash ends job control
	}
	fmt.Fprintf(&b, `\command \. /proc/self/fd/%d `, d.source)
	if stdin {
		fmt.Fprintf(&b, "</proc/self/fd/%d ", d.stdin)
	}
	fmt.Fprintf(&b, "%d<&%d %d<&- %d<&- %d>&- %d>&-\n", d.source, d.script, d.script, d.stdin, d.status, d.null)
	fmt.Fprintf(&b, `{ \command \echo %d "$?" "$-" >&%d || \exit 125; \set +xv; } >&%d 2>&%d`+"\n", seq, d.status, d.null, d.null)
	return b.String()
}

// prelude stands before each script, on its first line: it closes the script's descriptor, and gives the script what the line of
// the status took: $?, and the option x, with which that line would have been traced.
func (d *dialect) prelude(last outcome) string {
	status := ""
	switch last.status {
	case 0:
	case 1:
		status = "! :; "
	default: // as part of a list, so that the option e does not end the shell
		status = fmt.Sprintf(`(\command \exit %d) && :; `, last.status)
	}
	var options string
	for _, o := range "xv" {
		if strings.ContainsRune(last.flags, o) {
			options += string(o)
		}
	}
	switch {
	case options == "":
		return d.enter + status
	case status == "":
		return d.enter + `\set -` + options + "; "
	}
	return d.enter + `{ \set -` + options + "; " + status + "} 2>/dev/null; " // or the status would be traced
}

// files are the descriptors of the new shell by number; -1 is closed.
func (d *dialect) files(p *shellPipes) []uintptr {
	files := make([]uintptr, max(d.lines, d.script, d.stdin, d.status, d.null)+1)
	for i := range files {
		files[i] = ^uintptr(0)
	}
	for n, fd := range map[int]int{
		0: p.null, 1: p.theirs[0], 2: p.theirs[1], d.script: p.script, d.stdin: p.stdin, d.status: p.theirs[2], d.null: p.sink, d.lines: p.lines,
	} {
		files[n] = uintptr(fd)
	}
	return files
}

// An outcome is what the line of the status says.
type outcome struct {
	seq    uint64
	status int
	flags  string // $-
}

const maxOutcome = 96 // bytes of that line

// parseOutcome reads such a line. The sandbox may have written anything.
func parseOutcome(line string) (o outcome, ok bool) {
	seq, rest, _ := strings.Cut(line, " ")
	status, flags, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(seq, 10, 64)
	code, serr := strconv.ParseUint(status, 10, 8)
	if err != nil || serr != nil || len(flags) > 64 {
		return outcome{}, false
	}
	for _, c := range []byte(flags) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			return outcome{}, false
		}
	}
	return outcome{n, int(code), flags}, true
}
