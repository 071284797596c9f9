package client_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/client"
)

const fakeID = "sabcde0000000000000000000"

// A fake is as much of a platform as these tests need: commands echo their script.
type fake struct {
	dsecv1connect.UnimplementedSandboxServiceHandler
	server *httptest.Server
	mux    *http.ServeMux

	mu      sync.Mutex
	scripts map[string]string // by command id
	cuts    int               // answers of streams that are still to be cut
	watches int
}

func newFake() *fake {
	f := &fake{scripts: map[string]string{}, mux: http.NewServeMux()}
	f.mux.Handle(dsecv1connect.NewSandboxServiceHandler(f))
	f.mux.HandleFunc("GET /v1/sandboxes/{id}/commands/{cmd}/{stream}", f.serveOutput)
	f.server = httptest.NewServer(f.mux)
	return f
}

func (f *fake) client(t *testing.T) *client.Client {
	t.Helper()
	t.Cleanup(f.server.Close)
	c, err := client.New(client.Options{URL: f.server.URL, Key: "dsec_test", Sleep: func(ctx context.Context, _ time.Duration) error { return ctx.Err() }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if _, err := c.Sandbox(fakeID).Get(t.Context()); err != nil { // it has answered once: outages are sat out from here on
		t.Fatal(err)
	}
	return c
}

// cut says whether this answer is to be cut.
func (f *fake) cut() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cuts--
	return f.cuts >= 0
}

func (f *fake) GetSandbox(_ context.Context, r *connect.Request[dsecv1.GetSandboxRequest]) (*connect.Response[dsecv1.GetSandboxResponse], error) {
	return connect.NewResponse(&dsecv1.GetSandboxResponse{Sandbox: &dsecv1.Sandbox{Id: r.Msg.Id, State: dsecv1.State_STATE_READY}}), nil
}

func (f *fake) CreateSandbox(context.Context, *connect.Request[dsecv1.CreateSandboxRequest]) (*connect.Response[dsecv1.CreateSandboxResponse], error) {
	return connect.NewResponse(&dsecv1.CreateSandboxResponse{Sandbox: &dsecv1.Sandbox{Id: fakeID, State: dsecv1.State_STATE_READY}}), nil
}

func (f *fake) CreateSandboxes(_ context.Context, r *connect.Request[dsecv1.CreateSandboxesRequest], out *connect.ServerStream[dsecv1.CreateSandboxesResponse]) error {
	for i := range r.Msg.Count {
		if i == r.Msg.Count/2 && f.cut() {
			panic(http.ErrAbortHandler)
		}
		res := &dsecv1.CreateSandboxesResponse{Index: i, Sandbox: &dsecv1.Sandbox{Id: fakeID}}
		if i == 1 {
			res = &dsecv1.CreateSandboxesResponse{Index: i, Failure: &dsecv1.Failure{Code: "resource_exhausted", Message: "full", Info: &dsecv1.ErrorInfo{Reason: "no_capacity"}}}
		}
		if err := out.Send(res); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) DeleteSandbox(context.Context, *connect.Request[dsecv1.DeleteSandboxRequest]) (*connect.Response[dsecv1.DeleteSandboxResponse], error) {
	return connect.NewResponse(&dsecv1.DeleteSandboxResponse{}), nil
}

func (f *fake) result(id string) *dsecv1.CommandResult {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.scripts[id] + "\n"
	return &dsecv1.CommandResult{CommandId: id, Stdout: &dsecv1.Output{Data: []byte(out), Size: int64(len(out)), HeadSize: int64(len(out))}, Stderr: &dsecv1.Output{}}
}

func (f *fake) Exec(_ context.Context, r *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	f.mu.Lock()
	f.scripts[r.Msg.CommandId] = strings.TrimPrefix(r.Msg.Command.Shell, "echo ")
	f.mu.Unlock()
	return connect.NewResponse(&dsecv1.ExecResponse{Result: f.result(r.Msg.CommandId)}), nil
}

func (f *fake) GetCommand(_ context.Context, r *connect.Request[dsecv1.GetCommandRequest]) (*connect.Response[dsecv1.GetCommandResponse], error) {
	return connect.NewResponse(&dsecv1.GetCommandResponse{Result: f.result(r.Msg.CommandId)}), nil
}

func (f *fake) WatchSandboxes(_ context.Context, _ *connect.Request[dsecv1.WatchSandboxesRequest], out *connect.ServerStream[dsecv1.WatchSandboxesResponse]) error {
	f.mu.Lock()
	f.watches++
	state := []dsecv1.State{dsecv1.State_STATE_READY, dsecv1.State_STATE_STOPPED}[min(f.watches-1, 1)]
	f.mu.Unlock()
	for _, m := range []*dsecv1.WatchSandboxesResponse{
		{Event: &dsecv1.WatchSandboxesResponse_Sandbox{Sandbox: &dsecv1.Sandbox{Id: fakeID, State: state}}},
		{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}}, {Event: &dsecv1.WatchSandboxesResponse_Alive{Alive: true}},
	} {
		if err := out.Send(m); err != nil {
			return err
		}
	}
	panic(http.ErrAbortHandler)
}

// serveOutput gives one byte more of the output with each answer, and cuts it.
func (f *fake) serveOutput(w http.ResponseWriter, r *http.Request) {
	all := string(f.result(r.PathValue("cmd")).Stdout.Data)
	var offset int
	for _, digit := range r.FormValue("offset") {
		offset = offset*10 + int(digit-'0')
	}
	if offset < len(all) && f.cut() {
		io.WriteString(w, all[offset:offset+1])
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	io.WriteString(w, all[min(offset, len(all)):])
}

// echoPort changes the protocol to bytes that come back in capitals, until the client's end, and then says "bye".
func echoPort(w http.ResponseWriter, r *http.Request) {
	if !strings.HasPrefix(r.Header.Get("Upgrade"), "dsec-tcp") || r.Header.Get("Connection") != "Upgrade" {
		http.Error(w, "no upgrade", http.StatusUpgradeRequired)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: dsec-tcp\r\n\r\nhello\n")
	for in := bufio.NewScanner(rw); in.Scan(); {
		io.WriteString(conn, strings.ToUpper(in.Text())+"\n")
	}
	io.WriteString(conn, "bye\n")
}
