package container

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Recover implements driver.Driver. A process counts as aether only with the recorded start time and inside the sandbox's own
// control group: numbers of processes come again.
func (d *Driver) Recover(ctx context.Context, h driver.Handle) (driver.Status, error) {
	over := driver.Status{Exit: driver.Exit{Code: -1}}
	if err := ctx.Err(); err != nil {
		return over, err
	}
	rec, err := d.known(h)
	if err != nil {
		return over, err
	}
	if said, err := parseHandle(h); err != nil || said.Pid != 0 && (said.Pid != rec.Pid || said.Start != rec.Start) {
		return over, err // the handle is of another start
	}
	if b := d.box(h.ID); b != nil {
		return d.status(b), nil
	}
	if rec.Pid == 0 {
		return over, nil
	}
	process, err := findAether(rec)
	if errors.Is(err, os.ErrNotExist) {
		return over, nil
	}
	if err != nil {
		return over, fmt.Errorf("recover sandbox: %w", err)
	}
	if err := d.watch(h.ID, &box{done: make(chan struct{})}, process); err != nil {
		return over, err
	}
	return driver.Status{Running: true}, nil
}

func (d *Driver) status(b *box) driver.Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-b.done:
		return driver.Status{Exit: b.exit}
	default:
		return driver.Status{Running: b.process != nil, Exit: driver.Exit{Code: -1}}
	}
}

// findAether refers to the process first and looks then: from there on its number cannot change hands. os.ErrNotExist if
// it is not what was recorded.
func findAether(rec record) (*linux.Process, error) {
	process, err := linux.OpenProcess(rec.Pid)
	if err != nil {
		return nil, err
	}
	start, err := linux.StartTime(rec.Pid)
	if err == nil && start != rec.Start {
		err = fmt.Errorf("process %d is another one: %w", rec.Pid, os.ErrNotExist)
	}
	if err == nil {
		err = checkMember(rec.Aether, rec.Pid)
	}
	if err != nil {
		process.Close()
		return nil, err
	}
	return process, nil
}

func checkMember(group string, pid int) error {
	f, err := os.Open(filepath.Join(group, "cgroup.procs"))
	if err != nil {
		return fmt.Errorf("list control group: %w", err)
	}
	defer f.Close()
	want := strconv.Itoa(pid)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if lines.Text() == want {
			return nil
		}
	}
	return fmt.Errorf("process %d is not in %s: %w", pid, group, os.ErrNotExist)
}

// Sweep implements driver.Driver.
func (d *Driver) Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error) {
	found, err := d.records.list()
	if err != nil {
		return nil, err
	}
	sockets, err := os.ReadDir(d.dirs.sockets)
	if err != nil {
		return nil, fmt.Errorf("list sockets: %w", err)
	}
	recorded := make(map[sandbox.ID]bool, len(found))
	for _, id := range found {
		recorded[id] = true
	}
	for _, s := range sockets {
		if id := sandbox.ID(s.Name()); isID(s.Name()) && !recorded[id] {
			found = append(found, id)
		}
	}
	found = slices.DeleteFunc(found, func(id sandbox.ID) bool { return keep[id] })
	var errs []error
	for _, id := range found {
		if err := d.Destroy(ctx, driver.Handle{Driver: Name, Version: handleVersion, ID: id}); err != nil {
			errs = append(errs, fmt.Errorf("sweep sandbox %s: %w", id, err))
		}
	}
	return found, errors.Join(errs...)
}
