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

// A Command is one thing to run: Argv as it is, or Shell through bash, else sh. With a terminal it may be neither: the user's
// login shell.
type Command struct {
	Argv            []string
	Shell           string
	Cwd             string
	User            string
	Env             map[string]string
	Timeout         time.Duration
	NoOutputTimeout time.Duration // without a byte of output
	Stdin           []byte
	StdinFollows    bool
	Tag             string    // to find it again by
	Terminal        *Terminal // nil = none; with one StdinFollows is implied
	Session         string    // runs in the session of this name
	Trusted         bool      // all else is stopped, and the shell is the platform's
}

// A Terminal is the window of a command that has one. Zeros are the defaults.
type Terminal struct {
	Rows, Cols int
	Term       string // $TERM; "" = what the environment says, else DefaultTerm
}

// Bounds and defaults of a Terminal.
const (
	MaxTerminalSize = 1<<16 - 1
	DefaultRows     = 24
	DefaultCols     = 80
	DefaultTerm     = "xterm-256color"
)

var (
	commandID   = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	commandTag  = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,64}$`)
	trustedUser = regexp.MustCompile(`^(root|[0-9]{1,10}(:[0-9]{1,10})?)$`)
	termName    = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.+-]{0,63}$`)
)

// ValidCommandID reports whether s can name a command.
func ValidCommandID(s string) bool { return commandID.MatchString(s) }

// ValidSessionName reports whether s can name a session.
func ValidSessionName(s string) bool { return commandID.MatchString(s) }

// ValidTag reports whether s can be a command's tag.
func ValidTag(s string) bool { return commandTag.MatchString(s) }

// Validate is the one check of a window from outside.
func (t Terminal) Validate() error {
	switch {
	case t.Rows < 0 || t.Rows > MaxTerminalSize || t.Cols < 0 || t.Cols > MaxTerminalSize:
		return Errorf(InvalidArgument, "invalid_terminal", "a terminal of %d rows and %d columns; each must be 1 to %d, or 0 for the default", t.Rows, t.Cols, MaxTerminalSize)
	case t.Term != "" && !termName.MatchString(t.Term):
		return Errorf(InvalidArgument, "invalid_terminal", "%q is not a name of a terminal; one is %s", clip(t.Term), DefaultTerm)
	}
	return nil
}

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
	case len(c.Argv) > 0 && c.Shell != "", len(c.Argv) == 0 && c.Shell == "" && c.Terminal == nil:
		return bad("exactly one of argv and shell must be given")
	case len(c.Argv) > 0 && c.Argv[0] == "":
		return bad("the program's name is empty")
	case len(c.Argv) > MaxArgs || total > MaxArgBytes:
		return Errorf(InvalidArgument, "argument_list_too_long", "%d arguments with %d bytes are over the kernel's limit; pass them by stdin or in a file", len(c.Argv), total)
	case strings.ContainsRune(c.Shell, 0):
		return bad("the script holds a NUL byte, which no shell can receive")
	case len(c.Shell) > MaxScript:
		return Errorf(InvalidArgument, "script_too_long", "a script of %d bytes; at most 16 MiB", len(c.Shell))
	case c.Trusted && c.Terminal != nil:
		return bad("a trusted command has no terminal")
	case c.Trusted && c.User != "" && !trustedUser.MatchString(c.User):
		return bad("user %q: a trusted command runs as root or by number (uid, uid:gid), since names are the sandbox's word", clip(c.User))
	case c.Trusted && len(c.Argv) > 0 && strings.ContainsRune(c.Argv[0], '/'):
		return bad("%q is a program of the sandbox, which cannot be trusted; name a tool, or if that is meant run env with its path as argument", clip(c.Argv[0]))
	case c.Timeout < 0:
		return bad("timeout must be greater than 0")
	case c.NoOutputTimeout < 0:
		return bad("no_output_timeout must be greater than 0")
	case c.Tag != "" && !ValidTag(c.Tag):
		return Errorf(InvalidArgument, "invalid_tag", "tag %q: letters, digits and _.-, at most 64", clip(c.Tag))
	case len(c.Stdin) > MaxInlineStdin:
		return bad("inline stdin of %d bytes; at most 64 KiB, longer input goes by stdin_follows", len(c.Stdin))
	}
	if c.Session != "" {
		if err := c.validateInSession(); err != nil {
			return err
		}
	}
	if c.Terminal != nil {
		if err := c.Terminal.Validate(); err != nil {
			return err
		}
	}
	return validateSurroundings("invalid_command", c.User, c.Cwd, c.Env)
}

// validateInSession refuses what a session has been given once and for all, or does not offer.
func (c Command) validateInSession() error {
	bad := func(format string, args ...any) error {
		return Errorf(InvalidArgument, "invalid_command", format, args...)
	}
	if err := (SessionSpec{Name: c.Session}).Validate(); err != nil {
		return err
	}
	switch {
	case len(c.Argv) > 0:
		return bad("a session runs scripts; give shell, or run the program without a session")
	case c.Cwd != "" || c.User != "" || len(c.Env) > 0:
		return bad("a command of a session has the session's working directory, user and environment; give them to the session, or set them in the script")
	case c.StdinFollows:
		return bad("a command of a session gets its input whole, at most 64 KiB by stdin; put more into a file")
	case c.Terminal != nil || c.Trusted:
		return bad("a command of a session has neither a terminal of its own nor trust; run it without a session")
	}
	return nil
}
