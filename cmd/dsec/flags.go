package main

import (
	"flag"
	"fmt"
	"io"
	"strings"
)

// A flagSet is the standard flag.FlagSet with the command line that Docker users expect: -x and --long differ, one-letter
// flags combine (-aq) and take their value attached (-m512m), and flags may follow positional arguments until `--`, or
// until the command to run begins.
type flagSet struct {
	*flag.FlagSet
	letters      map[string]string // one letter -> name
	commandAfter int               // positional arguments before the command to run begins; -1 = there is none
}

func newFlagSet(name string) *flagSet {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	return &flagSet{FlagSet: fs, letters: make(map[string]string), commandAfter: -1}
}

// letter gives a registered flag its one-letter form.
func (f *flagSet) letter(l, name string) {
	if f.Lookup(name) == nil || len(l) != 1 {
		panic("letter " + l + " for unknown flag " + name)
	}
	f.letters[l] = name
}

// on reports whether a boolean flag of that name exists and is set.
func (f *flagSet) on(name string) bool {
	g := f.Lookup(name)
	return g != nil && g.Value.String() == "true"
}

// given reports whether the flag was on the command line.
func (f *flagSet) given(name string) bool {
	found := false
	f.Visit(func(g *flag.Flag) { found = found || g.Name == name })
	return found
}

// parse sets the flags and returns the positional arguments. It returns flag.ErrHelp for -h and --help, otherwise a
// usage error.
func (f *flagSet) parse(args []string) ([]string, error) {
	var positional []string
	for len(args) > 0 {
		arg := args[0]
		switch {
		case arg == "--":
			return append(positional, args[1:]...), nil
		case isHelp(arg) && !(arg == "-h" && f.letters["h"] != ""):
			return nil, flag.ErrHelp
		case len(arg) < 2 || arg[0] != '-':
			if f.commandAfter >= 0 && len(positional) == f.commandAfter {
				return append(positional, args...), nil
			}
			positional, args = append(positional, arg), args[1:]
			continue
		}
		var err error
		if strings.HasPrefix(arg, "--") {
			args, err = f.parseLong(arg[2:], args[1:])
		} else {
			args, err = f.parseLetters(arg[1:], args[1:])
		}
		if err != nil {
			return nil, err
		}
	}
	return positional, nil
}

func isHelp(arg string) bool { return arg == "-h" || arg == "--help" || arg == "-help" }

// parseLong handles "name", "name=value" and "name" with its value in rest; it returns what is left of rest.
func (f *flagSet) parseLong(text string, rest []string) ([]string, error) {
	name, value, attached := strings.Cut(text, "=")
	g := f.Lookup(name)
	if g == nil {
		return nil, usagef("there is no flag --%s", name)
	}
	if !attached {
		if isBoolFlag(g) {
			value = "true"
		} else if len(rest) == 0 {
			return nil, usagef("flag --%s needs a value", name)
		} else {
			value, rest = rest[0], rest[1:]
		}
	}
	return rest, f.assign(name, "--"+name, value)
}

// parseLetters handles "x", "xyz" of booleans, "xVALUE", "x=VALUE" and "x" with its value in rest.
func (f *flagSet) parseLetters(text string, rest []string) ([]string, error) {
	for text != "" {
		l := text[:1]
		text = text[1:]
		name, ok := f.letters[l]
		if !ok {
			return nil, usagef("there is no flag -%s", l)
		}
		if isBoolFlag(f.Lookup(name)) {
			value := "true"
			if v, attached := strings.CutPrefix(text, "="); attached {
				value, text = v, ""
			}
			if err := f.assign(name, "-"+l, value); err != nil {
				return nil, err
			}
			continue
		}
		switch {
		case text != "":
			return rest, f.assign(name, "-"+l, strings.TrimPrefix(text, "="))
		case len(rest) == 0:
			return nil, usagef("flag -%s needs a value", l)
		}
		return rest[1:], f.assign(name, "-"+l, rest[0])
	}
	return rest, nil
}

func (f *flagSet) assign(name, as, value string) error {
	if err := f.Set(name, value); err != nil {
		return usagef("flag %s: %q does not fit: %v", as, value, err)
	}
	return nil
}

func isBoolFlag(g *flag.Flag) bool {
	b, ok := g.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// describe lists the flags for help, sorted by name.
func (f *flagSet) describe() string {
	letterOf := make(map[string]string)
	for l, name := range f.letters {
		letterOf[name] = l
	}
	type line struct{ left, right string }
	var lines []line
	width := 0
	f.VisitAll(func(g *flag.Flag) {
		placeholder, usage := flag.UnquoteUsage(g)
		left := "    --" + g.Name
		if l := letterOf[g.Name]; l != "" {
			left = "-" + l + ", --" + g.Name
		}
		if placeholder != "" && !isBoolFlag(g) {
			left += " " + placeholder
		}
		if d := g.DefValue; d != "" && d != "false" && d != "true" && d != "0" && d != "0s" {
			usage += " (default " + d + ")"
		}
		width = max(width, len(left))
		lines = append(lines, line{left, usage})
	})
	var b strings.Builder
	for _, l := range lines {
		fmt.Fprintf(&b, "  %-*s  %s\n", width, l.left, l.right)
	}
	return b.String()
}
