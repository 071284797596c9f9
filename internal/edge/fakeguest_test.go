package edge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing/iotest"
	"time"

	"dsec/sandbox"
)

// fakeGuest is an aether in memory. Its commands are shell-like words: "true", "exit N", "sleep D", "wait" (until killed),
// "echo TEXT", "cat" (stdin to stdout).
type fakeGuest struct {
	o    GuestOptions
	done chan struct{}

	mu       sync.Mutex
	closed   bool
	err      error
	commands map[string]*fakeCommand
	files    map[string][]byte
	wg       sync.WaitGroup
	last     sandbox.Command
	trusts   []Grounds
	onTrust  func() error

	sessions    map[string]GuestSession
	lastSession sandbox.SessionSpec
}

// connectFake reaches a fakeGuest if the driver's process is there.
func connectFake(ctx context.Context, o GuestOptions) (Guest, error) {
	for {
		conn, err := o.Dial(ctx)
		if err == nil {
			conn.Close()
			return &fakeGuest{o: o, done: make(chan struct{}), commands: make(map[string]*fakeCommand), files: make(map[string][]byte)}, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

func (g *fakeGuest) Done() <-chan struct{} { return g.done }
func (g *fakeGuest) Err() error            { g.mu.Lock(); defer g.mu.Unlock(); return g.err }

// lose is the end of aether as the client sees it.
func (g *fakeGuest) lose(err error, killed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return
	}
	g.closed, g.err = true, err
	for _, c := range g.commands {
		c.finish(CommandResult{ExitCode: 137, Signal: 9, Killed: killed})
	}
	close(g.done)
}

func (g *fakeGuest) Close() error {
	g.lose(errors.New("closed"), true)
	g.wg.Wait()
	return nil
}

func (g *fakeGuest) Start(_ context.Context, id string, cmd sandbox.Command) (GuestCommand, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last = cmd
	if c := g.commands[id]; c != nil {
		return c, nil
	}
	if g.closed {
		return nil, sandbox.Errorf(sandbox.Unavailable, "guest_died", "gone")
	}
	if strings.HasPrefix(cmd.Shell, "no-such") {
		return nil, sandbox.Errorf(sandbox.NotFound, "program_not_found", "no program")
	}
	c := &fakeCommand{id: id, ended: make(chan struct{}), grown: make(chan struct{}), result: CommandResult{Running: true, StartedAt: time.Now(), Description: cmd.Shell, Tag: cmd.Tag, Session: cmd.Session, Terminal: cmd.Terminal != nil}}
	g.commands[id] = c
	g.wg.Go(func() {
		c.run(cmd)
		g.change()
		if g.o.OnEnd != nil {
			g.o.OnEnd(id)
		}
	})
	return c, nil
}

func (g *fakeGuest) CreateSession(_ context.Context, spec sandbox.SessionSpec) (GuestSession, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s, ok := g.sessions[spec.Name]; ok && !s.Ended {
		return s, nil
	}
	s := GuestSession{Name: spec.Name, Shell: "bash", CreatedAt: time.Now()}
	if g.sessions == nil {
		g.sessions = make(map[string]GuestSession)
	}
	g.sessions[spec.Name], g.lastSession = s, spec
	return s, nil
}

func (g *fakeGuest) Sessions(context.Context) ([]GuestSession, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(g.sessions)), nil
}

func (g *fakeGuest) DeleteSession(_ context.Context, name string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.sessions[name]; !ok {
		return sandbox.Errorf(sandbox.NotFound, "session_not_found", "no session")
	}
	delete(g.sessions, name)
	return nil
}

func (g *fakeGuest) change() {
	if g.o.OnChange != nil {
		g.o.OnChange(g.Running(), false)
	}
}

func (g *fakeGuest) Command(id string) (GuestCommand, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	c, ok := g.commands[id]
	return c, ok
}

func (g *fakeGuest) Commands() (out []GuestCommand) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range slices.Sorted(maps.Keys(g.commands)) {
		out = append(out, g.commands[k])
	}
	return out
}

// Processes is one for each running command.
func (g *fakeGuest) Processes(context.Context) (list []Process, more bool, err error) {
	for i, c := range g.Commands() {
		list = append(list, Process{PID: 100 + i, Name: "fake", CPUTicks: 250, Command: c.ID(), StartedTicks: 7})
	}
	return list, false, nil
}

// Signal ends the command of a process.
func (g *fakeGuest) Signal(ctx context.Context, pid, signal int, _ uint64) error {
	all := g.Commands()
	if pid < 100 || pid >= 100+len(all) {
		return sandbox.Errorf(sandbox.NotFound, "process_not_found", "no process %d", pid)
	}
	return all[pid-100].Kill(ctx, signal)
}

func (g *fakeGuest) Trust(_ context.Context, grounds Grounds) error {
	if g.onTrust != nil {
		return g.onTrust()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.trusts = append(g.trusts, grounds)
	return nil
}

func (g *fakeGuest) Running() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.commands {
		if c.Result().Running {
			n++
		}
	}
	return n
}

func (g *fakeGuest) ReadFile(_ context.Context, f FileRead) (FileInfo, io.ReadCloser, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b, ok := g.files[f.Path]
	if !ok {
		return FileInfo{}, nil, sandbox.Errorf(sandbox.NotFound, "file_not_found", "no such file")
	}
	part := b[min(f.Offset, int64(len(b))):]
	if f.Length > 0 {
		part = part[:min(f.Length, int64(len(part)))]
	}
	info := FileInfo{Size: int64(len(b)), Mode: 0o640, MTime: time.Unix(1_800_000_000, 5), UID: 7, GID: 8, Length: int64(len(part))}
	if strings.HasSuffix(f.Path, "short") { // a file that shrinks while it is read
		part = part[:len(part)/2]
	}
	return info, io.NopCloser(bytes.NewReader(part)), nil
}

func (g *fakeGuest) WriteFile(_ context.Context, f FileWrite, r io.Reader) (int64, []byte, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return 0, nil, sandbox.Errorf(sandbox.Canceled, "canceled", "the body broke off").WithCause(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.files[f.Path] = b
	return int64(len(b)), make([]byte, 32), nil
}

// fakeArchive is a file as its own archive.
type fakeArchive struct {
	io.Reader
	result ArchiveResult
}

func (fakeArchive) Close() error                     { return nil }
func (a fakeArchive) Result() (ArchiveResult, error) { return a.result, nil }

// ReadArchive gives the content of a file. A path that ends in "short" has a problem, one in "cut" breaks off.
func (g *fakeGuest) ReadArchive(_ context.Context, a ArchiveRead) (GuestArchive, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b, ok := g.files[a.Path]
	for _, name := range a.Names {
		b, ok = append(b, g.files[string(name)]...), true
	}
	if !ok {
		return nil, sandbox.Errorf(sandbox.NotFound, "file_not_found", "no such file")
	}
	out := fakeArchive{bytes.NewReader(b), ArchiveResult{Entries: 1, Bytes: int64(len(b)), Skipped: 2}}
	if strings.HasSuffix(a.Path, "short") {
		out.result.Problem = sandbox.Errorf(sandbox.FailedPrecondition, "file_changed", "füle \U0001F600 became shorter")
	}
	if strings.HasSuffix(a.Path, "cut") {
		out.Reader = io.MultiReader(out.Reader, iotest.ErrReader(sandbox.Errorf(sandbox.Unavailable, "guest_died", "gone")))
	}
	return out, nil
}

// WriteArchive keeps an archive as a file.
func (g *fakeGuest) WriteArchive(ctx context.Context, a ArchiveWrite, r io.Reader) (ArchiveResult, error) {
	n, _, err := g.WriteFile(ctx, FileWrite{Path: fmt.Sprintf("%+v", a)}, r)
	return ArchiveResult{Entries: 3, Bytes: n}, err
}

type fakeCommand struct {
	id    string
	ended chan struct{}

	mu     sync.Mutex
	grown  chan struct{}
	out    []byte
	in     []byte
	inEnd  bool
	result CommandResult
	rows   int
	cols   int
}

func (c *fakeCommand) run(cmd sandbox.Command) {
	word, arg, _ := strings.Cut(cmd.Shell, " ")
	switch word {
	case "echo":
		c.print([]byte(arg + "\n"))
	case "exit":
		n, _ := strconv.Atoi(arg)
		c.finish(CommandResult{ExitCode: n})
	case "sleep":
		d, _ := time.ParseDuration(arg)
		select {
		case <-time.After(d):
		case <-c.ended:
		}
	case "wait":
		<-c.ended
	case "cat":
		c.cat()
	}
	c.finish(CommandResult{})
}

func (c *fakeCommand) cat() {
	for {
		c.mu.Lock()
		in, end, grown := c.in, c.inEnd, c.grown
		c.in = nil
		c.mu.Unlock()
		c.print(in)
		if end {
			return
		}
		select {
		case <-grown:
		case <-c.ended:
			return
		}
	}
}

func (c *fakeCommand) growLocked() {
	close(c.grown)
	c.grown = make(chan struct{})
}

func (c *fakeCommand) print(b []byte) {
	if len(b) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = append(c.out, b...)
	c.growLocked()
}

func (c *fakeCommand) finish(r CommandResult) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.result.Running {
		return
	}
	r.StartedAt, r.EndedAt, r.Description = c.result.StartedAt, time.Now(), c.result.Description
	r.Tag, r.Session, r.Terminal = c.result.Tag, c.result.Session, c.result.Terminal
	c.result = r
	close(c.ended)
	c.growLocked()
}

func (c *fakeCommand) ID() string { return c.id }

func (c *fakeCommand) Wait(ctx context.Context) error {
	select {
	case <-c.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *fakeCommand) Result() CommandResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.result
	r.Stdout = StreamSize{Size: int64(len(c.out)), Head: int64(len(c.out))}
	return r
}

func (c *fakeCommand) Head(stream, limit int) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stream != 1 {
		return nil
	}
	return bytes.Clone(c.out[:min(limit, len(c.out))])
}

func (c *fakeCommand) SetOOM(killed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.result.OOMKilled = killed
}

func (c *fakeCommand) Known(context.Context) error { return nil }

func (c *fakeCommand) Resize(_ context.Context, rows, cols int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.result.Terminal {
		return sandbox.Errorf(sandbox.FailedPrecondition, "no_terminal", "no terminal")
	}
	c.rows, c.cols = rows, cols
	return nil
}

func (c *fakeCommand) Kill(context.Context, int) error {
	c.finish(CommandResult{ExitCode: 137, Signal: 9, Killed: true})
	return nil
}

func (c *fakeCommand) WriteStdin(_ context.Context, offset int64, r io.Reader, end bool) (int64, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in, c.inEnd = append(c.in, b...), end
	c.growLocked()
	return offset + int64(len(b)), nil
}

func (c *fakeCommand) WriteStdinExactly(ctx context.Context, offset int64, r io.Reader, end bool) (int64, error) {
	c.mu.Lock()
	at := int64(len(c.in))
	c.mu.Unlock()
	if offset != at {
		return 0, sandbox.Errorf(sandbox.FailedPrecondition, "stdin_moved", "more has arrived").WithFact("offset", strconv.FormatInt(at, 10))
	}
	return c.WriteStdin(ctx, offset, r, end)
}

func (c *fakeCommand) Output(stream int, q OutputQuery) (OutputReader, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q.Offset == 666 {
		return nil, sandbox.Errorf(sandbox.NotFound, "output_dropped", "no longer kept").WithFact("next_offset", "1000")
	}
	at := q.Offset
	if q.Tail != nil {
		at = max(at, int64(len(c.out))-*q.Tail)
	}
	return &fakeOutput{c: c, stream: stream, first: at, at: at, q: q, final: !c.result.Running, closed: make(chan struct{})}, nil
}

type fakeOutput struct {
	c         *fakeCommand
	stream    int
	first, at int64
	q         OutputQuery
	final     bool
	once      sync.Once
	closed    chan struct{}
}

func (o *fakeOutput) Close() error  { o.once.Do(func() { close(o.closed) }); return nil }
func (o *fakeOutput) Offset() int64 { return o.first }
func (o *fakeOutput) Final() bool   { return o.final }

func (o *fakeOutput) Ready() bool {
	o.c.mu.Lock()
	defer o.c.mu.Unlock()
	return o.at < int64(len(o.c.out)) || !o.c.result.Running
}

func (o *fakeOutput) Read(p []byte) (int, error) {
	var silence <-chan time.Time
	if o.q.Quiet > 0 {
		silence = time.After(o.q.Quiet)
	}
	for {
		o.c.mu.Lock()
		var have []byte
		if o.stream == 1 {
			have = o.c.out[min(o.at, int64(len(o.c.out))):]
		}
		n := copy(p, have)
		running, grown := o.c.result.Running, o.c.grown
		o.c.mu.Unlock()
		o.at += int64(n)
		if n > 0 {
			return n, nil
		}
		if !o.q.Follow || !running {
			o.final = !running
			return 0, io.EOF
		}
		select {
		case <-grown:
		case <-silence:
			return 0, io.EOF
		case <-o.closed:
			return 0, fmt.Errorf("closed")
		}
	}
}

// Dial reaches a server of the test itself.
func (g *fakeGuest) Dial(ctx context.Context, host string, port int, _ time.Duration) (GuestConn, error) {
	if host == "" {
		host = "127.0.0.1"
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "port_refused", "nothing listens on port %d", port)
	}
	if err != nil {
		return nil, err
	}
	tcp := c.(*net.TCPConn)
	go func() { <-g.done; tcp.Close() }()
	return fakeConn{tcp}, nil
}

type fakeConn struct{ *net.TCPConn }

func (c fakeConn) Reset() { _ = c.SetLinger(0) }

func (g *fakeGuest) ForgetCommand(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.commands, id)
}
