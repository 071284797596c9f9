package edge

import (
	"context"
	"crypto/rand"
	"maps"
	"math"
	"sync"
	"time"

	"dsec/sandbox"
)

// maxWait bounds how long one call may wait for a command; the caller asks again.
const maxWait = 24 * time.Hour

// live is the guest of a ready sandbox, or why there is none to run commands in.
func (in *instance) live() (Guest, error) {
	in.mu.Lock()
	state, code, message, g := in.life.state, in.life.reason.Code, in.life.reason.Message, in.guest
	in.mu.Unlock()
	switch {
	case state == sandbox.Ready && g != nil:
		return g, nil
	case state == sandbox.Creating:
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "sandbox_not_ready", "sandbox %s is still being created; wait until it is ready", in.id)
	}
	return nil, sandbox.Errorf(sandbox.FailedPrecondition, "sandbox_ended", "sandbox %s is %s: %s; create a new one", in.id, state, message).
		WithFact("state", state.String()).WithFact("reason", code)
}

// kept is the guest also of a sandbox that has ended: what it knows of commands and output is readable until the sandbox
// is forgotten.
func (in *instance) kept() (Guest, error) {
	if g := in.snapshot().guest; g != nil {
		return g, nil
	}
	return in.live()
}

func (in *instance) command(id string) (GuestCommand, error) {
	g, err := in.kept()
	if err != nil {
		return nil, err
	}
	c, ok := g.Command(id)
	if !ok {
		if _, err := in.kept(); err != nil { // meanwhile it was given up: see reconnecting
			return nil, err
		}
		return nil, sandbox.Errorf(sandbox.NotFound, "command_not_found", "sandbox %s has no command %q; the oldest results are dropped first", in.id, clip(id))
	}
	return c, nil
}

// exec starts the command, or finds the one with this id, and waits for its end as long as wait says.
func (e *Edge) exec(ctx context.Context, in *instance, id string, cmd sandbox.Command, wait time.Duration) (GuestCommand, error) {
	g, err := in.live()
	if err != nil {
		return nil, err
	}
	if id == "" {
		id = rand.Text()
	} else if !sandbox.ValidCommandID(id) {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_command_id", "command id %q: letters, digits, _ and -, at most 64", clip(id))
	}
	if err := cmd.Validate(); err != nil {
		return nil, err
	}
	if cmd.Trusted {
		if err := e.trust(ctx, in, g); err != nil {
			return nil, err
		}
	}
	e.oomBegin(in, id)
	stop := e.watchStart(in)
	if cmd.Session == "" { // a session has them from its beginning
		cmd = in.withDefaults(cmd)
	}
	c, err := g.Start(ctx, id, cmd)
	stop()
	if err != nil {
		in.oom.drop(id)
		return nil, err
	}
	if err := e.await(ctx, in, c, wait); err != nil {
		e.follow(in, c)
		return nil, err
	}
	return c, nil
}

// startPatience is how long a command may take to start before the edge looks whether something holds it up. A fork takes
// milliseconds, on a machine that is busy it may take seconds.
const startPatience = time.Second

// watchStart clears aether's way again and again until stop is called: see Cgroups.KillStuck.
func (e *Edge) watchStart(in *instance) (stop func()) {
	done := make(chan struct{})
	t := time.AfterFunc(startPatience, func() {
		e.spawn(func() { e.clearUntil(in, done) })
	})
	return func() {
		t.Stop()
		close(done)
	}
}

func (e *Edge) clearUntil(in *instance, done <-chan struct{}) {
	for {
		e.clearWay(in)
		select {
		case <-done:
			return
		case <-in.ctx.Done():
			return
		case <-time.After(startPatience):
		}
	}
}

func (e *Edge) clearWay(in *instance) {
	if !in.clearing.TryLock() { // of many that wait, one looks
		return
	}
	defer in.clearing.Unlock()
	in.mu.Lock()
	cg := in.made.cgroups
	in.mu.Unlock()
	killed, err := e.o.Cgroups.KillStuck(cg, startPatience)
	if killed > 0 || err != nil {
		e.log.Warn("a command was kept from starting by another", "sandbox_id", in.id, "killed", killed, "error", err)
	}
}

// withDefaults completes cmd by what the sandbox says.
func (in *instance) withDefaults(cmd sandbox.Command) sandbox.Command {
	if cmd.Trusted {
		return asTrusted(cmd)
	}
	spec := &in.intent.Spec
	setDefault(&cmd.User, spec.User)
	setDefault(&cmd.Cwd, spec.Workdir)
	switch {
	case len(spec.Env) == 0:
	case len(cmd.Env) == 0:
		cmd.Env = spec.Env // shared: nobody writes to it
	default:
		env := maps.Clone(spec.Env)
		maps.Copy(env, cmd.Env)
		cmd.Env = env
	}
	return cmd
}

// await waits for c's end up to wait (negative = no bound but ctx) and settles its result. A command that is still
// running then is followed in the background. An error is ctx's, or that the sandbox ended without a result.
func (e *Edge) await(ctx context.Context, in *instance, c GuestCommand, wait time.Duration) error {
	var err error
	switch {
	case wait < 0:
		err = c.Wait(ctx)
	case wait > 0:
		wctx, cancel := context.WithTimeout(ctx, wait)
		err = c.Wait(wctx)
		cancel()
	}
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	r := c.Result()
	if !r.Running {
		e.settle(in, c, r)
		return neverEnded(ctx, c)
	}
	if _, lerr := in.live(); lerr != nil {
		return lerr
	}
	e.follow(in, c)
	return nil
}

// waitOf converts the wire's wait_seconds.
func waitOf(seconds float64) (time.Duration, error) {
	switch {
	case math.IsNaN(seconds):
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_wait", "wait_seconds is not a number")
	case seconds < 0:
		return -1, nil
	case seconds > maxWait.Seconds():
		return maxWait, nil
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// An oomWatch tells which failed commands an out-of-memory kill belongs to: the sandbox's count grew while the command ran.
// With several commands at once each that failed in that time is marked, since the kernel does not say whose process it
// was.
type oomWatch struct {
	mu      sync.Mutex
	known   int64 // kills when last read
	at      time.Time
	running map[string]oomEntry // by command id
}

type oomEntry struct {
	base     int64 // kills when it started
	followed bool  // a goroutine waits for its end
}

// oomFresh is how old a reading may be to serve as a command's base: a burst of commands reads once.
const oomFresh = time.Second

func (o *oomWatch) drop(id string) {
	o.mu.Lock()
	delete(o.running, id)
	o.mu.Unlock()
}

// readLocked reads the count. If that fails the last known one stands: a missing mark is better than a failed command.
func (e *Edge) readOOMLocked(in *instance) int64 {
	in.mu.Lock()
	cg := in.made.cgroups
	in.mu.Unlock()
	if n, err := e.o.Cgroups.OOMKills(cg); err == nil {
		in.oom.known = n
	}
	in.oom.at = time.Now()
	return in.oom.known
}

func (e *Edge) oomBegin(in *instance, id string) {
	o := &in.oom
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, again := o.running[id]; again {
		return
	}
	if time.Since(o.at) >= oomFresh {
		e.readOOMLocked(in)
	}
	if o.running == nil {
		o.running = make(map[string]oomEntry)
	}
	o.running[id] = oomEntry{base: o.known}
}

// settle completes the result of a command that has ended, once; others who wait for the same command find it complete.
func (e *Edge) settle(in *instance, c GuestCommand, r CommandResult) {
	o := &in.oom
	o.mu.Lock()
	defer o.mu.Unlock()
	entry, ok := o.running[c.ID()]
	if !ok {
		return
	}
	delete(o.running, c.ID())
	if r.ExitCode != 0 || r.Signal != 0 {
		if e.readOOMLocked(in) > entry.base {
			c.SetOOM(true)
		}
	}
}

// follow waits in the background for the end of a command whose caller does not, so that its result is settled then.
func (e *Edge) follow(in *instance, c GuestCommand) {
	o := &in.oom
	o.mu.Lock()
	defer o.mu.Unlock()
	entry, ok := o.running[c.ID()]
	if !ok || entry.followed {
		return
	}
	entry.followed = true
	o.running[c.ID()] = entry
	e.spawn(func() {
		_ = c.Wait(in.ctx) // an error means that the sandbox is ending
		if r := c.Result(); !r.Running {
			e.settle(in, c, r)
		}
		e.touch(in)
	})
}
