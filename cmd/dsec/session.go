package main

import (
	"context"
	"strconv"

	dsecv1 "dsec/api/dsec/v1"
)

var sessionCommand = command{
	name: "session", group: groupInside,
	summary: "shells that keep their directory, variables and jobs between commands",
	details: `Commands run in them with ` + "`dsec exec --session NAME`" + `, one at a time.

  dsec session create s4k2 build -w /src
  dsec exec --session build s4k2 --shell 'export V=1; cd lib'
  dsec exec --session build s4k2 pwd
  dsec session rm s4k2 build`,
	sub: []command{sessionCreateCommand, sessionLsCommand, sessionRmCommand},
}

var sessionCreateCommand = command{
	name: "create", group: groupInside, args: "SANDBOX [NAME]",
	summary: "start a session, or find the one of this name",
	details: "Its name is printed.\n\n  dsec session create s4k2 build -w /src -e CC=clang",
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		var o specFlags
		f.Var(&o.env, "env", "environment variable `KEY=VALUE`, or KEY for its value here; may be repeated")
		f.letter("e", "env")
		f.StringVar(&o.user, "user", "", "`USER`: name, uid, name:group or uid:gid")
		f.letter("u", "user")
		f.StringVar(&o.workdir, "workdir", "", "directory `DIR` that it begins in")
		f.letter("w", "workdir")
		jsonFlag(f, &o.asJSON, jsonHelp+`: {"name": ...}`)
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 1, 2, "the sandbox"); err != nil {
				return err
			}
			env, err := environment(o.env, c.getenv)
			if err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			made, err := sb.CreateSession(ctx, &dsecv1.CreateSessionRequest{Name: at(args, 1), Cwd: o.workdir, User: o.user, Env: env})
			if err != nil {
				return err
			}
			return c.printNamed("name", made.Name, o.asJSON)
		}
	},
}

var sessionLsCommand = command{
	name: "ls", group: groupInside, args: "SANDBOX",
	summary: "list sessions; those that have ended, too, until they are removed",
	details: "With --json each is one line of JSON, as the API gives it.\n\n  dsec session ls s4k2",
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		var asJSON bool
		jsonFlag(f, &asJSON, "print one line of JSON for each")
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 1, 1, "the sandbox"); err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			all, err := sb.Sessions(ctx)
			if err != nil {
				return err
			}
			t := newTable("NAME", "STATUS", "CREATED", "RUNNING", "WAITING", "SHELL")
			for _, s := range all {
				if asJSON {
					if err := c.printJSON(s); err != nil {
						return err
					}
				}
				t.row(s.GetName(), sessionStatus(s), age(c.now(), s.GetCreatedAt()), s.GetRunningCommand(), strconv.Itoa(int(s.GetWaitingCommands())), s.GetShell())
			}
			if asJSON {
				return nil
			}
			return t.print(c)
		}
	},
}

func sessionStatus(s *dsecv1.Session) string {
	switch {
	case !s.GetEnded() && s.GetRunningCommand() != "":
		return "busy"
	case !s.GetEnded():
		return "ready"
	case s.GetReason() == "exited":
		return "exited (" + strconv.Itoa(int(s.GetExitCode())) + ")"
	}
	return "ended (" + s.GetReason() + ")"
}

var sessionRmCommand = command{
	name: "rm", group: groupInside, args: "SANDBOX NAME...",
	summary: "end sessions and all that runs in them",
	details: "The names of those removed are printed.\n\n  dsec session rm s4k2 build",
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		var asJSON bool
		jsonFlag(f, &asJSON, jsonHelp+`: {"name": ...} for each`)
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 2, -1, "sandbox or session"); err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			return c.eachOf(ctx, args[1:], "name", asJSON, func(name string) error { return sb.Session(name).Delete(ctx) })
		}
	},
}

// at is args[i], "" beyond the end.
func at(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

// eachOf does something to each of several things, and prints those to which it was done. What fails for one is said, and the rest
// goes on.
func (c *console) eachOf(ctx context.Context, refs []string, key string, asJSON bool, do func(string) error) error {
	failed := false
	for _, ref := range refs {
		if err := do(ref); err != nil {
			if concernsAll(ctx, err) {
				return err
			}
			c.sayError(err, asJSON)
			failed = true
			continue
		}
		if err := c.printNamed(key, ref, asJSON); err != nil {
			return err
		}
	}
	if failed {
		return &exitError{code: exitFailure}
	}
	return nil
}

// printNamed prints a name, or as JSON {"<key>": name}.
func (c *console) printNamed(key, name string, asJSON bool) error {
	if asJSON {
		return c.printJSON(map[string]string{key: name})
	}
	return c.print("%s\n", name)
}
