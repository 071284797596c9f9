package edge

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/journal"
	"dsec/internal/edge/steps"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// making is a sandbox on its way up or down. Its methods read and write what the steps hand on only under the instance's
// lock: a setup that hangs runs beside the teardown.
type making struct {
	e  *Edge
	in *instance
	// leave gives the setup's place to another: what follows may take long, and costs the node nothing.
	leave func()
}

// sandboxSteps make a sandbox. rootfs, network and limits do not need each other, yet run one after the other: together
// they take a fraction of a millisecond, and on a busy node handing them to other goroutines costs more than it saves.
var sandboxSteps *steps.List[*making]

// init, since the steps lead back to the list: what they start may tear down.
func init() {
	sandboxSteps = steps.New(
		steps.Step[*making]{Name: "admit", Setup: setupAdmit, Teardown: teardownAdmit},
		steps.Step[*making]{Name: "rootfs", Setup: setupRootfs, Teardown: teardownRootfs},
		steps.Step[*making]{Name: "network", Setup: setupNetwork, Teardown: teardownNetwork, After: "limits"},
		steps.Step[*making]{Name: "limits", Setup: setupLimits, Teardown: teardownLimits},
		steps.Step[*making]{Name: "policy", Setup: setupPolicy},
		steps.Step[*making]{Name: "create", Setup: setupCreate, Teardown: teardownCreate},
		steps.Step[*making]{Name: "start", Setup: setupStart, Teardown: teardownStart},
		steps.Step[*making]{Name: "guest", Setup: setupGuest},
		steps.Step[*making]{Name: "probe", Setup: setupProbe},
		steps.Step[*making]{Name: "ready", Setup: setupReady},
	)
}

func (m *making) update(f func(*made)) {
	m.in.mu.Lock()
	defer m.in.mu.Unlock()
	f(&m.in.made)
}

// setupAdmit reserves room and writes the intent: from here on the sandbox is found after a crash.
func setupAdmit(ctx context.Context, m *making) error {
	if err := m.e.reserve(m.in); err != nil {
		return err
	}
	if err := m.e.record(ctx, journal.Record{Op: journal.OpIntent, ID: m.in.id, Intent: m.in.intent}); err != nil {
		return fmt.Errorf("recording intent: %w", err)
	}
	m.in.mu.Lock()
	defer m.in.mu.Unlock()
	m.in.journaled = true
	return nil
}

func teardownAdmit(_ context.Context, m *making) error {
	m.e.release(m.in)
	return nil
}

func setupRootfs(ctx context.Context, m *making) error {
	lowers, err := m.e.o.Layers.Acquire(ctx, m.in.id, m.in.intent.Sources)
	if err != nil {
		return fmt.Errorf("mounting layers: %w", err)
	}
	upper, err := m.e.createUpper(ctx, m.in.id, m.in.intent.Spec.Limits)
	if err != nil {
		return fmt.Errorf("making upper: %w", err)
	}
	m.update(func(d *made) { d.rootfs = rootfs.Container{Lowers: lowers, Upper: upper} })
	return nil
}

func (e *Edge) createUpper(ctx context.Context, id sandbox.ID, l sandbox.Limits) (rootfs.Upper, error) {
	if l.Inodes == 0 {
		return e.o.Uppers.Create(ctx, id, l.Disk)
	}
	counter, ok := e.o.Uppers.(InodeCounter)
	if !ok {
		return rootfs.Upper{}, errInodes
	}
	return counter.CreateCounted(ctx, id, l.Disk, l.Inodes)
}

var errInodes = sandbox.Errorf(sandbox.Unsupported, "inodes_not_limited",
	"the quota of this node's disk does not count inodes; leave their limit out: the limit of the disk bounds files too, since their metadata counts")

func teardownRootfs(ctx context.Context, m *making) error {
	return errors.Join(m.e.o.Uppers.Remove(ctx, m.in.id), m.e.o.Layers.Release(ctx, m.in.id))
}

func setupNetwork(ctx context.Context, m *making) error {
	m.in.net.changing.Lock()
	defer m.e.endChange(m.in)
	r := m.e.reach(m.in, m.in.intent.Network)
	n, err := m.e.o.Networks.Acquire(ctx, m.in.id, r.policy)
	if err != nil {
		return fmt.Errorf("acquiring network slot: %w", err)
	}
	m.update(func(d *made) {
		d.network = n
		m.in.net.applied, m.in.net.acquired = r, true
	})
	return nil
}

// teardownNetwork gives the slot to others: not while processes may be in it. Those are gone with their control groups.
func teardownNetwork(ctx context.Context, m *making) error {
	m.e.names.Release(m.in.id)
	return m.e.o.Networks.Release(ctx, m.in.id)
}

func setupLimits(ctx context.Context, m *making) error {
	cg, err := m.e.o.Cgroups.Create(ctx, m.in.id, m.in.intent.Spec.Limits)
	if err != nil {
		return fmt.Errorf("making control groups: %w", err)
	}
	m.update(func(d *made) { d.cgroups = cg })
	return nil
}

func teardownLimits(ctx context.Context, m *making) error { return m.e.o.Cgroups.Remove(ctx, m.in.id) }

// setupPolicy is where rules are compiled for what the host offers. All sandboxes have one policy today, which the
// driver and the device program apply; what is left is to refuse what nothing here enforces.
func setupPolicy(_ context.Context, m *making) error { return m.in.intent.Spec.Validate() }

func setupCreate(ctx context.Context, m *making) error {
	s := m.in.snapshot()
	d := s.made
	h, err := m.in.driver.Create(ctx, driver.Spec{
		ID: m.in.id, Hostname: m.in.hostname(), Limits: m.in.intent.Spec.Limits, Rootfs: d.rootfs, Network: d.network, Hosts: s.reach.hosts,
		Cgroups: d.cgroups, GuestKey: m.in.intent.GuestKey,
	})
	if err != nil {
		return fmt.Errorf("creating: %w", err)
	}
	m.update(func(d *made) {
		d.handle = &h
		m.in.net.written = s.reach.hosts
	})
	return nil
}

func (in *instance) hostname() string {
	if h := in.intent.Spec.Hostname; h != "" {
		return h
	}
	return string(in.id)
}

// handle is the driver's, or one that says no more than the id where the driver was interrupted.
func (m *making) handle() driver.Handle {
	if h := m.in.snapshot().made.handle; h != nil {
		return *h
	}
	return driver.Handle{Driver: m.in.driver.Name(), ID: m.in.id}
}

func teardownCreate(ctx context.Context, m *making) error {
	if err := m.in.driver.Destroy(ctx, m.handle()); err != nil {
		return fmt.Errorf("destroying: %w", err)
	}
	return nil
}

func setupStart(ctx context.Context, m *making) error {
	h, err := m.in.driver.Start(ctx, m.handle())
	if err != nil {
		return fmt.Errorf("starting: %w", err)
	}
	m.update(func(d *made) { d.handle = &h })
	m.e.spawn(func() { m.e.watchProcess(m.in, h) })
	return nil
}

// guestGrace is how long the client gets to notice that aether is gone.
const guestGrace = time.Second

// teardownStart ends all processes. The guest's client is closed here and not before, so that commands that still run end
// as killed, with the output they had; what it knows stays readable until the sandbox is forgotten.
func teardownStart(ctx context.Context, m *making) error {
	g := m.in.snapshot().guest
	idle := g == nil || g.Running() == 0
	if g != nil && idle {
		m.closeGuest(g)
	}
	if err := m.in.driver.Stop(ctx, m.handle()); err != nil {
		return fmt.Errorf("stopping: %w", err)
	}
	if idle {
		return nil
	}
	t := time.NewTimer(guestGrace)
	defer t.Stop()
	select {
	case <-g.Done():
	case <-t.C:
	}
	m.closeGuest(g)
	return nil
}

func (m *making) closeGuest(g Guest) {
	if err := g.Close(); err != nil {
		m.e.log.Warn("guest client did not close cleanly", "sandbox_id", m.in.id, "error", err)
	}
}

func setupGuest(ctx context.Context, m *making) error {
	g, err := m.e.connectGuest(ctx, m.in, m.handle())
	if err != nil {
		return fmt.Errorf("waiting for aether: %w", err)
	}
	m.in.mu.Lock()
	m.in.guest = g
	m.in.mu.Unlock()
	m.e.spawn(func() { m.e.watchGuest(m.in, g) })
	return nil
}

// setupReady writes what finds the sandbox again: from here on it survives the edge.
func setupReady(ctx context.Context, m *making) error {
	d := m.in.snapshot().made
	if d.handle == nil {
		return sandbox.Errorf(sandbox.Internal, "internal", "internal error: ready without a handle")
	}
	err := m.e.record(ctx, journal.Record{Op: journal.OpRunning, ID: m.in.id, Running: &journal.Running{
		Handle: *d.handle, Cgroups: d.cgroups, Network: d.network, Rootfs: d.rootfs, ReadyAt: time.Now(), Took: sandboxSteps.Took(&m.in.progress),
	}})
	if err != nil {
		return fmt.Errorf("recording: %w", err)
	}
	return nil
}
