package guest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/aether"
	"dsec/sandbox"
)

// A talk is one session of a test.
type talk struct {
	t    *testing.T
	w    *world
	c    *Client
	name string
}

func noBash(o *aether.Options) { o.NoBash = true }

// eachShell runs a test with bash and with sh.
func eachShell(t *testing.T, test func(t *testing.T, s *talk)) {
	for name, change := range map[string][]func(*aether.Options){"bash": nil, "sh": {noBash}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, change...)
			s := begin(t, w, w.connect(), "s")
			if got := s.view().Shell; got != name {
				t.Fatalf("the shell is %q", got)
			}
			test(t, s)
		})
	}
}

func begin(t *testing.T, w *world, c *Client, name string) *talk {
	t.Helper()
	spec := sandbox.SessionSpec{Name: name, Cwd: "/", User: me(), Env: map[string]string{"PATH": os.Getenv("PATH"), "GREETING": "hello"}}
	if _, err := c.CreateSession(testContext(t), spec); err != nil {
		t.Fatal(err)
	}
	return &talk{t, w, c, name}
}

func (s *talk) start(cmd sandbox.Command) *Command {
	s.t.Helper()
	cmd.Session = s.name
	m, err := s.c.Start(testContext(s.t), newID(), cmd)
	if err != nil {
		s.t.Fatalf("start %q: %v", describe(cmd), err)
	}
	return m
}

func (s *talk) end(m *Command) (Result, string, string) {
	s.t.Helper()
	if err := m.Wait(testContext(s.t)); err != nil {
		s.t.Fatalf("%s: %v", m.result.Description, err)
	}
	return m.Result(), readAll(s.t, m, 1), readAll(s.t, m, 2)
}

func (s *talk) run(cmd sandbox.Command) (Result, string, string) {
	s.t.Helper()
	return s.end(s.start(cmd))
}

// says runs a script and compares its standard output and status.
func (s *talk) says(script, want string, status int) {
	s.t.Helper()
	r, out, errOut := s.run(sandbox.Command{Shell: script})
	if out != want || r.ExitCode != status {
		s.t.Errorf("%s\n  says %q and ends with %d, want %q and %d; stderr %q", script, clipped(out), r.ExitCode, clipped(want), status, clipped(errOut))
	}
}

func clipped(s string) string { return s[:min(len(s), 200)] }

func (s *talk) view() Session {
	s.t.Helper()
	list, err := s.c.Sessions(testContext(s.t))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, v := range list {
		if v.Name == s.name {
			return v
		}
	}
	s.t.Fatalf("there is no session %q", s.name)
	return Session{}
}

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

func TestSessionKeepsItsState(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		dir := t.TempDir()
		s.says("cd "+dir+"; a='x  y'; f() { echo \"f $1\"; }; export B=2; umask 027; set -o noglob", "", 0)
		s.says(`pwd; echo "$a"; f 3; sh -c 'echo $B $GREETING'; umask; echo *`, dir+"\nx  y\nf 3\n2 hello\n0027\n*\n", 0)
		s.says("(exit 7)", "", 7)
		s.says("echo $?; echo $?", "7\n0\n", 0)
		s.says("false", "", 1)
		s.says("echo $?", "1\n", 0)
		s.says("no-such-program", "", 127)
		s.says("echo $?", "127\n", 0)
		s.says("gone=$(mktemp -d); cd $gone; rmdir $gone; echo here", "here\n", 0)
		s.says("echo still; cd /; pwd", "still\n/\n", 0)
		s.says("unset a; set -u", "", 0)
		s.says("set +u; echo done", "done\n", 0)
		s.says("exec 5>&1 || :; echo a >&5", "a\n", 0)
	})
}

// What a terminal takes: the same lines must not break a session.
func TestSessionTakesAnyScript(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		s.says("cat <<EOF\nhello $((1+1))\nEOF\n", "hello 2\n", 0)
		s.says("cat <<'EOF' | tr a-z A-Z\nquo'te\"\nEOF", "QUO'TE\"\n", 0)
		s.says("cat <<EOF\nno end\n", "no end\n", 0)
		for _, script := range []string{"echo 'unbalanced", "echo \"unbalanced", "if true; then", ") x", "f() {", "echo $((", "`"} {
			r, out, errOut := s.run(sandbox.Command{Shell: script})
			if r.ExitCode == 0 || out != "" || errOut == "" {
				t.Errorf("%s: %+v %q %q", script, r, out, errOut)
			}
		}
		s.says("echo lives", "lives\n", 0)
		s.says("return 5", "", 5)
		s.says("break 3; continue 2", "", 0)
		s.says("# only a comment", "", 0)
		s.says("echo a # b\\", "a\n", 0)
		s.says("\n\n  \n", "", 0)
		s.says("printf 'a\\n\\n\\r\\000\\377\\n\\nlast'", "a\n\n\r\x00\xff\n\nlast", 0)
		s.says("printf 'a\\n\\n' >&2", "", 0)
		s.says("echo ä€😀", "ä€😀\n", 0)
		s.says("x="+strings.Repeat("y", 10_000_000)+"; echo ${#x}", "10000000\n", 0)
		s.says("x='"+strings.Repeat("line\n", 200_000)+"'; echo ${#x}", "1000000\n", 0)
		s.says("unset x; echo end", "end\n", 0)
	})
}

func TestSessionTracesNoLinesOfOurs(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		for i, script := range []string{"set -x", "echo a", "false", "echo $?", "set +x", "echo b"} {
			_, _, errOut := s.run(sandbox.Command{Shell: script})
			got := strings.TrimLeft(strings.TrimSpace(errOut), "+ ")
			if want := []string{"", "echo a", "false", "echo 1", "set +x", ""}[i]; got != want {
				t.Errorf("%s traces %q", script, errOut)
			}
		}
	})
}

func TestLongestScriptInSession(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		line := "# " + strings.Repeat("x", 97) + "\n"
		script := strings.Repeat(line, (sandbox.MaxScript-20)/len(line)) + "echo long"
		s.says(script, "long\n", 0)
		s.says("echo $?; exit 3\n"+script, "0\n", 3) // sh has not read most of it
	})
}

func TestSessionInput(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		big := bytes.Repeat([]byte("0123456789abcdef"), sandbox.MaxInlineStdin/16)
		for _, in := range [][]byte{[]byte("one line\n"), []byte("no end"), big, {0, 255, 10}} {
			if _, out, _ := s.run(sandbox.Command{Shell: "cat", Stdin: in}); out != string(in) {
				t.Errorf("%d bytes of input: %d came back", len(in), len(out))
			}
		}
		s.says("cat; [ -c /proc/self/fd/0 ] && readlink /proc/self/fd/0", "/dev/null\n", 0)
		if _, out, _ := s.run(sandbox.Command{Shell: "read a; read b; echo $b-$a", Stdin: []byte("1\n2\n3\n")}); out != "2-1\n" {
			t.Errorf("read: %q", out)
		}
		s.says("cat & wait; echo nothing", "nothing\n", 0)
	})
}

func TestSessionRedirections(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		file := filepath.Join(t.TempDir(), "out")
		s.says("exec 4>&1 >"+file+" 2>&1", "", 0)
		s.says("echo one; echo two >&2", "", 0)
		s.says("no-such-program", "", 127)
		s.says("exec >&4 4>&-", "", 0)
		s.says("head -2 "+file, "one\ntwo\n", 0)
	})
}

// Processes that a command starts have nothing of ours open.
func TestSessionLeaksNoDescriptors(t *testing.T) {
	without := func(all, known []string) []string {
		return slices.DeleteFunc(all, func(s string) bool { return slices.Contains(known, s) })
	}
	eachShell(t, func(t *testing.T, s *talk) {
		_, usual, _ := run(t, s.c, shell("ls /proc/self/fd")) // with what the test itself was left
		for _, script := range []string{"ls /proc/self/fd", "ls /proc/self/fd | cat", "exec ls /proc/self/fd"} {
			_, out, _ := s.run(sandbox.Command{Shell: script})
			if extra := without(strings.Fields(out), strings.Fields(usual)); len(extra) > 0 || len(out) < 8 {
				t.Errorf("%s: %q, of which %q are ours", script, out, extra)
			}
		}
	})
}

func TestSessionJobs(t *testing.T) {
	w := newWorld(t)
	s := begin(t, w, w.connect(), "s")
	s.says("sleep 1000 & echo $!>/dev/null", "", 0)
	if _, out, _ := s.run(sandbox.Command{Shell: "jobs"}); !strings.Contains(out, "Running") {
		t.Errorf("jobs: %q", out)
	}
	s.says("kill %1; wait %1 2>/dev/null; echo $?", "143\n", 0)
	foreground := func() { // the job waits for what fg says of it
		t.Helper()
		file := filepath.Join(t.TempDir(), "fg")
		s.says("(until [ -s "+file+" ]; do sleep 0.01; done; exit 9) & fg >"+file, "", 9)
	}
	foreground()
	s.says("sh -c 'exit 3' & p=$!", "", 0)
	s.says("wait $p", "", 3)
	s.says("exec /no/such/program 2>/dev/null", "", 127) // with which bash ends job control
	foreground()
}

// What a job writes while no command runs comes with the next one.
func TestSessionOutputInBetween(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		gate := filepath.Join(t.TempDir(), "gate")
		if err := syscall.Mkfifo(gate, 0o600); err != nil {
			t.Fatal(err)
		}
		s.says("(read x <"+gate+"; echo late; echo done >"+gate+") & echo now", "now\n", 0)
		if _, _, err := s.other("echo >" + gate + "; read x <" + gate); err != nil {
			t.Fatal(err)
		}
		s.says("echo next; wait", "late\nnext\n", 0)
		// It is bounded, and nobody waits for room.
		s.says("(read x <"+gate+"; seq 100000; echo done >"+gate+") & echo now", "now\n", 0)
		if _, _, err := s.other("echo >" + gate + "; read x <" + gate); err != nil {
			t.Fatal(err)
		}
		_, out, _ := s.run(sandbox.Command{Shell: "wait; echo end"})
		if !strings.HasSuffix(out, "\n99999\n100000\nend\n") || len(out) > 20<<10 {
			t.Errorf("%d bytes came, with the end %q", len(out), out[max(0, len(out)-40):])
		}
		if first, _, _ := strings.Cut(out, "\n"); len(first) != 5 {
			t.Errorf("it begins in the middle of a line: %q", first)
		}
	})
}

// other runs a script outside of the session.
func (s *talk) other(script string) (Result, string, error) {
	r, out, _ := run(s.t, s.c, shell(script))
	if r.ExitCode != 0 {
		return r, out, fmt.Errorf("%s: %d", script, r.ExitCode)
	}
	return r, out, nil
}

func TestBackgroundChildrenInSession(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		began := time.Now()
		for _, script := range []string{"sleep 1000 & echo now", "setsid sleep 1000 & echo now", "sleep 1000 2>&1 & echo now", "(sleep 1000 >/dev/null &); echo now"} {
			s.says(script, "now\n", 0)
		}
		if time.Since(began) > 500*time.Second {
			t.Error("a command waited for what it left in the background")
		}
		if err := s.c.DeleteSession(testContext(t), s.name); err != nil {
			t.Fatal(err)
		}
	})
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

// alive reports whether the process goes on.
func alive(pid string) bool {
	n, err := strconv.Atoi(strings.TrimSpace(pid))
	if err != nil {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func waitGone(t *testing.T, pid string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); alive(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %s goes on", pid)
		}
	}
}

// A time-out ends what the command has started, and nothing else.
func TestSessionSurvivesTimeout(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		s.says("x=5; sleep 1000 & echo $! >"+t.TempDir()+"/p; p=$!", "", 0)
		_, before, _ := s.run(sandbox.Command{Shell: "echo $p"})
		for _, script := range []string{
			"setsid sleep 1000 & echo $!; sleep 1000",
			"sleep 1000 & echo $!; wait",
			"sh -c 'trap : INT TERM; echo $$; while :; do sleep 1000; done'",
			"sh -c 'echo $$; exec sleep 1000' | cat",
			"z=$(sh -c 'echo $$ >&2; exec sleep 1000')",
		} {
			r, out, errOut := s.run(sandbox.Command{Shell: script, Timeout: 300 * time.Millisecond})
			if !r.TimedOut || r.ExitCode != 137 || r.Killed {
				t.Errorf("%s: %+v", script, r)
			}
			line, _, _ := strings.Cut(out+errOut, "\n")
			waitGone(t, line)
		}
		s.says("echo $x; unset x", "5\n", 0)
		if !alive(before) {
			t.Error("an earlier job was killed")
		}
		if v := s.view(); v.Ended {
			t.Errorf("%+v", v)
		}
	})
}

// bash gives up whatever it is doing.
func TestBashIsInterrupted(t *testing.T) {
	w := newWorld(t)
	s := begin(t, w, w.connect(), "s")
	s.says("f() { while :; do sleep 0.01; done; }; g() { while :; do f; done; }; y=7", "", 0)
	for _, script := range []string{
		"while :; do :; done", "g; echo more", "while :; do sleep 1000; done", "eval 'while :; do f; done'",
		"set -u; set -x; while :; do :; done", "( while :; do :; done )", "read x < <(sleep 1000)", "until false; do sleep 0; done; echo no",
	} {
		r, out, _ := s.run(sandbox.Command{Shell: script, Timeout: 200 * time.Millisecond})
		if !r.TimedOut || r.Killed || out != "" {
			t.Errorf("%s: %+v %q", script, r, out)
		}
		s.says("set +ux; echo $y", "7\n", 0)
	}
	for _, script := range []string{"sleep 1000; echo no", "while :; do sleep 1000; done", "while :; do :; done", "f; echo no"} {
		m := s.start(sandbox.Command{Shell: "echo a; " + script})
		r := follow(t, m, 1)
		if _, err := r.Read(make([]byte, 2)); err != nil {
			t.Fatal(err)
		}
		r.Close()
		for !m.isDone() {
			if err := m.Kill(testContext(t), int(syscall.SIGINT)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
		}
		if r, out, _ := s.end(m); r.ExitCode != 130 || out != "a\n" || r.Killed {
			t.Errorf("%s, interrupted: %+v %q", script, r, out)
		}
		s.says("echo $y $?", "7 130\n", 0)
	}
	s.says("trap -p DEBUG", "", 0)
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

func TestSessionQueue(t *testing.T) {
	eachShell(t, func(t *testing.T, s *talk) {
		gate := filepath.Join(t.TempDir(), "gate")
		if err := syscall.Mkfifo(gate, 0o600); err != nil {
			t.Fatal(err)
		}
		first := s.start(sandbox.Command{Shell: "read x <" + gate + "; n=0; echo first"})
		var waiting []*Command
		for range 20 {
			waiting = append(waiting, s.start(sandbox.Command{Shell: "n=$((n+1)); echo $n"}))
		}
		long := s.start(sandbox.Command{Shell: "n=$((n+1)); echo $n; : " + strings.Repeat("x", 3*inlineScript)})
		waiting = append(waiting, long)
		if v := s.view(); v.Running != first.ID() || v.Waiting != 21 {
			t.Errorf("%+v", v)
		}
		if err := waiting[3].Kill(testContext(t), 0); err != nil {
			t.Fatal(err)
		}
		if r, out, _ := s.end(waiting[3]); !r.Killed || out != "" {
			t.Errorf("killed while it waited: %+v %q", r, out)
		}
		if _, _, err := s.other("echo >" + gate); err != nil {
			t.Fatal(err)
		}
		s.end(first)
		n := 0
		for i, m := range waiting {
			if i == 3 {
				continue
			}
			n++
			if _, out, _ := s.end(m); out != strconv.Itoa(n)+"\n" {
				t.Errorf("command %d says %q", i, out)
			}
		}
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

// A reader that stops holds up a command of a session, not the session's end.
func TestSessionIsHeldBack(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	s := begin(t, w, c, "s")
	m := s.start(sandbox.Command{Shell: "yes"})
	r := follow(t, m, 1)
	if _, err := r.Read(make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(testContext(t), 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(testContext(t)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	s.says("echo on", "on\n", 0)
}
