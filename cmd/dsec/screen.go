package main

import (
	"os"
	"os/signal"
	"sync"
	"syscall"

	"dsec/internal/linux"
)

// A screen is a terminal that a person sits at.
type screen interface {
	size() (rows, cols uint16) // 0 where it has none
	raw() (restore func() error, err error)
	// resized tells of each change of the size, until stop is called.
	resized() (changes <-chan os.Signal, stop func())
}

// screenOf is the terminal that f is; nil if it is none.
func screenOf(f *os.File) screen {
	if !linux.IsTerminal(int(f.Fd())) {
		return nil
	}
	return terminalFile{f}
}

type terminalFile struct{ f *os.File }

func (t terminalFile) size() (rows, cols uint16) {
	rows, cols, _ = linux.WindowSize(int(t.f.Fd())) // 0 where it cannot be told
	return rows, cols
}

func (t terminalFile) raw() (func() error, error) { return linux.MakeRaw(int(t.f.Fd())) }

func (terminalFile) resized() (<-chan os.Signal, func()) {
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGWINCH)
	return changes, func() { signal.Stop(changes) }
}

// A rawMode is the mode of our terminal while keys go to a program inside. However dsec ends, it ends with the terminal as it
// was.
type rawMode struct {
	mu      sync.Mutex
	of      screen
	restore func() error // nil = it is not in raw mode
}

// enter begins it. It is said where the terminal cannot do it.
func (m *rawMode) enter() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.restore != nil {
		return nil
	}
	restore, err := m.of.raw()
	if err != nil {
		return err
	}
	m.restore = restore
	return nil
}

// leave ends it; it may be called at any time, from anywhere.
func (m *rawMode) leave() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.restore != nil {
		_ = m.restore() // fails where the terminal is gone
		m.restore = nil
	}
}

func (m *rawMode) on() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.restore != nil
}

// protect runs f such that a panic finds the terminal as it was. A deferred call of another goroutine would not run.
func (m *rawMode) protect(f func() error) error {
	defer func() {
		if r := recover(); r != nil {
			m.leave()
			panic(r)
		}
	}()
	return f()
}

// obey does what signals want that the terminal's own keys do not send in raw mode: SIGQUIT ends dsec as it does elsewhere,
// SIGTSTP stops it, each with the terminal as it was. redraw is called after a stop. It runs until stop is called.
func (m *rawMode) obey(redraw func()) (stop func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGQUIT, syscall.SIGTSTP, syscall.SIGCONT)
	done, finished := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(finished)
		for {
			select {
			case <-done:
				return
			case s := <-signals:
				m.obeyOne(s, redraw)
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		close(done)
		<-finished
	}
}

func (m *rawMode) obeyOne(s os.Signal, redraw func()) {
	switch s {
	case syscall.SIGQUIT:
		m.leave()
		signal.Reset(syscall.SIGQUIT)
		_ = syscall.Kill(os.Getpid(), syscall.SIGQUIT) // to ourselves: nothing else can fail
	case syscall.SIGTSTP:
		m.leave()
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case syscall.SIGCONT:
		if m.enter() == nil {
			redraw()
		}
	}
}
