package guest

import (
	"container/list"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

const (
	inlineScript   = 96 << 10 // a longer one follows as data: an argument may have 128 KiB
	maxStart       = 3 << 20  // what aether takes
	maxDescription = 200      // bytes
	ackStep        = wire.Window / 4
	retainInAether = 4 << 10 // output of an ended command that aether keeps for the next edge, in bytes per stream
)

// A StreamSize says what a stream had and what is kept of it, in bytes. Head is from the start and Tail from the end; if
// nothing was dropped, Head == Size.
type StreamSize struct{ Size, Head, Tail int64 }

// A Result is what is known of a command.
type Result struct {
	Running                                  bool
	ExitCode, Signal                         int // 128+Signal if a signal ended it
	TimedOut, Killed, OOMKilled, StdinBroken bool
	Stdout, Stderr                           StreamSize
	NoOutput                                 bool // timed out, for want of output
	StartedAt, EndedAt                       time.Time
	Description                              string // what ran, shortened; "" if an earlier edge started it
	Tag                                      string
	Terminal                                 bool
	StdinSize                                int64  // bytes of input that have arrived; see Known
	Session                                  string // in which it runs, or ""
}

// A Command is one command of a sandbox.
type Command struct {
	c         *Client
	id        string
	stdinTurn chan struct{} // held by the one who writes stdin

	mu        sync.Mutex
	link      *link // nil while there is no connection
	stream    uint32
	request   *aetherv1.Start // nil once started, or if adopted
	started   bool
	done      bool
	err       error // why it could not be started, or is no longer known
	result    Result
	out       [2]body
	followers [2]followers
	stdin     *input
	script    *input
	killed    []int         // signals to be sent again after a reconnect, before it started
	attached  bool          // Started was seen on this connection
	spooled   *list.Element // in its node's list, if its output may be dropped; guarded by the node
	fresh     [2]bool
	waiters   chan struct{}
}

func newCommand(c *Client, id string) *Command {
	m := &Command{c: c, id: id, stdinTurn: make(chan struct{}, 1)}
	m.result.StartedAt = time.Now()
	m.out[0] = body{spool: c.spool, owner: m, name: id + ".1"}
	m.out[1] = body{spool: c.spool, owner: m, name: id + ".2"}
	return m
}

// adoptedCommand is one that an earlier edge started.
func adoptedCommand(c *Client, k *aetherv1.CommandStatus) *Command {
	m := newCommand(c, k.CommandId)
	m.started = true
	m.result.Tag, m.result.Session, m.result.Terminal = k.Tag, k.Session, k.Terminal
	if at := time.Unix(0, k.StartedNs); k.StartedNs > 0 && at.Before(m.result.StartedAt) { // else it is not true
		m.result.StartedAt = at
	}
	m.stdin = &input{m: m, channel: wire.Stdin, unknown: true}
	for i := range m.out {
		m.out[i].recover()
		m.hold(i, m.out[i].size) // whoever followed it asks again
	}
	return m
}

// ID is the command's id.
func (m *Command) ID() string { return m.id }

// change is closed at the next notify. m.mu is held.
func (m *Command) change() <-chan struct{} {
	if m.waiters == nil {
		m.waiters = make(chan struct{})
	}
	return m.waiters
}

// notify wakes everyone who waits for a change. m.mu is held.
func (m *Command) notify() {
	if m.waiters != nil {
		close(m.waiters)
		m.waiters = nil
	}
}

func (m *Command) isDone() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.done
}

// Start starts cmd, or finds the command with this id, running or remembered. cmd has been validated, and its
// environment, user and working directory are complete. It returns once the command runs or has ended; a command that
// cannot be started is an error and not remembered.
func (c *Client) Start(ctx context.Context, id string, cmd sandbox.Command) (*Command, error) {
	if !sandbox.ValidCommandID(id) {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_command", "a command id has 1 to 64 letters, digits, _ and -")
	}
	if _, err := c.current(ctx); err != nil {
		return nil, err
	}
	m, l, err := c.reserve(id, cmd)
	if err != nil {
		return nil, err
	}
	c.changed(true)
	if l != nil {
		m.resume(l)
		l.conn.Flush()
	}
	if err := m.waitStarted(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

// reserve finds the command or makes one, which is to be started on l, if that is not nil. A connection fetched earlier may
// have been replaced, and the next one begun with, before the command was in the list.
func (c *Client) reserve(id string, cmd sandbox.Command) (m *Command, l *link, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil || c.closed {
		return nil, nil, errors.Join(c.err, errClosed)
	}
	if m := c.commands[id]; m != nil {
		return m, nil, nil
	}
	m = newCommand(c, id)
	m.prepare(cmd)
	c.commands[id] = m
	c.running++
	return m, c.link, nil
}

func (m *Command) prepare(cmd sandbox.Command) {
	req := &aetherv1.Start{CommandId: m.id, Argv: cmd.Argv, Shell: cmd.Shell, Cwd: cmd.Cwd, User: cmd.User, Trusted: cmd.Trusted}
	if req.Cwd == "" {
		req.Cwd = "/"
	}
	if cmd.Timeout > 0 {
		req.TimeoutMs = milliseconds(cmd.Timeout)
	}
	if cmd.NoOutputTimeout > 0 {
		req.NoOutputTimeoutMs = milliseconds(cmd.NoOutputTimeout)
	}
	req.Tag, m.result.Tag = cmd.Tag, cmd.Tag
	if cmd.Session != "" {
		m.prepareInSession(req, cmd)
		return
	}
	req.Env = environment(cmd)
	follows := cmd.StdinFollows
	if t := cmd.Terminal; t != nil {
		follows, m.result.Terminal = true, true
		req.Terminal = &aetherv1.Terminal{Rows: uint32(orDefault(t.Rows, sandbox.DefaultRows)), Cols: uint32(orDefault(t.Cols, sandbox.DefaultCols))}
	}
	if len(cmd.Stdin) > 0 || follows {
		req.Stdin = true
		m.stdin = &input{m: m, channel: wire.Stdin, end: !follows}
		m.stdin.buf.Append(cmd.Stdin)
	}
	if len(req.Shell) > inlineScript {
		// The shell closes its copy of the pipe first, so that nothing that the script starts inherits it.
		m.script = &input{m: m, channel: wire.Script, end: true}
		m.script.buf.Append([]byte("exec 3<&-; " + req.Shell))
		req.Shell, req.ScriptFollows = "", true
	}
	m.request = req
	m.result.Description = describe(cmd)
}

// milliseconds rounds up, and does not overflow.
func milliseconds(d time.Duration) uint64 {
	n := d / time.Millisecond
	if d%time.Millisecond > 0 {
		n++
	}
	return uint64(max(n, 1))
}

func orDefault(n, otherwise int) int {
	if n == 0 {
		return otherwise
	}
	return n
}

// environment is cmd's in the form of the kernel. What kind of terminal it has is what was said of the terminal.
func environment(cmd sandbox.Command) []string {
	env := make([]string, 0, len(cmd.Env)+1)
	told := cmd.Terminal != nil && cmd.Terminal.Term != ""
	for _, k := range slices.Sorted(maps.Keys(cmd.Env)) {
		if k != "TERM" || !told {
			env = append(env, k+"="+cmd.Env[k])
		}
	}
	if told {
		env = append(env, "TERM="+cmd.Terminal.Term)
	}
	return env
}

// prepareInSession completes the request for a command of a session, which has all its input with it.
func (m *Command) prepareInSession(req *aetherv1.Start, cmd sandbox.Command) {
	req.Session, req.StdinData = cmd.Session, cmd.Stdin
	if len(req.Shell) > inlineScript {
		m.script = &input{m: m, channel: wire.Script, end: true}
		m.script.buf.Append([]byte(req.Shell))
		req.Shell, req.ScriptFollows = "", true
	}
	m.request = req
	m.result.Description, m.result.Session = describe(cmd), cmd.Session
}

// describe is what ran, in one short line of valid UTF-8.
func describe(cmd sandbox.Command) string {
	s := cmd.Shell
	switch {
	case len(cmd.Argv) > 0:
		s = strings.Join(cmd.Argv[:min(len(cmd.Argv), 32)], " ")
	case s == "":
		s = "login shell"
	}
	if len(s) > maxDescription {
		s = s[:maxDescription]
		for !utf8.ValidString(s) && len(s) > maxDescription-utf8.UTFMax {
			s = s[:len(s)-1]
		}
		s += "…"
	}
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\n", " "), "\uFFFD")
}

// resume starts the command on a connection, or attaches it there.
func (m *Command) resume(l *link) {
	if m.attach(l) {
		m.c.remove(m)
	}
}

// attach reports whether the command turned out to be one that cannot be asked for.
func (m *Command) attach(l *link) (refused bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done || m.link == l {
		return false
	}
	id, err := l.open(m)
	if err != nil {
		return false // the next connection does it
	}
	m.link, m.stream, m.attached = l, id, false
	m.fresh = [2]bool{true, true}
	req := m.request
	if req == nil {
		req = &aetherv1.Start{CommandId: m.id, AttachOnly: true}
	}
	req.StdoutOffset, req.StderrOffset = uint64(m.out[0].size), uint64(m.out[1].size)
	for i := range m.out {
		m.out[i].acked = m.out[i].size
	}
	if m.request == nil {
		err = l.post(wire.MsgStart, id, req)
	} else {
		err = m.postStart(l, req)
	}
	if err != nil {
		return m.refuse(err)
	}
	for _, in := range []*input{m.script, m.stdin} {
		if in != nil && m.request != nil {
			in.rewind()
			in.ready()
		}
	}
	for _, s := range m.killed {
		_ = l.post(wire.MsgKill, id, &aetherv1.Kill{Signal: int32(s)}) // the connection's error
	}
	return false
}

func (m *Command) postStart(l *link, req *aetherv1.Start) error {
	if n := protoSize(req); n > maxStart {
		return sandbox.Errorf(sandbox.InvalidArgument, "argument_list_too_long",
			"arguments and environment of %d bytes are over the kernel's limit; pass them by stdin or in a file", n)
	}
	return l.post(wire.MsgStart, m.stream, req)
}

// refuse ends a command that never ran. m.mu is held. A connection's error is no reason to.
func (m *Command) refuse(err error) bool {
	if connectionsOwn(err) {
		return false
	}
	m.link.forget(m.stream)
	m.err, m.done = err, true
	m.notify()
	return true
}

// waitStarted waits until the command runs, ended or could not be started.
func (m *Command) waitStarted(ctx context.Context) error {
	m.mu.Lock()
	if m.started || m.done {
		err := m.err
		m.mu.Unlock()
		return err
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, unresponsive("start the command"))
	defer cancel()
	return m.wait(ctx, func() bool { return m.started || m.done })
}

// Wait returns when the command has ended. It fails only with ctx, or if the command is no longer known.
func (m *Command) Wait(ctx context.Context) error {
	return m.wait(ctx, func() bool { return m.done })
}

func (m *Command) wait(ctx context.Context, until func() bool) error {
	for {
		m.mu.Lock()
		if until() || m.err != nil {
			err := m.err
			m.mu.Unlock()
			return err
		}
		changed := m.change()
		m.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Result is what is known now.
func (m *Command) Result() Result {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.result
	r.Running = !m.done
	r.Stdout, r.Stderr = m.out[0].sizes(), m.out[1].sizes()
	if m.stdin != nil {
		r.StdinSize = int64(m.stdin.next())
	}
	return r
}

// Known waits until it is known how much of its input the command has been given: of one that an earlier edge started,
// aether has to say it.
func (m *Command) Known(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, unresponsive("say how much input it has"))
	defer cancel()
	err := m.wait(ctx, func() bool { return m.stdin == nil || !m.stdin.unknown || m.done || m.err != nil })
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil // there is nothing more to know
	}
	return err
}

// Resize sets the window of the command's terminal. To an ended command it does nothing.
func (m *Command) Resize(ctx context.Context, rows, cols int) error {
	switch r := m.Result(); {
	case rows < 1 || rows > sandbox.MaxTerminalSize || cols < 1 || cols > sandbox.MaxTerminalSize:
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_terminal", "a terminal of %d rows and %d columns; each must be 1 to %d", rows, cols, sandbox.MaxTerminalSize)
	case !r.Terminal:
		return sandbox.Errorf(sandbox.FailedPrecondition, "no_terminal", "the command was started without a terminal")
	case !r.Running:
		return nil
	}
	m.c.changed(true)
	req := &aetherv1.Resize{CommandId: m.id, Rows: uint32(rows), Cols: uint32(cols)}
	for attempt := 0; ; attempt++ {
		_, err := m.c.call(ctx, &aetherv1.Call{Call: &aetherv1.Call_Resize{Resize: req}}, "command_not_found", requestTimeout)
		if !errors.Is(err, errBroken) || attempt == 2 { // the same size twice does no harm
			if err != nil && m.isDone() {
				return nil
			}
			return err
		}
	}
}

// SetOOM records whether the kernel's OOM killer ended something of the command.
func (m *Command) SetOOM(killed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.result.OOMKilled = killed
}

// Kill ends the whole tree with signal 0, else signals the command's process group. To an ended command it does nothing.
func (m *Command) Kill(ctx context.Context, signal int) error {
	if signal < 0 || signal > 64 {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_signal", "signal %d; use 1 to 64, or 0 to kill the whole tree", signal)
	}
	l, err := m.c.current(ctx)
	if err != nil {
		if m.isDone() {
			return nil
		}
		return err
	}
	m.c.changed(true)
	m.mu.Lock()
	if m.done {
		m.mu.Unlock()
		return nil
	}
	queued := signal == 0 || !m.started
	if queued {
		m.killed = append(m.killed, signal)
	}
	if m.link != nil { // it may be newer than the one that was there above
		l = m.link
		err = l.post(wire.MsgKill, m.stream, &aetherv1.Kill{Signal: int32(signal)})
	}
	m.mu.Unlock()
	l.conn.Flush()
	switch {
	case !connectionsOwn(err):
		return err
	case queued: // it is sent on the next connection
		return nil
	}
	return errBroken
}
