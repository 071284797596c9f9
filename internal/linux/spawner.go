package linux

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// A child begins with a copy of the descriptors of the thread that makes it, and closes them when it executes a program: with
// thousands of them that is a millisecond and more. So one thread has a table of its own, with next to nothing in it. It gets what
// a child is to have from the process's table, through a descriptor of the process itself.
type spawner struct {
	once     sync.Once
	err      error
	self     int // pidfd of this process, in the thread's table
	requests chan func()
}

var theSpawner spawner

// run has f run on the thread.
func (s *spawner) run(f func()) error {
	s.once.Do(func() {
		s.requests = make(chan func())
		ready := make(chan error)
		go s.serve(ready)
		s.err = <-ready
	})
	if s.err != nil {
		return s.err
	}
	done := make(chan struct{})
	s.requests <- func() {
		defer close(done)
		f()
	}
	<-done
	return nil
}

// serve never ends, and so keeps its thread. That must not be the process's first, whose table is what others see as the
// process's: as long as this goroutine holds that one, another goroutine gets another.
func (s *spawner) serve(ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == os.Getpid() {
		started := make(chan error)
		go s.serve(started)
		ready <- <-started
		runtime.UnlockOSThread()
		return
	}
	err := s.separate()
	ready <- err
	if err != nil {
		return // the thread ends with its goroutine
	}
	for f := range s.requests {
		f()
	}
}

func (s *spawner) separate() error {
	if r, w, err := os.Pipe(); err != nil { // with the first that it waits for the scheduler opens what it needs
		return err
	} else if err := errors.Join(r.Close(), w.Close()); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FILES); err != nil {
		return fmt.Errorf("separate a thread's descriptors: %w", err)
	}
	if err := closeAllButRuntime(); err != nil {
		return err
	}
	var err error
	if s.self, err = unix.PidfdOpen(os.Getpid(), 0); err != nil {
		return fmt.Errorf("open this process: %w", err)
	}
	return nil
}

// closeAllButRuntime closes what the thread has, but for standard input and output and that with which Go's scheduler wakes
// others: it may do that from any thread.
func closeAllButRuntime() error {
	const dir = "/proc/thread-self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list a thread's descriptors: %w", err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 {
			continue
		}
		target, err := os.Readlink(dir + "/" + e.Name())
		if err != nil || strings.Contains(target, "[eventpoll]") || strings.Contains(target, "[eventfd]") {
			continue // the first: that of the listing itself
		}
		unix.Close(fd)
	}
	return nil
}

// forkExec starts a program with these descriptors of the process; group may be -1.
func (s *spawner) forkExec(path string, args []string, files []int, group int) (pid int, err error) {
	failed := s.run(func() {
		var own []int
		defer func() { Close(own...) }()
		get := func(fd int) int {
			if err != nil {
				return -1
			}
			var got int
			if got, err = unix.PidfdGetfd(s.self, fd, 0); err == nil {
				own = append(own, got)
			}
			return got
		}
		attr := &syscall.ProcAttr{Env: []string{}, Sys: &syscall.SysProcAttr{}}
		for _, fd := range files {
			attr.Files = append(attr.Files, uintptr(get(fd)))
		}
		if group >= 0 {
			attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, get(group)
		}
		if err == nil {
			pid, err = syscall.ForkExec(path, args, attr)
		}
	})
	if failed != nil {
		return 0, failed
	}
	return pid, err
}
