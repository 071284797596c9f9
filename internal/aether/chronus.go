package aether

import (
	"context"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

const (
	maxSessions  = 64          // whose shell lives
	maxEnded     = 16          // that are remembered; the oldest go first
	maxWaiting   = 64          // commands of one session behind the one that runs
	maxQueued    = 4 << 20     // bytes of scripts and input of all commands that wait
	maxShellIn   = 64 << 10    // of input of one command
	deletedGrace = time.Minute // for the end of a shell that was killed
)

// A chronus is a named session: a shell that lives on, and runs one command at a time. Towards the edge each of these is a
// command like any other.
//
// Its lock comes before those of commands, and these before the server's.
type chronus struct {
	srv     *Server
	name    string
	created time.Time
	ready   chan struct{} // closed once the shell was started, or could not be
	gone    chan struct{} // closed when it has ended

	shell  *dialect
	cgroup *cgroup

	mu       sync.Mutex
	failure  *failure // it could not be started
	pid      int      // 0 before and after
	pipes    *shellPipes
	outlets  [2]*outlet
	statuses *os.File
	silence  bool   // nothing more will come from there
	report   []byte // an unfinished line of statuses

	seq     uint64   // of the last command that was begun
	last    outcome  // of the command before
	begun   moment   // of the running one
	running *command // nil = the shell waits
	over    bool     // running has told its outcome, or the shell has ended: what is owed of its output is still missing
	waiting []queued
	reason  string // why we ended it
	dying   bool   // it was killed
	ended   bool
	status  unix.WaitStatus
}

// A queued command waits for its turn.
type queued struct {
	c   *command
	req *aetherv1.Start
}

// cost is what a command occupies while it waits.
func (q queued) cost() int64 {
	n := int64(len(q.req.Shell) + len(q.req.StdinData))
	if q.req.ScriptFollows {
		n += wire.Window
	}
	return n
}

// createSession finds the live session of that name or makes one, in place of one that has ended.
func (s *Server) createSession(ctx context.Context, req *aetherv1.CreateSession) (*aetherv1.Reply, error) {
	if f := checkSession(req); f != nil {
		return nil, f
	}
	x, isNew, err := s.reserveSession(req.Name)
	if err != nil {
		return nil, err
	}
	if isNew {
		s.spawner.jobs <- job{x: x, session: req}
	}
	select {
	case <-x.ready:
	case <-ctx.Done():
		return nil, failf(aetherv1.Code_CODE_RESOURCES, "the call was given up")
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failure != nil {
		return nil, x.failure
	}
	return &aetherv1.Reply{Reply: &aetherv1.Reply_Session{Session: x.viewLocked()}}, nil
}

func (s *Server) reserveSession(name string) (x *chronus, isNew bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.chroni[name]; x != nil {
		return x, false, nil
	}
	switch {
	case s.closing:
		return nil, false, failf(aetherv1.Code_CODE_RESOURCES, "the sandbox is ending")
	case len(s.chroni) >= maxSessions:
		return nil, false, failf(aetherv1.Code_CODE_RESOURCES, "there are %d sessions in this sandbox; close one", maxSessions)
	}
	x = &chronus{srv: s, name: name, created: time.Now(), ready: make(chan struct{}), gone: make(chan struct{})}
	if s.chroni == nil {
		s.chroni = make(map[string]*chronus)
	}
	s.chroni[name] = x
	return x, true, nil
}

// listSessions tells of all, those that have ended last.
func (s *Server) listSessions() *aetherv1.Sessions {
	s.mu.Lock()
	all := make([]*chronus, 0, len(s.chroni)+len(s.endedChroni))
	for _, x := range s.chroni {
		all = append(all, x)
	}
	all = append(all, s.endedChroni...)
	s.mu.Unlock()
	out := &aetherv1.Sessions{}
	for _, x := range all {
		x.mu.Lock()
		if x.pid != 0 || x.ended {
			out.Sessions = append(out.Sessions, x.viewLocked())
		}
		x.mu.Unlock()
	}
	return out
}

// sessionNamed finds a session, one that lives before one that has ended.
func (s *Server) sessionNamed(name string) *chronus {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.chroni[name]; x != nil {
		return x
	}
	for _, x := range slices.Backward(s.endedChroni) {
		if x.name == name {
			return x
		}
	}
	return nil
}

// deleteSession ends a session with all that it started, and forgets it.
func (s *Server) deleteSession(ctx context.Context, name string) error {
	x := s.sessionNamed(name)
	if x == nil {
		return noSession(name)
	}
	select {
	case <-x.ready:
	case <-ctx.Done():
	}
	x.mu.Lock()
	x.end("deleted")
	x.mu.Unlock()
	t := time.NewTimer(deletedGrace)
	defer t.Stop()
	select {
	case <-x.gone:
	case <-ctx.Done():
	case <-t.C:
		return failf(aetherv1.Code_CODE_RESOURCES, "the session's shell was killed but has not ended yet")
	}
	s.mu.Lock()
	s.endedChroni = slices.DeleteFunc(s.endedChroni, func(e *chronus) bool { return e.name == name })
	s.mu.Unlock()
	return nil
}

// forgetSession takes x, whose shell has ended or never was, from those that live.
func (s *Server) forgetSession(x *chronus, remember bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.chroni[x.name] == x {
		delete(s.chroni, x.name)
	}
	if !remember {
		return
	}
	// Of one name only the last that ended is of use.
	s.endedChroni = slices.DeleteFunc(s.endedChroni, func(e *chronus) bool { return e.name == x.name })
	s.endedChroni = append(s.endedChroni, x)
	if len(s.endedChroni) > maxEnded {
		s.endedChroni = slices.Delete(s.endedChroni, 0, 1)
	}
}

func checkSession(req *aetherv1.CreateSession) *failure {
	if req.Name == "" || len(req.Name) > 64 {
		return failf(aetherv1.Code_CODE_INVALID, "no valid name of a session")
	}
	return checkStart(&aetherv1.Start{CommandId: "s", Shell: ":", Cwd: req.Cwd, User: req.User, Env: req.Env})
}

func noSession(name string) *failure {
	return failf(aetherv1.Code_CODE_NO_SESSION, "there is no session %q", clip(name, 64))
}

// endedLocked is what a command of a session that has ended gets.
func (x *chronus) endedLocked() *failure {
	how := "its shell exited with " + exitText(x.status)
	switch x.reason {
	case "timeout":
		how = "a command ran out of time and could not be interrupted, so that its shell was killed"
	case "killed":
		how = "a command was killed and could not be interrupted, so that its shell was killed"
	case "broken":
		how = "its shell closed the descriptors by which it is driven"
	case "unresponsive":
		how = "its shell ran nothing more of what it was given (set -n, or something else in place of command or .), so that it was killed"
	case "deleted":
		how = "it was deleted"
	}
	return failf(aetherv1.Code_CODE_SESSION_ENDED, "session %q has ended: %s; create it anew, which begins with nothing of what it had", x.name, how)
}

func exitText(ws unix.WaitStatus) string {
	if ws.Signaled() {
		return "signal " + unix.SignalName(ws.Signal())
	}
	return "status " + strconv.Itoa(ws.ExitStatus())
}

// viewLocked is what the edge is told. x.mu is held.
func (x *chronus) viewLocked() *aetherv1.Session {
	m := &aetherv1.Session{Name: x.name, Ended: x.ended, CreatedNs: x.created.UnixNano(), WaitingCommands: uint32(len(x.waiting)), Shell: x.shell.name}
	if x.running != nil {
		m.RunningCommand = x.running.id
	}
	if !x.ended {
		return m
	}
	m.Reason = x.reason
	m.ExitCode, m.Signal = exitOf(x.status)
	if m.Reason == "" {
		m.Reason = "exited"
		if m.Signal != 0 {
			m.Reason = "killed"
		}
	}
	return m
}

// started takes over the new shell. Called by the spawner, before anyone can reap it.
func (x *chronus) started(pid int, d *dialect, p *shellPipes) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.pid, x.shell, x.pipes = pid, d, p
	p.closeTheirs()
	x.outlets = [2]*outlet{newOutlet(x, 0, p.ours[0]), newOutlet(x, 1, p.ours[1])}
	for _, o := range x.outlets {
		x.srv.pump(o.file, o.pump)
	}
	x.statuses = os.NewFile(uintptr(p.ours[2]), "status")
	p.ours = [3]int{-1, -1, -1} // the pumps'
	x.srv.pump(x.statuses, x.readStatuses)
	if !x.tell(d.initial) {
		x.end("broken")
	}
	close(x.ready)
}

// failedToStart is for a shell that could not be started.
func (x *chronus) failedToStart(f *failure) {
	x.srv.forgetSession(x, false)
	x.mu.Lock()
	x.failure = f
	x.mu.Unlock()
	close(x.ready)
	close(x.gone)
}

// tell writes lines for the shell. It has read all that was written before.
func (x *chronus) tell(lines string) bool {
	n, err := unix.Write(x.pipes.tell, []byte(lines))
	return err == nil && n == len(lines)
}

// end kills the shell and all that it started. x.mu is held.
func (x *chronus) end(reason string) {
	if x.ended || x.pid == 0 {
		return
	}
	if x.reason == "" || reason == "deleted" {
		x.reason = reason
	}
	if c := x.running; c != nil && !x.over && x.reason != "broken" && x.reason != "unresponsive" { // before its shell can say how it ended
		c.mu.Lock()
		c.killed = true
		c.mu.Unlock()
	}
	if pid := x.pid; !x.dying {
		x.dying = true
		x.srv.pumps.Go(func() { untrace(pid, x.hasEnded) })
	}
	if x.cgroup != nil {
		if err := x.cgroup.kill(); err == nil {
			return
		}
	}
	for _, p := range x.members() {
		_ = unix.Kill(p.pid, unix.SIGKILL) // it may have ended
	}
	_ = unix.Kill(-x.pid, unix.SIGKILL) // fails only if the whole group has gone
	_ = unix.Kill(x.pid, unix.SIGKILL)  // it is not reaped: the number is its own
}

func (x *chronus) hasEnded() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.ended
}

// abandon gives up all output that has not been read.
func (x *chronus) abandon() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, o := range x.outlets {
		if o != nil {
			_ = o.file.SetReadDeadline(time.Unix(1, 0)) // fails if the pump has closed it
			o.end()
			o.wakeUp()
		}
	}
}
