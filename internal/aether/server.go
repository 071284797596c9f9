package aether

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/aether/config"
	"dsec/internal/wire"
)

const (
	maxRunning  = 4096 // commands at once
	maxFinished = 1024 // results that wait for the edge; the oldest go first
	maxStrange  = 8    // connections that have not shown the key
	maxHeld     = 1024 // pipes of ended commands that somebody still has; the oldest are closed

	restTime = time.Second

	// Processors of the runtime. A fork holds its processor until the child has executed; on a busy machine, with one,
	// eight commands at once took three times as long. At rest a second costs 100 KiB, and with one command at a time it is
	// only woken to look for work.
	restProcs = 1
	busyProcs = 2
)

// Options of a Server.
type Options struct {
	Config   config.Config
	CgroupFD int    // <sandbox>/user; used unless Config.Cgroup is "none"
	TaskFDs  []int  // v1 tasks files; the spawner writes and closes them
	ReapAll  bool   // this process is an init: all children are its business
	Shell    string // sessions are of this sh, as in an image without bash; for tests
	Guarded  bool   // commands cannot get CAP_SYS_RESOURCE, which this process has
	Log      *slog.Logger
}

// A Server starts commands for the edge that is connected, and goes on while none is.
type Server struct {
	key      []byte
	log      *slog.Logger
	spawner  *spawner
	gate     *gate
	reaper   *reaper
	pool     *cgroupPool
	accts    *accounts
	buffered atomic.Int64 // bytes of output of all commands
	active   atomic.Int64 // commands whose end has not been told
	queued   atomic.Int64 // bytes of commands that wait in sessions

	watchers atomic.Int64 // see watcher
	watches  atomic.Int64
	trees    chan struct{} // taken by each change of files under way
	lists    chan struct{} // and by each listing
	names    names         // of trees that requests go through

	pumps    sync.WaitGroup // goroutines of pipes
	sessions sync.WaitGroup

	mu       sync.Mutex
	commands map[string]*command
	running  int
	trusted  *spawner   // of trusted commands; nil until the edge has handed over what they need
	done     []*command // finished and not released, oldest first
	current  *session
	conns    map[*wire.Conn]struct{}
	polled   map[*os.File]struct{} // pipes with a pump
	held     []*os.File            // of these, those of ended commands, oldest first
	closing  bool

	chroni      map[string]*chronus // whose shell lives, or is being started
	endedChroni []*chronus          // oldest first

	idleSince time.Time
	resting   bool // restNow will be called

	ownProcess bool // the runtime's settings are ours
	widened    bool // GOMAXPROCS is busyProcs
}

// New makes a server and places its spawner. The caller's umask becomes that of commands.
func New(o Options) (*Server, error) {
	if err := o.Config.Validate(); err != nil {
		return nil, err
	}
	s := &Server{
		key: o.Config.Key, log: o.Log, ownProcess: o.ReapAll, accts: newAccounts(),
		commands: make(map[string]*command), conns: make(map[*wire.Conn]struct{}),
		polled: make(map[*os.File]struct{}), trees: make(chan struct{}, maxTrees), lists: make(chan struct{}, maxTrees),
		gate: newGate(),
	}
	if o.Config.Cgroup != config.CgroupNone {
		pool, err := newCgroupPool(o.CgroupFD)
		if err != nil {
			return nil, err
		}
		s.pool = pool
	}
	s.spawner = &spawner{
		jobs: make(chan job, 64), tasks: o.TaskFDs, cpus: o.Config.CPUs, pool: s.pool, accts: s.accts,
		env: defaultEnv(o.Config), stopped: make(chan struct{}), guarded: o.Guarded,
		dialects: dialects, forking: new(sync.Mutex), gate: s.gate,
	}
	if o.Shell != "" {
		sh := dialects[1]
		sh.path = o.Shell
		s.spawner.dialects = []dialect{sh}
	}
	s.reaper = newReaper(o.ReapAll, s.spawner.forking)
	s.spawner.reaper = s.reaper
	ready := make(chan error, 1)
	go s.spawner.run(ready)
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("place the spawner: %w", err)
	}
	if o.ReapAll {
		s.reaper.wg.Go(s.reaper.run)
	}
	return s, nil
}

func defaultEnv(c config.Config) map[string]string {
	env := maps.Clone(c.Env)
	if c.Hostname == "" || env["HOSTNAME"] != "" {
		return env
	}
	if env == nil {
		env = make(map[string]string)
	}
	env["HOSTNAME"] = c.Hostname
	return env
}

// Serve accepts connections until ctx ends or the listener is closed. The newest edge that shows the key replaces the
// one before at once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		nc, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("accept: %w", err)
		}
		s.ServeConn(nc)
	}
}

// ServeConn serves one connection in the background.
func (s *Server) ServeConn(nc net.Conn) {
	var files *receiver
	if uc, ok := nc.(*net.UnixConn); ok {
		files = &receiver{UnixConn: uc}
		nc = files
	}
	conn := wire.NewConn(nc, wire.Options{MaxMessage: maxHello, Timeout: writeTimeout})
	s.mu.Lock()
	defer s.mu.Unlock() // also over Go: Close waits for what it found in conns
	if s.closing || len(s.conns) > maxStrange {
		_ = nc.Close()
		return
	}
	s.conns[conn] = struct{}{}
	sess := &session{srv: s, conn: conn, files: files, commands: make(map[uint32]*command), transfers: make(map[uint32]transfer)}
	s.sessions.Go(func() {
		err := sess.run()
		s.log.Debug("connection ended", "reason", err)
		s.mu.Lock()
		delete(s.conns, conn)
		if s.current == sess {
			s.current = nil
		}
		s.mu.Unlock()
	})
}

// replace makes sess the one edge.
func (s *Server) replace(sess *session) {
	s.mu.Lock()
	old := s.current
	s.current = sess
	s.mu.Unlock()
	if old != nil {
		_ = old.conn.Close()
	}
}

// command finds or makes the command that req names.
func (s *Server) command(sess *session, stream uint32, req *aetherv1.Start) (c *command, isNew bool, f *failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.commands[req.CommandId]; c != nil {
		return c, false, nil
	}
	switch {
	case req.AttachOnly:
		return nil, false, failf(aetherv1.Code_CODE_NOT_FOUND, "no command %q", clip(req.CommandId, 64))
	case s.closing:
		return nil, false, failf(aetherv1.Code_CODE_RESOURCES, "the sandbox is ending")
	case s.running >= maxRunning:
		return nil, false, failf(aetherv1.Code_CODE_RESOURCES, "%d commands are running in this sandbox; wait for some to end", maxRunning)
	}
	c = newCommand(s, sess, stream, req)
	s.commands[c.id] = c
	s.running++
	if s.active.Add(1) > 1 && s.ownProcess && !s.widened {
		s.widened = true
		runtime.GOMAXPROCS(busyProcs)
	}
	return c, true, nil
}

// finished keeps c's result until the edge releases it, or too many wait.
func (s *Server) finished(c *command) {
	var oldest *command
	s.mu.Lock()
	s.running--
	if s.running == 0 {
		s.rest()
	}
	if s.commands[c.id] == c { // a failed start may have been released already
		s.done = append(s.done, c)
	}
	if len(s.done) > maxFinished {
		oldest = s.done[0]
		s.done = s.done[1:]
		delete(s.commands, oldest.id)
	}
	s.mu.Unlock()
	if oldest != nil {
		oldest.forget()
	}
}

// rest gives unused memory back to the kernel once nothing has run for restTime. s.mu is held.
func (s *Server) rest() {
	s.idleSince = time.Now()
	if s.resting || s.closing {
		return
	}
	s.resting = true
	time.AfterFunc(restTime, s.restNow)
}

func (s *Server) restNow() {
	s.mu.Lock()
	left := restTime - time.Since(s.idleSince)
	idle := s.running == 0 && left <= 0
	if idle && s.widened {
		s.widened = false
		runtime.GOMAXPROCS(restProcs)
	}
	s.resting = s.running == 0 && left > 0 && !s.closing
	if s.resting {
		time.AfterFunc(left, s.restNow)
	}
	s.mu.Unlock()
	if idle {
		if s.pool != nil {
			s.pool.trim()
		}
		debug.FreeOSMemory()
	}
}

// pump runs f for a polled pipe. Close closes the pipe if nothing else did.
func (s *Server) pump(file *os.File, f func()) {
	s.mu.Lock()
	s.polled[file] = struct{}{}
	s.mu.Unlock()
	s.pumps.Go(func() {
		f()
		s.mu.Lock()
		delete(s.polled, file)
		if i := slices.Index(s.held, file); i >= 0 {
			s.held = slices.Delete(s.held, i, i+1)
		}
		s.mu.Unlock()
	})
}

// hold takes note of a pipe whose command has ended. Each costs some KiB and a descriptor, and how many there are is up to
// the sandbox: one process there can open the pipes of all the others.
func (s *Server) hold(file *os.File) {
	s.mu.Lock()
	s.held = append(s.held, file)
	var oldest *os.File
	if len(s.held) > maxHeld {
		oldest = s.held[0]
		s.held = slices.Delete(s.held, 0, 1)
	}
	s.mu.Unlock()
	if oldest != nil {
		_ = oldest.Close() // its pump ends, and who writes to it gets SIGPIPE
	}
}

// release forgets an ended command. One that still runs is kept.
func (s *Server) release(c *command) {
	c.mu.Lock()
	done := c.done
	c.mu.Unlock()
	if !done {
		return
	}
	s.mu.Lock()
	if s.commands[c.id] == c {
		delete(s.commands, c.id)
	}
	for i, d := range s.done {
		if d == c {
			s.done = append(s.done[:i], s.done[i+1:]...)
			break
		}
	}
	s.mu.Unlock()
	c.forget()
}

// statuses is what a new edge learns in Hello.
func (s *Server) statuses() []*aetherv1.CommandStatus {
	s.mu.Lock()
	commands := slices.Collect(maps.Values(s.commands)) // a command's lock comes before the server's
	s.mu.Unlock()
	out := make([]*aetherv1.CommandStatus, 0, len(commands))
	for _, c := range commands {
		c.mu.Lock()
		out = append(out, c.state())
		c.mu.Unlock()
	}
	return out
}

// Close kills every command, ends all connections and waits for both. Call it after Serve has returned.
func (s *Server) Close() {
	s.mu.Lock()
	s.closing = true
	var running []*command
	for _, c := range s.commands {
		running = append(running, c)
	}
	conns := slices.Collect(maps.Keys(s.conns))
	chroni := slices.Collect(maps.Values(s.chroni))
	s.mu.Unlock()
	for _, x := range chroni {
		<-x.ready
		x.mu.Lock()
		x.end("killed")
		x.mu.Unlock()
	}
	for _, c := range running {
		c.kill(0)
	}
	for _, c := range conns {
		_ = c.Close()
	}
	s.sessions.Wait()
	for _, c := range running { // nobody will make room for their output
		c.abandon()
	}
	for _, x := range chroni {
		<-x.gone
		x.abandon()
	}
	s.closeSpawners()
	close(s.reaper.stop)
	s.reaper.wg.Wait()
	s.mu.Lock()
	polled := slices.Collect(maps.Keys(s.polled))
	s.mu.Unlock()
	for _, f := range polled { // background processes may hold the other ends for ever
		_ = f.Close()
	}
	s.pumps.Wait()
	if s.pool != nil {
		s.pool.close()
	}
}

func (s *Server) closeSpawners() {
	s.mu.Lock()
	trusted := s.trusted
	s.mu.Unlock()
	if trusted != nil {
		close(trusted.jobs)
		<-trusted.stopped
	}
	close(s.spawner.jobs)
	<-s.spawner.stopped
	for _, j := range s.gate.abandon() {
		j.failed(failf(aetherv1.Code_CODE_RESOURCES, "the sandbox is ending"))
	}
}
