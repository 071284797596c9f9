package aether

import (
	"errors"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A child is told of its process's end, and collects it.
type child interface {
	exited(collect func() unix.WaitStatus)
}

// A reaper collects children that ended. As PID 1 it waits for any child, since orphans come to it; else only for those
// it was told of, and leaves the children of others alone.
type reaper struct {
	all     bool
	forking *sync.Mutex // the spawner's

	mu    sync.Mutex
	known map[int]child

	kick chan struct{} // all: there may be children again
	stop chan struct{}
	wg   sync.WaitGroup
}

func newReaper(all bool, forking *sync.Mutex) *reaper {
	return &reaper{all: all, forking: forking, known: make(map[int]child), kick: make(chan struct{}, 1), stop: make(chan struct{})}
}

// add tells of a child. The forking lock is held.
func (r *reaper) add(pid int, c child) {
	r.mu.Lock()
	r.known[pid] = c
	r.mu.Unlock()
	if !r.all {
		r.wg.Go(func() { r.waitOne(pid) })
		return
	}
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

func (r *reaper) lookup(pid int) child {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known[pid]
}

// run reaps whatever ends, as PID 1.
func (r *reaper) run() {
	for {
		pid, err := waitAny(unix.P_ALL, 0)
		switch {
		case errors.Is(err, unix.ECHILD):
			select {
			case <-r.kick:
			case <-r.stop:
				return
			}
		case err == nil:
			r.ended(pid)
		}
	}
}

func (r *reaper) waitOne(pid int) {
	if p, err := waitAny(unix.P_PID, pid); err == nil {
		r.ended(p)
	}
}

// ended collects pid, which is a zombie until then: while its command's lock is held, nobody can signal a process that
// got the same number.
func (r *reaper) ended(pid int) {
	c := r.lookup(pid)
	if c == nil {
		r.forking.Lock() // it may be the child that is being forked at this moment
		r.forking.Unlock()
		c = r.lookup(pid)
	}
	if c == nil {
		_, _ = collect(pid) // an orphan, or a child that the failed exec collects itself
		return
	}
	r.mu.Lock()
	delete(r.known, pid) // before it is collected: then the number is free for another command
	r.mu.Unlock()
	c.exited(func() unix.WaitStatus {
		ws, _ := collect(pid)
		return ws
	})
}

func collect(pid int) (unix.WaitStatus, error) {
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &ws, unix.WNOHANG, nil)
		if !errors.Is(err, unix.EINTR) {
			return ws, err
		}
	}
}

// siginfoChild is the part of siginfo_t that waitid fills in, on 64-bit machines.
type siginfoChild struct {
	signo, errno, code int32
	_                  int32
	pid                int32
	uid                uint32
	status             int32
	_                  [128 - 7*4]byte
}

// waitAny blocks until a child has ended and leaves it to be collected.
func waitAny(idType, id int) (int, error) {
	var info siginfoChild
	for {
		_, _, errno := unix.Syscall6(unix.SYS_WAITID, uintptr(idType), uintptr(id), uintptr(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOWAIT, 0, 0)
		switch errno {
		case 0:
			return int(info.pid), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
