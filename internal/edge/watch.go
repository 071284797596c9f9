package edge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"dsec/internal/edge/driver"
	"dsec/sandbox"
)

// deathGrace is how long a lost guest waits for the verdict on its process, which knows more.
const deathGrace = time.Second

func (e *Edge) connectGuest(ctx context.Context, in *instance, h driver.Handle) (Guest, error) {
	return e.o.Guests(ctx, GuestOptions{
		ID:        in.id,
		Dial:      func(ctx context.Context) (net.Conn, error) { return in.driver.DialGuest(ctx, h) },
		Key:       in.intent.GuestKey,
		OutputDir: e.outputDir(in.id),
		// The end of a command is activity, too. No journal here: this is on the guest's hot path.
		OnChange: func(int, bool) { in.lastUse.Store(time.Now().UnixNano()) },
		OnEnd:    func(command string) { e.watchers.ended(in, command) },
		Log:      e.log.With("sandbox_id", in.id),
	})
}

// watchProcess ends the sandbox when aether's process ends, whoever ended it.
func (e *Edge) watchProcess(in *instance, h driver.Handle) {
	for n := 1; ; n++ {
		exit, err := in.driver.Wait(in.ctx, h)
		if in.ctx.Err() != nil {
			return
		}
		if err == nil {
			code, message := e.verdict(in, exit)
			e.fault(in, code, sandbox.Errorf(sandbox.Internal, code, "the sandbox died while it was starting: %s", message), message)
			return
		}
		e.log.Warn("waiting for the sandbox's process failed", "sandbox_id", in.id, "error", err)
		select {
		case <-time.After(teardownBackoff(n)):
		case <-in.ctx.Done():
			return
		}
	}
}

// verdict says what a process's end was.
func (e *Edge) verdict(in *instance, exit driver.Exit) (code, message string) {
	const sigkill = 9
	if exit.Signal != sigkill {
		return sandbox.ReasonGuestDied, fmt.Sprintf("the sandbox's first process ended unexpectedly (exit code %d, signal %d)", exit.Code, exit.Signal)
	}
	if n, err := e.o.Cgroups.OOMKills(aetherPart(in.snapshot().made.cgroups)); err == nil && n > 0 {
		return sandbox.ReasonOOM, "the kernel ran out of the memory set aside for the sandbox's first process and killed it"
	}
	return sandbox.ReasonKilled, "the sandbox's first process was killed from outside"
}

// aetherPart asks about the part of the groups that holds aether, as if it were the user's.
func aetherPart(cg driver.Cgroups) driver.Cgroups {
	return driver.Cgroups{V2User: cg.V2Aether, V1User: cg.V1Aether}
}

// watchGuest ends the sandbox when aether can no longer be spoken to.
func (e *Edge) watchGuest(in *instance, g Guest) {
	select {
	case <-g.Done():
	case <-in.ctx.Done():
		return
	}
	select {
	case <-time.After(deathGrace):
	case <-in.ctx.Done():
		return
	}
	code, message := sandbox.ReasonGuestDied, "the connection to the sandbox's first process is lost for good"
	var known *sandbox.Error
	if errors.As(g.Err(), &known) {
		message = known.Message
		if known.Reason == "guest_protocol" {
			code = known.Reason
		}
	}
	e.fault(in, code, g.Err(), message)
}
