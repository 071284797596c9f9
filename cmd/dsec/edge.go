package main

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"dsec/internal/inflight"
	"dsec/internal/linux"
	"dsec/sandbox"
)

var edgeCommand = command{
	name: "edge", group: groupServers,
	summary: "run a node agent; `dsec up` starts one",
	details: "It serves on Unix sockets in its run directory. A termination signal ends all sandboxes and removes what the edge made. When its\n" +
		"standard input ends, it stops and leaves the sandboxes running for the next edge.",
	setup: setupEdge,
}

// edgeOptions are the flags of `dsec edge`.
type edgeOptions struct {
	nodeFlags
	code     string
	grantKey string
	readyFD  int
}

func setupEdge(f *flagSet) action {
	var o edgeOptions
	o.nodeFlags.register(f)
	f.StringVar(&o.code, "code", "", "the edge's 5-character `CODE`")
	f.StringVar(&o.grantKey, "grant-key", "", "`HEX` of the public key that signs grants")
	f.IntVar(&o.readyFD, "ready-fd", 0, "`NUMBER` of a file descriptor that is told when the edge serves")
	listPoints := f.Bool("list-failpoints", false, "print the names of all failpoints (for tests) and exit")
	return func(ctx context.Context, c *console, args []string) error {
		if *listPoints {
			return printFailpoints(c.stdout)
		}
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		if err := o.check(); err != nil {
			return err
		}
		log, err := newLogger(c.stderr, o.logLevel)
		if err != nil {
			return err
		}
		return runEdge(ctx, c, &o, log)
	}
}

const (
	edgeLockWait     = 30 * time.Second // for the last edge, which may be stopping
	edgeDetachWithin = 5 * time.Second
	edgeEndWithin    = 2 * time.Minute
)

// runEdge serves until ctx ends (everything is removed) or standard input does (sandboxes go on).
func runEdge(ctx context.Context, c *console, o *edgeOptions, log *slog.Logger) (err error) {
	report := readinessTo(o.readyFD)
	defer func() {
		if err != nil {
			report(readiness{Error: err.Error()})
		}
	}()
	tuneDaemon(log)
	stdlog.SetOutput(io.Discard) // net/http tells there what servers inside sandboxes send unasked
	release, err := waitForLock(ctx, filepath.Join(o.edgeDir(), "lock"))
	if err != nil {
		return err
	}
	defer release()
	n, err := openNode(ctx, o, log)
	if err != nil {
		return err
	}
	if err := n.edge.Recover(ctx); err != nil {
		return errors.Join(fmt.Errorf("recovering sandboxes: %w", err), n.detach())
	}
	servers, err := serveEdge(o, n, log)
	if err != nil {
		return errors.Join(err, n.detach())
	}
	log.InfoContext(ctx, "edge is ready", "edge", o.code)
	report(readiness{URL: o.edgeSocket()})
	select {
	case <-ctx.Done():
		err := n.shutdown() // answers requests meanwhile: a caller that waits for a delete gets its answer
		servers.stop()
		return errors.Join(err, n.removeRunDir())
	case <-parentGone(c.stdin):
		log.Info("the parent is gone; leaving the sandboxes to the next edge")
		servers.stop()
		return n.detach()
	}
}

// teardownEdge cleans up after a platform that was killed: it recovers what there is, and ends it.
func teardownEdge(ctx context.Context, p *platform) error {
	code, key, err := storedIdentity(ctx, p)
	if err != nil || code == "" {
		return err
	}
	release, err := waitForLock(ctx, filepath.Join(p.edgeDir(), "lock"))
	if err != nil {
		return err
	}
	defer release()
	o := &edgeOptions{nodeFlags: nodeFlags{platform: *p, maxSandboxes: 1}, code: string(code), grantKey: key}
	n, err := openNode(ctx, o, slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err != nil {
		return err
	}
	if err := n.edge.Recover(ctx); err != nil {
		return errors.Join(fmt.Errorf("recovering sandboxes: %w", err), n.detach())
	}
	return errors.Join(n.shutdown(), n.removeRunDir())
}

// waitForLock makes this process the only edge of its directory; the last one may need a moment to end.
func waitForLock(ctx context.Context, path string) (func(), error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("making the edge's directory: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, edgeLockWait)
	defer cancel()
	for {
		release, err := lockFile(path)
		if !errors.Is(err, errLocked) {
			return release, err
		}
		select {
		case <-ctx.Done():
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "edge_running", "another edge still runs on %s", filepath.Dir(path))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// parentGone is closed when standard input ends.
func parentGone(stdin io.Reader) <-chan struct{} {
	gone := make(chan struct{})
	go func() {
		io.Copy(io.Discard, stdin)
		close(gone)
	}()
	return gone
}

// edgeServers are the two sockets of an edge.
type edgeServers struct {
	grpc  *grpc.Server
	bytes *http.Server
}

func serveEdge(o *edgeOptions, n *node, log *slog.Logger) (*edgeServers, error) {
	calls, err := listenUnix(o.edgeSocket())
	if err != nil {
		return nil, err
	}
	bodies, err := listenUnix(o.bytesSocket())
	if err != nil {
		calls.Close()
		return nil, err
	}
	bounded := inflight.Listen(bodies, 0) // its one peer bounds them
	s := &edgeServers{
		grpc:  grpc.NewServer(append(n.edge.ServerOptions(), grpc.MaxRecvMsgSize(64<<20), grpc.MaxSendMsgSize(64<<20), grpc.NumStreamWorkers(4))...),
		bytes: &http.Server{Handler: n.edge.ByteHandler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)},
	}
	s.bytes.ConnState = bounded.Note
	n.edge.RegisterGRPC(s.grpc)
	go func() {
		if err := s.grpc.Serve(calls); err != nil {
			log.Error("edge socket ended", "error", err)
		}
	}()
	go func() {
		if err := s.bytes.Serve(bounded); err != nil && !errors.Is(err, http.ErrServerClosed) {
			log.Error("byte socket ended", "error", err)
		}
	}()
	return s, nil
}

// stop ends both servers and whatever they were doing. Their sockets go with them.
func (s *edgeServers) stop() {
	s.grpc.Stop()
	s.bytes.Close()
}

// listenUnix listens on a socket that only root can reach. One that a killed process left is replaced.
func listenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("removing the last edge's socket: %w", err)
	}
	l, err := linux.ListenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("closing the socket to others: %w", err)
	}
	return l, nil
}

func parseGrantKey(s string) (ed25519.PublicKey, error) {
	key, err := hex.DecodeString(s)
	if err != nil || len(key) != ed25519.PublicKeySize {
		return nil, usagef("--grant-key must be the %d hex digits of an Ed25519 public key", 2*ed25519.PublicKeySize)
	}
	return key, nil
}
