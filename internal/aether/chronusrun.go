package aether

import (
	"bytes"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

// interruptGrace is how long the shell of a session may take to give up a command before it is killed.
const interruptGrace = 5 * time.Second

// checkSessionStart refuses what a session cannot run.
func checkSessionStart(req *aetherv1.Start) *failure {
	switch {
	case req.Session == "":
		if len(req.StdinData) > 0 {
			return failf(aetherv1.Code_CODE_INVALID, "stdin_data is for sessions")
		}
	case len(req.Argv) > 0 || req.Stdin || req.Terminal != nil || req.Trusted || len(req.StdinData) > maxShellIn:
		return failf(aetherv1.Code_CODE_INVALID, "a session runs a script, with at most %d bytes of input", maxShellIn)
	}
	return nil
}

// runInSession gives c to its session.
func (s *Server) runInSession(c *command, req *aetherv1.Start) {
	x := s.sessionNamed(req.Session)
	if x == nil {
		c.failed(noSession(req.Session))
		return
	}
	if f := x.enqueue(queued{c, req}); f != nil {
		c.failed(f)
	}
}

func (x *chronus) enqueue(q queued) *failure {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.ended || (x.pid != 0 && x.reason != ""):
		return x.endedLocked()
	case x.pid == 0:
		return noSession(x.name) // not yet
	case len(x.waiting) >= maxWaiting:
		return failf(aetherv1.Code_CODE_RESOURCES, "%d commands wait in session %q; wait for some to end", maxWaiting, x.name)
	}
	q.c.mu.Lock()
	q.c.chronus, q.c.pid = x, x.pid // the shell's
	for i := range q.c.out {
		q.c.out[i].wake = x.outlets[i].wake
	}
	q.c.mu.Unlock()
	if x.running == nil {
		return x.begin(q)
	}
	if x.srv.queued.Add(q.cost()) > maxQueued {
		x.srv.queued.Add(-q.cost())
		return failf(aetherv1.Code_CODE_RESOURCES, "scripts and input of commands that wait in sessions are over %d bytes; wait for some to end", maxQueued)
	}
	x.waiting = append(x.waiting, q)
	q.c.mu.Lock()
	q.c.postStarted() // whoever asked for it need not wait for its turn; the caller flushes
	q.c.mu.Unlock()
	return nil
}

// begin gives a command to the shell, which waits. x.mu is held.
func (x *chronus) begin(q queued) *failure {
	c := q.c
	fd, err := x.pipes.openScript()
	if err == nil && len(q.req.StdinData) > 0 {
		err = x.pipes.setStdin(q.req.StdinData)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return asFailure("give the script to the session", err)
	}
	x.seq++
	x.begun = now()
	x.running, x.over = c, false
	prelude := []byte(x.shell.prelude(x.last))
	lines := x.shell.drive(x.seq, len(q.req.StdinData) > 0, x.last)
	c.mu.Lock()
	for _, o := range x.outlets {
		o.give(c)
	}
	if q.req.ScriptFollows {
		_, _ = unix.Write(fd, prelude) // the pipe is empty and takes it
	} else {
		c.script = &input{c: c, channel: wire.Script, end: true, inner: true}
		c.script.buf.Append(prelude)
		c.script.buf.Append([]byte(q.req.Shell))
	}
	c.script.fd = fd
	c.script.advance()
	if c.timeout > 0 {
		c.expire = time.AfterFunc(c.timeout, c.expired)
	}
	c.startSilence()
	c.settle = time.AfterFunc(settleTime, func() { x.settleDown(c) })
	if c.killed {
		c.killTree()
	}
	c.mu.Unlock()
	if !x.tell(lines) {
		x.end("broken")
	}
	return nil
}

// settleDown says that a command runs which did not end at once, and reads its output from then on.
func (x *chronus) settleDown(c *command) {
	c.mu.Lock()
	if c.reaped {
		c.mu.Unlock()
		return
	}
	c.settled = true
	c.postStarted()
	sess := c.sess
	c.mu.Unlock()
	sess.flush()
	for _, o := range x.outlets {
		o.wakeUp()
	}
	x.attend(c, settleTime, false)
}

// readStatuses takes what the shell says, until it, and all that may have its end of the pipe, is gone.
func (x *chronus) readStatuses() {
	rc, err := x.statuses.SyscallConn()
	for open := true; err == nil && open; {
		err = rc.Read(func(fd uintptr) bool {
			x.mu.Lock()
			defer x.mu.Unlock()
			var again bool
			open, again = x.hearOnce(int(fd))
			return !again
		})
	}
	_ = x.statuses.Close() // a pipe that was only read
}

// hearOnce reads from the pipe of statuses. x.mu is held.
func (x *chronus) hearOnce(fd int) (open, again bool) {
	if x.ended {
		return false, false
	}
	var buf [256]byte
	n, err := unix.Read(fd, buf[:])
	switch {
	case errors.Is(err, unix.EAGAIN):
		return true, true
	case errors.Is(err, unix.EINTR):
		return true, false
	case err != nil || n == 0:
		x.silence = true // attend ends a shell, but for one that is about to end or is another program now (exec)
		return false, false
	}
	x.hear(buf[:n])
	return true, false
}

// maxRest is how many reads hearRest makes: the shell says a line for each command, and others who write there need never stop.
const maxRest = 64

// hearRest takes what the shell said before it ended.
func (x *chronus) hearRest() {
	rc, err := x.statuses.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) { // fails if it is closed: then all was heard
		open, again := true, false
		for tries := 0; open && !again && tries < maxRest; tries++ {
			open, again = x.hearOnce(int(fd))
		}
	})
}

// hear takes bytes of the pipe of statuses. x.mu is held.
func (x *chronus) hear(b []byte) {
	if x.reason == "broken" {
		return
	}
	x.report = append(x.report, b...)
	for {
		line, rest, ok := bytes.Cut(x.report, []byte("\n"))
		if !ok {
			break
		}
		o, ok := parseOutcome(string(line))
		x.report = append(x.report[:0], rest...)
		if !ok || x.running == nil || x.over || o.seq != x.seq {
			x.end("broken") // somebody else writes there
			return
		}
		x.last = o
		x.ends(unix.WaitStatus(o.status << 8))
	}
	if len(x.report) > maxOutcome {
		x.report = nil
		x.end("broken")
	}
}

// ends is the end of the running command. What is in the pipes now is its own. x.mu is held.
func (x *chronus) ends(ws unix.WaitStatus) {
	c := x.running
	c.mu.Lock()
	if c.timedOut || c.killed {
		ws = unix.WaitStatus(unix.SIGKILL) // as of any other command
	}
	c.reaped, c.status = true, ws
	c.stopTimers()
	c.mu.Unlock()
	x.over = true
	for _, o := range x.outlets {
		o.owe()
	}
	for _, o := range x.outlets {
		for o.owed > 0 && o.fd >= 0 && o.room() > 0 {
			if err := o.readOnce(readSize); errors.Is(err, unix.EAGAIN) {
				o.owed = 0 // somebody else has read it
			}
		}
		o.wakeUp()
	}
	x.settleUp()
}

// settleUp finishes the running command once everything that is owed has been read, and begins with the next. x.mu is held.
func (x *chronus) settleUp() {
	c := x.running
	if c == nil || !x.over || x.outlets[0].owed > 0 || x.outlets[1].owed > 0 {
		return
	}
	x.running, x.over = nil, false
	_ = x.pipes.clearStdin() // fails only if the session has ended: then it is closed
	x.finish(c)
	for x.running == nil && !x.ended && x.reason == "" && len(x.waiting) > 0 {
		q := x.waiting[0]
		x.waiting = slices.Delete(x.waiting, 0, 1)
		x.srv.queued.Add(-q.cost())
		if f := x.begin(q); f != nil {
			q.c.failed(f)
		}
	}
	for _, o := range x.outlets {
		o.wakeUp()
	}
}

// finish ends a command that counts as reaped.
func (x *chronus) finish(c *command) {
	c.mu.Lock()
	c.closeInputs()
	for i := range c.out {
		c.out[i].closed, c.out[i].wake = true, nil
	}
	c.finishAndUnlock()
}

// exited is called by the reaper when the shell has ended.
func (x *chronus) exited(collect func() unix.WaitStatus) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.hearRest()
	x.status = collect()
	x.pid, x.ended = 0, true
	x.pipes.close()
	if x.cgroup != nil {
		x.srv.pool.release(x.cgroup)
		x.cgroup = nil
	}
	for _, q := range x.waiting {
		x.srv.queued.Add(-q.cost())
		q.c.failed(x.endedLocked())
	}
	x.waiting = nil
	x.srv.forgetSession(x, true)
	if c := x.running; c != nil && !x.over {
		x.ends(x.status)
	}
	for _, o := range x.outlets { // background jobs may write to them for ever
		if o.fd >= 0 {
			x.srv.hold(o.file)
		}
		o.idle = nil
		o.wakeUp()
	}
	close(x.gone)
}

// interrupt ends what c has started, and has the shell give it up. What runs in the background since before c is left alone.
func (x *chronus) interrupt(c *command) {
	pause := 10 * time.Millisecond
	for deadline := time.Now().Add(interruptGrace); ; pause = min(2*pause, 200*time.Millisecond) {
		x.mu.Lock()
		x.hearRest() // a signal that comes after the end of the script is one too many
		switch {
		case x.drop(c) || x.running != c || x.over || x.ended:
			x.mu.Unlock()
			return
		case time.Now().After(deadline):
			x.end(reasonOf(c))
			x.mu.Unlock()
			return
		}
		if x.shell.abort != 0 {
			_ = unix.Kill(x.pid, x.shell.abort) // before the others: it goes on with the next one as soon as they end
		}
		x.signalNew(unix.SIGKILL)
		x.mu.Unlock()
		select {
		case <-x.gone:
		case <-time.After(pause):
		}
	}
}

func reasonOf(c *command) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timedOut {
		return "timeout"
	}
	return "killed"
}

// drop ends a command that still waits for its turn. x.mu is held.
func (x *chronus) drop(c *command) bool {
	i := slices.IndexFunc(x.waiting, func(q queued) bool { return q.c == c })
	if i < 0 {
		return false
	}
	x.srv.queued.Add(-x.waiting[i].cost())
	x.waiting = slices.Delete(x.waiting, i, i+1)
	c.mu.Lock()
	c.reaped, c.status = true, unix.WaitStatus(unix.SIGKILL)
	c.mu.Unlock()
	x.finish(c)
	return true
}

// signal is for the processes that c has started. The shell itself is spared; it takes SIGINT as it does at a terminal.
func (x *chronus) signal(c *command, s unix.Signal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.running != c || x.over || x.ended {
		return
	}
	if s == unix.SIGINT && x.shell.abort != 0 {
		_ = unix.Kill(x.pid, x.shell.abort)
	}
	x.signalNew(s)
}

func (x *chronus) signalNew(s unix.Signal) {
	for _, p := range x.members() {
		if p.pid != x.pid && p.after(x.begun) {
			_ = unix.Kill(p.pid, s) // it may have ended
		}
	}
}
