package client_test

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

func TestOutputGoesOnAfterEveryCut(t *testing.T) {
	f := newFake()
	c := f.client(t)
	text := "a line that is cut at every byte"
	k, err := c.Sandbox(fakeID).Start(t.Context(), &dsecv1.Command{Shell: "echo " + text})
	if err != nil {
		t.Fatal(err)
	}
	for _, follow := range []bool{true, false} {
		f.mu.Lock()
		f.cuts = 1 << 20
		f.mu.Unlock()
		out := k.Output(t.Context(), client.Stdout, client.OutputOptions{Offset: 2, Follow: follow})
		got, err := io.ReadAll(out)
		if err != nil || string(got) != text[2:]+"\n" || out.Offset() != int64(len(text)+1) {
			t.Fatalf("follow %v: %q, %v, at %d", follow, got, err, out.Offset())
		}
	}
}

func TestOutputThatIsClosed(t *testing.T) {
	c := newFake().client(t)
	k, err := c.Sandbox(fakeID).Start(t.Context(), &dsecv1.Command{Shell: "echo x"})
	if err != nil {
		t.Fatal(err)
	}
	out := k.Output(t.Context(), client.Stdout, client.OutputOptions{})
	out.Close()
	if _, err := io.ReadAll(out); sandbox.ClassOf(err) != sandbox.Canceled {
		t.Fatalf("%v", err)
	}
}

func TestCreateManyGivesEachOnce(t *testing.T) {
	f := newFake()
	c := f.client(t)
	f.cuts = 3
	seen := map[int32]int{}
	for r, err := range c.CreateMany(t.Context(), &dsecv1.SandboxSpec{Image: "x"}, 8, "") {
		if err != nil {
			t.Fatal(err)
		}
		seen[r.GetIndex()]++
		if failed := client.FailureError(r.GetFailure()); (failed != nil) != (r.GetIndex() == 1) || failed != nil && sandbox.ReasonOf(failed) != "no_capacity" {
			t.Fatalf("%d: %v", r.GetIndex(), failed)
		}
	}
	for i := range int32(8) {
		if seen[i] != 1 {
			t.Fatalf("%v", seen)
		}
	}
}

// After each cut the present state comes again.
func TestWatchBeginsAnew(t *testing.T) {
	c := newFake().client(t)
	var states []dsecv1.State
	for m, err := range c.Watch(t.Context(), &dsecv1.WatchSandboxesRequest{}) {
		if err != nil {
			t.Fatal(err)
		}
		if _, alive := m.GetEvent().(*dsecv1.WatchSandboxesResponse_Alive); alive {
			t.Fatal("keep-alives are not for the consumer")
		}
		if s := m.GetSandbox(); s != nil {
			states = append(states, s.GetState())
		}
		if len(states) == 3 {
			break
		}
	}
	if states[0] != dsecv1.State_STATE_READY || states[1] != dsecv1.State_STATE_STOPPED {
		t.Fatalf("%v", states)
	}
}

func TestPort(t *testing.T) {
	f := newFake()
	f.mux.HandleFunc("GET /v1/sandboxes/{id}/ports/8000/tcp", echoPort)
	f.mux.HandleFunc("GET /v1/sandboxes/{id}/ports/9/tcp", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusConflict)
		io.WriteString(w, `{"code":"failed_precondition","message":"nothing listens on port 9","details":[{"type":"dsec.v1.ErrorInfo","debug":{"reason":"port_closed"}}]}`)
	})
	f.mux.HandleFunc("GET /v1/sandboxes/{id}/ports/10/tcp", func(http.ResponseWriter, *http.Request) {})
	sb := f.client(t).Sandbox(fakeID)
	conn, err := sb.Port(8000).Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	want := func(text string) {
		t.Helper()
		if line, err := in.ReadString('\n'); err != nil || line != text {
			t.Fatalf("%q, %v", line, err)
		}
	}
	want("hello\n") // sent with the head of the answer
	io.WriteString(conn, "some\n")
	want("SOME\n")
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	want("bye\n")
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	for port, reason := range map[int]string{9: "port_closed", 10: "no_upgrade"} {
		if _, err := sb.Port(port).Dial(t.Context()); sandbox.ReasonOf(err) != reason {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

func TestHTTPKnowsOnlyTheSandbox(t *testing.T) {
	hc := &http.Client{Transport: newFake().client(t).Sandbox(fakeID).HTTP()}
	for _, url := range []string{"http://example.org/", "http://169.254.169.254/", "http://localhost:0/"} {
		_, err := hc.Get(url)
		if r := sandbox.ReasonOf(err); !strings.HasPrefix(r, "invalid_") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// The names go as they are, whatever bytes they have, and what goes wrong after the answer has begun is told.
func TestReadArchiveOf(t *testing.T) {
	f := newFake()
	var asked string
	f.mux.HandleFunc("POST /v1/sandboxes/{id}/archive", func(w http.ResponseWriter, r *http.Request) {
		names, err := io.ReadAll(r.Body)
		if err != nil || r.URL.Query().Get("user") != "nobody" || r.URL.Query().Has("path") {
			t.Error(r.URL, err)
		}
		asked = string(names)
		w.Header().Set("Trailer", "Dsec-Archive, Dsec-Error")
		_, _ = w.Write([]byte("tar"))
		w.Header().Set("Dsec-Archive", `{"entries":1,"bytes":3}`)
		w.Header().Set("Dsec-Error", `{"code":"not_found","message":"there is no /b"}`)
	})
	r, err := f.client(t).Sandbox(fakeID).Files("nobody").ReadArchiveOf(t.Context(), "/a\xff\n", "/b")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	content, err := io.ReadAll(r)
	if string(content) != "tar" || sandbox.ClassOf(err) != sandbox.NotFound || asked != "/a\xff\n\x00/b\x00" {
		t.Fatalf("%q %v %q", content, err, asked)
	}
	if got := r.Result(); got.Entries != 1 || got.Bytes != 3 {
		t.Fatal(got)
	}
}
