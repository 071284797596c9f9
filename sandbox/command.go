package sandbox

import (
	"regexp"
	"strings"
	"time"
)

// Bounds of a command. MaxArg is the kernel's MAX_ARG_STRLEN less one for the NUL: a single argument over it cannot be
// executed; a script is spooled instead.
const (
	MaxArg         = 128<<10 - 1
	MaxArgs        = 64 << 10
	MaxArgBytes    = 2<<20 - 64<<10 // a quarter of the usual 8 MiB stack, less room for the environment
	MaxScript      = 16 << 20
	MaxInlineStdin = 64 << 10
)

// A Command is one thing to run: Argv as it is, or Shell through bash, else sh.
type Command struct {
	Argv         []string
	Shell        string
	Cwd          string
	User         string
	Env          map[string]string
	Timeout      time.Duration
	Stdin        []byte
	StdinFollows bool
}

var commandID = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// ValidCommandID reports whether s can name a command.
func ValidCommandID(s string) bool { return commandID.MatchString(s) }

// Validate is the one check of a command from outside.
func (c Command) Validate() error {
	bad := func(format string, args ...any) error {
		return Errorf(InvalidArgument, "invalid_command", format, args...)
	}
	total := 0
	for _, a := range c.Argv {
		total += len(a) + 9
		switch {
		case strings.ContainsRune(a, 0):
			return bad("an argument holds a NUL byte, which no program can receive")
		case len(a) > MaxArg:
			return Errorf(InvalidArgument, "argument_too_long", "an argument of %d bytes is over the kernel's limit of %d; pass it by stdin or in a file, or run a script with run_shell, which may be 16 MiB", len(a), MaxArg)
		}
	}
	switch {
	case (len(c.Argv) == 0) == (c.Shell == ""):
		return bad("exactly one of argv and shell must be given")
	case len(c.Argv) > 0 && c.Argv[0] == "":
		return bad("the program's name is empty")
	case len(c.Argv) > MaxArgs || total > MaxArgBytes:
		return Errorf(InvalidArgument, "argument_list_too_long", "%d arguments with %d bytes are over the kernel's limit; pass them by stdin or in a file", len(c.Argv), total)
	case strings.ContainsRune(c.Shell, 0):
		return bad("the script holds a NUL byte, which no shell can receive")
	case len(c.Shell) > MaxScript:
		return Errorf(InvalidArgument, "script_too_long", "a script of %d bytes; at most 16 MiB", len(c.Shell))
	case c.Cwd != "" && (!strings.HasPrefix(c.Cwd, "/") || len(c.Cwd) > 4096 || strings.ContainsRune(c.Cwd, 0)):
		return bad("working directory %q must be an absolute path", clip(c.Cwd))
	case c.User != "" && !userSpec.MatchString(c.User):
		return bad("user %q is not a user name, uid, name:group or uid:gid", clip(c.User))
	case c.Timeout < 0:
		return bad("timeout must be greater than 0")
	case len(c.Stdin) > MaxInlineStdin:
		return bad("inline stdin of %d bytes; at most 64 KiB, longer input goes by stdin_follows", len(c.Stdin))
	case len(c.Env) > maxEnv:
		return bad("%d environment variables; at most %d", len(c.Env), maxEnv)
	}
	return ValidateEnv(c.Env)
}
