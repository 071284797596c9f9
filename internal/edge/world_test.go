package edge

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/fake"
	"dsec/internal/edge/failpoint"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

const testEdge = sandbox.EdgeCode("tedge")

var testKey = ed25519.NewKeyFromSeed([]byte(strings.Repeat("k", 32)))

// fixedHost is a machine with room.
type fixedHost struct {
	mu sync.Mutex
	s  HostSample
}

func (h *fixedHost) Sample() (HostSample, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.s, nil
}

func roomyHost() *fixedHost {
	return &fixedHost{s: HostSample{MemoryTotal: 64 << 30, MemoryAvailable: 60 << 30, Tasks: 100, TasksMax: 1 << 20, FilesMax: 1 << 20, MountsMax: 1 << 20, CPUs: 8}}
}

// world is an edge on a fake host, and its callers.
type world struct {
	testing.TB
	dir    string
	host   *fake.Host
	o      Options
	e      *Edge
	s      *server
	signer *grant.Signer
	guests sync.Map // id -> *fakeGuest
}

// newWorld makes an edge that serves. change may adapt the options.
func newWorld(t testing.TB, change ...func(*Options)) *world {
	t.Helper()
	return openWorld(t, t.TempDir(), fake.NewHost(), change...)
}

func openWorld(t testing.TB, dir string, host *fake.Host, change ...func(*Options)) *world {
	t.Helper()
	w := &world{TB: t, dir: dir, host: host, signer: grant.NewSigner(testKey)}
	w.o = Options{
		Code: testEdge, DataDir: dir, BootID: "boot-1", Version: "test", Verifier: grant.NewVerifier(testEdge, w.signer.Public()),
		Drivers: []driver.Driver{host.Driver()}, BlobPath: func(d string) (string, error) { return "/blobs/" + d, nil },
		Layers: host.Layers(), Uppers: host.Uppers(), Networks: host.Networks(), Cgroups: host.Cgroups(), Host: roomyHost(),
		Guests: func(ctx context.Context, o GuestOptions) (Guest, error) {
			g, err := connectFake(ctx, o)
			if err == nil {
				w.guests.Store(o.ID, g)
			}
			return g, err
		},
		Log: testLog(),
	}
	for _, f := range change {
		f(&w.o)
	}
	w.open()
	return w
}

func testLog() *slog.Logger {
	out := io.Discard
	if os.Getenv("EDGE_TEST_LOG") != "" {
		out = os.Stderr
	}
	return slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (w *world) open() {
	w.Helper()
	e, err := New(w.o)
	if err != nil {
		w.Fatal(err)
	}
	if err := e.Recover(context.Background()); err != nil {
		w.Fatal(err)
	}
	w.e, w.s = e, &server{e: e}
}

// close ends the edge and checks that nothing is left.
func (w *world) close() {
	w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if err := w.e.Shutdown(ctx); err != nil {
		w.Errorf("Shutdown: %v", err)
	}
	w.nothingLeft("after Shutdown")
	if left, _ := os.ReadDir(w.dir); len(left) != 0 {
		w.Errorf("left in the data directory: %v", left)
	}
}

func (w *world) nothingLeft(when string) {
	w.Helper()
	if left := w.host.Objects(); len(left) != 0 {
		w.Errorf("%s: left on the host: %v", when, left)
	}
}

func (w *world) detach() {
	w.Helper()
	if err := w.e.Detach(context.Background()); err != nil {
		w.Errorf("Detach: %v", err)
	}
}

func (w *world) grant(project, role string) string {
	w.Helper()
	raw, err := w.signer.Sign(grant.Grant{Project: project, Role: role, Principal: "ada", Edge: testEdge})
	if err != nil {
		w.Fatal(err)
	}
	return raw
}

func (w *world) as(project, role string) context.Context {
	return metadata.NewIncomingContext(context.Background(), metadata.Pairs(grant.MetadataKey, w.grant(project, role)))
}

// grantFor and userOf are for an edge with another code.
func (w *world) grantFor(code sandbox.EdgeCode) string {
	w.Helper()
	raw, err := w.signer.Sign(grant.Grant{Project: "default", Role: grant.RoleUser, Principal: "ada", Edge: code})
	if err != nil {
		w.Fatal(err)
	}
	return raw
}

func (w *world) userOf(code sandbox.EdgeCode) context.Context {
	return metadata.NewIncomingContext(context.Background(), metadata.Pairs(grant.MetadataKey, w.grantFor(code)))
}

func (w *world) user() context.Context    { return w.as("default", grant.RoleUser) }
func (w *world) watcher() context.Context { return w.as("", grant.RoleWatcher) }

// spec is a create of project default.
func (w *world) spec(change ...func(*edgev1.CreateSandbox)) *edgev1.CreateSandbox {
	c := &edgev1.CreateSandbox{
		Id: string(sandbox.NewID(testEdge)), Grant: w.grant("default", grant.RoleUser),
		Spec:   &dsecv1.SandboxSpec{Image: "python:3", Env: map[string]string{"A": "spec", "B": "spec"}, User: "agent", Workdir: "/work"},
		Layers: []*dsecv1.Layer{{Metadata: &dsecv1.Blob{Digest: "sha256:" + strings.Repeat("a", 64), Size: 4096}}},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func idle(d time.Duration) func(*edgev1.CreateSandbox) {
	return func(c *edgev1.CreateSandbox) { c.Spec.IdleTimeoutSeconds = int64(d / time.Second) }
}

func lifetime(d time.Duration) func(*edgev1.CreateSandbox) {
	return func(c *edgev1.CreateSandbox) { c.Spec.LifetimeSeconds = int64(d / time.Second) }
}

func deadline(d time.Duration) func(*edgev1.CreateSandbox) {
	return func(c *edgev1.CreateSandbox) { c.Deadline = timestamppb.New(time.Now().Add(d)) }
}

func key(k, digest string) func(*edgev1.CreateSandbox) {
	return func(c *edgev1.CreateSandbox) { c.IdempotencyKey, c.SpecDigest = k, digest }
}

// stream is what CreateSandboxes sends to.
type stream struct {
	grpc.ServerStream
	ctx  context.Context
	send func(*edgev1.CreateResult) error
}

func (s *stream) Context() context.Context          { return s.ctx }
func (s *stream) Send(r *edgev1.CreateResult) error { return s.send(r) }

// createAll runs a batch to its end.
func (w *world) createAll(ctx context.Context, creates ...*edgev1.CreateSandbox) (map[string]*edgev1.CreateResult, error) {
	out := make(map[string]*edgev1.CreateResult)
	err := w.s.CreateSandboxes(&edgev1.CreateSandboxesRequest{Creates: creates}, &stream{ctx: ctx, send: func(r *edgev1.CreateResult) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		out[r.Id] = r
		return nil
	}})
	return out, err
}

// tryCreate makes one sandbox.
func (w *world) tryCreate(change ...func(*edgev1.CreateSandbox)) (*edgev1.CreateResult, error) {
	w.Helper()
	all, err := w.createAll(w.user(), w.spec(change...))
	if err != nil {
		w.Fatal(err)
	}
	for _, r := range all {
		return r, grpcerr.FromFailure(r.Failure)
	}
	w.Fatal("no result")
	return nil, nil
}

func (w *world) create(change ...func(*edgev1.CreateSandbox)) sandbox.ID {
	w.Helper()
	r, err := w.tryCreate(change...)
	if err != nil {
		w.Fatalf("create: %v", err)
	}
	return sandbox.ID(r.Id)
}

func (w *world) get(id sandbox.ID) *dsecv1.Sandbox {
	w.Helper()
	v, err := w.s.GetSandbox(w.user(), &edgev1.GetSandboxRequest{Id: string(id)})
	if err != nil {
		w.Fatalf("get %s: %v", id, err)
	}
	return v
}

func (w *world) expect(id sandbox.ID, state dsecv1.State, reason string) {
	w.Helper()
	if v := w.get(id); v.State != state || v.Reason.GetCode() != reason {
		w.Errorf("%s is %v %q (%s); want %v %q", id, v.State, v.Reason.GetCode(), v.Reason.GetMessage(), state, reason)
	}
}

func (w *world) delete(id sandbox.ID, wait bool) {
	w.Helper()
	if _, err := w.s.DeleteSandbox(w.user(), &edgev1.DeleteSandboxRequest{Id: string(id), Wait: wait}); err != nil {
		w.Errorf("delete %s: %v", id, err)
	}
}

func (w *world) exec(id sandbox.ID, shell string, wait float64) (*dsecv1.CommandResult, error) {
	r, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), Command: &dsecv1.Command{Shell: shell}, WaitSeconds: wait})
	return r, grpcerr.FromStatus(err)
}

func (w *world) guest(id sandbox.ID) *fakeGuest {
	w.Helper()
	g, ok := w.guests.Load(id)
	if !ok {
		w.Fatalf("no guest of %s", id)
	}
	return g.(*fakeGuest)
}

func (w *world) status() *edgev1.Status {
	w.Helper()
	st, err := w.s.GetStatus(w.watcher(), &edgev1.GetStatusRequest{})
	if err != nil {
		w.Fatal(err)
	}
	return st
}

// arm sets a failpoint for the rest of the test.
func (w *world) arm(spec string) (restore func(), hits func() int64) {
	w.Helper()
	restore, hits, err := failpoint.Set(spec)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(restore)
	return restore, hits
}

var errBoom = errors.New("boom")

func boom(context.Context, sandbox.ID) error { return fmt.Errorf("wrapped: %w", errBoom) }
