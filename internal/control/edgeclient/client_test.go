package edgeclient_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/edgeclient"
	"dsec/internal/control/edgetest"
	"dsec/sandbox"
)

const code = sandbox.EdgeCode("eaaaa")

func setup(t testing.TB, away time.Duration) (*edgetest.Edge, *edgeclient.Client) {
	t.Helper()
	e := edgetest.New(t, code, nil)
	c, err := edgeclient.New(edgeclient.Options{Code: code, Dial: e.Dial, DialBytes: e.DialBytes, AwayTimeout: away, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return e, c
}

func request() *edgev1.CreateSandbox {
	return &edgev1.CreateSandbox{Id: string(sandbox.NewID(code)), Spec: &dsecv1.SandboxSpec{}, Grant: "g", Deadline: timestamppb.New(time.Now().Add(time.Minute))}
}

func want(t *testing.T, err error, class sandbox.Class, reason string) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != class || e.Reason != reason {
		t.Fatalf("got %v; want %s %s", err, class, reason)
	}
}

func TestCreatesTravelInBatches(t *testing.T) {
	e, c := setup(t, 0)
	// The first goes out at once. While it is held, the others gather.
	hold := make(chan struct{})
	e.Set(func(h *edgetest.Hooks) {
		h.Create = func(context.Context, *edgev1.CreateSandbox) error { <-hold; return nil }
	})
	const n = 200
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			r := request()
			res, sent, err := c.Create(t.Context(), r)
			if err != nil || !sent || res.GetId() != r.GetId() || res.GetSandbox().GetId() != r.GetId() {
				t.Errorf("got %v, %v, %v", res, sent, err)
			}
		})
	}
	edgetest.Eventually(t, "all creates arrive while the first is held", func() bool { n1, _ := e.Counts(); return n1 == n })
	close(hold)
	wg.Wait()
	if creates, batches := e.Counts(); creates != n || batches > n/4 {
		t.Errorf("%d creates in %d batches", creates, batches)
	}
}

func TestASingleCreateDoesNotWait(t *testing.T) {
	e, c := setup(t, 0)
	for range 5 {
		if _, _, err := c.Create(t.Context(), request()); err != nil {
			t.Fatal(err)
		}
	}
	if _, batches := e.Counts(); batches != 5 {
		t.Errorf("%d batches", batches)
	}
}

func TestFailureOfOneInABatch(t *testing.T) {
	e, c := setup(t, 0)
	bad := request()
	e.Set(func(h *edgetest.Hooks) {
		h.Create = func(_ context.Context, r *edgev1.CreateSandbox) error {
			if r.GetId() == bad.GetId() {
				return sandbox.Errorf(sandbox.ResourceExhausted, "disk_full", "full")
			}
			return nil
		}
	})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if res, _, err := c.Create(t.Context(), request()); err != nil || res.GetFailure() != nil {
				t.Errorf("got %v, %v", res, err)
			}
		})
	}
	res, _, err := c.Create(t.Context(), bad)
	if err != nil || res.GetFailure().GetInfo().GetReason() != "disk_full" {
		t.Errorf("got %v, %v", res, err)
	}
	wg.Wait()
}

func TestEveryCallerGoneEndsTheBatch(t *testing.T) {
	e, c := setup(t, 0)
	arrived, ended := make(chan struct{}), make(chan error, 1)
	e.Set(func(h *edgetest.Hooks) {
		h.Create = func(ctx context.Context, _ *edgev1.CreateSandbox) error {
			close(arrived)
			<-ctx.Done()
			ended <- ctx.Err()
			return ctx.Err()
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-arrived; cancel() }()
	_, sent, err := c.Create(ctx, request())
	want(t, err, sandbox.Canceled, "canceled")
	if !sent {
		t.Error("it was sent")
	}
	<-ended
	edgetest.Eventually(t, "nothing is left", func() bool { return len(e.Live()) == 0 })
}

func TestEdgeAway(t *testing.T) {
	e, c := setup(t, 50*time.Millisecond)
	e.Vanish()
	start := time.Now()
	_, err := c.GetStatus(t.Context(), "g")
	want(t, err, sandbox.Unavailable, "edge_unavailable")
	_, sent, err := c.Create(t.Context(), request())
	want(t, err, sandbox.Unavailable, "edge_unavailable")
	if sent {
		t.Error("it was sent to nobody")
	}
	w := httptest.NewRecorder()
	var got error
	c.ServeBytes(w, httptest.NewRequest("GET", "/v1/sandboxes/x/files", nil), "g", func(_ http.ResponseWriter, _ *http.Request, err error) { got = err })
	want(t, got, sandbox.Unavailable, "edge_unavailable")
	if d := time.Since(start); d > 2*edgeclient.DefaultAwayTimeout { // three calls, which by default would wait so long each
		t.Errorf("it took %v", d)
	}
	e.Appear(t)
	edgetest.Eventually(t, "it works again", func() bool { _, err := c.GetStatus(t.Context(), "g"); return err == nil })
}

func TestRestartIsWaitedFor(t *testing.T) {
	e, c := setup(t, 30*time.Second)
	if _, err := c.GetStatus(t.Context(), "g"); err != nil {
		t.Fatal(err)
	}
	e.Vanish()
	edgetest.Eventually(t, "the client sees it", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		_, err := c.GetStatus(ctx, "g") // a deadline that is shorter than AwayTimeout, as a poll's is
		return sandbox.ReasonOf(err) == "edge_unavailable" && errors.Is(err, context.DeadlineExceeded)
	})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.GetStatus(gone, "g")
	want(t, err, sandbox.Canceled, "canceled")
	done := make(chan error)
	go func() { _, err := c.GetStatus(t.Context(), "g"); done <- err }()
	e.Appear(t)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestVanishInTheMiddle(t *testing.T) {
	e, c := setup(t, time.Minute)
	arrived := make(chan struct{}, 2)
	e.Set(func(h *edgetest.Hooks) {
		h.Create = func(ctx context.Context, _ *edgev1.CreateSandbox) error {
			arrived <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}
		h.Exec = func(ctx context.Context, _ *dsecv1.ExecRequest) (*dsecv1.CommandResult, error) {
			arrived <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	r := request()
	errs := make(chan error, 2)
	go func() { _, _, err := c.Create(t.Context(), r); errs <- err }()
	<-arrived
	go func() {
		errs <- c.Call(t.Context(), "g", func(ctx context.Context, c edgev1.EdgeServiceClient) error {
			_, err := c.Exec(ctx, &dsecv1.ExecRequest{SandboxId: r.GetId()})
			return err
		})
	}()
	<-arrived
	e.Vanish()
	for range 2 {
		want(t, <-errs, sandbox.Unavailable, "edge_unavailable")
	}
}

func TestErrorsKeepTheirClassAndReason(t *testing.T) {
	_, c := setup(t, 0)
	_, err := c.GetSandbox(t.Context(), "g", &edgev1.GetSandboxRequest{Id: "x"})
	want(t, err, sandbox.NotFound, "sandbox_not_found")
	_, err = c.GetStatus(t.Context(), "")
	want(t, err, sandbox.Unauthenticated, "no_grant")
}

func TestCloseEndsEverything(t *testing.T) {
	e, c := setup(t, 0)
	arrived := make(chan struct{})
	e.Set(func(h *edgetest.Hooks) {
		h.Create = func(ctx context.Context, _ *edgev1.CreateSandbox) error {
			close(arrived)
			<-ctx.Done()
			return ctx.Err()
		}
	})
	done := make(chan error)
	go func() { _, _, err := c.Create(t.Context(), request()); done <- err }()
	<-arrived
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Fatal("a create outlived its client")
	}
	if _, _, err := c.Create(t.Context(), request()); err == nil {
		t.Fatal("a closed client creates")
	}
	// The test's own clean-up closes again.
	e.Set(func(h *edgetest.Hooks) { h.Create = nil })
}

// front serves the client's byte routes as an apiserver would.
func front(t *testing.T, c *edgeclient.Client) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.ServeBytes(w, r, "g", func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, sandbox.ReasonOf(err), http.StatusServiceUnavailable)
		})
	}))
	t.Cleanup(s.Close)
	return s
}

func TestBytesPassAsTheyAre(t *testing.T) {
	e, c := setup(t, 0)
	s := front(t, c)
	r := request()
	if _, _, err := c.Create(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	url := s.URL + "/v1/sandboxes/" + r.GetId() + "/files?path=/a%20b;c%2F%00"
	content := bytes.Repeat([]byte("0123456789abcdef\x00\xff"), 1<<17)
	put, _ := http.NewRequest("PUT", url, bytes.NewReader(content))
	put.Header.Set("Authorization", "Bearer secret")
	put.Header.Set("Dsec-Grant", "forged")
	put.Header.Set("Cookie", "c=d")
	res, err := http.DefaultClient.Do(put)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 200 || res.Trailer.Get("Dsec-Done") != "1" {
		t.Fatalf("%v %v %v", err, res.Status, res.Trailer)
	}
	res.Body.Close()
	h := e.Headers()[0]
	if h.Get("Authorization") != "" || h.Get("Cookie") != "" || h.Get("Dsec-Grant") != "g" || len(h["Dsec-Grant"]) != 1 || h.Get("X-Forwarded-For") != "" {
		t.Errorf("the edge got %v", h)
	}
	get, _ := http.NewRequest("GET", url, nil)
	get.Header.Set("Range", "bytes=16-33")
	res, err = http.DefaultClient.Do(get)
	if err != nil {
		t.Fatal(err)
	}
	got, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if res.StatusCode != http.StatusPartialContent || !bytes.Equal(got, content[16:34]) || res.Header.Get("Dsec-Mode") != "0644" {
		t.Errorf("%s %q %v", res.Status, got, res.Header)
	}
	res, err = http.Get(s.URL + "/v1/sandboxes/" + r.GetId() + "/files?path=/none")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got, _ := io.ReadAll(res.Body); res.StatusCode != 404 || !bytes.Contains(got, []byte("file_not_found")) {
		t.Errorf("%s %s", res.Status, got)
	}
}

func TestATruncatedAnswerIsSeen(t *testing.T) {
	e, c := setup(t, 0)
	s := front(t, c)
	e.Set(func(h *edgetest.Hooks) {
		h.Bytes = func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte("some"))
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
	})
	res, err := http.Get(s.URL + "/v1/sandboxes/x/files")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got, err := io.ReadAll(res.Body); err == nil {
		t.Fatalf("a cut answer looks whole: %q", got)
	}
}

// A request that was not answered before the edge is found to be down may be sent again, of whatever method it is.
func TestDownIsNoFaultOfThePlatform(t *testing.T) {
	e, c := setup(t, 0)
	s := front(t, c)
	arrived := make(chan struct{})
	e.Set(func(h *edgetest.Hooks) {
		h.Bytes = func(_ http.ResponseWriter, r *http.Request) {
			arrived <- struct{}{}
			<-r.Context().Done()
		}
	})
	for _, method := range []string{http.MethodGet, http.MethodPut} {
		go func() {
			<-arrived
			c.SetDown(true)
			c.SetDown(false)
		}()
		r, err := http.NewRequest(method, s.URL+"/v1/sandboxes/x/files", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if strings.TrimSpace(string(body)) != "edge_unavailable" {
			t.Errorf("%s: %d %q", method, res.StatusCode, body)
		}
	}
}

func TestDownEndsStreamsInFlight(t *testing.T) {
	e, c := setup(t, 0)
	s := front(t, c)
	ended := make(chan struct{})
	e.Set(func(h *edgetest.Hooks) {
		h.Bytes = func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(200)
			http.NewResponseController(w).Flush()
			<-r.Context().Done() // a follower of a silent command
			close(ended)
		}
	})
	res, err := http.Get(s.URL + "/v1/sandboxes/x/files")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	c.SetDown(true)
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("the stream looks whole")
	}
	<-ended
	c.SetDown(false)
	e.Set(func(h *edgetest.Hooks) {
		h.Bytes = func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "up") }
	})
	res, err = http.Get(s.URL + "/v1/sandboxes/x/files")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got, err := io.ReadAll(res.Body); err != nil || string(got) != "up" {
		t.Errorf("%q %v", got, err)
	}
}
