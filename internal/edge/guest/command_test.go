package guest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/sandbox"
)

func TestByteExactOutput(t *testing.T) {
	c := newWorld(t).connect()
	for _, out := range []string{"", "x", "a\n\n\nb", "no final newline", "cr\r\nlf\n", "nul\x00nul", "\xff\xfe invalid \xc3", strings.Repeat("long line ", 200_000), "\n"} {
		cmd := shell("cat")
		cmd.Shell = "tee /dev/stderr"
		cmd.StdinFollows = true
		ctx := testContext(t)
		m, err := c.Start(ctx, newID(), cmd)
		if err != nil {
			t.Fatal(err)
		}
		n, err := m.WriteStdin(ctx, 0, strings.NewReader(out), true)
		if err != nil || n != int64(len(out)) {
			t.Fatalf("stdin: %d, %v", n, err)
		}
		if err := m.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		for stream := 1; stream <= 2; stream++ {
			if got := readAll(t, m, stream); got != out {
				t.Errorf("stream %d: %d bytes %.40q, want %d bytes %.40q", stream, len(got), got, len(out), out)
			}
		}
		if r := m.Result(); r.ExitCode != 0 || r.Running || r.Stdout.Size != int64(len(out)) || r.Stdout.Head != r.Stdout.Size {
			t.Errorf("result %+v", r)
		}
	}
}

func TestExitCodesAndSignals(t *testing.T) {
	c := newWorld(t).connect()
	for script, want := range map[string]Result{
		"exit 0":                       {},
		"exit 7":                       {ExitCode: 7},
		"exit 255":                     {ExitCode: 255},
		"kill -9 $$":                   {ExitCode: 137, Signal: 9},
		"kill -TERM $$":                {ExitCode: 143, Signal: 15},
		"(exit 3) & wait $!":           {ExitCode: 3},
		"exec sh -c 'exit 4'":          {ExitCode: 4},
		"cat <<E\nunbalanced ' \" \nE": {},
	} {
		r, _, _ := run(t, c, shell(script))
		if r.ExitCode != want.ExitCode || r.Signal != want.Signal || r.TimedOut || r.Killed {
			t.Errorf("%q: %+v", script, r)
		}
	}
}

func TestExecErrors(t *testing.T) {
	c := newWorld(t).connect()
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	text := filepath.Join(dir, "text")
	badInterp := filepath.Join(dir, "badinterp")
	for name, mode := range map[string]os.FileMode{plain: 0o644, text: 0o755, badInterp: 0o755} {
		content := "just text\n"
		if name == badInterp {
			content = "#!/no/such/interpreter\n"
		}
		if err := os.WriteFile(name, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{"PATH": dir}
	big := make([]string, 40_000)
	for i := range big {
		big[i] = strings.Repeat("x", 60)
	}
	for _, tc := range []struct {
		name   string
		cmd    sandbox.Command
		class  sandbox.Class
		reason string
	}{
		{"missing", sandbox.Command{Argv: []string{"/no/such"}}, sandbox.NotFound, "program_not_found"},
		{"missing in PATH", sandbox.Command{Argv: []string{"nosuch"}, Env: env}, sandbox.NotFound, "program_not_found"},
		{"below a file", sandbox.Command{Argv: []string{plain + "/x"}}, sandbox.NotFound, "program_not_found"},
		{"not executable", sandbox.Command{Argv: []string{plain}}, sandbox.FailedPrecondition, "not_executable"},
		{"not executable in PATH", sandbox.Command{Argv: []string{"plain"}, Env: env}, sandbox.FailedPrecondition, "not_executable"},
		{"directory", sandbox.Command{Argv: []string{dir}}, sandbox.FailedPrecondition, "not_executable"},
		{"ENOEXEC", sandbox.Command{Argv: []string{text}}, sandbox.FailedPrecondition, "not_executable"},
		{"interpreter", sandbox.Command{Argv: []string{badInterp}}, sandbox.FailedPrecondition, "not_executable"},
		{"E2BIG", sandbox.Command{Argv: append([]string{"/bin/true"}, big...)}, sandbox.InvalidArgument, "argument_list_too_long"},
		{"cwd missing", sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/no/such"}, sandbox.NotFound, "workdir_not_found"},
		{"cwd is a file", sandbox.Command{Argv: []string{"/bin/true"}, Cwd: plain}, sandbox.NotFound, "workdir_not_found"},
		{"NUL", sandbox.Command{Argv: []string{"/bin/true", "a\x00b"}}, sandbox.InvalidArgument, "invalid_request"},
		{"user", sandbox.Command{Argv: []string{"/bin/true"}, User: "nosuchuser"}, sandbox.NotFound, "user_not_found"},
		{"group", sandbox.Command{Argv: []string{"/bin/true"}, User: "0:nosuchgroup"}, sandbox.NotFound, "user_not_found"},
	} {
		if tc.cmd.User == "" {
			tc.cmd.User = me()
		}
		_, err := c.Start(testContext(t), newID(), tc.cmd)
		if e := sandbox.AsError(err); e == nil || e.Class != tc.class || e.Reason != tc.reason {
			t.Errorf("%s: %v (%+v)", tc.name, err, e)
		}
	}
	if n := c.Running(); n != 0 {
		t.Errorf("%d commands still count as running", n)
	}
	if n := len(c.Commands()); n != 0 {
		t.Errorf("%d failed commands are remembered", n)
	}
}

func TestEnvironmentAndDescriptors(t *testing.T) {
	c := newWorld(t).connect()
	_, out, _ := run(t, c, sandbox.Command{Argv: []string{"/usr/bin/env"}, User: me(), Env: map[string]string{"A": "1", "HOME": "/x"}})
	for _, want := range []string{"A=1\n", "HOME=/x\n", "PATH=", "SHELL=/"} {
		if !strings.Contains(out, want) {
			t.Errorf("environment lacks %q:\n%s", want, out)
		}
	}
	const list = "ls /proc/self/fd; readlink /proc/self/fd/0"
	plain, err := exec.Command("/bin/sh", "-c", list).Output() // what started the test may have leaked some itself
	if err != nil {
		t.Fatal(err)
	}
	if _, out, _ := run(t, c, shell(list)); out != string(plain) {
		t.Errorf("descriptors of a command: %q, want %q", out, plain)
	}
	if r, out, _ := run(t, c, sandbox.Command{Argv: []string{"cat"}, User: me(), Env: map[string]string{"PATH": "/bin:/usr/bin"}}); r.ExitCode != 0 || out != "" {
		t.Errorf("cat without stdin: %+v %q", r, out)
	}
}

func TestLongScripts(t *testing.T) {
	c := newWorld(t).connect()
	_, fds, _ := run(t, c, shell("ls /proc/self/fd | wc -l; true"))
	for _, size := range []int{100 << 10, 1 << 20, 16<<20 - 100} {
		var b strings.Builder
		b.WriteString("n=0\n")
		for b.Len() < size-40 {
			b.WriteString("# " + strings.Repeat("x", 1000) + "\n")
		}
		b.WriteString("n=42; echo $n $0; ls /proc/self/fd | wc -l; exit 5\n")
		r, out, errOut := run(t, c, shell(b.String()))
		if r.ExitCode != 5 || !strings.HasPrefix(out, "42 ") || !strings.HasSuffix(out, "\n"+fds) {
			t.Errorf("script of %d bytes: exit %d, %q %q", size, r.ExitCode, out, errOut)
		}
	}
}

func TestBackgroundChildren(t *testing.T) {
	c := newWorld(t).connect()
	r, out, _ := run(t, c, shell("echo before; sleep 1000 & echo $!")) // which outlives all patience
	var pid int
	if _, err := fmt.Sscanf(out, "before\n%d\n", &pid); err != nil || r.ExitCode != 0 {
		t.Fatalf("%+v %q", r, out)
	}
	p, _ := os.FindProcess(pid)
	if err := p.Kill(); err != nil {
		t.Errorf("the background child is gone: %v", err)
	}
}

func TestTimeoutAndKill(t *testing.T) {
	c := newWorld(t).connect()
	cmd := shell("echo out; sleep 1000 & sleep 1000")
	cmd.Timeout = 50 * time.Millisecond
	r, out, _ := run(t, c, cmd)
	for out == "" && r.TimedOut && cmd.Timeout < time.Minute { // on a slow machine the shell gets no further
		cmd.Timeout *= 5
		r, out, _ = run(t, c, cmd)
	}
	if !r.TimedOut || r.Signal != 9 || out != "out\n" {
		t.Errorf("%+v %q", r, out)
	}
	ctx := testContext(t)
	for _, signal := range []int{0, 15} {
		m, err := c.Start(ctx, newID(), shell("sleep 1000"))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Kill(ctx, signal); err != nil {
			t.Fatal(err)
		}
		if err := m.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		want := signal
		if signal == 0 {
			want = 9
		}
		if r := m.Result(); r.Signal != want || r.Killed != (signal == 0) {
			t.Errorf("kill %d: %+v", signal, r)
		}
		if err := m.Kill(ctx, 0); err != nil {
			t.Errorf("kill after the end: %v", err)
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	c := newWorld(t).connect()
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			want := fmt.Sprintf("%d\n", i)
			if r, out, _ := run(t, c, shell("echo "+want)); r.ExitCode != 0 || out != want {
				t.Errorf("%+v %q", r, out)
			}
		})
	}
	wg.Wait()
	if n := c.Running(); n != 0 {
		t.Errorf("%d running", n)
	}
}
