// Package steps runs a sandbox's steps: Setup in order, Teardown in reverse.
//
// # What a step must keep
//
//   - Teardown is idempotent, safe without Setup, after a Setup that failed, was cancelled or was cut by SIGKILL, and
//     while a Setup that hangs has not returned.
//   - A cancelled context ends either soon.
//
// What surprises: Teardown goes on after a step that fails or hangs, since each step's objects are its own and holding a
// disk quota because a control group is busy helps nobody (a step that does need another one's end says so, by After); what
// failed is tried again by the next attempt, what succeeded is not. A teardown that ignores its context is left behind at its deadline; later attempts never start a second one
// beside it.
//
// Every step declares two failpoints: "<name>" around Setup and "<name>.teardown" around Teardown.
package steps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"dsec/internal/edge/failpoint"
)

// A Step is one thing that is made on the host for a sandbox S. Setup and Teardown may be nil.
type Step[S any] struct {
	Name     string
	Setup    func(context.Context, S) error
	Teardown func(context.Context, S) error
	// After names a later step without whose teardown this one's would be wrong: it is not tried before.
	After string
}

// TeardownDeadline is how long one step's teardown may take in one attempt.
const TeardownDeadline = 10 * time.Second

// grace is what a teardown gets to return after its context has ended, before it is left behind.
const grace = time.Second

// A List is the steps of one kind of sandbox. It has no state of its own.
type List[S any] struct {
	steps []Step[S]
	after []int // by step: the one whose teardown comes before, or -1
	up    []*failpoint.Point
	down  []*failpoint.Point
}

// New declares the steps and their failpoints: call it once, at package level.
func New[S any](list ...Step[S]) *List[S] {
	l := &List[S]{steps: list}
	for i, s := range list {
		after := -1
		if s.After != "" {
			after = slices.IndexFunc(list, func(other Step[S]) bool { return other.Name == s.After })
			if after <= i {
				panic("steps: " + s.After + " is no step after " + s.Name)
			}
		}
		l.after = append(l.after, after)
		l.up = append(l.up, failpoint.New(s.Name))
		l.down = append(l.down, failpoint.New(s.Name+".teardown"))
	}
	return l
}

// Names are the steps' names in order.
func (l *List[S]) Names() []string {
	names := make([]string, len(l.steps))
	for i, s := range l.steps {
		names[i] = s.Name
	}
	return names
}

// An Error names the step in which something failed.
type Error struct {
	Step string
	Err  error
}

func (e *Error) Error() string { return "step " + e.Step + ": " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Progress is how far one sandbox is. The zero value is one for which nothing was set up.
type Progress struct {
	mu      sync.Mutex
	started int             // steps whose setup began
	torn    uint64          // bit i: step i is torn down
	took    []time.Duration // by step
	stuck   []chan error    // by step: a teardown that was left behind, and will answer here
}

// Assume says that every step of n may have left something: a sandbox that an earlier process made, or whose setup went
// on after its teardown.
func (p *Progress) Assume(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.started, p.torn = n, 0
}

// Took is how long each step's setup took, by name, for those that finished.
func (l *List[S]) Took(p *Progress) map[string]time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[string]time.Duration, len(p.took))
	for i, d := range p.took {
		out[l.steps[i].Name] = d
	}
	return out
}

// Len is the number of steps.
func (l *List[S]) Len() int { return len(l.steps) }

// Setup runs all setups in order and stops at the first that fails, or when ctx ends. The error is an *Error.
func (l *List[S]) Setup(ctx context.Context, s S, p *Progress) error {
	for i := range l.steps {
		if err := l.setupOne(ctx, i, s, p); err != nil {
			return &Error{Step: l.steps[i].Name, Err: err}
		}
	}
	return nil
}

func (l *List[S]) setupOne(ctx context.Context, i int, s S, p *Progress) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	p.started = i + 1
	p.mu.Unlock()
	begin := time.Now()
	if err := l.up[i].Before(ctx); err != nil {
		return err
	}
	if f := l.steps[i].Setup; f != nil {
		if err := f(ctx, s); err != nil {
			return err
		}
	}
	if err := l.up[i].After(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	p.took = append(p.took, time.Since(begin))
	p.mu.Unlock()
	return nil
}

// Teardown runs the teardown of every step that was begun and is not torn down yet, in reverse. nil means that nothing
// is left. One attempt takes at most a little over TeardownDeadline for each step that hangs, less if ctx ends.
func (l *List[S]) Teardown(ctx context.Context, s S, p *Progress) error {
	p.mu.Lock()
	started := p.started
	if p.stuck == nil {
		p.stuck = make([]chan error, len(l.steps))
	}
	p.mu.Unlock()
	var errs []error
	for i := started - 1; i >= 0; i-- {
		if p.isTorn(i) {
			continue
		}
		if a := l.after[i]; a >= 0 && a < started && !p.isTorn(a) {
			errs = append(errs, &Error{Step: l.steps[i].Name, Err: fmt.Errorf("it waits for the teardown of %s", l.steps[a].Name)})
			continue
		}
		if err := l.teardownOne(ctx, i, s, p); err != nil {
			errs = append(errs, &Error{Step: l.steps[i].Name, Err: err})
			continue
		}
		p.mu.Lock()
		p.torn |= 1 << i
		p.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (p *Progress) isTorn(i int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.torn&(1<<i) != 0
}

func (l *List[S]) teardownOne(ctx context.Context, i int, s S, p *Progress) error {
	ctx, cancel := context.WithTimeout(ctx, TeardownDeadline)
	defer cancel()
	p.mu.Lock()
	done := p.stuck[i]
	p.mu.Unlock()
	if done == nil {
		done = make(chan error, 1)
		go func() { done <- l.teardownNow(ctx, i, s) }()
	}
	select {
	case err := <-done:
		return p.unstick(i, err)
	case <-ctx.Done():
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case err := <-done:
		return p.unstick(i, err)
	case <-t.C:
		p.mu.Lock()
		p.stuck[i] = done
		p.mu.Unlock()
		return fmt.Errorf("teardown did not return within %v: %w", TeardownDeadline, context.DeadlineExceeded)
	}
}

func (p *Progress) unstick(i int, err error) error {
	p.mu.Lock()
	p.stuck[i] = nil
	p.mu.Unlock()
	return err
}

func (l *List[S]) teardownNow(ctx context.Context, i int, s S) error {
	return l.down[i].Around(ctx, func() error {
		if f := l.steps[i].Teardown; f != nil {
			return f(ctx, s)
		}
		return nil
	})
}
