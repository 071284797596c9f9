package aether

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// A spawner forks every command from one thread. v1 control groups and CPU masks belong to threads and are inherited
// over fork, so that placing this thread once places every command, with no write per command.
type spawner struct {
	jobs     chan job
	tasks    []int // v1 tasks files of the user's groups
	cpus     []int
	pool     *cgroupPool // nil = no control groups
	accts    *accounts
	env      map[string]string
	null     int // /dev/null, or -1
	guarded  bool
	dialects []dialect // of sessions
	reaper   *reaper
	stopped  chan struct{}

	// forking is held from before a fork until its child is known to the reaper, which waits for it before it takes a
	// child for an orphan.
	forking *sync.Mutex

	gate    *gate
	trusted bool // its commands are: see trusted.go
	tools   int  // directory of their tools
}

// A job is a command, or a session.
type job struct {
	c       *command
	req     *aetherv1.Start
	x       *chronus
	session *aetherv1.CreateSession
}

// run serves jobs until the channel is closed. ready gets the outcome of placing the thread.
func (s *spawner) run(ready chan<- error) {
	runtime.LockOSThread() // never unlocked: its groups and mask are the user's
	if unix.Gettid() == unix.Getpid() {
		// The thread-group leader stands for the whole process, to the OOM killer too: it must stay out of the user's
		// groups. It is parked for good when this goroutine ends.
		go s.run(ready)
		return
	}
	defer close(s.stopped)
	err := s.place()
	ready <- err
	if err != nil {
		return
	}
	var resume chan []job // nil blocks
	if !s.trusted {
		resume = s.gate.resume
	}
	for {
		select {
		case j, ok := <-s.jobs:
			if !ok {
				return
			}
			s.serve(j)
		case jobs := <-resume:
			for _, j := range jobs {
				s.serve(j)
			}
		}
	}
}

// serve starts j as soon as it may be.
func (s *spawner) serve(j job) {
	if s.trusted {
		j.c.holds = true // letGo releases
		if f := s.gate.hold(); f != nil {
			j.c.failed(f)
			return
		}
		s.start(j)
		return
	}
	if !s.gate.enter(j) {
		return
	}
	if j.x != nil {
		s.startShell(j.x, j.session)
	} else {
		s.start(j)
	}
	s.gate.leave()
}

// failed says that j was not started.
func (j job) failed(f *failure) {
	if j.x != nil {
		j.x.failedToStart(f)
	} else {
		j.c.failed(f)
	}
}

// usualTimerSlack is the kernel's default, in nanoseconds.
const usualTimerSlack = 50_000

func (s *spawner) place() error {
	if s.guarded {
		if err := guard(); err != nil {
			return err
		}
	}
	// The launcher gave us a larger one, which commands must not inherit.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, usualTimerSlack, 0, 0, 0); err != nil {
		return fmt.Errorf("set the timer slack: %w", err)
	}
	for _, fd := range s.tasks {
		if _, err := unix.Write(fd, []byte("0")); err != nil { // "0" is the writing thread
			return fmt.Errorf("enter the user's v1 cgroup: %w", err)
		}
		unix.Close(fd)
	}
	if len(s.cpus) > 0 {
		var set unix.CPUSet
		for _, n := range s.cpus {
			set.Set(n)
		}
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("set the cpu mask: %w", err)
		}
	}
	s.null = openNull("/dev/null")
	return nil
}

// openNull returns a descriptor of the null device, or -1 where name is something else.
func openNull(name string) int {
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(1, 3) {
		unix.Close(fd)
		return -1
	}
	return fd
}

// start makes j's process, or tells the edge why it cannot.
func (s *spawner) start(j job) {
	acc, env, prog, err := s.resolve(j.req)
	if err != nil {
		j.c.failed(asFailure("find user and program", err))
		return
	}
	pipes, err := s.openPipes(j, acc)
	if err != nil {
		j.c.failed(asFailure("make pipes", err))
		return
	}
	defer pipes.closeChild()
	if s.pool != nil {
		if j.c.cgroup, err = s.pool.acquire(); err != nil {
			pipes.closeParent()
			j.c.failed(asFailure("make the command's control group", err))
			return
		}
	}
	s.forking.Lock()
	pid, fail := s.fork(j, prog, env, acc, pipes)
	if fail == nil {
		j.c.started(pid, pipes)
		s.reaper.add(pid, j.c)
	}
	s.forking.Unlock()
	if fail == nil && pipes.slave >= 0 {
		j.c.flush()
	}
	if fail != nil {
		pipes.closeParent()
		if j.c.cgroup != nil {
			s.pool.release(j.c.cgroup)
			j.c.cgroup = nil
		}
		j.c.failed(fail)
	}
}

// resolve looks in the sandbox for what the request names, unless it is to be trusted.
func (s *spawner) resolve(req *aetherv1.Start) (account, []string, program, error) {
	if s.trusted {
		acc, err := numericAccount(req.User)
		return acc, trustedEnv(req.Env), trustedProgram(req), err
	}
	acc, err := s.accts.lookup(req.User)
	if err != nil {
		return acc, nil, program{}, err
	}
	env := environment(req.Env, s.env, acc)
	if req.Terminal != nil {
		env = terminalEnv(env)
	}
	prog, err := programOf(req, env, acc)
	return acc, env, prog, err
}

func (s *spawner) fork(j job, prog program, env []string, acc account, p *pipes) (int, *failure) {
	cwd, fail := openCwd(j.req.Cwd, acc)
	if fail != nil {
		return 0, fail
	}
	defer unix.Close(cwd)
	attr := procAttr(cwd, env, acc, j.c.cgroup)
	attr.Files, attr.Sys.Setctty = p.child, p.slave >= 0
	for _, cand := range prog.candidates {
		pid, err := syscall.ForkExec(cand.path, cand.argv, attr)
		if err == nil {
			return pid, nil
		}
		f := explain(err, cand.path, acc)
		if !prog.shell && !prog.tool || f.code != aetherv1.Code_CODE_NOT_FOUND {
			return 0, f
		}
	}
	return 0, prog.missing()
}

// procAttr is what processes of a user begin with, but for their files.
func procAttr(cwd int, env []string, acc account, g *cgroup) *syscall.ProcAttr {
	attr := &syscall.ProcAttr{Dir: refPath(cwd), Env: env, Sys: &syscall.SysProcAttr{Setsid: true}}
	if !acc.sameRights() || (len(acc.groups) > 0 && os.Geteuid() == 0) {
		attr.Sys.Credential = &syscall.Credential{Uid: acc.uid, Gid: acc.gid, Groups: acc.groups}
	}
	if g != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, g.dir
	}
	return attr
}

// pipes of one command. child are the descriptors that become 0, 1, 2 and perhaps scriptFD.
type pipes struct {
	child      []uintptr
	childOwned []int // of child, those to close here
	stdin      int   // our ends, non-blocking; -1 = none
	script     int
	out        [2]int
	slave      int // of a terminal, which is all of stdin and out[0]
}

func (s *spawner) openPipes(j job, acc account) (*pipes, error) {
	p := &pipes{stdin: -1, script: -1, out: [2]int{-1, -1}, slave: -1}
	var err error
	if size := j.c.windowNow(); size != (window{}) {
		err = p.openTerminal(size, acc)
	} else {
		err = p.open(s.null, j.req.Stdin, acc)
	}
	if err == nil && j.req.ScriptFollows {
		p.script, err = p.add(acc, false)
	}
	if s.trusted {
		p.giveTools(s.tools)
	}
	if err != nil {
		p.closeChild()
		p.closeParent()
		return nil, err
	}
	return p, nil
}

func (p *pipes) openTerminal(size window, acc account) error {
	t, err := openTerminal("/dev/ptmx", size, acc)
	if err != nil {
		return err
	}
	p.stdin, p.out[0], p.slave = t.input, t.master, t.slave
	p.child = []uintptr{uintptr(t.slave), uintptr(t.slave), uintptr(t.slave)}
	return nil
}

func (p *pipes) open(null int, stdin bool, acc account) error {
	var err error
	switch {
	case stdin:
		if p.stdin, err = p.add(acc, false); err != nil {
			return err
		}
	case null >= 0:
		p.child = append(p.child, uintptr(null))
	default: // an image without /dev/null: what is read from a pipe that nobody writes ends at once, too
		w, err := p.add(acc, false)
		if err != nil {
			return err
		}
		unix.Close(w)
	}
	for i := range p.out {
		if p.out[i], err = p.add(acc, true); err != nil {
			return err
		}
	}
	return nil
}

// add makes one pipe, gives its far end to the child and returns ours. The pipe belongs to the command's user, who could
// otherwise not open /dev/stdout or /proc/self/fd/3 again.
func (p *pipes) add(acc account, childWrites bool) (int, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return -1, err
	}
	ours, theirs := fds[0], fds[1]
	if !childWrites {
		ours, theirs = theirs, ours
	}
	p.child = append(p.child, uintptr(theirs))
	p.childOwned = append(p.childOwned, theirs)
	err := unix.SetNonblock(ours, true)
	if err == nil && !acc.sameRights() {
		err = unix.Fchown(theirs, int(acc.uid), int(acc.gid))
	}
	if err != nil {
		unix.Close(ours)
		return -1, err
	}
	return ours, nil
}

func (p *pipes) closeChild() {
	for _, fd := range p.childOwned {
		unix.Close(fd)
	}
	p.childOwned = nil
}

func (p *pipes) closeParent() {
	for _, fd := range []int{p.stdin, p.script, p.out[0], p.out[1], p.slave} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// checkStart refuses what no kernel could run, before anything is made.
func checkStart(req *aetherv1.Start) *failure {
	kinds := 0
	for _, has := range []bool{len(req.Argv) > 0, req.Shell != "", req.ScriptFollows} {
		if has {
			kinds++
		}
	}
	if f := checkSessionStart(req); f != nil {
		return f
	}
	switch {
	case kinds != 1 && !req.AttachOnly && (kinds > 1 || req.Terminal == nil):
		return failf(aetherv1.Code_CODE_INVALID, "exactly one of argv and shell must be given")
	case req.CommandId == "" || len(req.CommandId) > 64:
		return failf(aetherv1.Code_CODE_INVALID, "no valid command id")
	case !strings.HasPrefix(req.Cwd, "/") && !req.AttachOnly:
		return failf(aetherv1.Code_CODE_NO_CWD, "working directory %q is not absolute", clip(req.Cwd, 256))
	case len(req.Argv) > 0 && req.Argv[0] == "":
		return failf(aetherv1.Code_CODE_INVALID, "the program's name is empty")
	}
	if req.Trusted {
		if f := checkTrusted(req); f != nil {
			return f
		}
	}
	if t := req.Terminal; t != nil {
		if f := checkTerminal(t.Rows, t.Cols); f != nil {
			return f
		}
	}
	for _, list := range [][]string{req.Argv, req.Env, {req.Shell, req.Cwd, req.User}} {
		for _, s := range list {
			if strings.ContainsRune(s, 0) {
				return failf(aetherv1.Code_CODE_INVALID, "an argument, variable or path holds a NUL byte")
			}
		}
	}
	return nil
}
