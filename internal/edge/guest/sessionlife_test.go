package guest

import (
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/sandbox"
)

// How sessions are made and how they end. What commands see of one is in sessions_test.go, with what all tests of sessions use.

// ended waits for the end of the session.
func (s *talk) ended() Session {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if v := s.view(); v.Ended {
			return v
		}
		if time.Now().After(deadline) {
			s.t.Fatal("the session goes on")
		}
	}
}

func TestSessionEnds(t *testing.T) {
	for name, c := range map[string]struct {
		script       string
		status       int
		out          string
		code, signal int
		reason       string
	}{
		"exit":               {"echo a; exit 3", 3, "a\n", 3, 0, "exited"},
		"exit of nothing":    {"exit", 0, "", 0, 0, "exited"},
		"option e":           {"set -e; echo a; false; echo b", 1, "a\n", 1, 0, "exited"},
		"a trap of the exit": {"trap 'echo bye' EXIT; exit 4", 4, "bye\n", 4, 0, "exited"},
		"another program":    {"exec sh -c 'echo other; exit 5'", 5, "other\n", 5, 0, "exited"},
		"for long":           {"echo a; exec xargs sh -c 'sleep 3; exit 6'", 123, "a\n", 123, 0, "exited"}, // busybox's, in the shell's own process
		"killed":             {"echo a; kill -9 $$", 137, "a\n", 137, 9, "killed"},
		"terminated":         {"kill -TERM $$; sleep 1000", 143, "", 143, 15, "killed"},
	} {
		t.Run(name, func(t *testing.T) {
			eachShell(t, func(t *testing.T, s *talk) {
				r, out, _ := s.run(sandbox.Command{Shell: c.script})
				if r.ExitCode != c.status || out != c.out {
					t.Errorf("result %+v, output %q", r, out)
				}
				v := s.ended()
				if v.ExitCode != c.code || v.Signal != c.signal || v.Reason != c.reason {
					t.Errorf("session %+v", v)
				}
				_, err := s.c.Start(testContext(t), newID(), sandbox.Command{Shell: "true", Session: s.name})
				if sandbox.ReasonOf(err) != "session_ended" {
					t.Errorf("a command afterwards: %v", err)
				}
				again := begin(t, s.w, s.c, s.name)
				again.says("echo anew", "anew\n", 0)
				if err := s.c.DeleteSession(testContext(t), s.name); err != nil {
					t.Fatal(err)
				}
				if list, err := s.c.Sessions(testContext(t)); err != nil || len(list) != 0 {
					t.Errorf("%+v, %v", list, err)
				}
			})
		})
	}
}

func TestShellKilledByAnother(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		_, pid, _ := s.run(sandbox.Command{Shell: "echo $$"})
		m := s.start(sandbox.Command{Shell: "echo a; sleep 1000"})
		waiting := s.start(sandbox.Command{Shell: "echo never"})
		r := follow(t, m, 1)
		if _, err := r.Read(make([]byte, 2)); err != nil {
			t.Fatal(err)
		}
		r.Close()
		if _, _, err := s.other("kill -9 " + pid); err != nil {
			t.Fatal(err)
		}
		if r, out, _ := s.end(m); r.Signal != 9 || r.ExitCode != 137 || out != "a\n" {
			t.Errorf("%+v %q", r, out)
		}
		if err := waiting.Wait(testContext(t)); sandbox.ReasonOf(err) != "session_ended" {
			t.Errorf("what waited: %v", err)
		}
		if v := s.ended(); v.Reason != "killed" || v.Signal != 9 {
			t.Errorf("%+v", v)
		}
	})
}

// A shell that cannot be interrupted is killed, and the result tells of it.
func TestSessionDiesOfTimeout(t *testing.T) {
	for name, script := range map[string]string{
		"another program": "exec sh -c 'while :; do :; done'",
		"a deaf bash":     "trap '' 62; while :; do :; done",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := begin(t, w, w.connect(), "s")
			r, _, _ := s.run(sandbox.Command{Shell: script, Timeout: 100 * time.Millisecond})
			if !r.TimedOut || r.ExitCode != 137 {
				t.Errorf("%+v", r)
			}
			if name == "a deaf bash" && !r.Killed {
				t.Errorf("%+v", r)
			}
			if v := s.ended(); name == "a deaf bash" && (v.Reason != "timeout" || v.Signal != 9) {
				t.Errorf("%+v", v)
			}
		})
	}
}

func TestSessionBreaks(t *testing.T) {
	for name, script := range map[string]string{
		"descriptors closed": "i=3; while [ $i -lt 300 ]; do eval \"exec $i>&-\"; i=$((i+1)); done",
		"a forged status":    "for f in /proc/$$/fd/*; do [ -p $f ] && echo 999 0 x >$f; done; sleep 1000",
		"garbage":            "for f in /proc/$$/fd/*; do [ -p $f ] && head -c 300 /dev/zero >$f; done; sleep 1000",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := begin(t, w, w.connect(), "s")
			s.run(sandbox.Command{Shell: script, Timeout: time.Minute})
			if v := s.ended(); v.Reason != "broken" {
				t.Errorf("%+v", v)
			}
		})
	}
}

// A shell that reads on and runs nothing would keep its command until a time-out. It is noticed, at once or after a while.
func TestSessionRunsNothingMore(t *testing.T) {
	for name, script := range map[string]string{
		"option n":           "echo a; set -n; echo b",
		"option n, later":    "echo a; sleep 0.1; set -n",
		"command replaced":   "echo a; command() { :; }; sleep 1000 &",
		"and another waits":  "echo a; command() { :; }; sleep 0.1",
		"commands forgotten": "echo a; alias command=: ; command() { :; }",
	} {
		t.Run(name, func(t *testing.T) {
			eachShell(t, func(t *testing.T, s *talk) {
				m := s.start(sandbox.Command{Shell: script})
				waiting, err := s.c.Start(testContext(t), newID(), sandbox.Command{Shell: "echo never", Session: s.name})
				if err == nil {
					err = waiting.Wait(testContext(t))
				}
				if sandbox.ReasonOf(err) != "session_ended" {
					t.Errorf("what waited: %v", err)
				}
				if r, out, _ := s.end(m); r.ExitCode != 137 || r.TimedOut || r.Killed || out != "a\n" {
					t.Errorf("%+v %q", r, out)
				}
				if v := s.ended(); v.Reason != "unresponsive" {
					t.Errorf("%+v", v)
				}
			})
		})
	}
}

// What a script calls by the names that the lines of a session use is its own matter.
func TestSessionWithNamesOfItsOwn(t *testing.T) {
	w := newWorld(t)
	s := begin(t, w, w.connect(), "bash")
	names := []string{"exec", "trap", "read", "printf", "eval", ".", "echo", "set", "return", "exit", "source", "builtin", "test"}
	for _, name := range names {
		s.says(name+"() { command printf 'mine %s\n' "+name+"; }", "", 0)
	}
	s.says("echo; command echo x; (command exit 3)", "mine echo\nx\n", 3)
	s.says("command echo $?; exec; trap; set", "3\nmine exec\nmine trap\nmine set\n", 0)
	r, _, _ := s.run(sandbox.Command{Shell: "while :; do :; done", Timeout: 200 * time.Millisecond})
	if !r.TimedOut || r.Killed {
		t.Errorf("%+v", r)
	}
	s.says("unset -f "+strings.Join(names, " ")+"; echo end", "end\n", 0)
	eachShell(t, func(t *testing.T, s *talk) {
		s.says("[ -z \"$BASH\" ] || shopt -s expand_aliases; for n in exec trap return exit . command set; do alias $n='echo mine '; done", "", 0)
		s.says("echo a; (false)", "a\n", 1)
		s.says("echo $?; unalias -a", "1\n", 0)
	})
}

func TestSessionLimits(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	s := begin(t, w, c, "s")
	block := s.start(sandbox.Command{Shell: "sleep 1000"})
	var err error
	for n := 0; err == nil; n++ {
		if n > 100 {
			t.Fatal("there is no bound on commands that wait")
		}
		_, err = c.Start(ctx, newID(), sandbox.Command{Shell: "true", Session: "s"})
	}
	if sandbox.ReasonOf(err) != "sandbox_resources" {
		t.Error(err)
	}
	if err := block.Kill(ctx, 0); err != nil {
		t.Fatal(err)
	}
	s.end(block)
	block = begin(t, w, c, "t").start(sandbox.Command{Shell: "sleep 1000"})
	err = nil
	for n := 0; err == nil; n++ {
		if n > 60 {
			t.Fatal("there is no bound on bytes that wait")
		}
		_, err = c.Start(ctx, newID(), sandbox.Command{Shell: ": " + strings.Repeat("x", 4*inlineScript), Session: "t"})
	}
	if sandbox.ReasonOf(err) != "sandbox_resources" {
		t.Error(err)
	}
	err = nil
	for n := 0; err == nil; n++ {
		if n > 100 {
			t.Fatal("there is no bound on sessions")
		}
		_, err = c.CreateSession(ctx, sandbox.SessionSpec{Name: "many" + strconv.Itoa(n), User: me()})
	}
	if sandbox.ReasonOf(err) != "sandbox_resources" {
		t.Error(err)
	}
	for _, v := range sure(c.Sessions(ctx)) {
		if err := c.DeleteSession(ctx, v.Name); err != nil {
			t.Error(err)
		}
	}
	for range 20 { // those that have ended are few
		e := begin(t, w, c, newID())
		e.run(sandbox.Command{Shell: "exit"})
		e.ended()
	}
	if n := len(sure(c.Sessions(ctx))); n != 16 {
		t.Errorf("%d sessions that have ended are listed", n)
	}
}

func sure[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestSessionNotThere(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	_, err := c.Start(ctx, newID(), sandbox.Command{Shell: "true", Session: "none"})
	if sandbox.ReasonOf(err) != "session_not_found" {
		t.Error(err)
	}
	if err := c.DeleteSession(ctx, "none"); sandbox.ReasonOf(err) != "session_not_found" {
		t.Error(err)
	}
	for reason, spec := range map[string]sandbox.SessionSpec{
		"workdir_not_found": {Name: "a", Cwd: "/no/such", User: me()},
		"user_not_found":    {Name: "a", User: "nobody-of-this-name"},
	} {
		if _, err := c.CreateSession(ctx, spec); sandbox.ReasonOf(err) != reason {
			t.Errorf("%s: %v", reason, err)
		}
	}
	if n := len(sure(c.Sessions(ctx))); n != 0 {
		t.Errorf("%d sessions", n)
	}
	if c.Running() != 0 {
		t.Errorf("%d commands run", c.Running())
	}
}

// One session made by many at once is one.
func TestSessionIsMadeOnce(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := c.CreateSession(testContext(t), sandbox.SessionSpec{Name: "a", User: me()}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := len(sure(c.Sessions(testContext(t)))); n != 1 {
		t.Errorf("%d sessions", n)
	}
	if err := c.DeleteSession(testContext(t), "a"); err != nil {
		t.Error(err)
	}
}

// A session outlives connections and edges; what runs in it is found again, to the byte.
func TestSessionOutlivesTheEdge(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		w := s.w
		gate := filepath.Join(t.TempDir(), "gate")
		if err := syscall.Mkfifo(gate, 0o600); err != nil {
			t.Fatal(err)
		}
		s.says("v=1", "", 0)
		m := s.start(sandbox.Command{Shell: "seq 20000; read x <" + gate + "; seq 20001 60000; v=2"})
		next := s.start(sandbox.Command{Shell: "echo $v"})
		for range 3 {
			w.cut()
			if v := s.view(); v.Ended {
				t.Errorf("%+v", v)
			}
		}
		s.c.Close()
		c := w.connect()
		s2 := &talk{t, w, c, s.name}
		found, ok := c.Command(m.ID())
		if !ok || found.Result().Session != s.name {
			t.Fatalf("the command is not found: %v", ok)
		}
		if _, _, err := s2.other("echo >" + gate); err != nil {
			t.Fatal(err)
		}
		r, out, _ := s2.end(found)
		if !strings.HasSuffix(out, "\n60000\n") || r.ExitCode != 0 || r.Stdout.Size != 348894 {
			t.Errorf("%+v %d", r, len(out))
		}
		then, _ := c.Command(next.ID())
		if _, out, _ := s2.end(then); out != "2\n" {
			t.Errorf("%q", out)
		}
		s2.says("echo $v", "2\n", 0)
	})
}

func TestDeleteSessionEndsAll(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		_, job, _ := s.run(sandbox.Command{Shell: "sleep 1000 & echo $!"})
		m := s.start(sandbox.Command{Shell: "echo $$; sleep 1000"})
		waiting := s.start(sandbox.Command{Shell: "echo never"})
		if err := s.c.DeleteSession(testContext(t), s.name); err != nil {
			t.Fatal(err)
		}
		if r, _, _ := s.end(m); !r.Killed || r.Signal != 9 {
			t.Errorf("%+v", r)
		}
		if err := waiting.Wait(testContext(t)); sandbox.ReasonOf(err) != "session_ended" {
			t.Errorf("what waited: %v", err)
		}
		waitGone(t, job)
		if n := len(sure(s.c.Sessions(testContext(t)))); n != 0 {
			t.Errorf("%d sessions", n)
		}
	})
}
