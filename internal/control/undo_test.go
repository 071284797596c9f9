package control_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control"
	"dsec/internal/control/edgetest"
	"dsec/sandbox"
)

// hold makes creates block until their context ends or release is closed; arrived gets one value for each.
func hold(p *platform) (arrived chan string, release chan struct{}) {
	arrived, release = make(chan string, 1000), make(chan struct{})
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Create = func(ctx context.Context, r *edgev1.CreateSandbox) error {
			arrived <- r.GetId()
			select {
			case <-release:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	return arrived, release
}

func gone(t *testing.T, p *platform) {
	t.Helper()
	edgetest.Eventually(t, "no sandbox is left", func() bool { return len(p.edges[0].Live()) == 0 })
}

func TestAClientThatGoesAwayLeavesNothing(t *testing.T) {
	p := start(t, func(o *control.Options) { o.Quota = 1 })
	p.publish("base", "base:latest", "")
	arrived, release := hold(p)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := p.sandboxes().CreateSandbox(ctx, connect.NewRequest(&dsecv1.CreateSandboxRequest{Spec: &dsecv1.SandboxSpec{Image: "base"}, IdempotencyKey: "k"}))
		failed <- err
	}()
	<-arrived
	cancel()
	if err := <-failed; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	gone(t, p)
	close(release)
	// Quota and key are free. The create waits for the roll-back to end.
	if _, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k"); err != nil {
		t.Fatal(err)
	}
}

func TestCancelByKeyWhileCreating(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	arrived, _ := hold(p)
	failed := make(chan error)
	go func() {
		_, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k")
		failed <- err
	}()
	<-arrived
	_, err := p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{IdempotencyKey: "k", Wait: true}))
	ok(t, err)
	if n := len(p.edges[0].Live()); n != 0 {
		t.Errorf("%d left after a delete that waited", n)
	}
	wantReason(t, <-failed, "create_canceled")
	for _, d := range p.edges[0].Deletes() {
		if d.GetReasonCode() != sandbox.ReasonCanceled {
			t.Errorf("deleted because of %q", d.GetReasonCode())
		}
	}
	// A cancel of what never was is no error, and reaches a create that comes late.
	_, err = p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{IdempotencyKey: "late"}))
	ok(t, err)
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base"}, "late")
	wantReason(t, err, "create_canceled")
}

// The sandbox becomes ready while its create is cancelled: what waits for the cancel waits for the end of the sandbox.
func TestCancelByKeyOfWhatBecomesReady(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	arrived, release := hold(p)
	late := sync.OnceFunc(func() { close(release) })
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Delete = func(context.Context, sandbox.ID) error {
			defer late()
			if len(p.edges[0].Deletes()) == 1 {
				return sandbox.Errorf(sandbox.Unavailable, "busy", "the first delete is lost")
			}
			return nil
		}
	})
	failed := make(chan error)
	go func() {
		_, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k")
		failed <- err
	}()
	<-arrived
	_, err := p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{IdempotencyKey: "k", Wait: true}))
	ok(t, err)
	wantReason(t, <-failed, "create_canceled")
	deletes := p.edges[0].Deletes()
	if n := len(deletes); n < 2 || !deletes[n-1].GetWait() {
		t.Errorf("%d deletes, and the last did not wait until nothing is left", n)
	}
}

// A retry on another connection keeps the create alive when the first connection is found to be gone.
func TestRetryJoinsAndOutlivesTheFirst(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	arrived, release := hold(p)
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error)
	go func() {
		_, err := p.sandboxes().CreateSandbox(ctx, connect.NewRequest(&dsecv1.CreateSandboxRequest{Spec: &dsecv1.SandboxSpec{Image: "base"}, IdempotencyKey: "k"}))
		first <- err
	}()
	id := <-arrived
	second := make(chan *dsecv1.Sandbox)
	var entered atomic.Bool
	go func() {
		entered.Store(true)
		sb, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k")
		if err != nil {
			t.Error(err)
		}
		second <- sb
	}()
	edgetest.Eventually(t, "the retry is under way", entered.Load)
	// Whether the retry arrives before or after the first is gone, it must get a sandbox, and only one may be left.
	cancel()
	<-first
	close(release)
	sb := <-second
	if live := p.edges[0].Live(); len(live) != 1 || string(live[0]) != sb.GetId() {
		t.Errorf("%v live; the answer was %s, the first try %s", live, sb.GetId(), id)
	}
}

// rawCreate sends a create over a connection of its own and leaves without reading the answer.
func rawCreate(t *testing.T, p *platform, key string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
	ok(t, err)
	body := `{"spec":{"image":"base"},"idempotencyKey":"` + key + `"}`
	_, err = io.WriteString(c, "POST /dsec.v1.SandboxService/CreateSandbox HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer "+p.key+"\r\nContent-Length: "+itoa(len(body))+"\r\n\r\n"+body)
	ok(t, err)
	return c
}

func TestConnectionResetWhileCreating(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	arrived, _ := hold(p)
	c := rawCreate(t, p, "k")
	<-arrived
	c.(*net.TCPConn).SetLinger(0) // RST, as a killed client with unread data
	c.Close()
	gone(t, p)
}

func TestDisconnectInTheMiddleOfABatch(t *testing.T) {
	const window = 4
	p := start(t, func(o *control.Options) { o.BatchWindow = window })
	p.publish("base", "base:latest", "")
	one := make(chan struct{}, 1)
	one <- struct{}{} // becomes ready, the others do not
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Create = func(ctx context.Context, _ *edgev1.CreateSandbox) error {
			select {
			case <-one:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := p.sandboxes().CreateSandboxes(ctx, connect.NewRequest(&dsecv1.CreateSandboxesRequest{Spec: &dsecv1.SandboxSpec{Image: "base"}, Count: 10_000}))
	ok(t, err)
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	edgetest.Eventually(t, "another begins in its place", func() bool { n, _ := p.edges[0].Counts(); return n == window+1 })
	cancel()
	stream.Close()
	edgetest.Eventually(t, "the request ends", func() bool { return strings.Contains(p.log.String(), "path=/dsec.v1.SandboxService/CreateSandboxes") })
	// Each may have begun one more before it saw that nobody waits.
	if n, _ := p.edges[0].Counts(); n > 2*window+1 {
		t.Errorf("%d creates, most of them for nobody", n)
	}
	edgetest.Eventually(t, "the others are undone, the first was delivered", func() bool { return len(p.edges[0].Live()) == 1 })
}

// leaves is an answer whose reader has it and is gone before the server can do anything else.
type leaves struct {
	*httptest.ResponseRecorder
	cancel context.CancelFunc
}

func (l leaves) Flush() {
	l.ResponseRecorder.Flush()
	if strings.Contains(l.Body.String(), `"sandbox":`) {
		l.cancel()
	}
}

// A caller that leaves with its answer keeps the sandbox: a script that ends with its create, a loop that is left after the first.
func TestWhoLeavesWithTheAnswerKeepsTheSandbox(t *testing.T) {
	one := `{"spec":{"image":"base"}}`
	many := `{"spec":{"image":"base"},"count":3}`
	for _, c := range []struct{ procedure, contentType, body string }{
		{dsecv1connect.SandboxServiceCreateSandboxProcedure, "application/json", one},
		{dsecv1connect.SandboxServiceCreateSandboxesProcedure, "application/connect+json", "\x00\x00\x00\x00" + string(rune(len(many))) + many},
	} {
		p := start(t, func(o *control.Options) { o.BatchWindow = 1 })
		p.publish("base", "base:latest", "")
		ctx, cancel := context.WithCancel(t.Context())
		r := httptest.NewRequestWithContext(ctx, "POST", c.procedure, strings.NewReader(c.body))
		r.Header.Set("Authorization", "Bearer "+p.key)
		r.Header.Set("Content-Type", c.contentType)
		w := leaves{httptest.NewRecorder(), cancel}
		p.control.Handler().ServeHTTP(w, r)
		ok(t, p.control.Close()) // waits until what was not given is undone
		for _, id := range p.edges[0].Live() {
			if !strings.Contains(w.Body.String(), string(id)) {
				t.Errorf("%s: %s lives, given was %s", c.procedure, id, w.Body)
			}
		}
		if n := len(p.edges[0].Live()); n != 1 {
			t.Errorf("%s: %d live", c.procedure, n)
		}
	}
}

// stuck is an answer whose reader does not read until told.
type stuck struct {
	*httptest.ResponseRecorder
	read chan struct{}
}

func (s stuck) Write(b []byte) (int, error) {
	<-s.read
	return s.ResponseRecorder.Write(b)
}

// While a caller does not read, no further creates begin.
func TestBackPressure(t *testing.T) {
	const window, count = 4, 50
	p := start(t, func(o *control.Options) { o.BatchWindow = window })
	p.publish("base", "base:latest", "")
	body := `{"spec":{"image":"base"},"count":` + itoa(count) + `}`
	r := httptest.NewRequest("POST", dsecv1connect.SandboxServiceCreateSandboxesProcedure, strings.NewReader("\x00\x00\x00\x00"+string(rune(len(body)))+body))
	r.Header.Set("Authorization", "Bearer "+p.key)
	r.Header.Set("Content-Type", "application/connect+json")
	w := stuck{httptest.NewRecorder(), make(chan struct{})}
	done := make(chan struct{})
	go func() { p.control.Handler().ServeHTTP(w, r); close(done) }()
	// One result is being written, and each of the window holds another.
	edgetest.Eventually(t, "creates begin", func() bool { n, _ := p.edges[0].Counts(); return n >= window+1 })
	const others = 20
	for range others { // more than the whole batch would need, were it going on
		p.mustCreate()
	}
	if n, _ := p.edges[0].Counts(); n != window+1+others {
		t.Errorf("%d creates began for a reader that does not read", n-others)
	}
	close(w.read)
	<-done
	if n := strings.Count(w.Body.String(), `"sandbox":`); n != count {
		t.Errorf("%d results: %.300q", n, w.Body)
	}
}

func TestEdgeVanishesWhileCreating(t *testing.T) {
	p := start(t, func(o *control.Options) { o.AwayTimeout = time.Minute })
	p.publish("base", "base:latest", "")
	arrived, release := hold(p)
	failed := make(chan error)
	go func() { _, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k"); failed <- err }()
	<-arrived
	p.edges[0].Vanish()
	wantReason(t, <-failed, "edge_unavailable")
	close(release)
	p.edges[0].Appear(t)
	// The key works again once the old create is undone.
	sb, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k")
	ok(t, err)
	if live := p.edges[0].Live(); len(live) != 1 || string(live[0]) != sb.GetId() {
		t.Errorf("%v live, want %s", live, sb.GetId())
	}
}

// The edge believes that its result has arrived, but the connection broke: nobody has the sandbox, so it must go.
func TestResultLostOnTheWay(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	p.edges[0].Set(func(h *edgetest.Hooks) { h.DropResult = true })
	_, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
	wantReason(t, err, "edge_unavailable")
	p.edges[0].Set(func(h *edgetest.Hooks) { h.DropResult = false })
	if len(p.edges[0].Live()) != 1 {
		t.Fatal("the test does not do what it says")
	}
	edgetest.Eventually(t, "the edge can appear", func() bool { return tryAppear(t, p.edges[0]) })
	gone(t, p)
}

func tryAppear(t *testing.T, e *edgetest.Edge) bool {
	for _, dial := range []func(context.Context) (net.Conn, error){e.Dial, e.DialBytes} {
		if c, err := dial(t.Context()); err == nil {
			c.Close()
			return false // it has not vanished yet
		}
	}
	e.Appear(t)
	return true
}

func TestFullEdgeIsLeftForAnother(t *testing.T) {
	p := start(t, nil, "eaaaa", "ebbbb")
	p.publish("base", "base:latest", "")
	p.edges[0].Set(func(h *edgetest.Hooks) { h.Full = true })
	for range 10 {
		if sb := p.mustCreate(); sandbox.ID(sb.GetId()).Edge() != "ebbbb" {
			t.Errorf("%s", sb.GetId())
		}
	}
	p.edges[1].Set(func(h *edgetest.Hooks) { h.Full = true })
	_, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
	wantReason(t, err, "node_full") // what an edge said, not only that none is left
}

func TestControlPlaneRestart(t *testing.T) {
	p := start(t, func(o *control.Options) { o.Quota = 2 })
	p.publish("base", "base:latest", "")
	sb, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k")
	ok(t, err)
	// Another control plane over the same store and edge: it knows nothing but what the edge tells.
	again, err := control.New(t.Context(), control.Options{
		Store: p.store, Images: p.images, Quota: 2, Poll: 20 * time.Millisecond, Log: p.slog,
		Edges: []control.Edge{{Code: "eaaaa", Dial: p.edges[0].Dial, DialBytes: p.edges[0].DialBytes}},
	})
	ok(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { again.Run(ctx) })
	defer func() {
		cancel()
		wg.Wait()
		ok(t, again.Close())
	}()
	p.control = again
	p.serve(p.slog)
	defer p.server.Close()
	found, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "k")
	ok(t, err)
	if found.GetId() != sb.GetId() {
		t.Errorf("%s is not %s", found.GetId(), sb.GetId())
	}
	p.mustCreate()
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
	wantReason(t, err, "quota_exceeded")
}

func TestShutdownUndoesCreatesInFlight(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	arrived, _ := hold(p)
	failed := make(chan error)
	go func() { _, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, ""); failed <- err }()
	<-arrived
	ok(t, p.control.Close())
	if err := <-failed; err == nil || errors.Is(err, http.ErrServerClosed) {
		t.Errorf("got %v", err)
	}
	if n := len(p.edges[0].Live()); n != 0 {
		t.Errorf("%d left", n)
	}
}
