package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/internal/aether"
	"dsec/internal/aether/config"
	"dsec/sandbox"
)

// A world is an aether in this process, without control groups, and how to reach it.
type world struct {
	t      *testing.T
	key    []byte
	socket string
	dir    string

	mu    sync.Mutex
	conns []net.Conn
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, key: make([]byte, config.KeyLen), dir: t.TempDir()}
	if _, err := rand.Read(w.key); err != nil {
		t.Fatal(err)
	}
	// The test's own directory may be too long for a socket.
	short, err := os.MkdirTemp("", "ae")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(short) })
	w.socket = filepath.Join(short, "s")
	srv, err := aether.New(aether.Options{Config: config.Config{Key: w.key, Cgroup: config.CgroupNone}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", w.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		srv.Close()
	})
	return w
}

func (w *world) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", w.socket)
	if err == nil {
		w.mu.Lock()
		w.conns = append(w.conns, nc)
		w.mu.Unlock()
	}
	return nc, err
}

// cut breaks every connection so far.
func (w *world) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		c.Close()
	}
	w.conns = nil
}

func (w *world) options() Options {
	return Options{ID: "test", Dial: w.dial, Key: w.key, OutputDir: filepath.Join(w.dir, "out"), Log: slog.New(slog.NewTextHandler(w.t.Output(), nil))}
}

func (w *world) connect() *Client {
	w.t.Helper()
	c, err := Connect(testContext(w.t), w.options())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func shell(script string) sandbox.Command {
	return sandbox.Command{Shell: script, Cwd: "/", Env: map[string]string{"PATH": os.Getenv("PATH")}, User: me()}
}

func me() string { return fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()) }

var ids struct {
	sync.Mutex
	n int
}

func newID() string {
	ids.Lock()
	defer ids.Unlock()
	ids.n++
	return fmt.Sprintf("c%d", ids.n)
}

// run runs cmd to its end and returns all of its output.
func run(t testing.TB, c *Client, cmd sandbox.Command) (Result, string, string) {
	t.Helper()
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatalf("start %q: %v", describe(cmd), err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatalf("wait for %q: %v", describe(cmd), err)
	}
	return m.Result(), readAll(t, m, 1), readAll(t, m, 2)
}

func readAll(t testing.TB, m *Command, stream int) string {
	t.Helper()
	r := m.Output(stream, 0, true)
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read output %d: %v", stream, err)
	}
	return string(b)
}

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

func TestStdinRoundTrip(t *testing.T) {
	c := newWorld(t).connect()
	in := make([]byte, 16<<20)
	if _, err := rand.Read(in); err != nil {
		t.Fatal(err)
	}
	cmd := shell("cat")
	cmd.StdinFollows = true
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	out := m.Output(1, 0, true)
	defer out.Close()
	sum := make(chan [32]byte, 1)
	go func() {
		h := sha256.New()
		if _, err := io.Copy(h, out); err != nil {
			t.Error(err)
		}
		sum <- [32]byte(h.Sum(nil))
	}()
	half := len(in) / 2
	if n, err := m.WriteStdin(ctx, 0, bytes.NewReader(in[:half]), false); err != nil || n != int64(half) {
		t.Fatalf("first half: %d, %v", n, err)
	}
	if _, err := m.WriteStdin(ctx, int64(half)+1, bytes.NewReader(in[half+1:]), false); sandbox.ReasonOf(err) != "stdin_gap" {
		t.Errorf("a gap: %v", err)
	}
	if n, err := m.WriteStdin(ctx, 1000, bytes.NewReader(in[1000:]), true); err != nil || n != int64(len(in)) {
		t.Fatalf("all from an earlier offset: %d, %v", n, err)
	}
	if got := <-sum; got != sha256.Sum256(in) {
		t.Error("cat changed its input")
	}
	if err := m.Wait(ctx); err != nil || m.Result().StdinBroken {
		t.Errorf("%v %+v", err, m.Result())
	}
}

func TestBrokenStdin(t *testing.T) {
	c := newWorld(t).connect()
	ctx := testContext(t)
	cmd := shell("head -c 10 >/dev/null")
	cmd.StdinFollows = true
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.WriteStdin(ctx, 0, bytes.NewReader(make([]byte, 4<<20)), true)
	if sandbox.ReasonOf(err) != "stdin_broken" {
		t.Errorf("writing to who does not read: %v", err)
	}
	if err := m.Wait(ctx); err != nil || !m.Result().StdinBroken {
		t.Errorf("%v %+v", err, m.Result())
	}
	m, err = c.Start(ctx, newID(), shell("true"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = m.WriteStdin(ctx, 0, strings.NewReader("x"), true); sandbox.ReasonOf(err) != "no_stdin" {
		t.Errorf("stdin of a command without: %v", err)
	}
	cmd = shell("cat")
	cmd.Stdin = bytes.Repeat([]byte("in"), 32<<10)
	if _, out, _ := run(t, c, cmd); out != string(cmd.Stdin) {
		t.Errorf("inline stdin: %d bytes back", len(out))
	}
}

// Input that filled the pipe, and whose end comes alone once all of it was written: the command sees the end.
func TestStdinEndComesLater(t *testing.T) {
	ctx := testContext(t)
	c := newWorld(t).connect()
	in := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	cmd := shell("sleep 0.1; wc -c")
	cmd.StdinFollows = true
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	n, err := m.WriteStdin(ctx, 0, bytes.NewReader(in), false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.WriteStdin(ctx, n, strings.NewReader(""), true); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(m.Head(1, 100))); got != fmt.Sprint(len(in)) {
		t.Errorf("wc says %q", got)
	}
}

func TestBackgroundChildren(t *testing.T) {
	c := newWorld(t).connect()
	began := time.Now()
	r, out, _ := run(t, c, shell("echo before; sleep 20 & echo $!"))
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %v for a command with a background child", took)
	}
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
	cmd := shell("echo out; sleep 30 & sleep 30")
	cmd.Timeout = 50 * time.Millisecond
	r, out, _ := run(t, c, cmd)
	if !r.TimedOut || r.Signal != 9 || out != "out\n" {
		t.Errorf("%+v %q", r, out)
	}
	ctx := testContext(t)
	for _, signal := range []int{0, 15} {
		m, err := c.Start(ctx, newID(), shell("sleep 30"))
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

func TestSameIDIsTheSameCommand(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	file := filepath.Join(w.dir, "count")
	cmd := shell("echo x >> " + file)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			m, err := c.Start(ctx, "once", cmd)
			if err == nil {
				err = m.Wait(ctx)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	c.Close()
	again := w.connect() // another edge
	if _, err := again.Start(ctx, "once", cmd); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(file); string(b) != "x\n" {
		t.Errorf("it ran %d times", len(b)/2)
	}
}

func TestReconnect(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	cmd := shell("cat; echo end")
	cmd.StdinFollows = true
	m, err := c.Start(ctx, newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	in := make([]byte, 8<<20)
	if _, err := rand.Read(in); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range maxShort / 2 {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				w.cut()
			}
		}
	})
	n, err := m.WriteStdin(ctx, 0, bytes.NewReader(in), true)
	if err != nil || n != int64(len(in)) {
		t.Fatalf("%d, %v; client: %v; %+v", n, err, c.Err(), m.Result())
	}
	close(stop)
	wg.Wait()
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, m, 1); got != string(in)+"end\n" {
		t.Errorf("%d bytes of %d came back, or others", len(got), len(in)+4)
	}
}

// A command that is asked for while its connection is replaced is started on the new one.
func TestStartAgainstAReconnect(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	old, err := c.current(ctx)
	if err != nil {
		t.Fatal(err)
	}
	w.cut()
	for l := old; l == old; {
		if l, err = c.current(ctx); err != nil {
			t.Fatal(err)
		}
	}
	m, l, err := c.reserve(newID(), shell("true"))
	if err != nil || l == old || l == nil {
		t.Fatalf("to be started on %p, the old connection is %p: %v", l, old, err)
	}
	m.resume(l)
	l.conn.Flush()
	if err := m.Wait(ctx); err != nil {
		t.Error(err)
	}
}

func TestEdgeRestart(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	gate := filepath.Join(w.dir, "gate")
	script := fmt.Sprintf("head -c 3000000 /dev/zero | tr '\\0' a; echo small >&2; while [ ! -e %s ]; do sleep 0.01; done; head -c 3000000 /dev/zero | tr '\\0' b", gate)
	m, err := c.Start(ctx, "long", shell(script))
	if err != nil {
		t.Fatal(err)
	}
	r := m.Output(1, 0, true)
	if _, err := io.CopyN(io.Discard, r, 3_000_000); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := m.Wait(ctx); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("wait at a closed client: %v", err)
	}
	if err := os.WriteFile(gate, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	again := w.connect()
	m, ok := again.Command("long")
	if !ok {
		t.Fatal("the command is not known to the next edge")
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("a", 3_000_000) + strings.Repeat("b", 3_000_000)
	if got := readAll(t, m, 1); got != want {
		t.Errorf("stdout has %d bytes, or other ones", len(got))
	}
	if got := readAll(t, m, 2); got != "small\n" {
		t.Errorf("stderr %q", got)
	}
}

func TestFiles(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	for _, size := range []int{0, 1, 18 << 10, 64<<10 + 1, 16 << 20} {
		content := make([]byte, size)
		if _, err := rand.Read(content); err != nil {
			t.Fatal(err)
		}
		want := sha256.Sum256(content)
		p := filepath.Join(w.dir, "deep", "er", fmt.Sprint(size))
		n, sum, err := c.WriteFile(ctx, FileWrite{Path: p, User: me(), Mode: 0o640, MakeParents: true, Size: int64(size), SHA256: want[:]}, bytes.NewReader(content))
		if err != nil || n != int64(size) || !bytes.Equal(sum, want[:]) {
			t.Fatalf("write %d: %d %v", size, n, err)
		}
		info, r, err := c.ReadFile(ctx, FileRead{Path: p, User: me()})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		r.Close()
		if err != nil || !bytes.Equal(got, content) || info.Size != int64(size) || info.Mode != 0o640 || info.UID != uint32(os.Getuid()) {
			t.Errorf("read %d: %d bytes, %v, %+v", size, len(got), err, info)
		}
	}
	_, r, err := c.ReadFile(ctx, FileRead{Path: filepath.Join(w.dir, "deep/er/18432"), User: me(), Offset: 18000, Length: 10})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || len(b) != 10 {
		t.Errorf("a range: %d bytes, %v", len(b), err)
	}
	r.Close()
}

func TestFileErrors(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	fifo := filepath.Join(w.dir, "fifo")
	if r, _, errOut := run(t, c, shell("mkfifo "+fifo)); r.ExitCode != 0 {
		t.Fatal(errOut)
	}
	existing := filepath.Join(w.dir, "existing")
	if err := os.WriteFile(existing, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	for p, reason := range map[string]string{
		"/no/such": "file_not_found", w.dir: "is_directory", fifo: "invalid_request", "/dev/zero": "invalid_request",
		"/proc/self/environ": "invalid_request", "": "invalid_request", existing + "/x": "not_directory",
	} {
		_, _, err := c.ReadFile(ctx, FileRead{Path: p, User: me()})
		if sandbox.ReasonOf(err) != reason {
			t.Errorf("read %q: %v, want %s", p, err, reason)
		}
	}
	sum := sha256.Sum256([]byte("other"))
	for name, tc := range map[string]struct {
		w      FileWrite
		reason string
	}{
		"exclusive": {FileWrite{Path: existing, Exclusive: true, Size: -1}, "file_exists"},
		"directory": {FileWrite{Path: w.dir, Size: -1}, "is_directory"},
		"slash":     {FileWrite{Path: w.dir + "/new/", Size: -1}, "is_directory"},
		"parent":    {FileWrite{Path: w.dir + "/no/such/file", Size: -1}, "file_not_found"},
		"short":     {FileWrite{Path: existing, Size: 100}, "content_mismatch"},
		"long":      {FileWrite{Path: existing, Size: 1}, "content_mismatch"},
		"digest":    {FileWrite{Path: existing, Size: -1, SHA256: sum[:]}, "content_mismatch"},
		"fifo":      {FileWrite{Path: fifo, Size: -1}, "invalid_request"},
	} {
		tc.w.User = me()
		if _, _, err := c.WriteFile(ctx, tc.w, strings.NewReader("content")); sandbox.ReasonOf(err) != tc.reason {
			t.Errorf("%s: %v, want %s", name, err, tc.reason)
		}
	}
	broken := io.MultiReader(strings.NewReader("half"), failingReader{})
	if _, _, err := c.WriteFile(ctx, FileWrite{Path: existing, User: me(), Size: -1}, broken); sandbox.ReasonOf(err) != "upload_interrupted" {
		t.Errorf("a source that fails: %v", err)
	}
	if b, err := os.ReadFile(existing); err != nil || string(b) != "old" {
		t.Errorf("the old file is %q, %v", b, err)
	}
	waitNoTemp(t, w.dir)
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errors.New("source failed") }

// waitNoTemp waits until nothing half-written is left: a cancelled write is undone in the background.
func waitNoTemp(t *testing.T, dir string) {
	t.Helper()
	ctx := testContext(t)
	for {
		left, err := filepath.Glob(filepath.Join(dir, ".dsec-*"))
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("left behind: %v", left)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestWriteEndsWithConnection(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	pr, pw := io.Pipe()
	result := make(chan error, 1)
	go func() {
		_, _, err := c.WriteFile(testContext(t), FileWrite{Path: filepath.Join(w.dir, "f"), User: me(), Size: -1}, pr)
		result <- err
	}()
	if _, err := pw.Write(make([]byte, 100_000)); err != nil {
		t.Fatal(err)
	}
	w.cut()
	go pw.Write(make([]byte, 100_000))
	if err := <-result; sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("%v", err)
	}
	pr.Close()
	waitNoTemp(t, w.dir)
}

func TestWrongKey(t *testing.T) {
	w := newWorld(t)
	o := w.options()
	o.Key = make([]byte, config.KeyLen)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if _, err := Connect(ctx, o); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errKey) {
		t.Errorf("connect with a wrong key: %v", err)
	}
	w.connect()
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
