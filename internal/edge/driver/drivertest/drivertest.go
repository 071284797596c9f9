// Package drivertest is the conformance suite of driver.Driver: every rule of that contract is a test here, and every
// implementation runs all of them.
package drivertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/internal/edge/driver"
	"dsec/sandbox"
)

// A Harness knows how to use one implementation.
type Harness struct {
	Driver driver.Driver
	// Spec makes everything that a Spec of that id needs, and removes it at the end of the test (t.Cleanup).
	Spec func(t *testing.T, id sandbox.ID) driver.Spec
	// Broken is like Spec, but the result cannot be created. nil skips nothing: then a Spec without an id is used.
	Broken func(t *testing.T, id sandbox.ID) driver.Spec
	// Kill ends the sandbox's processes from outside with SIGKILL, behind the driver's back.
	Kill func(t *testing.T, h driver.Handle)
	// Reused is h as it would be if its process had ended and another one had its pid since.
	Reused func(t *testing.T, h driver.Handle) driver.Handle
	// Objects lists what of these sandboxes is on the host, for comparison.
	Objects func(t *testing.T) []string
	// Restart gives a driver as a new process of the edge would have it, on the same host.
	Restart func(t *testing.T) driver.Driver
	Edge    sandbox.EdgeCode
}

const patience = time.Minute

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *bench)
	}{
		{"Probe", testProbe},
		{"LifeCycle", testLifeCycle},
		{"TeardownWithoutCreate", testTeardownWithoutCreate},
		{"TeardownIsIdempotent", testTeardownIsIdempotent},
		{"TeardownWithoutStart", testTeardownWithoutStart},
		{"DestroyOfRunning", testDestroyOfRunning},
		{"TeardownByIDAlone", testTeardownByIDAlone},
		{"FailedCreate", testFailedCreate},
		{"CanceledCalls", testCanceledCalls},
		{"CreateCutAtAnyTime", testCreateCutAtAnyTime},
		{"WaitForEveryCaller", testWaitForEveryCaller},
		{"WaitEndsWithContext", testWaitEndsWithContext},
		{"KilledFromOutside", testKilledFromOutside},
		{"Recover", testRecover},
		{"RecoverEnded", testRecoverEnded},
		{"RecoverReusedPID", testRecoverReusedPID},
		{"RecoverForeignHandle", testRecoverForeignHandle},
		{"HandleSurvivesJSON", testHandleSurvivesJSON},
		{"DialGuestWhenStopped", testDialGuestWhenStopped},
		{"SweepKeeps", testSweepKeeps},
		{"SameIDAgain", testSameIDAgain},
		{"ConcurrentIDs", testConcurrentIDs},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
			defer cancel()
			b := &bench{Harness: h, ctx: ctx, before: h.Objects(t)}
			c.test(t, b)
			b.clean(t)
		})
	}
}

// bench is one test's view of the harness.
type bench struct {
	Harness
	ctx    context.Context
	before []string
}

func (b *bench) id() sandbox.ID { return sandbox.NewID(b.Edge) }

func (b *bench) created(t *testing.T) driver.Handle {
	t.Helper()
	h, err := b.Driver.Create(b.ctx, b.Spec(t, b.id()))
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return h
}

func (b *bench) started(t *testing.T) driver.Handle {
	t.Helper()
	h, err := b.Driver.Start(b.ctx, b.created(t))
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	return h
}

func (b *bench) teardown(t *testing.T, h driver.Handle) {
	t.Helper()
	if err := b.Driver.Stop(b.ctx, h); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := b.Driver.Destroy(b.ctx, h); err != nil {
		t.Errorf("Destroy: %v", err)
	}
}

// clean compares the host with what it was before the test.
func (b *bench) clean(t *testing.T) {
	t.Helper()
	before := make(map[string]bool)
	for _, o := range b.before {
		before[o] = true
	}
	for _, o := range b.Objects(t) {
		if !before[o] {
			t.Errorf("left on the host: %s", o)
		}
	}
}

func (b *bench) bare(id sandbox.ID) driver.Handle {
	return driver.Handle{Driver: b.Driver.Name(), ID: id}
}

// soon fails the test if f does not return within patience.
func soon(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s did not return", what)
	}
}

func testProbe(t *testing.T, b *bench) {
	c, err := b.Driver.Probe(b.ctx)
	if err != nil {
		t.Fatalf("this machine must have what the driver needs: %v", err)
	}
	if c.Backend != b.Driver.Name() || len(c.Features) == 0 {
		t.Errorf("capabilities say nothing: %+v", c)
	}
}

func testLifeCycle(t *testing.T, b *bench) {
	h := b.created(t)
	if h.ID == "" || h.Driver != b.Driver.Name() || h.Version < 1 {
		t.Errorf("handle %+v", h)
	}
	h, err := b.Driver.Start(b.ctx, h)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	if s, err := b.Driver.Recover(b.ctx, h); err != nil || !s.Running {
		t.Errorf("after Start: %+v %v", s, err)
	}
	b.teardown(t, h)
	if s, err := b.Driver.Recover(b.ctx, h); err != nil || s.Running {
		t.Errorf("after Destroy: %+v %v", s, err)
	}
}

func testTeardownWithoutCreate(t *testing.T, b *bench) {
	h := b.bare(b.id())
	b.teardown(t, h)
	if err := b.Driver.Destroy(b.ctx, h); err != nil {
		t.Errorf("Destroy before Stop: %v", err)
	}
}

func testTeardownIsIdempotent(t *testing.T, b *bench) {
	h := b.started(t)
	for range 3 {
		b.teardown(t, h)
	}
}

func testTeardownWithoutStart(t *testing.T, b *bench) { b.teardown(t, b.created(t)) }

func testDestroyOfRunning(t *testing.T, b *bench) {
	h := b.started(t)
	if err := b.Driver.Destroy(b.ctx, h); err != nil { // Stop was skipped: Destroy must still leave nothing
		t.Errorf("Destroy: %v", err)
	}
	b.teardown(t, h)
}

// testTeardownByIDAlone is for an edge that was killed before it recorded a handle.
func testTeardownByIDAlone(t *testing.T, b *bench) {
	b.teardown(t, b.bare(b.created(t).ID))
	h := b.started(t)
	b.teardown(t, b.bare(h.ID))
	if s, err := b.Driver.Recover(b.ctx, h); err != nil || s.Running {
		t.Errorf("still running: %+v %v", s, err)
	}
}

func testFailedCreate(t *testing.T, b *bench) {
	id := b.id()
	spec := driver.Spec{}
	if b.Broken != nil {
		spec = b.Broken(t, id)
	}
	if _, err := b.Driver.Create(b.ctx, spec); err == nil {
		t.Fatal("Create of a broken spec succeeded")
	}
	b.teardown(t, b.bare(id))
}

func testCanceledCalls(t *testing.T, b *bench) {
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	spec := b.Spec(t, b.id())
	soon(t, "Create with a cancelled context", func() {
		if _, err := b.Driver.Create(ctx, spec); err == nil {
			t.Error("Create succeeded with a cancelled context")
		}
	})
	b.teardown(t, b.bare(spec.ID))
	h := b.created(t)
	soon(t, "Start with a cancelled context", func() {
		if _, err := b.Driver.Start(ctx, h); err == nil {
			t.Error("Start succeeded with a cancelled context")
		}
	})
	b.teardown(t, h)
}

// testCreateCutAtAnyTime cancels in the middle. Whatever Create had made by then is undone or left for Destroy.
func testCreateCutAtAnyTime(t *testing.T, b *bench) {
	for _, after := range []time.Duration{10 * time.Microsecond, 100 * time.Microsecond, 300 * time.Microsecond, time.Millisecond, 3 * time.Millisecond} {
		spec := b.Spec(t, b.id())
		ctx, cancel := context.WithTimeout(b.ctx, after)
		h, err := b.Driver.Create(ctx, spec)
		if err == nil {
			_, err = b.Driver.Start(ctx, h)
		}
		cancel()
		_ = err // either is right
		b.teardown(t, b.bare(spec.ID))
		b.clean(t)
	}
}

func testWaitForEveryCaller(t *testing.T, b *bench) {
	h := b.started(t)
	const callers = 3
	exits := make([]driver.Exit, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			var err error
			if exits[i], err = b.Driver.Wait(b.ctx, h); err != nil {
				t.Errorf("Wait: %v", err)
			}
		})
	}
	if err := b.Driver.Stop(b.ctx, h); err != nil {
		t.Errorf("Stop: %v", err)
	}
	soon(t, "Wait", wg.Wait)
	for _, e := range exits {
		if e != exits[0] {
			t.Errorf("callers were told different things: %v", exits)
		}
	}
	soon(t, "Wait for one that ended before", func() {
		if _, err := b.Driver.Wait(b.ctx, h); err != nil {
			t.Errorf("Wait after the end: %v", err)
		}
	})
	b.teardown(t, h)
	soon(t, "Wait for one that was destroyed", func() {
		if _, err := b.Driver.Wait(b.ctx, h); err != nil {
			t.Errorf("Wait after Destroy: %v", err)
		}
	})
}

func testWaitEndsWithContext(t *testing.T, b *bench) {
	h := b.started(t)
	ctx, cancel := context.WithTimeout(b.ctx, 20*time.Millisecond)
	defer cancel()
	soon(t, "Wait with a context that ends", func() {
		if _, err := b.Driver.Wait(ctx, h); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait: %v", err)
		}
	})
	if s, err := b.Driver.Recover(b.ctx, h); err != nil || !s.Running {
		t.Errorf("a Wait that was given up ended the sandbox: %+v %v", s, err)
	}
	b.teardown(t, h)
}

func testKilledFromOutside(t *testing.T, b *bench) {
	h := b.started(t)
	b.Kill(t, h)
	soon(t, "Wait for one that was killed", func() {
		if e, err := b.Driver.Wait(b.ctx, h); err != nil || (e.Signal != 9 && e.Code != -1) {
			t.Errorf("exit %+v: %v", e, err)
		}
	})
	if s, err := b.Driver.Recover(b.ctx, h); err != nil || s.Running {
		t.Errorf("Recover: %+v %v", s, err)
	}
	b.teardown(t, h)
}

// testRecover is an edge that restarts: a new driver takes a running sandbox over and ends it.
func testRecover(t *testing.T, b *bench) {
	h := b.started(t)
	d := b.Restart(t)
	if s, err := d.Recover(b.ctx, h); err != nil || !s.Running {
		t.Fatalf("Recover: %+v %v", s, err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := d.Wait(b.ctx, h)
		done <- err
	}()
	if err := d.Stop(b.ctx, h); err != nil {
		t.Errorf("Stop by the new driver: %v", err)
	}
	soon(t, "Wait by the new driver", func() {
		if err := <-done; err != nil {
			t.Errorf("Wait: %v", err)
		}
	})
	if err := d.Destroy(b.ctx, h); err != nil {
		t.Errorf("Destroy by the new driver: %v", err)
	}
	b.teardown(t, h)
}

func testRecoverEnded(t *testing.T, b *bench) {
	h := b.started(t)
	b.Kill(t, h)
	d := b.Restart(t)
	s, err := d.Recover(b.ctx, h)
	for deadline := time.Now().Add(patience); err == nil && s.Running && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond) // the kernel ends a killed process in its own time
		s, err = d.Recover(b.ctx, h)
	}
	if err != nil || s.Running {
		t.Errorf("Recover: %+v %v", s, err)
	}
	if err := d.Stop(b.ctx, h); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := d.Destroy(b.ctx, h); err != nil {
		t.Errorf("Destroy: %v", err)
	}
	b.teardown(t, h)
}

// testRecoverReusedPID checks that another's process is neither taken for ours nor hurt.
func testRecoverReusedPID(t *testing.T, b *bench) {
	h := b.started(t)
	other := b.Reused(t, h)
	if s, err := b.Driver.Recover(b.ctx, other); err != nil || s.Running {
		t.Errorf("a reused pid was taken over: %+v %v", s, err)
	}
	b.teardown(t, h)
}

func testRecoverForeignHandle(t *testing.T, b *bench) {
	for name, h := range map[string]driver.Handle{
		"other driver": {Driver: "no-such-driver", Version: 1, ID: b.id()},
		"garbage":      {Driver: b.Driver.Name(), Version: 1, ID: b.id(), Data: json.RawMessage(`{"pid":"x","start":[],"token":7}`)},
		"empty":        b.bare(b.id()),
		"later":        {Driver: b.Driver.Name(), Version: 9999, ID: b.id(), Data: json.RawMessage(`{}`)},
	} {
		if s, _ := b.Driver.Recover(b.ctx, h); s.Running {
			t.Errorf("%s: taken for a running sandbox", name)
		}
		b.teardown(t, b.bare(h.ID)) // whatever the answer
	}
}

func testHandleSurvivesJSON(t *testing.T, b *bench) {
	h := b.started(t)
	raw, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	var back driver.Handle
	if err := json.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if s, err := b.Driver.Recover(b.ctx, back); err != nil || !s.Running {
		t.Errorf("Recover: %+v %v", s, err)
	}
	b.teardown(t, back)
}

func testDialGuestWhenStopped(t *testing.T, b *bench) {
	h := b.started(t)
	b.teardown(t, h)
	for _, h := range []driver.Handle{h, b.bare(b.id())} {
		soon(t, "DialGuest", func() {
			c, err := b.Driver.DialGuest(b.ctx, h)
			if err == nil {
				c.Close()
				t.Error("connected to a sandbox that is gone")
				return
			}
			if sandbox.ClassOf(err) != sandbox.Unavailable {
				t.Errorf("class %v: %v", sandbox.ClassOf(err), err)
			}
		})
	}
}

func testSweepKeeps(t *testing.T, b *bench) {
	keep, lose, half := b.started(t), b.started(t), b.created(t)
	found, err := b.Driver.Sweep(b.ctx, map[sandbox.ID]bool{keep.ID: true})
	if err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	got := fmt.Sprint(found)
	for _, h := range []driver.Handle{lose, half} {
		if !strings.Contains(got, string(h.ID)) {
			t.Errorf("%s is not among what was found: %v", h.ID, found)
		}
	}
	if strings.Contains(got, string(keep.ID)) {
		t.Errorf("the one to keep is among what was found")
	}
	if s, err := b.Driver.Recover(b.ctx, keep); err != nil || !s.Running {
		t.Errorf("the one to keep: %+v %v", s, err)
	}
	if s, err := b.Driver.Recover(b.ctx, lose); err != nil || s.Running {
		t.Errorf("the one to lose: %+v %v", s, err)
	}
	b.teardown(t, keep)
	b.clean(t) // Sweep alone removed the others
	if found, err := b.Driver.Sweep(b.ctx, nil); err != nil || len(found) != 0 {
		t.Errorf("second Sweep: %v %v", found, err)
	}
	b.teardown(t, lose)
	b.teardown(t, half)
}

// testSameIDAgain checks that nothing of a destroyed sandbox is in the way of another with its id.
func testSameIDAgain(t *testing.T, b *bench) {
	id := b.id()
	for range 2 {
		h, err := b.Driver.Create(b.ctx, b.Spec(t, id))
		if err != nil {
			t.Fatalf("Create: %v", err)
		}
		if h, err = b.Driver.Start(b.ctx, h); err != nil {
			t.Fatalf("Start: %v", err)
		}
		b.teardown(t, h)
	}
}

func testConcurrentIDs(t *testing.T, b *bench) {
	const n = 8
	specs := make([]driver.Spec, n)
	for i := range specs {
		specs[i] = b.Spec(t, b.id())
	}
	var wg sync.WaitGroup
	for _, spec := range specs {
		wg.Go(func() {
			h, err := b.Driver.Create(b.ctx, spec)
			if err == nil {
				h, err = b.Driver.Start(b.ctx, h)
			}
			if err != nil {
				t.Errorf("%s: %v", spec.ID, err)
				h = b.bare(spec.ID)
			}
			if err := b.Driver.Stop(b.ctx, h); err != nil {
				t.Errorf("%s: Stop: %v", spec.ID, err)
			}
			if err := b.Driver.Destroy(b.ctx, h); err != nil {
				t.Errorf("%s: Destroy: %v", spec.ID, err)
			}
		})
	}
	wg.Wait()
}
