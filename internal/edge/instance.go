package edge

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/journal"
	"dsec/internal/edge/steps"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// An instance is one sandbox on this edge: its life, and what its steps made.
type instance struct {
	id     sandbox.ID
	intent *journal.Intent // never changes
	driver driver.Driver
	ctx    context.Context // ends when it is terminal, or with the edge
	stop   context.CancelFunc

	lastUse  atomic.Int64 // Unix ns of the last activity
	recorded atomic.Int64 // the last activity that the journal knows
	requests atomic.Int64 // being served

	progress steps.Progress

	// events orders what is written of this sandbox: it is held while an event and its record are made. Above mu.
	events sync.Mutex

	mu        sync.Mutex
	life      life
	journaled bool // its intent is in the journal
	reserved  bool // admission holds something for it
	made      made
	guest     Guest
	callers   int   // of creates that wait for the outcome
	delivered bool  // a caller was told that it is ready
	undone    bool  // the last caller left: it is about to be ended, and nobody joins it any more
	cause     error // why the create failed, for its callers
	cancel    context.CancelFunc
	setupDone chan struct{} // closed when setup has returned; nil if there was none in this process
	forgotten bool          // no longer in the index: nothing is to be looked at any more
	abandoned bool          // teardown went on while setup had not returned
	tearing   bool          // an attempt is under way
	settled   chan struct{} // closed when it is ready or shall be gone
	isSettled bool
	gone      chan struct{} // closed when it is terminal

	net    netState
	oom    oomWatch
	inward inward

	probing probing

	trusting sync.Mutex
	trusted  Guest // that has got what trusted commands need; guarded by trusting

	clearing sync.Mutex // held by the one who clears aether's way: see watchStart
}

// made is what the steps hand on to later ones.
type made struct {
	handle  *driver.Handle // nil until the driver was asked to create
	cgroups driver.Cgroups
	network driver.Network
	rootfs  rootfs.Container
	took    map[string]time.Duration // by step, of an earlier process
}

func (e *Edge) newInstance(id sandbox.ID, intent *journal.Intent, d driver.Driver) *instance {
	in := &instance{
		id: id, intent: intent, driver: d, settled: make(chan struct{}), gone: make(chan struct{}),
		life: life{
			state: sandbox.Creating, createdAt: intent.CreatedAt, expiresAt: intent.CreatedAt.Add(intent.Spec.Lifetime),
			idle: intent.Spec.IdleTimeout, retention: e.o.Retention,
		},
	}
	in.net.network = intent.Network
	in.ctx, in.stop = context.WithCancel(e.ctx)
	in.lastUse.Store(intent.CreatedAt.UnixNano())
	in.recorded.Store(intent.CreatedAt.UnixNano())
	return in
}

// holdsKey reports whether a create with the same key gets this sandbox rather than a new one: unless somebody ended it,
// or it never became ready.
func (in *instance) holdsKey() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.holdsKeyLocked()
}

// join counts a caller more that waits for the outcome. With byKey it does so only for one that holds its key: looked at and
// counted in one step, or the last caller could leave in between, and the new one would wait for what is being undone.
func (in *instance) join(byKey bool) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if byKey && !in.holdsKeyLocked() {
		return false
	}
	in.callers++
	return true
}

func (in *instance) holdsKeyLocked() bool {
	switch in.life.state {
	case sandbox.Creating, sandbox.Ready:
		return !in.life.gone && !in.undone
	}
	switch in.life.reason.Code {
	case sandbox.ReasonDeleted, sandbox.ReasonCanceled, sandbox.ReasonNodeStopped:
		return false
	}
	return !in.life.readyAt.IsZero()
}

// use is what life asks about activity.
func (in *instance) use() use {
	u := use{last: time.Unix(0, in.lastUse.Load()), busy: in.requests.Load() > 0}
	in.mu.Lock()
	g := in.guest
	in.mu.Unlock()
	if g != nil && g.Running() > 0 {
		u.busy = true
	}
	return u
}

// snapshot is a consistent copy of what views and handlers need.
type snapshot struct {
	life    life
	guest   Guest
	made    made
	cause   error
	settled <-chan struct{}
	network journal.Network
	hosts   string // in its /etc/hosts
	reach   reach
}

func (in *instance) snapshot() snapshot {
	in.mu.Lock()
	defer in.mu.Unlock()
	return snapshot{life: in.life, guest: in.guest, made: in.made, cause: in.cause, settled: in.settled,
		network: in.net.network, hosts: in.net.written, reach: in.net.applied}
}

// settleLocked wakes who waits for the outcome of the create.
func (in *instance) settleLocked() {
	if !in.isSettled {
		in.isSettled = true
		close(in.settled)
	}
}

// activityGrain is how exactly the journal knows a sandbox's last activity: a tenth of its idle time, 1 s to 1 min.
func activityGrain(idle time.Duration) time.Duration {
	return min(max(idle/10, time.Second), time.Minute)
}

// touch notes activity. Once per grain it also goes to the journal, so that idle times continue after a restart.
func (e *Edge) touch(in *instance) {
	now := time.Now()
	in.lastUse.Store(now.UnixNano())
	was := in.recorded.Load()
	if now.Sub(time.Unix(0, was)) < activityGrain(in.intent.Spec.IdleTimeout) || !in.recorded.CompareAndSwap(was, now.UnixNano()) {
		return
	}
	if err := e.record(e.ctx, journal.Record{Op: journal.OpActivity, ID: in.id, At: now}); err != nil {
		e.log.Warn("activity is not recorded", "sandbox_id", in.id, "error", err)
	}
}

// begin notes that a request to the sandbox is being served, until the returned function is called.
func (e *Edge) begin(in *instance) (end func()) {
	in.requests.Add(1)
	e.touch(in)
	return func() {
		e.touch(in)
		in.requests.Add(-1)
	}
}
