package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// undoDeadline bounds the clean-up after a start that failed; what it leaves is Destroy's.
const undoDeadline = 10 * time.Second

// Stop implements driver.Driver: SIGKILL to everything in the sandbox's groups at once.
func (d *Driver) Stop(ctx context.Context, h driver.Handle) error {
	rec, err := d.known(h)
	if err != nil {
		return err
	}
	if err := killGroup(ctx, rec.Group); err != nil {
		return fmt.Errorf("stop sandbox: %w", err)
	}
	b := d.box(h.ID)
	if b == nil || d.onlyCreated(b) {
		return nil
	}
	select {
	case <-b.done: // reaped, or the start that was under way has failed
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of aether: %w", ctx.Err())
	}
}

func (d *Driver) onlyCreated(b *box) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return b.built != nil
}

// known is what is known of a sandbox: by its record, which is the newest, or else by the handle.
func (d *Driver) known(h driver.Handle) (record, error) {
	fromHandle, err := parseHandle(h)
	if err != nil {
		return record{}, err
	}
	rec, err := d.records.read(h.ID)
	if errors.Is(err, os.ErrNotExist) {
		fromHandle.Slot = noSlot // given back with the record; somebody else may have it
		return fromHandle, nil
	}
	if err != nil {
		return record{}, err
	}
	if rec.Group == "" {
		rec.Group, rec.Aether = fromHandle.Group, fromHandle.Aether
	}
	return rec, nil
}

// killedMark is an attribute of a group in which everything was killed. A kernel (measured: 6.18) may kill whatever is
// born in such a group later, so that a second sandbox of the same id has to enter another way.
const killedMark = "trusted.dsec.killed"

func wasKilled(group string) bool {
	attrs, err := linux.Lxattrs(group)
	return err == nil && attrs[killedMark] != ""
}

// killGroup kills all in a v2 group and below and waits until it is empty. A group that is not there is empty. It kills also
// what it cannot mark, and says so: then it is called again.
func killGroup(ctx context.Context, group string) error {
	if group == "" {
		return nil
	}
	err := linux.Lsetxattr(group, killedMark, "1") // before: whoever sees the group empty sees the mark
	if linux.IsGone(err) {
		err = nil
	}
	return errors.Join(err, linux.KillCgroup(ctx, group))
}

// undoStart ends what a failed start left, whatever became of the request.
func (d *Driver) undoStart(ctx context.Context, id sandbox.ID, rec record) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoDeadline)
	defer cancel()
	if err := killGroup(ctx, rec.Group); err != nil {
		return err
	}
	return d.removeTraces(id, rec.Slot)
}

// Destroy implements driver.Driver.
func (d *Driver) Destroy(ctx context.Context, h driver.Handle) error {
	rec, err := d.known(h)
	if err != nil {
		return err
	}
	if err := d.Stop(ctx, h); err != nil {
		return err
	}
	if b, made := d.takeBuilt(h.ID); made != nil {
		made.abandon()
		d.drop(h.ID, b)
	}
	d.mu.Lock()
	delete(d.boxes, h.ID)
	d.mu.Unlock()
	return d.removeTraces(h.ID, rec.Slot)
}
