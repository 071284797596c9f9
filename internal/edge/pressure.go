package edge

import (
	"context"
	"fmt"
	"time"

	"dsec/sandbox"
)

// A Pressure says in how much of the last 10 s something on the machine waited for want of a resource, in percent: the kernel's
// pressure stall information.
type Pressure struct {
	CPU, Memory, IO float64
}

// What brakes creates: from the first figure on, until it is below calm times that. From refuseMemory on they are refused.
//
//   - A sandbox that thrashes at its own limit makes pressure, too, and could keep others out: that of memory counts where the
//     node's memory is short besides, and that of disks, which one writer makes alone, delays creates and refuses none.
//   - A wait for CPUs is told and brakes nothing: sandboxes are meant to use them all, and a burst of creates does so itself.
const (
	brakeMemory    = 15
	brakeIO        = 50
	refuseMemory   = 40
	calm           = 0.7
	shortOfMemory  = 0.2 // share of it that is available
	brakeStep      = 100 * time.Millisecond
	brakeMost      = 2 * time.Second // for which one create is held back
	reasonPressure = "node_pressure"
)

// A brake holds creates back under pressure. It is pure: samples in, decisions out.
type brake struct {
	why     string // what there is too much pressure of; "" = none
	refuses bool
}

// sample looks at what was measured.
func (b *brake) sample(s HostSample) {
	p := s.Pressure
	memory := p.Memory
	if s.MemoryTotal > 0 && float64(s.MemoryAvailable) >= shortOfMemory*float64(s.MemoryTotal) {
		memory = 0
	}
	limit := func(v float64, held bool) float64 {
		if held {
			return v * calm
		}
		return v
	}
	was := *b
	*b = brake{}
	switch {
	case memory >= limit(brakeMemory, was.why == "memory"):
		b.why = "memory"
		b.refuses = memory >= limit(refuseMemory, was.refuses)
	case p.IO >= limit(brakeIO, was.why == "io"):
		b.why = "io"
	}
}

// refusal is the error of a create that is refused for pressure, or nil.
func (b *brake) refusal() *sandbox.Error {
	if !b.refuses {
		return nil
	}
	return sandbox.Errorf(sandbox.ResourceExhausted, reasonPressure,
		"the node is under pressure and takes no more sandboxes for now: what runs there waits for %s; try again later or on another node", b.why).
		WithFact("short", b.why)
}

// warning is what is told of it in the status.
func (b *brake) warning() string {
	switch {
	case b.refuses:
		return "what runs here waits for " + b.why + ": creates are refused"
	case b.why != "":
		return "what runs here waits for " + b.why + ": creates are held back"
	}
	return ""
}

// awaitPressure holds a create back while there is pressure: one after the other goes on, each after a moment, so that the node
// gets no new load faster than it may recover. A place for setups is not held meanwhile.
func (e *Edge) awaitPressure(ctx context.Context) error {
	a := e.admission
	for end := time.Now().Add(brakeMost); ; {
		a.mu.Lock()
		a.measureLocked()
		free := a.brake.why == "" || time.Since(a.passed) >= brakeStep && !a.brake.refuses
		if free {
			a.passed = time.Now()
		}
		refusal := a.brake.refusal()
		a.mu.Unlock()
		if free {
			return nil
		}
		if !time.Now().Before(end) {
			if refusal != nil {
				return refusal
			}
			return nil
		}
		t := time.NewTimer(brakeStep)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("waiting for less pressure: %w", ctx.Err())
		}
	}
}
