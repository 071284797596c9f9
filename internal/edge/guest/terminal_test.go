package guest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

// A typist is a person at a command's terminal.
type typist struct {
	t      *testing.T
	ctx    context.Context
	m      *Command
	out    io.ReadCloser
	seen   []byte // not yet looked at
	offset int64  // of input
}

func sit(t *testing.T, c *Client, cmd sandbox.Command) *typist {
	t.Helper()
	if cmd.Terminal == nil {
		cmd.Terminal = &sandbox.Terminal{}
	}
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	s := &typist{t: t, ctx: ctx, m: m, out: follow(t, m, 1)}
	stop := context.AfterFunc(ctx, func() { s.out.Close() })
	t.Cleanup(func() { stop(); s.out.Close() })
	return s
}

func (s *typist) types(text string) {
	s.t.Helper()
	n, err := s.m.WriteStdin(s.ctx, s.offset, strings.NewReader(text), false)
	if err != nil {
		s.t.Fatalf("typing %.40q: %v", text, err)
	}
	s.offset = n
}

// sees reads until text was shown and returns what was before it.
func (s *typist) sees(text string) string {
	s.t.Helper()
	buf := make([]byte, 32<<10)
	for {
		if before, after, ok := bytes.Cut(s.seen, []byte(text)); ok {
			s.seen = bytes.Clone(after)
			return string(before)
		}
		n, err := s.out.Read(buf)
		s.seen = append(s.seen, buf[:n]...)
		if err != nil {
			s.t.Fatalf("waiting for %q: %v; there is %.2000q", text, err, s.seen)
		}
	}
}

// leaves waits for the end and returns all output.
func (s *typist) leaves() (Result, string) {
	s.t.Helper()
	if err := s.m.Wait(s.ctx); err != nil {
		s.t.Fatal(err)
	}
	return s.m.Result(), readAll(s.t, s.m, 1)
}

func terminalOf(script string) sandbox.Command {
	cmd := shell(script)
	cmd.Terminal = &sandbox.Terminal{}
	return cmd
}

func TestTerminalIsOne(t *testing.T) {
	c := newWorld(t).connect()
	const look = `test -t 0 && test -t 1 && test -t 2 && tty && ps -o tpgid= -p $$ 2>/dev/null | grep -qw $$; echo $?; stty size; echo $TERM $LANG; stty -a | grep -o ' iutf8'`
	for _, tc := range []struct {
		terminal sandbox.Terminal
		env      map[string]string
		want     string
	}{
		{sandbox.Terminal{}, nil, "24 80|xterm-256color C.UTF-8"},
		{sandbox.Terminal{Rows: 65535, Cols: 65535, Term: "vt100"}, nil, "65535 65535|vt100 C.UTF-8"},
		{sandbox.Terminal{Rows: 1, Cols: 1}, map[string]string{"TERM": "dumb", "LANG": "de_DE.UTF-8"}, "1 1|dumb de_DE.UTF-8"},
		{sandbox.Terminal{Term: "vt220"}, map[string]string{"TERM": "dumb"}, "24 80|vt220 C.UTF-8"},
	} {
		cmd := shell(look)
		cmd.Terminal = &tc.terminal
		for k, v := range tc.env {
			cmd.Env[k] = v
		}
		r, out := sit(t, c, cmd).leaves()
		lines := strings.Split(strings.ReplaceAll(out, "\r\n", "\n"), "\n")
		if len(lines) != 6 || !strings.HasPrefix(lines[0], "/dev/pts/") || lines[1] != "0" || lines[2]+"|"+lines[3] != tc.want || lines[4] != " iutf8" {
			t.Errorf("%+v: %q", tc, lines)
		}
		if !r.Terminal || r.ExitCode != 0 || r.Stderr.Size != 0 || r.Stdout.Size != int64(len(out)) {
			t.Errorf("%+v", r)
		}
	}
	for _, bad := range []sandbox.Terminal{{Rows: 65536}, {Cols: -1}, {Rows: 1, Cols: 1 << 31}} {
		if _, err := c.Start(testContext(t), newID(), sandbox.Command{Terminal: &bad, User: me(), Cwd: "/"}); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}

func TestResize(t *testing.T) {
	c := newWorld(t).connect()
	s := sit(t, c, terminalOf(`trap 'told=1' WINCH; last=$(stty size); echo ready; while :; do
		now=$(stty size); [ "$now" = "$last" ] || [ -z "$told" ] || { last=$now; echo "$now"; }; sleep 0.01; done`))
	s.sees("ready\r\n")
	for _, size := range [][2]int{{50, 132}, {1, 1}, {65535, 65535}, {24, 80}} {
		if err := s.m.Resize(s.ctx, size[0], size[1]); err != nil {
			t.Fatal(err)
		}
		s.sees(fmt.Sprintf("%d %d\r\n", size[0], size[1]))
	}
	for _, size := range [][2]int{{0, 80}, {24, 0}, {65536, 80}, {24, -1}} {
		if err := s.m.Resize(s.ctx, size[0], size[1]); sandbox.ReasonOf(err) != "invalid_terminal" {
			t.Errorf("%v: %v", size, err)
		}
	}
	if err := s.m.Kill(s.ctx, 0); err != nil {
		t.Fatal(err)
	}
	s.leaves()
	if err := s.m.Resize(s.ctx, 10, 10); err != nil {
		t.Errorf("after the end: %v", err)
	}
	plain, err := c.Start(s.ctx, newID(), shell("sleep 1000"))
	if err != nil {
		t.Fatal(err)
	}
	if err := plain.Resize(s.ctx, 10, 10); sandbox.ReasonOf(err) != "no_terminal" {
		t.Errorf("without a terminal: %v", err)
	}
	if err := plain.Kill(s.ctx, 0); err != nil {
		t.Fatal(err)
	}
}

// interactive is a shell that shows a prompt, and nothing of whoever runs the test.
func interactive() sandbox.Command {
	return sandbox.Command{
		Argv: []string{"bash", "--norc", "--noprofile", "--noediting", "-i"}, Cwd: "/", User: me(),
		Env: map[string]string{"PATH": os.Getenv("PATH"), "PS1": "<prompt>", "HOME": "/nonexistent"},
	}
}

func TestJobControl(t *testing.T) {
	c := newWorld(t).connect()
	s := sit(t, c, interactive())
	s.sees("<prompt>")
	s.types("echo =$$=\n")
	s.sees("$=\r\n=")
	pid := s.sees("=\r\n")
	s.sees("<prompt>")
	s.types("sleep 1000; echo ended $?\n")
	waitFor(t, "sleep in the foreground", func() bool { return foreground(t, pid) == "sleep" })
	s.types("\x03") // ^C
	s.sees("<prompt>")
	s.types("cat\n")
	waitFor(t, "cat in the foreground", func() bool { return foreground(t, pid) == "cat" })
	s.types("\x1a") // ^Z
	s.sees("Stopped")
	s.sees("<prompt>")
	s.types("jobs; fg\n")
	s.sees("cat\r\n")
	waitFor(t, "cat in the foreground", func() bool { return foreground(t, pid) == "cat" })
	s.types("hello\n")
	s.sees("hello\r\nhello\r\n")
	s.types("\x04") // ^D
	s.sees("<prompt>")
	s.types("sleep 1000\n")
	waitFor(t, "sleep in the foreground", func() bool { return foreground(t, pid) == "sleep" })
	if err := s.m.Kill(s.ctx, 2); err != nil { // what is in the foreground gets it, not the shell
		t.Fatal(err)
	}
	s.sees("<prompt>")
	s.types("exit 7\n")
	if r, _ := s.leaves(); r.ExitCode != 7 || r.Signal != 0 {
		t.Errorf("%+v", r)
	}
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s", what)
		}
	}
}

// foreground is the name of what the keys of a process's terminal would reach.
func foreground(t *testing.T, pid string) string {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	name, _ := os.ReadFile("/proc/" + f[5] + "/comm") // it may have ended
	return strings.TrimSpace(string(name))
}

// The shell of the user's account, told to be a login shell.
func TestLoginShell(t *testing.T) {
	c := newWorld(t).connect()
	cmd := sandbox.Command{Terminal: &sandbox.Terminal{}, Cwd: "/", User: me(), Env: map[string]string{"PATH": os.Getenv("PATH"), "HOME": "/nonexistent", "PS1": "$ "}}
	s := sit(t, c, cmd)
	s.types("echo \"<$0>\" $((40+2)); exit 3\n")
	s.sees("<-")
	s.sees("sh> 42\r\n")
	if r, _ := s.leaves(); r.ExitCode != 3 || r.Description != "login shell" {
		t.Errorf("%+v", r)
	}
}

// What a terminal in raw mode gets is what was sent: every byte, however slowly it is read.
func TestRawInputIsWhole(t *testing.T) {
	c := newWorld(t).connect()
	in := make([]byte, 1<<20)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range in {
		in[i] = byte(rnd.Uint32()) // NUL, ^C, ^D, ^S and invalid UTF-8 among them
	}
	file := filepath.Join(t.TempDir(), "got")
	s := sit(t, c, terminalOf(fmt.Sprintf(`stty raw -echo; echo ready; for i in 1 2 3 4; do dd bs=1000 count=1 2>/dev/null; sleep 0.01; done >%s; head -c %d >>%s; stty sane`, file, len(in), file)))
	s.sees("ready")
	other, err := c.Start(s.ctx, newID(), shell("sleep 1000")) // which nothing here is to hold up
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.m.WriteStdin(s.ctx, 0, bytes.NewReader(append(in, make([]byte, 4000)...)), false); err != nil && sandbox.ReasonOf(err) != "stdin_broken" {
		t.Fatalf("%d: %v", n, err)
	}
	if r, out := s.leaves(); r.ExitCode != 0 {
		t.Fatalf("%+v %q", r, out)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(got, in) {
		t.Errorf("%d bytes arrived, %d of them right", len(got), commonPrefix(got, in))
	}
	if err := other.Kill(s.ctx, 0); err != nil {
		t.Fatal(err)
	}
}

func commonPrefix(a, b []byte) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// A program that does not read holds up its own input only, and can be ended.
func TestTerminalThatIsNotRead(t *testing.T) {
	c := newWorld(t).connect()
	s := sit(t, c, terminalOf("stty raw -echo; echo ready; sleep 1000"))
	s.sees("ready")
	written := make(chan error, 1)
	go func() {
		_, err := s.m.WriteStdin(s.ctx, 0, bytes.NewReader(make([]byte, 8<<20)), false)
		written <- err
	}()
	waitFor(t, "full terminal", func() bool { return s.m.Result().StdinSize > 64<<10 })
	if _, out, _ := run(t, c, shell("echo meanwhile")); out != "meanwhile\n" {
		t.Errorf("%q", out)
	}
	if err := s.m.Kill(s.ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := <-written; sandbox.ReasonOf(err) != "stdin_broken" {
		t.Errorf("input that nobody read: %v", err)
	}
	if r, _ := s.leaves(); !r.Killed || !r.StdinBroken {
		t.Errorf("%+v", r)
	}
}

// The end of input is ^D to a program that reads lines, also in the middle of one, and nothing to one in raw mode.
func TestEndOfInput(t *testing.T) {
	c := newWorld(t).connect()
	for _, text := range []string{"", "line\n", "no newline", "a\nb"} {
		s := sit(t, c, terminalOf("stty -echo; echo ready; cat; echo over"))
		s.sees("ready\r\n")
		if _, err := s.m.WriteStdin(s.ctx, 0, strings.NewReader(text), true); err != nil {
			t.Fatal(err)
		}
		if got := s.sees("over\r\n"); got != strings.ReplaceAll(text, "\n", "\r\n") {
			t.Errorf("%q: %q", text, got)
		}
		s.leaves()
	}
	s := sit(t, c, terminalOf("stty raw -echo; echo ready; head -c 3 | od -An -tx1; echo over"))
	s.sees("ready")
	if _, err := s.m.WriteStdin(s.ctx, 0, strings.NewReader("\x04\x00\xff"), true); err != nil {
		t.Fatal(err)
	}
	if got := s.sees("over"); !strings.Contains(got, "04 00 ff") {
		t.Errorf("%q", got)
	}
	s.leaves()
}

// Connections break at any moment, readers come and go: who reads on from where he was sees every byte once.
func TestTerminalOutputHasNoGap(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	const size = 10 << 20 // on one line
	s := sit(t, c, terminalOf(fmt.Sprintf(`stty raw -echo; echo ready; i=0; yes 0123456789abcdefghijklmnopqrstu | tr -d '\n' | head -c %d; echo; read x; echo $x`, size)))
	s.sees("ready\n")
	rnd := rand.New(rand.NewPCG(3, 4))
	offset := int64(len("ready\n"))
	var got []byte
	for len(got) < size {
		out, err := s.m.Output(1, OutputQuery{Offset: offset, Follow: true})
		if err != nil {
			t.Fatal(err)
		}
		want := min(1+rnd.IntN(700_000), size-len(got))
		piece := make([]byte, want)
		if _, err := io.ReadFull(out, piece); err != nil {
			t.Fatal(err)
		}
		out.Close()
		got = append(got, piece...)
		offset += int64(want)
		if rnd.IntN(2) == 0 {
			w.cut()
		}
	}
	pattern := bytes.Repeat([]byte("0123456789abcdefghijklmnopqrstu"), size/31+1)[:size]
	if !bytes.Equal(got, pattern) {
		t.Errorf("%d of %d bytes are right", commonPrefix(got, pattern), size)
	}
	s.types("done\n")
	r, _ := s.leaves()
	if r.Stdout.Size != offset+int64(len("\ndone\n")) {
		t.Errorf("%+v after offset %d", r, offset)
	}
}

// Who holds the terminal when the command's own process ends does not hold the command, and is hung up on.
func TestTerminalHangsUp(t *testing.T) {
	c := newWorld(t).connect()
	file := filepath.Join(t.TempDir(), "end")
	s := sit(t, c, terminalOf(fmt.Sprintf(`(trap '' HUP; touch %s.up; while echo x; do sleep 0.01; done 2>/dev/null; touch %s) & while [ ! -e %s.up ]; do sleep 0.01; done; echo last; exit 3`, file, file, file)))
	r, out := s.leaves()
	if r.ExitCode != 3 || !strings.Contains(out, "last\r\n") {
		t.Errorf("%+v %q", r, out)
	}
	waitFor(t, "error for who writes to a terminal that is gone", func() bool { _, err := os.Stat(file); return err == nil })
}

// The output is whole at the end, however much of it the terminal itself held.
func TestTerminalOutputIsWholeAtTheEnd(t *testing.T) {
	c := newWorld(t).connect()
	for _, n := range []int{1, 4095, 4096, 20_000, 300_000} {
		r, out := sit(t, c, terminalOf(fmt.Sprintf("stty -opost; head -c %d /dev/zero | tr '\\0' x; sleep 1000 & exit 5", n))).leaves()
		if out != strings.Repeat("x", n) || r.ExitCode != 5 {
			t.Errorf("%d bytes: %d, %+v", n, len(out), r)
		}
	}
}

// The next edge finds a command by its tag, what was typed stays typed, and typing goes on where it stopped.
func TestNextEdgeGoesOnAtTheTerminal(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	cmd := terminalOf("stty -echo; echo ready; while read line; do echo got $line; done")
	cmd.Tag = "some.tag"
	s := sit(t, c, cmd)
	s.sees("ready\r\n")
	s.types("one\n")
	s.sees("got one\r\n")
	started := s.m.Result().StartedAt
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	c = w.connect()
	m, ok := c.Command(s.m.ID())
	if !ok {
		t.Fatal("the next edge does not know the command")
	}
	if err := m.Known(s.ctx); err != nil {
		t.Fatal(err)
	}
	r := m.Result()
	if r.Tag != "some.tag" || !r.Terminal || !r.Running || r.StdinSize != int64(len("one\n")) || r.StartedAt.Sub(started).Abs() > time.Minute {
		t.Errorf("%+v", r)
	}
	if err := m.Resize(s.ctx, 30, 100); err != nil {
		t.Error(err)
	}
	next := &typist{t: t, ctx: s.ctx, m: m, out: follow(t, m, 1), offset: r.StdinSize}
	defer next.out.Close()
	if got := next.sees("got one\r\n"); got != "ready\r\n" {
		t.Errorf("%q", got)
	}
	next.types("two\n")
	next.sees("got two\r\n")
	next.types("\x04")
	if r, out := next.leaves(); r.ExitCode != 0 || out != "ready\r\ngot one\r\ngot two\r\n" {
		t.Errorf("%+v %q", r, out)
	}
}

// What a hostile aether tells of commands that an earlier edge started is checked, or made harmless.
func TestHostileStateOfCommands(t *testing.T) {
	idle := func(*fakeAether, wire.Type, uint32, []byte) {}
	for _, tag := range []string{"a b", "\xff", strings.Repeat("x", 65), "a\n"} {
		k := &aetherv1.CommandStatus{CommandId: "x", Tag: strings.ToValidUTF8(tag, "\x01")}
		if c, err := hostile(t, []*aetherv1.CommandStatus{k}, idle); err == nil {
			t.Errorf("tag %q was taken: %+v", tag, c.Commands()[0].Result())
		}
	}
	for _, ns := range []int64{-1, 0, math.MinInt64, math.MaxInt64} {
		c, err := hostile(t, []*aetherv1.CommandStatus{{CommandId: "x", Tag: "ok", Terminal: true, StartedNs: ns}}, idle)
		if err != nil {
			t.Fatal(err)
		}
		if r := c.Commands()[0].Result(); time.Since(r.StartedAt) > time.Hour || time.Until(r.StartedAt) > 0 || r.Tag != "ok" {
			t.Errorf("%d: %+v", ns, r)
		}
	}
	c, err := hostile(t, nil, func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
		switch ty {
		case wire.MsgStart:
			f.post(wire.MsgStarted, stream, &aetherv1.Started{Pid: 1})
		case wire.MsgCall: // no window is what it was asked for
			f.post(wire.MsgReply, stream, &aetherv1.Reply{Reply: &aetherv1.Reply_Processes{Processes: &aetherv1.Processes{}}})
		case wire.MsgKill:
			f.post(wire.MsgExit, stream, &aetherv1.Exit{ExitCode: 3, NoOutput: true})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	m, err := c.Start(ctx, "x", terminalOf("true"))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Resize(ctx, 1, 1); err != nil {
		t.Error(err)
	}
	if err := m.Kill(ctx, 0); err != nil {
		t.Error(err)
	}
	if err := m.Wait(ctx); err != nil || m.Result().NoOutput {
		t.Errorf("%v %+v", err, m.Result())
	}
}
