package aether

import (
	"syscall"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// startShell makes x's shell, or tells who asked for it why it cannot.
func (s *spawner) startShell(x *chronus, req *aetherv1.CreateSession) {
	acc, err := s.accts.lookup(req.User)
	if err != nil {
		x.failedToStart(asFailure("look up the user", err))
		return
	}
	pipes, err := openShellPipes(s.null, acc)
	if err != nil {
		x.failedToStart(asFailure("make pipes", err))
		return
	}
	if s.pool != nil {
		if x.cgroup, err = s.pool.acquire(); err != nil {
			pipes.closeTheirs()
			pipes.close()
			x.failedToStart(asFailure("make the session's control group", err))
			return
		}
	}
	s.forking.Lock()
	pid, d, fail := s.forkShell(x, req, acc, pipes)
	if fail == nil {
		x.started(pid, d, pipes)
		s.reaper.add(pid, x)
	}
	s.forking.Unlock()
	if fail != nil {
		pipes.closeTheirs()
		pipes.close()
		if x.cgroup != nil {
			s.pool.release(x.cgroup)
			x.cgroup = nil
		}
		x.failedToStart(fail)
	}
}

func (s *spawner) forkShell(x *chronus, req *aetherv1.CreateSession, acc account, p *shellPipes) (int, *dialect, *failure) {
	cwd, fail := openCwd(req.Cwd, acc)
	if fail != nil {
		return 0, nil, fail
	}
	defer unix.Close(cwd)
	attr := procAttr(cwd, environment(req.Env, s.env, acc), acc, x.cgroup)
	for i := range s.dialects {
		d := &s.dialects[i]
		attr.Files = d.files(p)
		pid, err := syscall.ForkExec(d.path, d.argv, attr)
		if err == nil {
			return pid, d, nil
		}
		if f := explain(err, d.path, acc); f.code != aetherv1.Code_CODE_NOT_FOUND {
			return 0, nil, f
		}
	}
	return 0, nil, program{shell: true}.missing()
}
