package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A fakeScreen is a terminal without a device.
type fakeScreen struct {
	mu         sync.Mutex
	rows, cols uint16
	isRaw      bool
	broken     bool
	changes    chan os.Signal
}

func (s *fakeScreen) size() (uint16, uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rows, s.cols
}

func (s *fakeScreen) raw() (func() error, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken {
		return nil, errFakeScreen
	}
	s.isRaw = true
	return func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.isRaw = false
		return nil
	}, nil
}

func (s *fakeScreen) resized() (<-chan os.Signal, func()) { return s.changes, func() {} }

func (s *fakeScreen) inRawMode() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isRaw
}

// atTerminal gives the harness a terminal; what is written to keys is typed at it.
func (h *harness) atTerminal() (s *fakeScreen, keys *io.PipeWriter) {
	s = &fakeScreen{rows: 30, cols: 100, changes: make(chan os.Signal, 1)}
	r, w := io.Pipe()
	h.t.Cleanup(func() { w.Close() })
	h.stdin, h.c.screen, h.c.raw.of = r, s, s
	h.vars["TERM"] = "fancy"
	h.f.programs["sh"] = tty
	h.f.programs["tty"] = tty
	return s, w
}

// tty is a program at a terminal: it shows what is typed and how large its window is, and exits with the number after "exit".
func tty(p *process) int {
	lines := make(chan string)
	go func() {
		defer close(lines)
		for in := bufio.NewScanner(p.stdin); in.Scan(); {
			lines <- in.Text()
		}
	}()
	for {
		select {
		case s := <-p.sizes:
			fmt.Fprintf(p.stdout, "window %dx%d\r\n", s[0], s[1])
		case l, ok := <-lines:
			code := 0
			if _, err := fmt.Sscanf(l, "exit %d", &code); err == nil || !ok {
				return code
			}
			fmt.Fprintf(p.stdout, "typed %q\r\n", l)
		}
	}
}

func TestTerminal(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	screen, keys := h.atTerminal()
	window := h.stdout.saw("window 30x100")
	done := h.start("exec", "-it", sb.Id, "tty")
	recv(t, window)
	if !screen.inRawMode() {
		t.Fatal("it is not in raw mode")
	}
	typed := h.stdout.saw(`typed "\x03ls"`) // Ctrl-C goes inside
	io.WriteString(keys, "\x03ls\n")
	recv(t, typed)
	screen.mu.Lock()
	screen.rows = 50
	screen.mu.Unlock()
	window = h.stdout.saw("window 50x100")
	screen.changes <- syscall.SIGWINCH
	recv(t, window)
	io.WriteString(keys, "exit 7\n")
	got := recv(t, done)
	if got.code != 7 || got.stderr != "" || screen.inRawMode() {
		t.Fatalf("%+v, raw %v", got, screen.inRawMode())
	}
	if c := h.f.execs[0]; c.Terminal.GetRows() != 30 || c.Terminal.GetCols() != 100 || c.Terminal.GetTerm() != "fancy" {
		t.Fatalf("%v", c)
	}
}

func TestShell(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	_, keys := h.atTerminal()
	done := h.start("shell", "-u", "nobody", sb.Id)
	io.WriteString(keys, "exit 3\n")
	if got := recv(t, done); got.code != 3 || got.stderr != "" {
		t.Fatalf("%+v", got)
	}
	if c := h.f.execs[0]; c.Argv[0] != "sh" || c.User != "nobody" || c.Terminal == nil {
		t.Fatalf("%v", c)
	}
	// Without a terminal it is like ssh: the input is a script.
	h.c.screen, h.stdin = nil, strings.NewReader("ls\nexit 4\n")
	h.stdout.b.Reset()
	h.want(recv(t, h.start("shell", sb.Id)), "typed \"ls\"\r\n", "", 4)
	if c := h.f.execs[1]; c.Terminal != nil || !c.StdinFollows {
		t.Fatalf("%v", c)
	}
	h.want(h.run("shell", sb.Id, "--", "echo", "-n", "x"), "-n x\n", "", 0)
	h.wantError(h.run("shell"), exitUsage, "the sandbox is missing")
	h.wantError(h.run("shell", "--detach-keys", "ctrl-1", sb.Id), exitUsage, "is no key")
}

func TestRunAtATerminal(t *testing.T) {
	h := newHarness(t)
	screen, keys := h.atTerminal()
	done := h.start("run", "-it", "debian")
	io.WriteString(keys, "exit 5\n")
	if got := recv(t, done); got.code != 5 || h.f.live() != 0 || screen.inRawMode() {
		t.Fatalf("%+v, %d live", got, h.f.live())
	}
	if c := h.f.execs[0]; c.Argv[0] != "sh" {
		t.Fatalf("%v", c)
	}
}

func TestTerminalUsage(t *testing.T) {
	h := newHarness(t)
	h.wantError(h.run("exec", "-it", "x", "true"), exitUsage, "not a terminal")
	h.wantError(h.run("exec", "-t", "--json", "x", "true"), exitUsage, "contradicts --json")
	h.wantError(h.run("exec", "-t", "--session", "s", "x", "true"), exitUsage, "--session contradicts")
	// Without our input it needs no terminal of ours.
	sb := h.f.add(nil)
	h.want(h.run("exec", "-t", sb.Id, "echo", "x"), "x\n", "", 0)
	screen, _ := h.atTerminal()
	screen.broken = true
	got := h.run("exec", "-it", sb.Id, "tty")
	h.wantError(got, exitPlatform, "no raw mode")
	if h.f.called("KillCommand") != 1 {
		t.Fatal("the command is left")
	}
}

func TestDetachAndAttach(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	screen, keys := h.atTerminal()
	typed := h.stdout.saw(`typed "one"`)
	done := h.start("exec", "-it", "--tag", "work", sb.Id, "tty")
	io.WriteString(keys, "one\n")
	recv(t, typed)
	io.WriteString(keys, "\x10\x11")
	if got := recv(t, done); got.code != 0 || !strings.Contains(got.stderr, "dsec attach") || screen.inRawMode() {
		t.Fatalf("%+v", got)
	}
	if h.f.called("KillCommand") != 0 {
		t.Fatal("it was killed")
	}
	for _, args := range [][]string{{"attach", sb.Id}, {"attach", "--tag", "work", sb.Id}} {
		h.stdout.b.Reset()
		r, w := io.Pipe()
		h.stdin = r
		replayed := h.stdout.saw(`typed "one"`)
		done = h.start(args...)
		recv(t, replayed)
		typed = h.stdout.saw(`typed "two"`)
		io.WriteString(w, "two\n")
		recv(t, typed)
		io.WriteString(w, "\x10\x11")
		if got := recv(t, done); got.code != 0 || strings.Count(got.stdout, `"one"`) != 1 {
			t.Fatalf("%+v", got)
		}
	}
	r, w := io.Pipe()
	h.stdin = r
	done = h.start("attach", sb.Id)
	io.WriteString(w, "exit 9\n")
	if got := recv(t, done); got.code != 9 {
		t.Fatalf("%+v", got)
	}
	h.wantError(h.run("attach", "--tag", "none", sb.Id), exitPlatform, `no command with the tag "none"`)
	h.wantError(h.run("attach", "--tag", "work", sb.Id, "x"), exitUsage, "not both")
}

func TestAttachToPlainCommand(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	id := strings.TrimSpace(h.run("exec", "-d", sb.Id, "hang").stdout)
	h.stdout.b.Reset()
	saw := h.stdout.saw("hanging\n")
	done := h.start("attach", sb.Id, id[:8])
	recv(t, saw)
	h.interrupt() // leaves it
	h.want(recv(t, done), "hanging\n", "", 130)
	if h.f.called("KillCommand") != 0 {
		t.Fatal("it was killed")
	}
}

func TestAttachToWhatHasEnded(t *testing.T) {
	h := newHarness(t)
	ended := h.f.add(nil)
	h.run("exec", ended.Id, "echo", "hi")
	h.want(h.run("attach", ended.Id), "hi\n", "dsec: no command is running; this is what the last one, which has ended, wrote:\n", 0)
}

// The connection is away for longer than the client waits: the terminal is as it was, and it is said how to go on.
func TestTerminalOfALostPlatform(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	screen, _ := h.atTerminal()
	window := h.stdout.saw("window")
	done := h.start("exec", "-it", sb.Id, "tty")
	recv(t, window)
	h.f.setIntercept(func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) })
	h.f.server.CloseClientConnections()
	got := recv(t, done)
	if got.code != exitPlatform || screen.inRawMode() || !strings.Contains(got.stderr, "does not answer") || !strings.Contains(got.stderr, "dsec attach") {
		t.Fatalf("%+v, raw %v", got, screen.inRawMode())
	}
	if strings.Contains(got.stderr, "trying again") {
		t.Fatalf("a notice on a screen that is drawn: %q", got.stderr)
	}
}

// A cut is resumed without a gap, a double or a word.
func TestTerminalSurvivesCuts(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	_, keys := h.atTerminal()
	h.f.cutOutput = 7
	done := h.start("exec", "-it", sb.Id, "tty")
	var want strings.Builder
	want.WriteString("window 30x100\r\n")
	recv(t, h.stdout.saw(want.String()))
	for i := range 20 {
		fmt.Fprintf(&want, "typed \"line %d\"\r\n", i)
		saw := h.stdout.saw(want.String())
		fmt.Fprintf(keys, "line %d\n", i)
		recv(t, saw)
	}
	io.WriteString(keys, "exit 0\n")
	h.want(recv(t, done), want.String(), "", 0)
}

func TestTerminalInterruptedByASignal(t *testing.T) {
	h := newHarness(t)
	sb := h.f.add(nil)
	screen, _ := h.atTerminal()
	window := h.stdout.saw("window")
	done := h.start("exec", "-it", sb.Id, "tty")
	recv(t, window)
	h.cancel(&interruptError{syscall.SIGHUP})
	if got := recv(t, done); got.code != 129 || got.stderr != "" || screen.inRawMode() || h.f.called("KillCommand") != 1 {
		t.Fatalf("%+v, raw %v, %d kills", got, screen.inRawMode(), h.f.called("KillCommand"))
	}
}

func TestPanicLeavesTheTerminalAsItWas(t *testing.T) {
	s := &fakeScreen{}
	m := &rawMode{of: s}
	if err := m.enter(); err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil || s.inRawMode() {
				t.Error("the panic was lost, or the terminal is raw")
			}
		}()
		_ = m.protect(func() error { panic("for the test") })
	}()
}

func TestParseKeys(t *testing.T) {
	for text, want := range map[string]string{"ctrl-p,ctrl-q": "\x10\x11", "": "", "~,.": "~.", "CTRL-A": "\x01", "ctrl-],q": "\x1dq", "ctrl-@": "\x00"} {
		if got, err := parseKeys(text); err != nil || string(got) != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"ctrl-", "ctrl-pq", "ab", ",", "ctrl-1", "é"} {
		if got, err := parseKeys(text); err == nil {
			t.Errorf("%q: %q, want an error", text, got)
		}
	}
}

func TestKeyFilter(t *testing.T) {
	for _, c := range []struct {
		keys  string
		in    []string
		out   string
		found bool
		held  string // and is sent after a pause
	}{
		{"\x10\x11", []string{"ab\x10\x11"}, "ab", true, ""},
		{"\x10\x11", []string{"a\x10", "\x11"}, "a", true, ""},
		{"\x10\x11", []string{"a\x10b\x10"}, "a\x10b", false, "\x10"},
		{"\x10\x11", []string{"\x10\x10\x11"}, "\x10", true, ""},
		{"aab", []string{"aaab"}, "a", true, ""},
		{"aab", []string{"aac"}, "aac", false, ""},
		{"abac", []string{"ababac"}, "ab", true, ""},
		{"", []string{"\x10\x11"}, "\x10\x11", false, ""},
	} {
		f := keyFilter{keys: []byte(c.keys)}
		var out bytes.Buffer
		found := false
		for _, in := range c.in {
			var p []byte
			p, found = f.pass([]byte(in))
			out.Write(p)
		}
		if held := string(f.release()); out.String() != c.out || found != c.found || held != c.held {
			t.Errorf("%q in %q: %q, %v, holds %q", c.keys, c.in, out.String(), found, held)
		}
	}
}

// A key that may be the first of those that detach is not held back for long.
func TestHeldKeyIsSent(t *testing.T) {
	k := newKeyboard([]byte("\x10\x11"))
	r, w := io.Pipe()
	defer w.Close()
	go k.read(t.Context(), r)
	io.WriteString(w, "\x10")
	got := make(chan string, 1)
	go func() {
		p, _ := k.take(t.Context(), 10)
		got <- string(p)
	}()
	select {
	case p := <-got:
		if p != "\x10" {
			t.Fatalf("%q", p)
		}
	case <-time.After(time.Minute):
		t.Fatal("it is held back for ever")
	}
}
