package edge

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/failpoint"
	"dsec/sandbox"
)

// trustedTimeout bounds a trusted command without a timeout of its own: nothing else in its sandbox goes on meanwhile.
const trustedTimeout = 10 * time.Minute

// trustPoint is between the groups and their handing over.
var trustPoint = failpoint.New("trust")

// trust sees to it that aether can run trusted commands. From then on it needs nobody for them: it stops the others and lets
// them go on by itself, so that an edge that dies leaves no sandbox standing still.
func (e *Edge) trust(ctx context.Context, in *instance, g Guest) error {
	if e.o.Tools == nil {
		if e.o.NoTools != nil {
			return e.o.NoTools
		}
		return sandbox.Errorf(sandbox.Unsupported, "no_trusted_tools", "this node has no tools for trusted commands; `dsec doctor` says why")
	}
	in.trusting.Lock()
	defer in.trusting.Unlock()
	if in.trusted == g { // by this connection's edge; a hand-over too many does no harm
		return nil
	}
	in.mu.Lock()
	cg := in.made.cgroups
	in.mu.Unlock()
	var made driver.Trusted
	err := trustPoint.Around(ctx, func() (err error) {
		made, err = e.o.Cgroups.Trusted(ctx, in.id, cg, in.intent.Spec.Limits)
		return err
	})
	if _, gone := in.live(); gone != nil { // its teardown may have removed the groups before these were made
		undo, cancel := detached(ctx, sandbox.StoppingDeadline)
		defer cancel()
		if err := e.o.Cgroups.Remove(undo, in.id); err != nil {
			e.log.Warn("groups of trusted commands are not removed", "sandbox_id", in.id, "error", err)
		}
		return gone
	}
	if err != nil {
		return fmt.Errorf("making control groups of trusted commands: %w", err)
	}
	grounds := Grounds{Freeze: made.Freeze, Group: made.V2, Tools: e.o.Tools.Mount()}
	for _, controller := range slices.Sorted(maps.Keys(made.V1)) {
		grounds.Tasks = append(grounds.Tasks, filepath.Join(made.V1[controller], "tasks"))
	}
	if err := g.Trust(ctx, grounds); err != nil {
		if _, gone := in.live(); gone != nil { // and its groups with it
			return gone
		}
		return err
	}
	in.trusted = g
	return nil
}

// asTrusted completes a trusted command: what the sandbox is told of users and environment is not used.
func asTrusted(cmd sandbox.Command) sandbox.Command {
	setDefault(&cmd.Timeout, trustedTimeout)
	setDefault(&cmd.User, "0:0")
	return cmd
}
