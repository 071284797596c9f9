package guest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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

// shells are those that images have for sh, besides bash: Debian's, and Alpine's.
var shells = map[string]string{"bash": "", "dash": "/bin/dash", "ash": "/bin/busybox"}

// eachShell runs a test with each kind of shell.
func eachShell(t *testing.T, test func(t *testing.T, s *talk)) {
	for name, path := range shells {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, func(o *aether.Options) { o.Shell = path })
			s := begin(t, w, w.connect(), "s")
			if got := s.view().Shell; (got == "bash") != (path == "") {
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
		// busybox becomes its own ls without an exec, which env's is.
		for _, script := range []string{"ls /proc/self/fd", "ls /proc/self/fd | cat", "exec env ls /proc/self/fd"} {
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
