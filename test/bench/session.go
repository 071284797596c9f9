package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	bin, out, only string
	docker         bool
	rounds, many   int
	hold           time.Duration
}

func (o *options) check() error {
	if os.Geteuid() != 0 {
		return errors.New("sandboxes need root; run it as root")
	}
	if o.bin == "" {
		o.bin = "bin"
	}
	var err error
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	for _, name := range []string{"dsec", "aether", "stage"} {
		if _, err := os.Stat(filepath.Join(o.bin, name)); err != nil {
			return fmt.Errorf("%w; run make build", err)
		}
	}
	if _, err := os.Stat("go.mod"); err != nil {
		return errors.New("run it at the root of the repository")
	}
	o.rounds = max(o.rounds, 1)
	return nil
}

// wants reports whether a part of a benchmark shall run.
func (o *options) wants(part string) bool {
	return o.only == "" || slices.Contains(strings.Split(o.only, ","), part)
}

// A part of a benchmark may run alone.
type part struct {
	name string
	run  func(context.Context) error
}

// runParts runs those that shall run.
func (o *options) runParts(ctx context.Context, parts ...part) error {
	for _, p := range parts {
		if o.wants(p.name) {
			if err := p.run(ctx); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return nil
}

// roundTime is how long a load goes on.
func (o *options) roundTime() time.Duration { return max(3*time.Second, o.hold) }

// A session is what a benchmark may make on this machine. Closing it undoes everything, the last first.
type session struct {
	options
	dir    string // on a disk
	runDir string // short: sockets are below it
	undo   []func() error
}

func newSession(o options) (*session, error) {
	dir, err := os.MkdirTemp("/var/tmp", "dsec-bench-")
	if err != nil {
		return nil, err
	}
	s := &session{options: o, dir: dir}
	s.later(func() error { return os.RemoveAll(dir) })
	s.runDir, err = os.MkdirTemp("/run", "dsec-bench-")
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.later(func() error { return os.RemoveAll(s.runDir) })
	return s, errors.Join(os.Chmod(dir, 0o711), os.Chmod(s.runDir, 0o711))
}

// later has f called when the session closes.
func (s *session) later(f func() error) { s.undo = append(s.undo, f) }

func (s *session) close() error {
	var errs []error
	for _, f := range slices.Backward(s.undo) {
		errs = append(errs, f())
	}
	s.undo = nil
	return errors.Join(errs...)
}

const stopTimeout = 2 * time.Minute

// endProcess asks p to end and waits for it; done is closed when it has.
func endProcess(p *os.Process, name string, done <-chan struct{}) error {
	_ = p.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-done:
		return nil
	case <-time.After(stopTimeout):
		_ = p.Kill()
		<-done
		return fmt.Errorf("%s did not end within %v", name, stopTimeout)
	}
}

// poll calls f until it reports true, or the time is over.
func poll(ctx context.Context, limit time.Duration, what string, f func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
	}
	return nil
}
