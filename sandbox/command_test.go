package sandbox

import (
	"strings"
	"testing"
	"time"
)

func TestCommandIsChecked(t *testing.T) {
	shell := func(change func(*Command)) Command {
		c := Command{Shell: "true"}
		change(&c)
		return c
	}
	terminal := func(rows, cols int, term string) Command {
		return Command{Terminal: &Terminal{Rows: rows, Cols: cols, Term: term}}
	}
	for name, c := range map[string]struct {
		cmd    Command
		reason string
	}{
		"script":                   {Command{Shell: "true"}, ""},
		"program":                  {Command{Argv: []string{"true"}}, ""},
		"both":                     {Command{Argv: []string{"true"}, Shell: "true"}, "invalid_command"},
		"neither":                  {Command{}, "invalid_command"},
		"neither, with a terminal": {terminal(0, 0, ""), ""},
		"both, with a terminal":    {Command{Argv: []string{"true"}, Shell: "true", Terminal: &Terminal{}}, "invalid_command"},
		"largest terminal":         {terminal(65535, 65535, "screen.xterm-256color"), ""},
		"too many rows":            {terminal(65536, 1, ""), "invalid_terminal"},
		"too many columns":         {terminal(1, 1<<32-1, ""), "invalid_terminal"},
		"TERM of two lines":        {terminal(1, 1, "xterm\nA=B"), "invalid_terminal"},
		"TERM that is an option":   {terminal(1, 1, "-x"), "invalid_terminal"},
		"long TERM":                {terminal(1, 1, strings.Repeat("x", 65)), "invalid_terminal"},
		"tag":                      {shell(func(c *Command) { c.Tag = "a.B-3_" }), ""},
		"tag with a space":         {shell(func(c *Command) { c.Tag = "a b" }), "invalid_tag"},
		"long tag":                 {shell(func(c *Command) { c.Tag = strings.Repeat("x", 65) }), "invalid_tag"},
		"session":                  {shell(func(c *Command) { c.Session = "a-B_3"; c.Stdin = []byte("x"); c.Tag = "t" }), ""},
		"session of no name":       {shell(func(c *Command) { c.Session = "a b" }), "invalid_session"},
		"session with a directory": {shell(func(c *Command) { c.Session, c.Cwd = "a", "/" }), "invalid_command"},
		"session with a user":      {shell(func(c *Command) { c.Session, c.User = "a", "root" }), "invalid_command"},
		"session with variables":   {shell(func(c *Command) { c.Session, c.Env = "a", map[string]string{"A": "b"} }), "invalid_command"},
		"session with a stream":    {shell(func(c *Command) { c.Session, c.StdinFollows = "a", true }), "invalid_command"},
		"session with a terminal":  {shell(func(c *Command) { c.Session, c.Terminal = "a", &Terminal{} }), "invalid_command"},
		"session, trusted":         {shell(func(c *Command) { c.Session, c.Trusted = "a", true }), "invalid_command"},
		"program in a session":     {Command{Argv: []string{"true"}, Session: "a"}, "invalid_command"},
		"negative silence":         {shell(func(c *Command) { c.NoOutputTimeout = -time.Second }), "invalid_command"},
	} {
		err := c.cmd.Validate()
		if (err == nil) != (c.reason == "") || err != nil && ReasonOf(err) != c.reason {
			t.Errorf("%s: %v, want %q", name, err, c.reason)
		}
	}
}
