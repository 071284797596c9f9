package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	// undoDeadline bounds the clean-up after a start that failed; what it leaves is Destroy's.
	undoDeadline = 10 * time.Second

	firstPause, longestPause = 200 * time.Microsecond, 20 * time.Millisecond
)

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

// killGroup kills all in a v2 group and below and waits until it is empty. A group that is not there is empty.
func killGroup(ctx context.Context, group string) error {
	if group == "" {
		return nil
	}
	if err := linux.Lsetxattr(group, killedMark, "1"); err != nil && !gone(err) {
		return fmt.Errorf("mark control group: %w", err)
	}
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		// Again every time: stage may have been between two groups.
		err := os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0)
		if gone(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kill control group: %w", err)
		}
		populated, err := isPopulated(group)
		if err != nil || !populated {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until control group is empty: %w", ctx.Err())
		case <-time.After(pause):
		}
	}
}

func isPopulated(group string) (bool, error) {
	events, err := os.ReadFile(filepath.Join(group, "cgroup.events"))
	if gone(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read control group's events: %w", err)
	}
	return !strings.Contains(string(events), "populated 0"), nil
}

// gone reports whether a control group was removed, before or while a file of it was used.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
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
