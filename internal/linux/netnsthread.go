package linux

import (
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// A NetnsThread is a thread that stays inside a network namespace and runs what it is given there, one after the other.
type NetnsThread struct {
	mu    sync.Mutex
	calls chan func()
	ended bool
}

// EnterNetns makes a thread inside the network namespace kept at path.
func EnterNetns(path string) (*NetnsThread, error) {
	ns, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	t := &NetnsThread{calls: make(chan func())}
	entered := make(chan error, 1)
	go func() {
		_ = onThread(func() error {
			err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			entered <- err
			for err == nil {
				f, ok := <-t.calls
				if !ok {
					return nil
				}
				f()
			}
			return nil
		})
	}()
	if err := <-entered; err != nil {
		return nil, fmt.Errorf("enter the network namespace %s: %w", path, err)
	}
	runtime.KeepAlive(ns)
	return t, nil
}

// Do runs f inside. f must not start goroutines that expect to be inside.
func (t *NetnsThread) Do(f func() error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return os.ErrClosed
	}
	done := make(chan error, 1)
	t.calls <- func() { done <- f() }
	return <-done
}

// Close ends the thread.
func (t *NetnsThread) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.ended {
		t.ended = true
		close(t.calls)
	}
}
