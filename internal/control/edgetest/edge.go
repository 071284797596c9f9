// Package edgetest is an edge for tests of the control plane: real gRPC and HTTP over Unix sockets, sandboxes in memory. It
// can delay, fail, block and vanish, and it counts what it has.
package edgetest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/sandbox"
)

// An Edge is one. The hooks may be set at any time through Set; they are called without its lock.
type Edge struct {
	edgev1.UnimplementedEdgeServiceServer
	Code sandbox.EdgeCode
	dir  string

	mu       sync.Mutex
	hooks    Hooks
	boxes    map[sandbox.ID]*box
	keys     map[key]sandbox.ID
	files    map[string][]byte
	server   *grpc.Server
	bytes    *http.Server
	batches  int
	creates  int
	deletes  []*edgev1.DeleteSandboxRequest
	headers  []http.Header // of byte requests
	verifier *grant.Verifier
}

// Hooks change what the edge does.
type Hooks struct {
	// Create is called for each create before it is ready; ctx ends when the sandbox is deleted or its caller goes away.
	Create func(ctx context.Context, r *edgev1.CreateSandbox) error
	Exec   func(ctx context.Context, r *dsecv1.ExecRequest) (*dsecv1.CommandResult, error)
	Delete func(ctx context.Context, id sandbox.ID) error
	Status func(*edgev1.Status)
	Bytes  http.HandlerFunc // instead of the usual routes
	Full   bool             // refuse creates: retry elsewhere
	// DropResult breaks the connection instead of sending a create's result: the edge believes that it was sent.
	DropResult bool
}

type key struct{ project, key string }

type box struct {
	sandbox *dsecv1.Sandbox
	key     key
	digest  string
	layers  int
	network []*edgev1.NetworkRule // that replaced those of its create
	cancel  context.CancelFunc
	wanted  bool
}

// New starts an edge that ends with the test.
func New(t testing.TB, code sandbox.EdgeCode, verifier *grant.Verifier) *Edge {
	t.Helper()
	dir, err := os.MkdirTemp("", "edgetest") // a test's own directory can be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	e := &Edge{Code: code, dir: dir, boxes: map[sandbox.ID]*box{}, keys: map[key]sandbox.ID{}, files: map[string][]byte{}, verifier: verifier}
	e.Appear(t)
	t.Cleanup(func() {
		e.Vanish()
		os.RemoveAll(dir)
	})
	return e
}

// Trust sets whose grants it accepts. A nil verifier accepts any grant but none.
func (e *Edge) Trust(v *grant.Verifier) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.verifier = v
}

// Appear serves, again after Vanish; it remembers its sandboxes.
func (e *Edge) Appear(t testing.TB) {
	t.Helper()
	rpc, err := net.Listen("unix", filepath.Join(e.dir, "rpc"))
	if err != nil {
		t.Fatal(err)
	}
	bytes, err := net.Listen("unix", filepath.Join(e.dir, "bytes"))
	if err != nil {
		t.Fatal(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.server = grpc.NewServer(grpc.MaxRecvMsgSize(24<<20), grpc.MaxSendMsgSize(24<<20))
	edgev1.RegisterEdgeServiceServer(e.server, e)
	e.bytes = &http.Server{Handler: e.byteRoutes()}
	go e.server.Serve(rpc)
	go e.bytes.Serve(bytes)
}

// Vanish cuts every connection, as SIGKILL would. Creates in flight are rolled back.
func (e *Edge) Vanish() {
	e.mu.Lock()
	server, bytes := e.server, e.bytes
	e.mu.Unlock()
	server.Stop()
	bytes.Close()
}

// Dial connects to its gRPC socket.
func (e *Edge) Dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(e.dir, "rpc"))
}

// DialBytes connects to its byte socket.
func (e *Edge) DialBytes(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(e.dir, "bytes"))
}

// Set changes the hooks.
func (e *Edge) Set(change func(*Hooks)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.hooks)
}

func (e *Edge) hook() Hooks {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.hooks
}

// Live is the ids of the sandboxes that are wanted, also while they are being created.
func (e *Edge) Live() []sandbox.ID {
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []sandbox.ID
	for id, b := range e.boxes {
		if b.wanted {
			ids = append(ids, id)
		}
	}
	return ids
}

// Counts says how many creates it got, in how many batches.
func (e *Edge) Counts() (creates, batches int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.creates, e.batches
}

// Deletes is the deletes it got.
func (e *Edge) Deletes() []*edgev1.DeleteSandboxRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]*edgev1.DeleteSandboxRequest(nil), e.deletes...)
}

// Headers is the headers of the byte requests it got.
func (e *Edge) Headers() []http.Header {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]http.Header(nil), e.headers...)
}

// Layers is how many layers the sandbox was created with.
func (e *Edge) Layers(id sandbox.ID) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[id]; b != nil {
		return b.layers
	}
	return -1
}

// End makes a sandbox end by itself.
func (e *Edge) End(id sandbox.ID, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[id]; b != nil {
		e.endLocked(b, reason)
	}
}

func (e *Edge) endLocked(b *box, reason string) {
	if !b.wanted {
		return
	}
	b.wanted = false
	b.cancel()
	if e.keys[b.key] == sandbox.ID(b.sandbox.GetId()) {
		delete(e.keys, b.key)
	}
	b.sandbox.State = dsecv1.State_STATE_STOPPED
	b.sandbox.Reason = &dsecv1.Reason{Code: reason}
}

// Eventually waits until the condition holds: for what happens after an answer.
func Eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// ErrDropped is the cause of results that were dropped.
var ErrDropped = errors.New("edgetest: result dropped")
