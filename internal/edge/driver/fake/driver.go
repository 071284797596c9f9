package fake

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"syscall"

	"dsec/internal/edge/driver"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// A Driver runs nothing: its processes are entries of the Host.
type Driver struct {
	h    *Host
	name string
}

var _ driver.Driver = (*Driver)(nil)

// Driver is the host's driver, named as the container backend so that ordinary specs find it.
func (h *Host) Driver() *Driver { return &Driver{h: h, name: sandbox.BackendContainer} }

// A process is what Start makes.
type process struct {
	done chan struct{}
	once sync.Once
	exit driver.Exit // once done is closed
}

func (p *process) end(e driver.Exit) {
	p.once.Do(func() {
		p.exit = e
		close(p.done)
	})
}

// data is what a handle carries and a "process" object holds: the token tells a process from a later one of the same id,
// as pid and start time do.
type data struct {
	Token string `json:"token"`
	Key   []byte `json:"key,omitempty"`
}

func tokenOf(h driver.Handle) string {
	var d data
	if json.Unmarshal(h.Data, &d) != nil {
		return ""
	}
	return d.Token
}

func (d *Driver) Name() string { return d.name }

func (d *Driver) Probe(ctx context.Context) (driver.Capabilities, error) {
	c := driver.Capabilities{Backend: d.name, Features: map[string]string{"isolation": "none: nothing runs"}}
	return c, d.h.call(ctx, "driver.Probe", "", func() error { return nil })
}

func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Handle, error) {
	if spec.ID == "" {
		return driver.Handle{}, sandbox.Errorf(sandbox.InvalidArgument, "bad_id", "a sandbox needs an id")
	}
	if d.h.get("created", spec.ID, nil) {
		return driver.Handle{}, sandbox.Errorf(sandbox.AlreadyExists, "exists", "sandbox %s exists", spec.ID)
	}
	h := driver.Handle{Driver: d.name, Version: 1, ID: spec.ID}
	d.h.setHosts(spec.ID, spec.Hosts)
	return h, d.h.call(ctx, "driver.Create", spec.ID, func() error {
		return d.h.put("created", spec.ID, data{Key: spec.GuestKey})
	})
}

// WriteHosts keeps lines for Host.HostsOf.
func (d *Driver) WriteHosts(ctx context.Context, h driver.Handle, _ rootfs.Container, lines string) error {
	return d.h.call(ctx, "driver.WriteHosts", h.ID, func() error {
		d.h.setHosts(h.ID, lines)
		return nil
	})
}

func (h *Host) setHosts(id sandbox.ID, lines string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hosts[id] = lines
}

// HostsOf is what was last written for a sandbox's /etc/hosts.
func (h *Host) HostsOf(id sandbox.ID) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.hosts[id]
}

func (d *Driver) Start(ctx context.Context, h driver.Handle) (driver.Handle, error) {
	var made data
	if !d.h.get("created", h.ID, &made) {
		return h, fmt.Errorf("sandbox %s was not created", h.ID)
	}
	made.Token = rand.Text()
	err := d.h.call(ctx, "driver.Start", h.ID, func() error {
		d.h.mu.Lock()
		d.h.procs[h.ID] = &process{done: make(chan struct{})}
		d.h.mu.Unlock()
		return d.h.put("process", h.ID, made)
	})
	if err != nil {
		return h, err
	}
	h.Data, err = json.Marshal(data{Token: made.Token})
	return h, err
}

// Stop kills every process.
func (d *Driver) Stop(ctx context.Context, h driver.Handle) error {
	return d.h.call(ctx, "driver.Stop", h.ID, func() error { return d.h.Die(h.ID, driver.Exit{Code: -1, Signal: 9}) })
}

// Die ends a sandbox's process as if it had ended by itself or been killed from outside.
func (h *Host) Die(id sandbox.ID, e driver.Exit) error {
	if err := h.remove("process", id); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.procs[id]; p != nil {
		p.end(e)
	}
	return nil
}

func (d *Driver) Destroy(ctx context.Context, h driver.Handle) error {
	return d.h.call(ctx, "driver.Destroy", h.ID, func() error {
		if err := d.h.Die(h.ID, driver.Exit{Code: -1, Signal: 9}); err != nil {
			return err
		}
		d.h.mu.Lock()
		delete(d.h.procs, h.ID)
		delete(d.h.hosts, h.ID)
		d.h.mu.Unlock()
		return d.h.remove("created", h.ID)
	})
}

// find is the process that h means, nil if that is not running.
func (d *Driver) find(h driver.Handle) *process {
	var now data
	if !d.h.get("process", h.ID, &now) || now.Token != tokenOf(h) || now.Token == "" {
		return nil
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	p := d.h.procs[h.ID]
	if p == nil { // an earlier process of the test started it
		p = &process{done: make(chan struct{})}
		d.h.procs[h.ID] = p
	}
	return p
}

func (d *Driver) Wait(ctx context.Context, h driver.Handle) (driver.Exit, error) {
	if err := d.h.hook(ctx, "driver.Wait", h.ID); err != nil {
		return driver.Exit{}, err
	}
	p := d.find(h)
	if p == nil {
		return d.ended(h), nil
	}
	select {
	case <-p.done:
		return p.exit, nil
	case <-ctx.Done():
		return driver.Exit{}, ctx.Err()
	}
}

// ended is how a process ended that is not running any more: not known, if nobody saw it.
func (d *Driver) ended(h driver.Handle) driver.Exit {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	if p := d.h.procs[h.ID]; p != nil {
		select {
		case <-p.done:
			return p.exit
		default:
		}
	}
	return driver.Exit{Code: -1}
}

func (d *Driver) Recover(ctx context.Context, h driver.Handle) (driver.Status, error) {
	if h.Driver != d.name {
		return driver.Status{}, sandbox.Errorf(sandbox.InvalidArgument, "foreign_handle", "the handle belongs to driver %q", h.Driver)
	}
	if err := d.h.hook(ctx, "driver.Recover", h.ID); err != nil {
		return driver.Status{}, err
	}
	if d.find(h) == nil {
		return driver.Status{Exit: d.ended(h)}, nil
	}
	return driver.Status{Running: true}, nil
}

func (d *Driver) DialGuest(ctx context.Context, h driver.Handle) (net.Conn, error) {
	if err := d.h.hook(ctx, "driver.DialGuest", h.ID); err != nil {
		return nil, err
	}
	var made data
	if d.find(h) == nil || !d.h.get("created", h.ID, &made) {
		return nil, sandbox.Errorf(sandbox.Unavailable, "guest_unavailable", "the sandbox's first process does not listen").
			WithCause(syscall.ECONNREFUSED) // as a socket without its listener says
	}
	here, there := net.Pipe()
	if d.h.Serve != nil {
		go d.h.Serve(there, h.ID, made.Key) // ends with the connection, which the caller owns
	}
	return here, nil
}

// Sweep removes everything that belongs to no id in keep.
func (d *Driver) Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error) {
	if err := d.h.hook(ctx, "driver.Sweep", ""); err != nil {
		return nil, err
	}
	seen := make(map[sandbox.ID]bool)
	var found []sandbox.ID
	for _, id := range append(d.h.list("process"), d.h.list("created")...) {
		if keep[id] || seen[id] {
			continue
		}
		seen[id] = true
		found = append(found, id)
		if err := d.Destroy(ctx, driver.Handle{Driver: d.name, ID: id}); err != nil {
			return found, err
		}
	}
	return found, nil
}
