// Package control is the control plane in one piece, as `dsec up` runs it: contracts go in, a handler comes out. The parts
// know each other by small interfaces; this is where they meet.
//
//	Handler: apiserver -> iam, launch (owner, placement) -> edgeclient -> edge
//	Run:     watcher polls edges -> placement's view, launch's rebuilding
package control

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/apiserver"
	"dsec/internal/control/edgeclient"
	"dsec/internal/control/iam"
	"dsec/internal/control/launch"
	"dsec/internal/control/placement"
	"dsec/internal/control/store"
	"dsec/internal/control/watcher"
	"dsec/internal/inflight"
	"dsec/sandbox"
)

// An Edge says how to reach one: by its gRPC and its byte socket. Address is what people read.
type Edge struct {
	Code      sandbox.EdgeCode
	Address   string
	Dial      func(context.Context) (net.Conn, error)
	DialBytes func(context.Context) (net.Conn, error)
}

// Options of a Control. Store and Images stay the caller's: Close does not close them. Zero values of the rest mean defaults.
type Options struct {
	Store   store.Store
	Images  apiserver.Images
	Edges   []Edge
	Quota   int // sandboxes of a root project; 0 = no limit
	Version string
	Log     *slog.Logger

	Poll            time.Duration // between polls of an edge
	AwayTimeout     time.Duration // how long calls wait for an edge that is away
	MaxImports      int
	MaxArchiveBytes int64
	BatchWindow     int
	BodyIdle        time.Duration
	PortSite        apiserver.PortSite // where browsers reach ports
	Requests        inflight.Limits    // what a project may have under way
}

// A Control is the control plane.
type Control struct {
	o        Options
	iam      *iam.IAM
	clients  map[sandbox.EdgeCode]*edgeclient.Client
	watcher  *watcher.Watcher
	launcher *launch.Launcher
	server   *apiserver.Server

	mu    sync.RWMutex
	nodes []placement.Edge // replaced, never changed
}

// listEvery is in polls; see launch.Options.ListEvery.
const listEvery = 5

// closeGrace is how long Close waits for creates to be undone.
const closeGrace = 15 * time.Second

// New wires a control plane and records its edges. Nothing is asked of the edges before Run.
func New(ctx context.Context, o Options) (*Control, error) {
	if o.Poll <= 0 {
		o.Poll = watcher.DefaultInterval
	}
	c := &Control{o: o, clients: make(map[sandbox.EdgeCode]*edgeclient.Client)}
	var err error
	if c.iam, err = iam.New(ctx, o.Store, time.Now); err != nil {
		return nil, fmt.Errorf("start iam: %w", err)
	}
	pollers := make(map[sandbox.EdgeCode]watcher.Poller)
	launchEdges := make(map[sandbox.EdgeCode]launch.Edge)
	apiEdges := make(map[sandbox.EdgeCode]apiserver.Edge)
	for _, e := range o.Edges {
		client, err := c.join(ctx, e)
		if err != nil {
			return nil, errors.Join(err, c.closeClients())
		}
		c.clients[e.Code], launchEdges[e.Code], apiEdges[e.Code] = client, client, client
		pollers[e.Code] = poller{client, c.iam}
	}
	c.watcher = watcher.New(watcher.Options{Interval: o.Poll, Jitter: jitter, OnEvent: c.onEvent, Log: o.Log}, pollers)
	c.launcher = launch.New(launch.Options{
		Quota: o.Quota, Edges: launchEdges, Nodes: c.candidates, Grants: c.iam,
		Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), Now: time.Now, Log: o.Log, ListEvery: listEvery * o.Poll,
	})
	c.server = apiserver.New(apiserver.Options{
		IAM: c.iam, Store: o.Store, Launcher: c.launcher, Edges: apiEdges, Nodes: c.watcher.All, Images: o.Images, Version: o.Version,
		Now: time.Now, Log: o.Log, MaxImports: o.MaxImports, MaxArchiveBytes: o.MaxArchiveBytes, BatchWindow: o.BatchWindow, BodyIdle: o.BodyIdle,
		PortSite: o.PortSite, Requests: o.Requests,
	})
	return c, nil
}

func (c *Control) join(ctx context.Context, e Edge) (*edgeclient.Client, error) {
	if !e.Code.Valid() {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_edge", "%q is not the code of an edge", string(e.Code))
	}
	if c.clients[e.Code] != nil {
		return nil, sandbox.Errorf(sandbox.AlreadyExists, "edge_exists", "edge %s is given twice", e.Code)
	}
	if err := c.o.Store.PutEdge(ctx, store.Edge{Code: e.Code, Address: e.Address, JoinedAt: time.Now()}); err != nil {
		return nil, fmt.Errorf("record edge %s: %w", e.Code, err)
	}
	return edgeclient.New(edgeclient.Options{Code: e.Code, Dial: e.Dial, DialBytes: e.DialBytes, AwayTimeout: c.o.AwayTimeout, Log: c.o.Log})
}

// A poller asks for status with the control plane's own grant.
type poller struct {
	client *edgeclient.Client
	iam    *iam.IAM
}

func (p poller) GetStatus(ctx context.Context) (*edgev1.Status, error) {
	signed, err := p.iam.WatcherGrant(p.client.Code())
	if err != nil {
		return nil, err
	}
	return p.client.GetStatus(ctx, signed)
}

// jitter is up to a tenth either way, so that polls of many edges spread.
func jitter(d time.Duration) time.Duration {
	return d + time.Duration((rand.Float64()-0.5)*0.2*float64(d))
}

func (c *Control) onEvent(e watcher.Event) {
	c.refresh()
	switch e.Kind {
	case watcher.Up:
		c.clients[e.Edge].SetDown(false)
		c.launcher.EdgeUp(e.Edge)
	case watcher.Down:
		c.clients[e.Edge].SetDown(true)
	}
	if e.Last.Status != nil && e.Kind != watcher.Down {
		c.launcher.EdgeStatus(e.Edge, e.Last.Asked, e.Last.Status.GetSandboxes())
	}
}

// refresh makes placement's view of what the watcher knows. Edges report at the same time: what was read under the lock is no
// older than what it replaces.
func (c *Control) refresh() {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.watcher.All()
	nodes := make([]placement.Edge, len(all))
	for i, o := range all {
		s := o.Status
		nodes[i] = placement.Edge{
			Code: o.Edge, Healthy: o.Healthy, Accepting: s.GetAccepting(), Braking: s.GetBraking(), Refusing: s.GetRefusingReason(), Backends: s.GetBackends(),
			Sandboxes: s.GetSandboxes(), Capacity: s.GetCapacity(), MemoryBytes: s.GetMemoryBytes(), MemoryAvailable: s.GetMemoryAvailableBytes(),
			CPUs: s.GetCpus(), CPUBusy: s.GetCpuBusy(),
		}
	}
	c.nodes = nodes
}

func (c *Control) candidates() []placement.Edge {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.nodes
}

// Handler is the public API. Serve it with apiserver.NewHTTPServer.
func (c *Control) Handler() http.Handler { return c.server.Handler() }

// Routes is the patterns of all routes that need a key, as http.ServeMux writes them.
func (c *Control) Routes() []string { return c.server.Routes() }

// PublicKey is what the edges must verify grants with.
func (c *Control) PublicKey() ed25519.PublicKey { return c.iam.PublicKey() }

// IAM makes and revokes keys.
func (c *Control) IAM() *iam.IAM { return c.iam }

// BootstrapKey returns a key for the administrator: current if it is still valid, else a new one.
func (c *Control) BootstrapKey(ctx context.Context, current string) (string, error) {
	k, err := c.iam.Bootstrap(ctx, current)
	if err != nil {
		return "", err
	}
	return k.Reveal(), nil
}

// Run watches the edges until ctx ends. Creates wait for it.
func (c *Control) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { c.watcher.Run(ctx) })
	wg.Go(func() { c.launcher.Run(ctx) })
	wg.Wait()
}

// Close undoes creates in flight, waiting for at most closeGrace, and ends the connections to the edges. The HTTP server
// must have been shut down before; Run must have returned or returns by itself.
func (c *Control) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	return errors.Join(c.launcher.Close(ctx), c.closeClients())
}

func (c *Control) closeClients() error {
	var errs []error
	for _, cl := range c.clients {
		errs = append(errs, cl.Close())
	}
	return errors.Join(errs...)
}
