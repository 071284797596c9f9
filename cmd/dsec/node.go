package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"dsec/internal/edge"
	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/container"
	"dsec/internal/edge/failpoint"
	"dsec/internal/edge/layers"
	"dsec/internal/edge/network"
	"dsec/internal/edge/network/relay"
	"dsec/internal/edge/policy"
	names "dsec/internal/edge/resolve"
	"dsec/internal/edge/tools"
	"dsec/internal/edge/upper"
	"dsec/internal/grant"
	"dsec/internal/image/store"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Sizes of what an edge keeps ready.
const (
	readySlots     = 64
	keepIdleLayers = 256
)

// A node is an edge with the parts that make sandboxes on this machine. This file and control.go are the only places that
// name concrete parts.
type node struct {
	edge      *edge.Edge
	container *container.Driver
	network   *network.Slots
	store     *store.Posix
	tools     *tools.Tools // nil: there are none on this machine
	runDir    string
	claim     *os.File // of the run directory
	ids       *idClaim
}

// openNode makes this machine ready for sandboxes, or finds what an earlier edge left. What fails leaves nothing, or if there
// was an earlier edge, what it left.
func openNode(ctx context.Context, o *edgeOptions, log *slog.Logger) (_ *node, err error) {
	code := sandbox.EdgeCode(o.code)
	key, err := parseGrantKey(o.grantKey)
	if err != nil {
		return nil, err
	}
	stage, aether, err := companions()
	if err != nil {
		return nil, err
	}
	first := !exists(o.journal())
	if err := linux.MountRunDir(o.runDir); err != nil {
		return nil, err
	}
	n := &node{runDir: o.runDir}
	var parts []edge.Sweeper // in the order of their removal
	defer func() {
		switch {
		case err == nil:
		case first && n.claim != nil:
			err = errors.Join(err, n.undo(parts))
		default:
			n.release()
		}
	}()
	if n.claim, err = o.claimRunDir(); err != nil {
		return nil, err
	}
	if n.ids, err = claimIDs(o.runDir, o.maxSandboxes); err != nil {
		return nil, err
	}
	groups, err := cgroup.Open(ctx, cgroup.Options{Name: "dsec-" + o.code, Log: log})
	if err != nil {
		return nil, err
	}
	parts = append(parts, groups)
	if err := policy.AttachDevices(groups.Root()); err != nil {
		return nil, fmt.Errorf("closing devices to sandboxes: %w", err)
	}
	uppers, err := upper.Open(ctx, upper.Options{DataDir: o.edgeDir(), RunDir: o.runDir, Bytes: int64(o.poolBytes), Log: log})
	if err != nil {
		return nil, err
	}
	parts = append(parts, uppers)
	if n.network, err = network.Open(ctx, network.Options{
		RunDir: filepath.Join(o.runDir, "net"), Ready: readySlots, Range: o.networkRange,
		Relay: []string{"/proc/self/exe", "relay"}, RelayUID: n.ids.relayUser(), Log: log,
	}); err != nil {
		return nil, err
	}
	parts = append(parts, n.network)
	mounts, err := layers.Open(ctx, layers.Options{RunDir: filepath.Join(o.runDir, "layers"), KeepIdle: keepIdleLayers, Log: log})
	if err != nil {
		return nil, err
	}
	parts = append(parts, mounts)
	if n.container, err = container.Open(ctx, container.Options{
		RunDir: o.runDir, Stage: stage, Aether: aether, IDBase: n.ids.base(), IDCapacity: n.ids.capacity(), Log: log,
	}); err != nil {
		return nil, err
	}
	if n.store, err = store.OpenPosix(o.storeDir()); err != nil {
		return nil, err
	}
	servers, err := names.ParseServers(o.resolvers)
	if err != nil {
		return nil, err
	}
	noTools := n.installTools(ctx, log)
	limits, _, err := o.bounds()
	if err != nil {
		return nil, err
	}
	// The apiserver's are met first: it learns of an end before the edge does.
	limits.Streams += limits.Streams/8 + 8
	limits.Calls += limits.Calls/8 + 8
	options := edge.Options{
		Code: code, Version: version, DataDir: o.edgeDir(), Verifier: grant.NewVerifier(code, key),
		Drivers: []driver.Driver{n.container}, BlobPath: n.blobPath,
		Layers: mounts, Uppers: uppersOf(uppers), Networks: n.network, Cgroups: groups, Guests: edge.ConnectAether, Ended: edge.EndedAether,
		Lookup:    names.Node(servers),
		Admission: edge.Admission{MaxSandboxes: int64(o.maxSandboxes)}, Requests: limits, Retention: o.keepEnded, Log: log, NoTools: noTools,
	}
	if n.tools != nil {
		options.Tools = n.tools
	}
	n.edge, err = edge.New(options)
	return n, err
}

// installTools makes trusted commands possible, or says why they are not: everything else works without.
func (n *node) installTools(ctx context.Context, log *slog.Logger) error {
	from, err := findTools()
	if err == nil {
		n.tools, err = tools.Install(ctx, from, filepath.Join(n.runDir, "tools"))
	}
	if err != nil {
		log.Warn("there will be no trusted commands", "error", err)
	}
	return err
}

// runRelay is the process beside the edge that carries connections of sandboxes.
func runRelay(ctx context.Context, o *relayOptions) error {
	return relay.Main(ctx, relay.Config{
		Router: o.router, Socket: o.socket, Root: o.root, UID: o.uid, Range: o.prefixes, Ready: os.NewFile(relay.ReadyFD, "ready"),
	})
}

func (n *node) blobPath(digest string) (string, error) {
	if path := n.store.Path(digest); path != "" {
		return path, nil
	}
	return "", sandbox.Errorf(sandbox.InvalidArgument, "bad_digest", "%.80q is not a digest", digest)
}

// detach leaves everything on the host as it is, for the next edge.
func (n *node) detach() error {
	ctx, cancel := context.WithTimeout(context.Background(), edgeDetachWithin)
	defer cancel()
	err := n.edge.Detach(ctx)
	n.release()
	return err
}

// shutdown ends every sandbox and removes everything that the parts made.
func (n *node) shutdown() error {
	ctx, cancel := context.WithTimeout(context.Background(), edgeEndWithin)
	defer cancel()
	if err := n.edge.Shutdown(ctx); err != nil {
		n.release()
		return fmt.Errorf("ending sandboxes: %w", err)
	}
	return errors.Join(n.container.Close(ctx), n.store.Close())
}

// undo removes what an openNode that failed has made.
func (n *node) undo(parts []edge.Sweeper) error {
	ctx, cancel := context.WithTimeout(context.Background(), edgeDetachWithin)
	defer cancel()
	var errs []error
	if n.container != nil {
		errs = append(errs, n.container.Close(ctx))
	}
	for _, part := range parts {
		errs = append(errs, part.Close(ctx))
	}
	if n.store != nil {
		errs = append(errs, n.store.Close())
	}
	return errors.Join(append(errs, n.removeRunDir())...)
}

// removeRunDir removes what openNode made first, once everything in it has ended.
func (n *node) removeRunDir() error {
	n.closeTools()
	if n.claim != nil {
		n.claim.Close() // an open file keeps the mount busy
	}
	if err := linux.UnmountRunDir(n.runDir); err != nil {
		n.ids.release()
		return err
	}
	n.ids.giveBack()
	return nil
}

// release ends this process's own goroutines and descriptors.
func (n *node) release() {
	if n.network != nil {
		n.network.Detach()
	}
	if n.container != nil {
		n.container.Detach()
	}
	if n.store != nil {
		n.store.Close()
	}
	n.closeTools()
	n.ids.release()
	if n.claim != nil {
		n.claim.Close()
	}
}

func (n *node) closeTools() {
	if n.tools != nil {
		n.tools.Close()
	}
}

// companions finds stage and aether beside this program.
func companions() (stage, aether string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", "", fmt.Errorf("finding this program: %w", err)
	}
	dir := filepath.Dir(self)
	stage, aether = filepath.Join(dir, "stage"), filepath.Join(dir, "aether")
	for _, path := range []string{stage, aether} {
		if _, err := os.Stat(path); err != nil {
			return "", "", sandbox.Errorf(sandbox.FailedPrecondition, "incomplete_installation", "%s is missing: stage and aether belong beside dsec; build them with `make build`", path)
		}
	}
	return stage, aether, nil
}

// findTools finds the program with the tools of trusted commands.
func findTools() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this program: %w", err)
	}
	return tools.Find(filepath.Dir(self), "/bin", "/usr/bin")
}

func printFailpoints(w io.Writer) error {
	for _, name := range failpoint.List() {
		if _, err := fmt.Fprintln(w, name); err != nil {
			return err
		}
	}
	return nil
}

func checkResolvers(list []string) error {
	_, err := names.ParseServers(list)
	return err
}

// uppersOf is the pool as the edge wants it: one that counts inodes says so by its methods.
func uppersOf(p *upper.Pool) edge.Uppers {
	if c, ok := p.Counted(); ok {
		return c
	}
	return p
}
