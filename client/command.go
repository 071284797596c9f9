package client

import (
	"context"
	"sync"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

const (
	// pollWait is how long one request waits for the end of a command, in seconds: short enough for a vanished connection to
	// be noticed.
	pollWait = 20
	// CaptureLimit is how much of a stream a result holds at most, in bytes: the most that the API inlines.
	CaptureLimit = 1 << 20
)

// A Command is one command of a sandbox: one that was started here, or any other, by its id.
type Command struct {
	ID string
	sb *Sandbox

	mu    sync.Mutex
	ended *dsecv1.CommandResult // without output, once it is known
}

// Command is the command with that id. Nothing is asked of the platform.
func (s *Sandbox) Command(id string) *Command { return &Command{ID: id, sb: s} }

// Start starts a command and returns when it runs. It gets an id here, so that an answer that got lost is asked for again
// without a second start.
func (s *Sandbox) Start(ctx context.Context, cmd *dsecv1.Command) (*Command, error) {
	return s.StartWithID(ctx, cmd, NewKey())
}

// StartWithID starts a command with that id, or finds the one that has it.
func (s *Sandbox) StartWithID(ctx context.Context, cmd *dsecv1.Command, id string) (*Command, error) {
	res, err := s.exec(ctx, cmd, id, 0, 1)
	if err != nil {
		return nil, err
	}
	return s.Command(res.GetCommandId()), nil
}

// Run runs a command to its end. The result holds the first CaptureLimit bytes of its output; the rest can be read with Output. If ctx ends
// first the command runs on.
func (s *Sandbox) Run(ctx context.Context, cmd *dsecv1.Command) (*dsecv1.CommandResult, error) {
	id := NewKey()
	res, err := s.exec(ctx, cmd, id, pollWait, CaptureLimit)
	for err == nil && res.GetRunning() {
		res, err = s.Command(id).Get(ctx, pollWait, CaptureLimit)
	}
	return res, err
}

func (s *Sandbox) exec(ctx context.Context, cmd *dsecv1.Command, id string, wait float64, inline int32) (*dsecv1.CommandResult, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.Exec, &dsecv1.ExecRequest{SandboxId: s.ID, CommandId: id, Command: cmd, WaitSeconds: wait, InlineLimit: inline})
	return res.GetResult(), err
}

// Commands lists the sandbox's commands. The filter's sandbox_id is set here; nil = all.
func (s *Sandbox) Commands(ctx context.Context, filter *dsecv1.ListCommandsRequest) ([]*dsecv1.CommandResult, error) {
	req := &dsecv1.ListCommandsRequest{SandboxId: s.ID, Tag: filter.GetTag(), Session: filter.GetSession(), Running: filter.GetRunning()}
	res, err := invoke(ctx, s.c, s.c.sandboxes.ListCommands, req)
	return res.GetCommands(), err
}

// Get is the command's present state, after waiting for its end for up to so many seconds, with up to inline bytes of each
// of its streams; 0 = 64 KiB.
func (k *Command) Get(ctx context.Context, wait float64, inline int32) (*dsecv1.CommandResult, error) {
	req := &dsecv1.GetCommandRequest{SandboxId: k.sb.ID, CommandId: k.ID, WaitSeconds: wait, InlineLimit: inline}
	res, err := invoke(ctx, k.sb.c, k.sb.c.sandboxes.GetCommand, req)
	return res.GetResult(), err
}

// Wait waits for the command's end, however long it takes. Its result is without output.
func (k *Command) Wait(ctx context.Context) (*dsecv1.CommandResult, error) {
	k.mu.Lock()
	res := k.ended
	k.mu.Unlock()
	if res != nil {
		return res, nil
	}
	for {
		res, err := k.Get(ctx, pollWait, 1)
		if err != nil {
			return nil, err
		}
		if !res.GetRunning() {
			k.mu.Lock()
			k.ended = res
			k.mu.Unlock()
			return res, nil
		}
	}
}

// Kill ends the command's whole process tree; another signal than 0 goes to its process group. Only the first is asked again
// where an answer got lost: another signal might arrive twice.
func (k *Command) Kill(ctx context.Context, signal int32) error {
	if signal != 0 {
		return k.KillOnce(ctx, signal)
	}
	_, err := invoke(ctx, k.sb.c, k.sb.c.sandboxes.KillCommand, k.killRequest(signal))
	return err
}

// KillOnce is Kill that does not sit an outage out.
func (k *Command) KillOnce(ctx context.Context, signal int32) error {
	_, err := invokeOnce(ctx, k.sb.c, k.sb.c.sandboxes.KillCommand, k.killRequest(signal))
	return err
}

func (k *Command) killRequest(signal int32) *dsecv1.KillCommandRequest {
	return &dsecv1.KillCommandRequest{SandboxId: k.sb.ID, CommandId: k.ID, Signal: signal}
}

// Resize sets the window of a command that has a terminal.
func (k *Command) Resize(ctx context.Context, rows, cols uint16) error {
	req := &dsecv1.ResizeTerminalRequest{SandboxId: k.sb.ID, CommandId: k.ID, Rows: uint32(rows), Cols: uint32(cols)}
	_, err := invoke(ctx, k.sb.c, k.sb.c.sandboxes.ResizeTerminal, req)
	return err
}

// RefusesInput reports whether err says that a command has ended or closed its input. Anything else that is refused, like a gap in the
// input, would be lost in silence.
func RefusesInput(err error) bool {
	switch sandbox.ReasonOf(err) {
	case "stdin_broken", "stdin_closed", "sandbox_ended", "sandbox_not_found":
		return true
	}
	return false
}
