// Package failpoint has named points at which tests kill, block or fail the edge.
//
// A point is declared once, as a package variable, and passed through with Point.Hit. Which points do something is said by
// the environment variable DSEC_FAILPOINT, read once at start, or by Set in a test:
//
//	DSEC_FAILPOINT=<name>:<before|after>[:<action>]      several are separated by commas
//	DSEC_FAILPOINT=@<file>                               the same in a file, so that the next start may have other ones
//
//	kill        SIGKILL to this process (the default): nothing runs after it, no deferred call, no clean-up
//	error       the point fails
//	block       the point waits until its context ends
//	hang        the point waits without looking at its context, until Set's restore is called; it says so on stderr
//	delay=<d>   the point waits for d, or until its context ends
//
// What surprises: List names every declared point, so that kill tests cover all of them without being told; a name in
// DSEC_FAILPOINT that was never declared is a mistake, which Check reports. While nothing is set a Hit costs one atomic
// load.
package failpoint

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Env is the variable that arms points at start.
const Env = "DSEC_FAILPOINT"

// A Point is one place before and after something. Declare it with New at package level.
type Point struct {
	name          string
	before, after atomic.Pointer[action]
}

type action struct {
	kind  string
	delay time.Duration
	freed chan struct{}
	hits  atomic.Int64
}

// Error is what a point set to fail returns. The edge treats it like any other fault of a step.
type Error struct{ Point string }

func (e *Error) Error() string { return "failpoint " + e.Point }

var (
	armed atomic.Int64 // points with an action

	mu     sync.Mutex
	points = map[string]*Point{}
	atInit = fromEnv(os.Getenv(Env)) // points that are declared later in the program's initialisation find themselves in it
)

// New declares a point. Declaring a name twice panics: List would be ambiguous.
func New(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if points[name] != nil {
		panic("failpoint " + name + " is declared twice")
	}
	p := &Point{name: name}
	points[name] = p
	for _, item := range split(atInit) {
		if n, pos, a, err := parse(item); err == nil && n == name {
			p.arm(pos, a)
		}
	}
	return p
}

// Before is passed before the thing, After after it. Each returns an error only if a test asked for one.
func (p *Point) Before(ctx context.Context) error {
	if armed.Load() == 0 {
		return nil
	}
	return p.hit(ctx, "before", p.before.Load())
}

// After is the counterpart of Before.
func (p *Point) After(ctx context.Context) error {
	if armed.Load() == 0 {
		return nil
	}
	return p.hit(ctx, "after", p.after.Load())
}

// Around runs f between Before and After.
func (p *Point) Around(ctx context.Context, f func() error) error {
	if err := p.Before(ctx); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	return p.After(ctx)
}

func (p *Point) hit(ctx context.Context, pos string, a *action) error {
	if a == nil {
		return nil
	}
	a.hits.Add(1)
	switch a.kind {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal is on its way to this very process
	case "error":
		return &Error{Point: p.name + ":" + pos}
	case "hang":
		fmt.Fprintf(os.Stderr, "failpoint %s:%s reached\n", p.name, pos)
		<-a.freed
		return nil
	}
	var timer <-chan time.Time
	if a.kind == "delay" {
		t := time.NewTimer(a.delay)
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-timer:
		return nil
	case <-a.freed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *Point) slot(pos string) *atomic.Pointer[action] {
	if pos == "before" {
		return &p.before
	}
	return &p.after
}

func (p *Point) arm(pos string, a *action) {
	if p.slot(pos).Swap(a) == nil {
		armed.Add(1)
	}
}

func (p *Point) disarm(pos string, a *action) {
	if p.slot(pos).CompareAndSwap(a, nil) {
		armed.Add(-1)
	}
	close(a.freed)
}

// Set arms points as DSEC_FAILPOINT would. restore disarms them and frees whoever waits there. The returned hits counts
// how often they were passed.
func Set(spec string) (restore func(), hits func() int64, err error) {
	type armedPoint struct {
		p   *Point
		pos string
		a   *action
	}
	var set []armedPoint
	for _, item := range split(spec) {
		name, pos, a, err := parse(item)
		if err != nil {
			return nil, nil, err
		}
		mu.Lock()
		p := points[name]
		mu.Unlock()
		if p == nil {
			return nil, nil, fmt.Errorf("no failpoint %q", name)
		}
		set = append(set, armedPoint{p, pos, a})
	}
	for _, s := range set {
		s.p.arm(s.pos, s.a)
	}
	restore = sync.OnceFunc(func() {
		for _, s := range set {
			s.p.disarm(s.pos, s.a)
		}
	})
	hits = func() (n int64) {
		for _, s := range set {
			n += s.a.hits.Load()
		}
		return n
	}
	return restore, hits, nil
}

// List names every place that can be armed: "<name>:before" and "<name>:after" of all declared points, sorted.
func List() []string {
	mu.Lock()
	defer mu.Unlock()
	out := make([]string, 0, 2*len(points))
	for name := range points {
		out = append(out, name+":before", name+":after")
	}
	slices.Sort(out)
	return out
}

// Check reports a DSEC_FAILPOINT that cannot be meant as it is. Call it once at start, when all points are declared.
func Check() error {
	mu.Lock()
	defer mu.Unlock()
	for _, item := range split(atInit) {
		name, _, _, err := parse(item)
		if err != nil {
			return fmt.Errorf("%s: %w", Env, err)
		}
		if points[name] == nil {
			return fmt.Errorf("%s: no failpoint %q", Env, name)
		}
	}
	return nil
}

// fromEnv reads the file that value names, if it does. One that is missing sets nothing.
func fromEnv(value string) string {
	path, isFile := strings.CutPrefix(value, "@")
	if !isFile {
		return value
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func split(spec string) []string {
	return strings.FieldsFunc(spec, func(r rune) bool { return r == ',' })
}

func parse(item string) (name, pos string, a *action, err error) {
	parts := strings.Split(item, ":")
	if len(parts) < 2 || len(parts) > 3 || (parts[1] != "before" && parts[1] != "after") {
		return "", "", nil, fmt.Errorf("failpoint %q is not <name>:<before|after>[:<action>]", item)
	}
	a = &action{kind: "kill", freed: make(chan struct{})}
	if len(parts) == 3 {
		kind, arg, hasArg := strings.Cut(parts[2], "=")
		a.kind = kind
		switch {
		case kind == "delay" && hasArg:
			if a.delay, err = time.ParseDuration(arg); err != nil {
				return "", "", nil, fmt.Errorf("failpoint %q: %w", item, err)
			}
		case hasArg, !slices.Contains([]string{"kill", "error", "block", "hang"}, kind):
			return "", "", nil, fmt.Errorf("failpoint %q: no action %q", item, parts[2])
		}
	}
	return parts[0], parts[1], a, nil
}
