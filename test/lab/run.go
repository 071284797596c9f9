package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"sync"
	"time"

	"dsec/test/lab/job"
)

// Limits of one test: its own, which says where it stands, and the guest's.
const (
	testTime = 4 * time.Minute
	hangTime = testTime + time.Minute
)

// A run is the tests that guests share.
type run struct {
	verbose bool
	times   *times

	mu      sync.Mutex
	waiting []test // the longest first
	passed  int
	failed  []test
}

func newRun(o options, tests []test, known *times) *run {
	const unknown = 5 // seconds
	seconds := func(t test) float64 {
		if s, ok := known.Seconds[t.String()]; ok {
			return s
		}
		return unknown
	}
	waiting := slices.Clone(tests)
	slices.SortStableFunc(waiting, func(a, b test) int { return cmp.Compare(seconds(b), seconds(a)) })
	return &run{verbose: o.verbose, times: known, waiting: waiting}
}

// all runs every test on as many guests as it may have.
func (r *run) all(ctx context.Context, m machine, guests int) error {
	total := len(r.waiting)
	say("%d tests", total)
	var wg sync.WaitGroup
	errs := make([]error, min(guests, total))
	for n := range errs {
		wg.Go(func() { errs[n] = r.guest(ctx, m, fmt.Sprintf("guest%d", n+1)) })
	}
	wg.Wait()
	for _, t := range r.failed {
		say("FAILED   %s", t)
	}
	say("%d passed, %d failed, %d not run", r.passed, len(r.failed), len(r.waiting))
	err := errors.Join(append(errs, r.times.save())...)
	if err == nil && r.passed != total {
		err = errors.New("not every test passed")
	}
	return err
}

// guest takes tests until none is left. A guest that a test broke is replaced.
func (r *run) guest(ctx context.Context, m machine, name string) error {
	var g *guest
	defer func() {
		if g != nil {
			g.stop()
		}
	}()
	for n := 1; ; {
		t, ok := r.take()
		if !ok {
			return nil
		}
		if g == nil {
			var err error
			if g, err = m.boot(ctx, fmt.Sprintf("%s-%d", name, n)); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			n++
			say("%s is up, %s", name, g.release)
		}
		if !r.test(ctx, g, t) {
			g.stop()
			g = nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

func (r *run) take() (test, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 {
		return test{}, false
	}
	t := r.waiting[0]
	r.waiting = r.waiting[1:]
	return t, true
}

var (
	skipLine = regexp.MustCompile(`(?m)^ *--- SKIP: (\S+)`)
	noTests  = []byte("testing: warning: no tests to run")
)

// test runs one test and reports whether the guest is still of use.
func (r *run) test(ctx context.Context, g *guest, t test) (usable bool) {
	var out bytes.Buffer
	start := time.Now()
	limited, cancel := context.WithTimeoutCause(ctx, hangTime, errors.New("the guest hangs"))
	defer cancel()
	err := g.run(limited, job.Job{
		Args: []string{"/lab/tests/" + path.Base(t.pkg) + ".test", "-test.v", "-test.run=^" + t.name + "$", "-test.timeout=" + testTime.String()},
		Dir:  "/lab/src/" + t.pkg, Env: []string{"CI=true", "DSEC_LAB=1"},
	}, &out)
	var failed errJob
	usable = err == nil || errors.As(err, &failed)
	if !usable {
		fmt.Fprintf(&out, "%v; the end of the guest's console:\n%s\n", err, g.consoleEnd())
	}
	if ctx.Err() != nil { // nobody waits for it any more
		return false
	}
	if err == nil && bytes.Contains(out.Bytes(), noTests) {
		err = errors.New("there is no such test")
	}
	if err == nil && skipLine.Match(out.Bytes()) {
		err = errors.New("a test that the lab cannot run is listed in test/lab/not.txt with its reason")
	}
	r.report(t, time.Since(start), err, out.Bytes())
	return usable
}

func (r *run) report(t test, took time.Duration, err error, out []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times.Seconds[t.String()] = took.Seconds()
	word := "ok"
	if err != nil {
		word = "FAILED"
		r.failed = append(r.failed, t)
	} else {
		r.passed++
	}
	if err != nil || r.verbose {
		fmt.Printf("%s", out)
	}
	if err != nil {
		fmt.Printf("%v\n", err)
	}
	say("%-8s %s (%.1f s)", word, t, took.Seconds())
}
