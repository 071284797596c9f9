package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// handleData is what a handle of this driver holds: a copy of the record, so that the edge's journal alone is enough.
type handleData = record

func makeHandle(id sandbox.ID, rec record) (driver.Handle, error) {
	data, err := json.Marshal(rec)
	if err != nil {
		return driver.Handle{}, fmt.Errorf("encode handle: %w", err)
	}
	return driver.Handle{Driver: Name, Version: handleVersion, ID: id, Data: data}, nil
}

// parseHandle checks a handle. One without data, of a Create whose answer was lost, gives an empty record.
func parseHandle(h driver.Handle) (record, error) {
	switch {
	case !isID(string(h.ID)):
		return record{}, fmt.Errorf("handle with the id %q", h.ID)
	case h.Driver != "" && h.Driver != Name:
		return record{}, fmt.Errorf("handle of driver %q given to %q", h.Driver, Name)
	case h.Version > handleVersion:
		return record{}, sandbox.Errorf(sandbox.Unsupported, "handle_too_new",
			"the sandbox was made by a newer version of dsec; run that version, or end the sandbox with it")
	}
	rec := handleData{Slot: noSlot}
	if len(h.Data) == 0 {
		return rec, nil
	}
	if err := json.Unmarshal(h.Data, &rec); err != nil {
		return record{}, fmt.Errorf("decode handle: %w", err)
	}
	return rec, rec.check()
}

func checkSpec(s driver.Spec) error {
	switch {
	case !isID(string(s.ID)):
		return fmt.Errorf("create: id %q", s.ID)
	case !filepath.IsAbs(s.Rootfs.Upper.Dir):
		return fmt.Errorf("create: upper directory %q", s.Rootfs.Upper.Dir)
	case s.Cgroups.V2Aether == "" || filepath.Dir(s.Cgroups.V2Aether) != filepath.Dir(s.Cgroups.V2User):
		return fmt.Errorf("create: control groups %q and %q are no siblings", s.Cgroups.V2Aether, s.Cgroups.V2User)
	case len(s.Hostname) > 64: // the kernel's __NEW_UTS_LEN
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_spec", "host name %q is longer than 64 bytes", s.Hostname)
	}
	return nil
}

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Handle, error) {
	if err := errors.Join(ctx.Err(), checkSpec(spec)); err != nil {
		return driver.Handle{}, err
	}
	slot, err := d.ranges.acquire(ctx, spec.ID)
	if err != nil {
		return driver.Handle{}, err
	}
	rec := record{
		Slot: slot, Aether: filepath.Clean(spec.Cgroups.V2Aether), Group: filepath.Dir(filepath.Clean(spec.Cgroups.V2Aether)),
	}
	if err := d.records.create(spec.ID, rec); err != nil {
		d.ranges.release(slot, spec.ID)
		if errors.Is(err, os.ErrExist) {
			return driver.Handle{}, sandbox.Errorf(sandbox.AlreadyExists, "sandbox_exists", "sandbox %s exists already", spec.ID)
		}
		return driver.Handle{}, err
	}
	d.at("intended")
	h, err := d.create(ctx, spec, rec)
	if err != nil {
		return driver.Handle{}, errors.Join(err, d.removeTraces(spec.ID, slot))
	}
	return h, nil
}

// create is Create once there is a record.
func (d *Driver) create(ctx context.Context, spec driver.Spec, rec record) (driver.Handle, error) {
	b := &built{}
	err := d.build(b, spec, rec.Slot)
	if err = errors.Join(err, ctx.Err()); err != nil {
		b.abandon()
		return driver.Handle{}, fmt.Errorf("create container: %w", err)
	}
	h, err := makeHandle(spec.ID, rec)
	if err == nil {
		err = d.keep(spec.ID, &box{built: b, log: b.log, done: make(chan struct{})})
	}
	if err != nil {
		b.abandon()
		return driver.Handle{}, err
	}
	return h, nil
}

var errDetached = sandbox.Errorf(sandbox.Unavailable, "edge_stopping", "this node is stopping; retry elsewhere")

func (d *Driver) keep(id sandbox.ID, b *box) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errDetached
	}
	d.boxes[id] = b
	return nil
}

func (d *Driver) box(id sandbox.ID) *box {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.boxes[id]
}

// removeTraces removes what outlives this process. The record goes last: until then a later process finds the rest.
func (d *Driver) removeTraces(id sandbox.ID, slot int) error {
	if err := d.sockets.Remove(string(id)); err != nil {
		return err
	}
	if err := d.records.remove(id); err != nil {
		return err
	}
	if slot != noSlot {
		d.ranges.release(slot, id)
	}
	return nil
}

// Start implements driver.Driver. aether may run only after its pid and start time are in the record: stage waits for that.
func (d *Driver) Start(ctx context.Context, h driver.Handle) (driver.Handle, error) {
	rec, err := parseHandle(h)
	if err != nil {
		return h, err
	}
	b, made := d.takeBuilt(h.ID)
	if made == nil {
		return h, sandbox.Errorf(sandbox.FailedPrecondition, "not_created",
			"sandbox %s cannot be started: it was not created by this process of the edge, or was started already", h.ID)
	}
	process, err := d.launch(ctx, h.ID, &rec, made)
	if err != nil {
		made.abandon()
		// Whatever stage left is in the sandbox's groups.
		err = errors.Join(err, d.undoStart(ctx, h.ID, rec))
		d.drop(h.ID, b)
		return h, err
	}
	d.at("started")
	made.remote.Close()
	if err := d.watch(h.ID, b, process); err != nil {
		return h, err
	}
	return makeHandle(h.ID, rec)
}

// takeBuilt takes what Create made, once.
func (d *Driver) takeBuilt(id sandbox.ID) (*box, *built) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := d.boxes[id]
	if b == nil {
		return nil, nil
	}
	made := b.built
	b.built = nil
	return b, made
}

// drop forgets a sandbox that never ran, and tells those who wait for it.
func (d *Driver) drop(id sandbox.ID, b *box) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.boxes[id] == b {
		delete(d.boxes, id)
	}
	b.exit = driver.Exit{Code: -1}
	close(b.done)
}

// launch runs stage until aether runs, and records it in between.
func (d *Driver) launch(ctx context.Context, id sandbox.ID, rec *record, b *built) (*linux.Process, error) {
	if _, err := b.remote.Write(b.plan); err != nil {
		return nil, fmt.Errorf("hand over plan: %w", err)
	}
	stagePid, err := linux.Spawn{Path: d.stage.bin, Args: []string{"stage", "run"}, Files: b.files, Cgroup: b.group}.Start()
	if err != nil {
		return nil, err
	}
	b.close() // else the end of the socket would never be seen
	t := &takeoff{driver: d, id: id, rec: rec, control: b.remote}
	err = t.follow(ctx)
	if err == nil && t.process == nil {
		err = fmt.Errorf("stage ended without a report")
	}
	if err != nil {
		return nil, errors.Join(err, t.giveUp(stagePid))
	}
	if _, err := linux.Reap(stagePid); err != nil {
		return nil, errors.Join(err, t.abort())
	}
	return t.process, nil
}
