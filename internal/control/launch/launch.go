// Package launch carries out what owner admits: it places a create, mints its id, asks the edge, and undoes what nobody
// received.
//
// What surprises:
//
//   - A create belongs to its waiters, not to the request that began it. A retry with the same key joins; the create is
//     rolled back when the last waiter leaves without having been given the answer. So a client that lost its connection
//     and one that is gone for ever differ only in whether they come back in time.
//   - The answer counts as received when it was written without an error. Until Release says so, it can be taken back.
//   - A rollback never uses a request's context. It is tried until the edge confirms, for at most rollbackFor; after that
//     the sandbox's own lifetime ends it.
//   - Nothing is created before every edge was asked what it has, or has shown to be away: an idempotency key of before
//     the start must be known.
package launch

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/iam"
	"dsec/internal/control/owner"
	"dsec/internal/control/placement"
	"dsec/sandbox"
)

const (
	maxPlaces    = 3 // edges that are tried for one create
	rollbackFor  = time.Minute
	rollbackCall = 10 * time.Second // one try
	rollbackWait = 100 * time.Millisecond
	answerGrace  = 5 * time.Second  // after the deadline, for the edge to say that it has passed
	rebuildFor   = 10 * time.Second // after the start, for edges to say what they have
	ownerEpoch   = 1                // there is one apiserver
)

// An Edge is what is asked of an edge: *edgeclient.Client.
type Edge interface {
	Create(ctx context.Context, r *edgev1.CreateSandbox) (result *edgev1.CreateResult, sent bool, err error)
	GetSandbox(ctx context.Context, signed string, r *edgev1.GetSandboxRequest) (*dsecv1.Sandbox, error)
	ListSandboxes(ctx context.Context, signed string, r *edgev1.ListSandboxesRequest) (*edgev1.ListSandboxesResponse, error)
	DeleteSandbox(ctx context.Context, signed string, r *edgev1.DeleteSandboxRequest) (*dsecv1.Sandbox, error)
}

// Grants signs for an edge: *iam.IAM.
type Grants interface {
	Grant(id iam.Identity, edge sandbox.EdgeCode) (string, error)
	WatcherGrant(edge sandbox.EdgeCode) (string, error)
}

// Options of a Launcher.
type Options struct {
	Quota  int // sandboxes of a root project; 0 = no limit
	Edges  map[sandbox.EdgeCode]Edge
	Nodes  func() []placement.Edge // what placement knows now
	Grants Grants
	Rand   placement.Rand // used under a lock
	Now    func() time.Time
	Log    *slog.Logger
	// ListEvery is the shortest time between two lists of an edge whose number of sandboxes differs from what is known.
	ListEvery time.Duration
}

// A Launcher creates and deletes sandboxes. It is safe for concurrent use.
type Launcher struct {
	o Options

	mu       sync.Mutex
	owners   map[string]*owner.Owner // by root project
	flights  map[flightKey]*flight
	answered map[sandbox.ID]*flight // done, with waiters that have not released
	overlay  placement.Overlay
	lists    map[sandbox.EdgeCode]listState
	missing  map[sandbox.EdgeCode]bool // not yet asked since the start
	closed   bool

	rebuilt chan struct{} // closed when missing is empty or rebuildFor is over
	kick    chan struct{}

	running sync.WaitGroup // flights, rollbacks and deletes
	ctx     context.Context
	end     context.CancelFunc
}

type flightKey struct {
	root   string
	ticket owner.Ticket
}

// New makes a launcher. Creates wait until Run has asked the edges.
func New(o Options) *Launcher {
	l := &Launcher{
		o: o, owners: make(map[string]*owner.Owner), flights: make(map[flightKey]*flight), answered: make(map[sandbox.ID]*flight),
		lists: make(map[sandbox.EdgeCode]listState), missing: make(map[sandbox.EdgeCode]bool),
		rebuilt: make(chan struct{}), kick: make(chan struct{}, 1),
	}
	for code := range o.Edges {
		l.missing[code] = true
	}
	if len(l.missing) == 0 {
		close(l.rebuilt)
	}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l
}

// Close refuses new creates, abandons those in flight and waits, until ctx ends, for what must be undone.
func (l *Launcher) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	for _, f := range l.flights {
		f.abandonLocked(errClosing)
	}
	l.mu.Unlock()
	done := make(chan struct{})
	go func() { l.running.Wait(); close(done) }()
	defer func() { l.end(); <-done }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("undo creates: %w", ctx.Err())
	}
}

var errClosing = sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the control plane is shutting down; try again")

func rootOf(project string) string {
	root, _, _ := strings.Cut(project, "/")
	return root
}

func (l *Launcher) ownerLocked(project string) *owner.Owner {
	root := rootOf(project)
	o := l.owners[root]
	if o == nil {
		o = owner.New(l.o.Quota)
		l.owners[root] = o
	}
	return o
}

// A Request asks for one sandbox. Spec, Layers and Network are resolved and are not changed.
type Request struct {
	Caller  iam.Identity
	Key     string // idempotency key; "" = none
	Digest  string // of the request as it was sent
	Spec    *dsecv1.SandboxSpec
	Layers  []*dsecv1.Layer
	Network []*edgev1.NetworkRule
	Timeout time.Duration // until ready
}

// A Release says whether the answer was given to the caller. It must be called exactly once.
type Release func(delivered bool)

func released(bool) {}

// Create returns the sandbox when it is ready. If ctx ends before, and nobody else waits for it, it is rolled back.
func (l *Launcher) Create(ctx context.Context, r Request) (*dsecv1.Sandbox, Release, error) {
	if err := l.awaitRebuilt(ctx); err != nil {
		return nil, released, err
	}
	deadline := l.o.Now().Add(r.Timeout)
	for {
		a, err := l.admit(r, deadline)
		switch {
		case err != nil:
			return nil, released, err
		case a.join != nil:
			return l.wait(ctx, a.join)
		case a.ends != nil:
			if err := await(ctx, a.ends); err != nil {
				return nil, released, err
			}
		default:
			sb, err := l.get(ctx, r.Caller, a.found)
			if sandbox.ClassOf(err) == sandbox.NotFound && err != nil { // it ended by itself, long ago
				l.forget(r.Caller.Project, a.found)
				continue
			}
			return sb, released, err
		}
	}
}

// forget tells the owner, if there is one yet, that a sandbox is no longer wanted.
func (l *Launcher) forget(project string, id sandbox.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o := l.owners[rootOf(project)]; o != nil {
		o.Deleted(id)
	}
}

func await(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return sandbox.AsError(ctx.Err())
	}
}

func (l *Launcher) awaitRebuilt(ctx context.Context) error { return await(ctx, l.rebuilt) }

// An admission is what a create has to do. One field is set.
type admission struct {
	join  *flight         // wait for its answer, as one of its waiters
	ends  <-chan struct{} // wait for this, then ask again
	found sandbox.ID      // it exists
}

func (l *Launcher) admit(r Request, deadline time.Time) (admission, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return admission{}, errClosing
	}
	v, err := l.ownerLocked(r.Caller.Project).Admit(l.o.Now(), owner.Request{
		Key: owner.Key{Project: r.Caller.Project, Key: r.Key}, Digest: r.Digest, Deadline: deadline,
	})
	if err != nil {
		return admission{}, err
	}
	f := l.flights[flightKey{rootOf(r.Caller.Project), v.Ticket}]
	switch v.Action {
	case owner.Start:
		return admission{join: l.startLocked(r, v.Ticket, deadline)}, nil
	case owner.Found:
		if f = l.answered[v.ID]; f == nil {
			return admission{found: v.ID}, nil
		}
		f.waiters++ // its first waiter may yet turn out to be gone
		return admission{join: f}, nil
	}
	switch {
	case f == nil:
		return admission{}, fmt.Errorf("ticket %d has no flight", v.Ticket)
	case v.Action == owner.Wait:
		return admission{ends: f.ended}, nil
	}
	f.waiters++
	return admission{join: f}, nil
}

func (l *Launcher) edge(code sandbox.EdgeCode) (Edge, error) {
	if e := l.o.Edges[code]; e != nil {
		return e, nil
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "no such node")
}

func (l *Launcher) get(ctx context.Context, who iam.Identity, id sandbox.ID) (*dsecv1.Sandbox, error) {
	e, err := l.edge(id.Edge())
	if err != nil {
		return nil, err
	}
	signed, err := l.o.Grants.Grant(who, id.Edge())
	if err != nil {
		return nil, err
	}
	return e.GetSandbox(ctx, signed, &edgev1.GetSandboxRequest{Id: string(id)})
}

// Delete ends a sandbox. Its quota is free as soon as the edge has accepted. That the edge finds none says nothing of quota:
// it says so of other projects' sandboxes too, and another project of the same root may have this one.
func (l *Launcher) Delete(ctx context.Context, who iam.Identity, id sandbox.ID, wait bool) (*dsecv1.Sandbox, error) {
	e, err := l.edge(id.Edge())
	if err != nil {
		return nil, err
	}
	signed, err := l.o.Grants.Grant(who, id.Edge())
	if err != nil {
		return nil, err
	}
	sb, err := e.DeleteSandbox(ctx, signed, &edgev1.DeleteSandboxRequest{Id: string(id), Wait: wait})
	if err != nil {
		return nil, err
	}
	l.forget(who.Project, id)
	return sb, nil
}

// DeleteByKey ends the create with that key, in whatever state it is. The sandbox is nil if none was made.
func (l *Launcher) DeleteByKey(ctx context.Context, who iam.Identity, key string, wait bool) (*dsecv1.Sandbox, error) {
	if err := l.awaitRebuilt(ctx); err != nil {
		return nil, err
	}
	l.mu.Lock()
	c := l.ownerLocked(who.Project).Cancel(l.o.Now(), owner.Key{Project: who.Project, Key: key})
	f := l.flights[flightKey{rootOf(who.Project), c.Ticket}]
	if f != nil {
		f.abandonLocked(errCancelled)
	}
	l.mu.Unlock()
	switch {
	case c.ID != "":
		sb, err := l.Delete(ctx, who, c.ID, wait)
		if err != nil && sandbox.ClassOf(err) == sandbox.NotFound { // it ended by itself, long ago
			l.forget(who.Project, c.ID)
			return nil, nil
		}
		return sb, err
	case f != nil && wait:
		return nil, await(ctx, f.ended)
	}
	return nil, nil
}

var errCancelled = sandbox.Errorf(sandbox.Canceled, sandbox.ReasonCanceled, "the create was cancelled by its idempotency key")
