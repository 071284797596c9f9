package edge

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

func TestExec(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		req := func(c *dsecv1.Command) error {
			_, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), Command: c, WaitSeconds: -1})
			return grpcerr.FromStatus(err)
		}
		if err := req(&dsecv1.Command{Shell: "true", Env: map[string]string{"B": "command"}}); err != nil {
			t.Fatal(err)
		}
		if got := w.guest(id).last; got.User != "agent" || got.Cwd != "/work" || got.Env["A"] != "spec" || got.Env["B"] != "command" {
			t.Errorf("defaults: %+v", got)
		}
		if err := req(&dsecv1.Command{Shell: "true", User: "root", Cwd: "/"}); err != nil {
			t.Fatal(err)
		}
		if got := w.guest(id).last; got.User != "root" || got.Cwd != "/" || got.Env["B"] != "spec" {
			t.Errorf("own: %+v", got)
		}
		for name, c := range map[string]*dsecv1.Command{
			"nothing":          {},
			"both":             {Shell: "true", Argv: []string{"true"}},
			"NUL":              {Argv: []string{"a\x00b"}},
			"negative timeout": {Shell: "true", TimeoutSeconds: -1},
			"NaN timeout":      {Shell: "true", TimeoutSeconds: math.NaN()},
			"none":             nil,
		} {
			if err := req(c); sandbox.ClassOf(err) != sandbox.InvalidArgument {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := req(&dsecv1.Command{Shell: "no-such-program"}); sandbox.ReasonOf(err) != "program_not_found" {
			t.Errorf("%v", err)
		}
		if n := len(w.e.index.byID[id].oom.running); n != 0 {
			t.Errorf("%d commands are watched that are not there", n)
		}
		w.close()
	})
}

func TestExecWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		get := func(cmd string, wait float64) *dsecv1.CommandResult {
			r, err := w.s.GetCommand(w.user(), &dsecv1.GetCommandRequest{SandboxId: string(id), CommandId: cmd, WaitSeconds: wait})
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		start := time.Now()
		r, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), CommandId: "c1", Command: &dsecv1.Command{Shell: "sleep 1m"}, WaitSeconds: 2.5})
		if err != nil || !r.Running || time.Since(start) != 2500*time.Millisecond {
			t.Fatalf("%v %v after %v", r, err, time.Since(start))
		}
		// a retry with the same id finds the same command
		if r, err = w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), CommandId: "c1", Command: &dsecv1.Command{Shell: "sleep 1m"}}); err != nil || !r.Running {
			t.Fatalf("%v %v", r, err)
		}
		if r := get("c1", -1); r.Running || time.Since(start) != time.Minute {
			t.Errorf("%v after %v", r, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(w.user(), time.Second)
		defer cancel()
		if _, err := w.s.Exec(ctx, &dsecv1.ExecRequest{SandboxId: string(id), CommandId: "c2", Command: &dsecv1.Command{Shell: "wait"}, WaitSeconds: -1}); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.DeadlineExceeded {
			t.Errorf("%v", err)
		}
		if r := get("c2", 0); !r.Running { // its caller went away, it goes on
			t.Errorf("%v", r)
		}
		if _, err := w.s.KillCommand(w.user(), &dsecv1.KillCommandRequest{SandboxId: string(id), CommandId: "c2"}); err != nil {
			t.Fatal(err)
		}
		if r := get("c2", -1); !r.Killed || r.SignalName != "SIGKILL" {
			t.Errorf("%v", r)
		}
		if _, err := w.s.KillCommand(w.user(), &dsecv1.KillCommandRequest{SandboxId: string(id), CommandId: "c2"}); err != nil {
			t.Errorf("kill of one that ended: %v", err)
		}
		list, err := w.s.ListCommands(w.user(), &dsecv1.ListCommandsRequest{SandboxId: string(id)})
		if err != nil || len(list.Commands) != 2 || list.Commands[0].Stdout.Data != nil {
			t.Errorf("%v %v", list, err)
		}
		w.delete(id, true)
		if r := get("c2", -1); !r.Killed { // results outlive the sandbox
			t.Errorf("after the sandbox: %v", r)
		}
		for name, err := range map[string]error{
			"unknown command": second(w.s.GetCommand(w.user(), &dsecv1.GetCommandRequest{SandboxId: string(id), CommandId: "nope"})),
			"NaN wait":        second(w.s.GetCommand(w.user(), &dsecv1.GetCommandRequest{SandboxId: string(id), CommandId: "c2", WaitSeconds: math.NaN()})),
			"bad signal":      second(w.s.KillCommand(w.user(), &dsecv1.KillCommandRequest{SandboxId: string(id), CommandId: "c2", Signal: 99})),
		} {
			if c := sandbox.ClassOf(grpcerr.FromStatus(err)); err == nil || c == sandbox.Internal {
				t.Errorf("%s: %v", name, err)
			}
		}
		w.close()
	})
}

// Nothing but its own time-out and the sandbox's lifetime ends a command, however long it is silent.
func TestACommandOfManyHours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create(idle(time.Minute))
		start := time.Now()
		r, err := w.exec(id, "sleep 20h", -1)
		if err != nil || r.Running || r.ExitCode != 0 || time.Since(start) != 20*time.Hour {
			t.Errorf("%v %v after %v", r, err, time.Since(start))
		}
		w.delete(id, true)
		w.close()
	})
}

func TestOutOfMemoryIsToldOfTheCommandThatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		group := "/fake/cgroup/" + string(id) + "/user"
		run := func(shell string, kills int64) *dsecv1.CommandResult {
			time.Sleep(2 * time.Second)
			done := make(chan *dsecv1.CommandResult, 1)
			go func() {
				r, err := w.exec(id, shell, -1)
				if err != nil {
					t.Error(err)
				}
				done <- r
			}()
			synctest.Wait()
			w.host.SetOOM(group, kills)
			if c := w.guest(id); shell == "wait" {
				for _, m := range c.Commands() {
					m.(*fakeCommand).finish(CommandResult{ExitCode: 137, Signal: 9})
				}
			}
			return <-done
		}
		if r := run("wait", 1); !r.OomKilled {
			t.Errorf("%v", r)
		}
		if r := run("exit 1", 1); r.OomKilled {
			t.Errorf("an old kill is told of a later command: %v", r)
		}
		if r := run("sleep 1s", 2); r.OomKilled {
			t.Errorf("a command that went well: %v", r)
		}
		// one whose caller does not wait
		if _, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), CommandId: "bg", Command: &dsecv1.Command{Shell: "wait"}}); err != nil {
			t.Fatal(err)
		}
		w.host.SetOOM(group, 3)
		c, _ := w.guest(id).Command("bg")
		c.(*fakeCommand).finish(CommandResult{ExitCode: 137, Signal: 9})
		synctest.Wait()
		if !c.Result().OOMKilled {
			t.Errorf("%+v", c.Result())
		}
		w.close()
	})
}
