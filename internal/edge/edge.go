// Package edge is the node agent: it makes sandboxes from what an apiserver asks for, keeps them, and removes every trace of
// them.
//
// # How a sandbox lives
//
// Its decisions are in life (pure: events in, effects out); instance holds it with what its steps made; the steps are one
// list (sandboxSteps), set up in order and torn down in reverse. What exists is in the journal before anybody is told.
//
// # What surprises
//
//   - Delete wins in every state. It changes what is wanted, cancels a setup under way, and frees the quota at once;
//     teardown is tried until it works. A setup that hangs is given setupGrace to notice, then teardown goes on beside it,
//     and once more when it returns.
//   - Nothing serves before Recover has ended: until then, and again after Shutdown or Detach began, every call gets
//     Unavailable.
//   - Recover ends what was half made. A sandbox lives on once it was ready and the journal says so, also if the edge died
//     before its caller was told.
//   - A request costs no timer: idleness is looked at when it could have begun, see wakeups.
//   - GetSandbox and ListSandboxes do not count as activity: looking at a sandbox must not keep it alive.
//   - Foreign and unknown ids get the same answer, from one function (lookup).
package edge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/failpoint"
	"dsec/internal/edge/journal"
	"dsec/internal/edge/resolve"
	"dsec/internal/grant"
	"dsec/internal/inflight"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Options wire an Edge. Everything without a remark is required.
type Options struct {
	Code     sandbox.EdgeCode
	Node     string // what users see as the sandbox's node; "" = Code
	Version  string
	DataDir  string // holds the journal and output/<id>
	BootID   string // "" = this boot's
	Verifier *grant.Verifier

	Drivers  []driver.Driver
	BlobPath func(digest string) (string, error) // where the image store has a blob
	Layers   Layers
	Uppers   Uppers
	Networks Networks
	Cgroups  Cgroups
	Guests   ConnectGuest
	Ended    EndedGuest // nil = nothing is found
	Host     Host       // nil = this machine's

	Lookup        resolve.Lookup      // of names in network rules; nil = the node's
	NodeAddresses func() []netip.Addr // which no rule opens; nil = those of the machine's interfaces

	Tools       Tools // nil: there are no trusted commands
	NoTools     error // why
	Admission   Admission
	Requests    inflight.Limits
	Retention   time.Duration // of terminal records; 0 = 10 min
	MaxTerminal int           // terminal records kept at most; 0 = 10,000
	Parallel    int           // setups at a time; 0 = 8
	Log         *slog.Logger
}

const (
	defaultRetention   = 10 * time.Minute
	defaultMaxTerminal = 10_000
	defaultParallel    = 8
	parallelTeardowns  = 32 // one that hangs gives its place back after steps.TeardownDeadline
)

// Phases of an Edge.
const (
	phaseNew int32 = iota
	phaseServing
	phaseDraining // creates are refused, everything else is answered
	phaseClosed
)

// An Edge is the node agent. Make it with New, then Recover, then serve.
type Edge struct {
	o         Options
	log       *slog.Logger
	drivers   map[string]driver.Driver
	journal   *journal.Journal
	found     journal.Found // until Recover took it
	admission *admission
	phase     atomic.Int32
	creating  atomic.Int64  // creates whose outcome somebody waits for
	setups    chan struct{} // places for setups
	teardowns chan struct{} // places for teardowns

	ctx    context.Context // the life of the edge's own goroutines
	cancel context.CancelFunc
	wg     sync.WaitGroup // all of them

	spawnMu sync.Mutex
	stopped bool // no goroutine begins any more

	index index
	names *resolve.Resolver

	wakeMu  sync.Mutex
	wakeups wakeups
	woken   chan struct{} // the earliest time changed

	chores   chores
	watchers watchers
	under    *inflight.Counter
}

// New checks the options and opens the journal. It touches nothing else on the host.
func New(o Options) (*Edge, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if err := failpoint.Check(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(o.DataDir, "output"), 0o700); err != nil {
		return nil, fmt.Errorf("making data directory: %w", err)
	}
	j, found, err := journal.Open(journal.Options{
		Path: filepath.Join(o.DataDir, "journal"), Edge: o.Code, BootID: o.BootID, Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	e := &Edge{
		o: o, log: o.Log, journal: j, found: found, drivers: make(map[string]driver.Driver),
		setups: make(chan struct{}, o.Parallel), teardowns: make(chan struct{}, parallelTeardowns), woken: make(chan struct{}, 1),
		admission: newAdmission(o.Admission, o.Host, o.Uppers, o.Log), index: newIndex(o.MaxTerminal),
		under: inflight.New(o.Requests),
	}
	for _, d := range o.Drivers {
		e.drivers[d.Name()] = d
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.names = resolve.Open(resolve.Options{Lookup: o.Lookup, Path: filepath.Join(o.DataDir, "names"), Changed: e.namesChanged, Log: o.Log})
	e.spawn(e.runWakeups)
	return e, nil
}

func (o *Options) complete() error {
	switch {
	case !o.Code.Valid():
		return fmt.Errorf("edge code %q is not valid", o.Code)
	case o.DataDir == "", o.Verifier == nil, len(o.Drivers) == 0, o.BlobPath == nil, o.Layers == nil, o.Uppers == nil,
		o.Networks == nil, o.Cgroups == nil, o.Guests == nil, o.Log == nil:
		return errors.New("edge options are incomplete")
	}
	if o.BootID == "" {
		var err error
		if o.BootID, err = linux.BootID(); err != nil {
			return err
		}
	}
	if o.Host == nil {
		o.Host = &procHost{}
	}
	if o.NodeAddresses == nil {
		o.NodeAddresses = nodeAddresses
	}
	setDefault(&o.Node, string(o.Code))
	setDefault(&o.Retention, defaultRetention)
	setDefault(&o.MaxTerminal, defaultMaxTerminal)
	setDefault(&o.Parallel, defaultParallel)
	return nil
}

func setDefault[T comparable](p *T, d T) {
	var zero T
	if *p == zero {
		*p = d
	}
}

// spawn runs f in a goroutine that stop waits for. Once stop has begun nothing starts: the next Recover does it.
func (e *Edge) spawn(f func()) {
	e.spawnMu.Lock()
	defer e.spawnMu.Unlock()
	if !e.stopped {
		e.wg.Go(f)
	}
}

// serving refuses every call outside of the phases in which the edge knows what it has.
func (e *Edge) serving() error {
	switch e.phase.Load() {
	case phaseServing, phaseDraining:
		return nil
	case phaseNew:
		return sandbox.Errorf(sandbox.Unavailable, "edge_recovering", "the node is starting and does not know its sandboxes yet; try again")
	}
	return errStopping
}

var errStopping = sandbox.Errorf(sandbox.Unavailable, "edge_stopping", "the node is stopping; try again, its sandboxes go on")

func (e *Edge) outputDir(id sandbox.ID) string {
	return filepath.Join(e.o.DataDir, "output", string(id))
}

// detached is a context for clean-up: it outlives its cause, and has a deadline of its own.
func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}
