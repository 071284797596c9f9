package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"dsec/internal/linux"
)

// stageRunner starts the program stage.
type stageRunner struct {
	bin  string
	null int // /dev/null, read and write
}

// A helper is a stage that makes a namespace and lives until end.
type helper struct {
	pid     int
	control *os.File
}

const helperDeadline = 10 * time.Second

// helper starts stage in a mode, with more descriptors where the mode needs them, and waits until it is ready.
func (s *stageRunner) helper(ctx context.Context, mode, arg string, more ...int) (*helper, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	control, remote, err := linux.SocketPair()
	if err != nil {
		return nil, err
	}
	pid, err := linux.Spawn{
		Path: s.bin, Args: []string{"stage", mode, arg}, Files: append([]int{s.null, s.null, s.null, remote}, more...), Cgroup: -1,
	}.Start()
	linux.Close(remote)
	if err != nil {
		control.Close()
		return nil, err
	}
	h := &helper{pid: pid, control: control}
	if err := h.expectReady(); err != nil {
		h.end()
		return nil, err
	}
	return h, nil
}

func (h *helper) expectReady() error {
	if err := h.control.SetReadDeadline(time.Now().Add(helperDeadline)); err != nil {
		return fmt.Errorf("set deadline: %w", err)
	}
	r, err := readReport(h.control)
	switch {
	case err != nil:
		return err
	case r.kind == reportFailure:
		return r.failure()
	case r.kind != reportReady:
		return fmt.Errorf("stage reported %d, want ready", r.kind)
	}
	return nil
}

// proceed lets it go on, and waits until it is ready again.
func (h *helper) proceed() error {
	if _, err := h.control.Write([]byte{1}); err != nil {
		return fmt.Errorf("tell stage to go on: %w", err)
	}
	return h.expectReady()
}

// end ends the helper and reaps it. What it made lives on where somebody holds it.
func (h *helper) end() {
	h.control.Close()
	_ = linux.Kill(h.pid) // it may hang; it is our child and not reaped yet, so it is the right one
	_, _ = linux.Reap(h.pid)
}

// readReport reads one message. io.EOF says that stage and what it became have closed the socket. If they did so with a message of
// ours unread, the kernel says that first, once, and gives what they had sent afterwards.
func readReport(control *os.File) (report, error) {
	buf := make([]byte, 64)
	n, err := control.Read(buf)
	if linux.IsBrokenPipe(err) {
		n, err = control.Read(buf)
	}
	switch {
	case errors.Is(err, io.EOF):
		return report{}, io.EOF
	case err != nil:
		return report{}, fmt.Errorf("read report of stage: %w", err)
	}
	return parseReport(buf[:n])
}
