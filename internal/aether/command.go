package aether

import (
	"bytes"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

const (
	// settleTime is how long a new command is left alone: its pipes are not polled and Started is not sent. Commands that
	// end sooner, most of them, cost one write to the edge and no poller. Longer would be felt by who waits for the first
	// output.
	settleTime = 4 * time.Millisecond
	// maxSettle bounds the pauses of a command that has hardly been given the CPU yet: it is left alone for half a second.
	maxSettle = 256 * time.Millisecond
	// drainTime is how long the end of a command waits for others who hold its pipes.
	drainTime = 100 * time.Millisecond
)

// A command goes through: waiting for the spawner, running, reaped (its process is gone, its output perhaps not), done.
// A command that could not be started is done with a failure.
type command struct {
	srv *Server
	id  string

	cgroup *cgroup // the spawner's until started, then guarded by mu

	mu      sync.Mutex
	pid     int // 0 until started
	status  unix.WaitStatus
	reaped  bool
	done    bool
	failure *failure

	holds bool // the gate, while it may run; see spawner.serve

	timedOut, killed bool
	killSignal       unix.Signal // to be sent once it has started; 0 = none
	chronus          *chronus    // in which it runs, or nil; then pid is its shell's

	named           string // the session's name, of a command of one
	timeout         time.Duration
	quiet           silence
	noOutput        bool
	tag             string
	began           time.Time
	window          window // of its terminal, if it has one: then out[1] is closed
	slave           int    // of its terminal while its process runs; else -1
	settle, expire  *time.Timer
	settleAfter     time.Duration // the time of settle, doubled while there was nothing to see
	drain           *time.Timer
	attend          *time.Timer // see chronus.attend
	settled         bool
	dying           bool // it was killed as a tree
	out             [2]output
	stdin, script   *input
	sess            *session // nil while no edge is connected
	stream          uint32
	answered, ended bool // Started, and Exit or Error, were sent to sess
}

func newCommand(srv *Server, sess *session, stream uint32, req *aetherv1.Start) *command {
	c := &command{srv: srv, id: req.CommandId, sess: sess, stream: stream, timeout: milliseconds(req.TimeoutMs), tag: req.Tag, began: time.Now(), slave: -1}
	c.quiet.after = milliseconds(req.NoOutputTimeoutMs)
	if req.Trusted && c.timeout == 0 {
		c.timeout = trustedTimeout
	}
	c.out = [2]output{{c: c, channel: wire.Stdout, fd: -1}, {c: c, channel: wire.Stderr, fd: -1}}
	if req.Stdin || req.Terminal != nil {
		c.stdin = &input{c: c, channel: wire.Stdin, fd: -1}
	}
	if t := req.Terminal; t != nil {
		c.window = window{t.Rows, t.Cols}
		c.out[0].tty, c.out[1].closed, c.stdin.tty = true, true, true
	}
	c.named = req.Session
	if req.ScriptFollows {
		c.script = &input{c: c, channel: wire.Script, fd: -1}
	}
	return c
}

// milliseconds converts without overflow.
func milliseconds(n uint64) time.Duration {
	return time.Duration(min(n, math.MaxInt64/uint64(time.Millisecond))) * time.Millisecond
}

func (c *command) inputOf(channel uint8) *input {
	switch channel {
	case wire.Stdin:
		return c.stdin
	case wire.Script:
		return c.script
	}
	return nil
}

// started takes over the pipes of the running process. Called by the spawner, before anyone can reap it.
func (c *command) started(pid int, p *pipes) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pid, c.slave = pid, p.slave
	c.out[0].fd, c.out[1].fd = p.out[0], p.out[1]
	for _, in := range []struct {
		in *input
		fd int
	}{{c.stdin, p.stdin}, {c.script, p.script}} {
		if in.in != nil {
			in.in.fd = in.fd
			in.in.advance()
		}
	}
	if c.timeout > 0 {
		c.expire = time.AfterFunc(c.timeout, c.expired)
	}
	c.startSilence()
	if c.slave >= 0 { // whoever waits at a terminal is to see at once
		_ = setWindow(c.slave, c.window) // it may have been changed; it was set before
		c.pollOutputs()
		c.postStarted()
	} else {
		c.settleAfter = settleTime
		c.settle = time.AfterFunc(settleTime, c.settleDown)
	}
	switch {
	case c.killed:
		c.killTree()
	case c.killSignal != 0:
		c.signal(c.killSignal)
	}
}

// failed records that c could not be started.
func (c *command) failed(f *failure) {
	c.mu.Lock()
	c.failure, c.done = f, true
	c.srv.active.Add(-1)
	for i := range c.out {
		c.out[i].closed = true
	}
	c.closeInputs()
	c.letGo()
	c.postExit()
	sess := c.sess
	c.mu.Unlock()
	c.srv.finished(c)
	sess.flush()
}

// settleDown polls the pipes of a command that did not end at once, and says that it runs. On a busy machine one that would
// end at once may only wait for the CPU; that costs a sixth of an exec and is put off.
func (c *command) settleDown() {
	c.mu.Lock()
	if c.reaped || c.settled {
		c.mu.Unlock()
		return
	}
	if c.settleAfter < maxSettle && c.silent() && c.starved(c.settleAfter/2) {
		c.settleAfter *= 2
		c.settle.Reset(c.settleAfter)
		c.mu.Unlock()
		return
	}
	c.pollOutputs()
	c.postStarted()
	sess := c.sess
	c.mu.Unlock()
	sess.flush()
}

// silent reports whether no output waits to be read.
func (c *command) silent() bool {
	for i := range c.out {
		if fd := c.out[i].fd; fd >= 0 {
			if n, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err != nil || n > 0 {
				return false
			}
		}
	}
	return true
}

// starved reports whether the process has had less CPU time than that although it wants to run, waits for a disk, or has
// ended: not whether it waits for something that may never happen.
func (c *command) starved(enough time.Duration) bool {
	var used unix.Timespec
	if err := unix.ClockGettime(cpuClock(c.pid), &used); err != nil || time.Duration(used.Nano()) >= enough {
		return false
	}
	var buf [128]byte
	fd, err := unix.Open("/proc/"+strconv.Itoa(c.pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return false
	}
	state := bytes.LastIndexByte(buf[:n], ')') + len(") ") // behind the name, which may hold anything
	return state < n && strings.IndexByte("RDZ", buf[state]) >= 0
}

// cpuClock is the clock of the CPU time of a process: the kernel's MAKE_PROCESS_CPUCLOCK.
func cpuClock(pid int) int32 {
	const sched = 2
	return ^int32(pid)<<3 | sched
}

func (c *command) pollOutputs() {
	c.settled = true
	for i := range c.out {
		c.out[i].poll()
	}
}

func (c *command) expired() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.reaped {
		c.timedOut = true
		c.killTree()
	}
}

// kill ends the tree with signal 0, else signals the process group, of a terminal the one in its foreground.
func (c *command) kill(signal unix.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.reaped || c.done:
	case signal == 0:
		c.killed = true
		if c.pid != 0 {
			c.killTree()
		}
	case c.pid == 0:
		c.killSignal = signal
	default:
		c.signal(signal)
	}
}

// killTree ends everything that descends from c. It is not reaped, so that its numbers are still its own.
func (c *command) killTree() {
	if x := c.chronus; x != nil { // whose lock comes before c's
		c.srv.pumps.Go(func() { x.interrupt(c) })
		return
	}
	if pid := c.pid; !c.dying {
		c.dying = true
		c.srv.pumps.Go(func() { untrace(pid, c.wasReaped) })
	}
	if c.cgroup != nil {
		err := c.cgroup.kill()
		if err == nil {
			return
		}
		c.srv.log.Error("kill by control group", "command_id", c.id, "error", err)
	}
	_ = unix.Kill(-c.pid, unix.SIGKILL) // fails only if the whole group has gone
}

func (c *command) wasReaped() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reaped
}

func (c *command) signal(s unix.Signal) {
	if x := c.chronus; x != nil {
		c.srv.pumps.Go(func() { x.signal(c, s) })
		return
	}
	if c.slave >= 0 {
		if group := c.foreground(); group > 0 {
			_ = unix.Kill(-group, s)
			return
		}
	}
	_ = unix.Kill(-c.pid, s) // fails only if the whole group has gone
}

// exited collects the process, while the lock keeps others from signalling it, and ends the command, now or once its
// pipes are drained.
func (c *command) exited(collect func() unix.WaitStatus) {
	c.mu.Lock()
	c.status = collect()
	c.reaped = true
	c.letGo()
	c.stopTimers()
	c.closeSlave()
	c.closeInputs()
	if !c.settled {
		for i := range c.out {
			c.out[i].readNow()
		}
	}
	if !c.out[0].closed || !c.out[1].closed {
		c.pollOutputs()
		for i := range c.out {
			c.out[i].owe()
		}
		c.drain = time.AfterFunc(drainTime, c.drained)
	}
	c.finishAndUnlock()
}

// letGo lets the rest of the sandbox go on after a trusted command, of which nothing stays behind. It does not wait for
// anybody who takes the output.
func (c *command) letGo() {
	if !c.holds {
		return
	}
	c.holds = false
	if c.cgroup != nil {
		_ = c.cgroup.kill() // if the group is gone, so is what was in it
	}
	c.srv.gate.release()
}

// drained gives up on who else holds the pipes.
func (c *command) drained() {
	c.mu.Lock()
	for i := range c.out {
		c.out[i].drained()
	}
	c.finishAndUnlock()
}

// abandon gives up all output that has not been read.
func (c *command) abandon() {
	c.mu.Lock()
	for i := range c.out {
		c.out[i].detach()
	}
	c.finishAndUnlock()
}

// outputEnded is called by a pump after the last byte of its pipe.
func (c *command) outputEnded(o *output) {
	c.mu.Lock()
	o.closed = true
	c.finishAndUnlock()
}

// finishAndUnlock ends c if nothing is missing, and sends what is to be sent.
func (c *command) finishAndUnlock() {
	finished := c.reaped && !c.done && c.out[0].closed && c.out[1].closed
	if finished {
		c.done = true
		c.srv.active.Add(-1)
		if c.drain != nil {
			c.drain.Stop()
		}
		c.settle, c.expire, c.drain, c.attend, c.quiet.timer = nil, nil, nil, nil, nil // results are kept by the dozen: they should be small
		if c.cgroup != nil {
			c.cgroup.pool.release(c.cgroup)
			c.cgroup = nil
		}
	}
	for i := range c.out {
		if c.out[i].sent < c.out[i].total() {
			c.out[i].ready()
		}
	}
	c.postExit()
	sess := c.sess
	c.mu.Unlock()
	if finished {
		c.srv.finished(c)
	}
	sess.flush()
}

func (c *command) stopTimers() {
	for _, t := range []*time.Timer{c.expire, c.settle, c.attend, c.quiet.timer} {
		if t != nil {
			t.Stop()
		}
	}
}

// flush sends what is queued for the edge.
func (c *command) flush() {
	c.mu.Lock()
	sess := c.sess
	c.mu.Unlock()
	sess.flush()
}

func (c *command) closeInputs() {
	for _, in := range []*input{c.stdin, c.script} {
		if in != nil {
			in.close()
		}
	}
}

// postStarted tells the edge once per connection that c runs, and from where its streams go on.
func (c *command) postStarted() {
	if c.sess == nil || c.answered || c.pid == 0 {
		return
	}
	c.answered = true
	m := &aetherv1.Started{Pid: uint32(c.pid), StdoutOffset: c.out[0].sent, StderrOffset: c.out[1].sent}
	if c.stdin != nil {
		m.StdinOffset = c.stdin.written + uint64(c.stdin.buf.Len())
	}
	c.sess.post(wire.MsgStarted, c.stream, m)
}

// postExit tells the edge how c ended, once everything that it wrote has gone out.
func (c *command) postExit() {
	if c.sess == nil || c.ended || !c.done {
		return
	}
	if c.failure != nil {
		c.ended = true
		c.sess.post(wire.MsgError, c.stream, c.failure.proto())
		return
	}
	if c.out[0].sent < c.out[0].total() || c.out[1].sent < c.out[1].total() {
		return
	}
	c.ended = true
	c.out[0].src, c.out[1].src = nil, nil
	c.sess.post(wire.MsgExit, c.stream, c.exit())
}

// state is what a new edge learns of c. c.mu is held.
func (c *command) state() *aetherv1.CommandStatus {
	return &aetherv1.CommandStatus{
		CommandId: c.id, Running: !c.done, StdoutSize: c.out[0].total(), StderrSize: c.out[1].total(),
		Tag: c.tag, Session: c.named, Terminal: c.window != window{}, StartedNs: c.began.UnixNano(),
	}
}

func (c *command) exit() *aetherv1.Exit {
	m := &aetherv1.Exit{
		TimedOut: c.timedOut, Killed: c.killed, NoOutput: c.noOutput,
		StdoutSize: c.out[0].total(), StderrSize: c.out[1].total(),
		StdinBroken: c.stdin != nil && c.stdin.broken,
	}
	m.ExitCode, m.Signal = exitOf(c.status)
	return m
}

// exitOf is an exit code as a shell tells it, and the signal, if one ended the process.
func exitOf(ws unix.WaitStatus) (code, signal int32) {
	if ws.Signaled() {
		return 128 + int32(ws.Signal()), int32(ws.Signal())
	}
	return int32(ws.ExitStatus()), 0
}

// attach continues c on another connection or stream, its output from the given offsets.
func (c *command) attach(sess *session, stream uint32, offsets [2]uint64) *failure {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.out {
		if offsets[i] > c.out[i].total() {
			return failf(aetherv1.Code_CODE_INVALID, "attach beyond the end of the output")
		}
	}
	if c.sess != nil && c.sess != sess {
		c.sess.forget(c.stream)
	}
	c.sess, c.stream, c.answered, c.ended = sess, stream, false, false
	for i := range c.out {
		o := &c.out[i]
		o.sent = max(o.sent, offsets[i]) // so that ack takes it
		o.ack(offsets[i])
		o.sent = o.base
		o.src = nil
	}
	for _, in := range []*input{c.stdin, c.script} {
		if in != nil && (in.written > 0 || in.closed) {
			in.ack()
		}
	}
	c.postStarted()
	for i := range c.out {
		if c.out[i].sent < c.out[i].total() {
			c.out[i].ready()
		}
	}
	c.postExit()
	return nil
}

// detachFrom forgets a connection that ended.
func (c *command) detachFrom(sess *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sess == sess {
		c.sess = nil
		for i := range c.out {
			c.out[i].src = nil
		}
	}
}

// forget frees what is kept of an ended command.
func (c *command) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess = nil
	for i := range c.out {
		c.out[i].forget()
	}
}
