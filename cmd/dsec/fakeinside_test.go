package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// fakeInside is what the fake platform knows of the inside of its sandboxes, all of them alike.
type fakeInside struct {
	sessions  []*dsecv1.Session
	listing   []*dsecv1.FileInfo
	stats     map[string]*dsecv1.FileInfo
	changes   []*dsecv1.FileChange
	processes []*dsecv1.Process
	signals   []*dsecv1.SignalProcessRequest
	measured  int
	events    []*dsecv1.WatchFilesResponse
	watched   []*dsecv1.WatchSandboxesResponse
	ports     map[string]func(io.ReadWriter)
	dirs      []string
	archives  map[string][]byte // by path, and what was put there under "PUT <path>"
}

// begin finds where output begins that is wanted by tail_lines or since.
func (c *fakeCommand) begin(r *http.Request, stream int) (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.streams[stream].Bytes()
	lines, err := strconv.Atoi(r.FormValue("tail_lines"))
	if err != nil {
		_, err = strconv.ParseInt(r.FormValue("since"), 10, 64)
		return int64(len(all)), err // nothing is so new
	}
	i := len(bytes.TrimSuffix(all, []byte("\n")))
	for ; lines > 0 && i > 0; lines-- {
		i = bytes.LastIndexByte(all[:i], '\n')
	}
	if i < 0 {
		return 0, nil
	}
	if i < len(all) && all[i] == '\n' {
		i++
	}
	return int64(i), nil
}

func (f *fakePlatform) ResizeTerminal(_ context.Context, r *connect.Request[dsecv1.ResizeTerminalRequest]) (*connect.Response[dsecv1.ResizeTerminalResponse], error) {
	c, err := f.command(r.Msg.SandboxId, r.Msg.CommandId)
	if err != nil {
		return nil, err
	}
	select {
	case c.sizes <- [2]uint32{r.Msg.Rows, r.Msg.Cols}:
	default:
	}
	return connect.NewResponse(&dsecv1.ResizeTerminalResponse{}), nil
}

func (f *fakePlatform) CreateSession(_ context.Context, r *connect.Request[dsecv1.CreateSessionRequest]) (*connect.Response[dsecv1.CreateSessionResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &dsecv1.Session{Name: r.Msg.Name, Shell: "bash", CreatedAt: timestamppb.New(testTime)}
	f.inside.sessions = append(f.inside.sessions, s)
	return connect.NewResponse(&dsecv1.CreateSessionResponse{Session: s}), nil
}

func (f *fakePlatform) ListSessions(context.Context, *connect.Request[dsecv1.ListSessionsRequest]) (*connect.Response[dsecv1.ListSessionsResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return connect.NewResponse(&dsecv1.ListSessionsResponse{Sessions: slices.Clone(f.inside.sessions)}), nil
}

func (f *fakePlatform) DeleteSession(_ context.Context, r *connect.Request[dsecv1.DeleteSessionRequest]) (*connect.Response[dsecv1.DeleteSessionResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inside.sessions = slices.DeleteFunc(f.inside.sessions, func(s *dsecv1.Session) bool { return s.Name == r.Msg.Name })
	return connect.NewResponse(&dsecv1.DeleteSessionResponse{}), nil
}

func (f *fakePlatform) ListFiles(_ context.Context, r *connect.Request[dsecv1.ListFilesRequest], out *connect.ServerStream[dsecv1.ListFilesResponse]) error {
	if r.Msg.Path == "/missing" {
		return wire(sandbox.Errorf(sandbox.NotFound, "file_not_found", "there is no directory /missing"))
	}
	for _, e := range f.inside.listing {
		if err := out.Send(&dsecv1.ListFilesResponse{Files: []*dsecv1.FileInfo{e}}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakePlatform) StatFiles(_ context.Context, r *connect.Request[dsecv1.StatFilesRequest]) (*connect.Response[dsecv1.StatFilesResponse], error) {
	var out dsecv1.StatFilesResponse
	paths := r.Msg.Paths
	for _, p := range r.Msg.RawPaths {
		paths = append(paths, string(p))
	}
	for _, p := range paths {
		res := &dsecv1.StatResult{File: f.inside.stats[p]}
		if file, ok := f.files[p]; ok && res.File == nil {
			mode, _ := strconv.ParseUint(file.mode, 8, 32)
			res.File = &dsecv1.FileInfo{Path: p, Type: dsecv1.FileType_FILE_TYPE_REGULAR, Mode: uint32(mode), Size: int64(len(file.data))}
		}
		if clean := path.Clean("/" + p); res.File == nil && (clean == "/" || slices.Contains(f.inside.dirs, clean)) {
			res.File = &dsecv1.FileInfo{Path: p, Type: dsecv1.FileType_FILE_TYPE_DIRECTORY, Mode: 0o750, ModifiedAt: timestamppb.New(testTime)}
		}
		if res.File == nil {
			res.Failure = &dsecv1.Failure{Code: "not_found", Message: "there is no " + p, Info: &dsecv1.ErrorInfo{Reason: "file_not_found"}}
		}
		out.Results = append(out.Results, res)
	}
	return connect.NewResponse(&out), nil
}

func (f *fakePlatform) ChangeFiles(_ context.Context, r *connect.Request[dsecv1.ChangeFilesRequest]) (*connect.Response[dsecv1.ChangeFilesResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inside.changes = append(f.inside.changes, r.Msg.Changes...)
	return connect.NewResponse(&dsecv1.ChangeFilesResponse{}), nil
}

func (f *fakePlatform) WatchFiles(_ context.Context, _ *connect.Request[dsecv1.WatchFilesRequest], out *connect.ServerStream[dsecv1.WatchFilesResponse]) error {
	for _, m := range f.inside.events {
		if err := out.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// WatchMetrics ends with the sandbox, after three measurements.
func (f *fakePlatform) WatchMetrics(_ context.Context, r *connect.Request[dsecv1.WatchMetricsRequest], out *connect.ServerStream[dsecv1.GetMetricsResponse]) error {
	for i := range 3 {
		m := &dsecv1.Metrics{
			SandboxId: r.Msg.SandboxId, At: timestamppb.New(testTime.Add(seconds(float64(i)))), CpuSeconds: 0.5 * float64(i), MemoryBytes: 3 << 20,
			MemoryLimitBytes: 1 << 30, Pids: 7, Unavailable: []string{"network_rx_bytes"},
		}
		if err := out.Send(&dsecv1.GetMetricsResponse{Metrics: m}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakePlatform) ListProcesses(context.Context, *connect.Request[dsecv1.ListProcessesRequest]) (*connect.Response[dsecv1.ListProcessesResponse], error) {
	return connect.NewResponse(&dsecv1.ListProcessesResponse{Processes: f.inside.processes}), nil
}

func (f *fakePlatform) SignalProcess(_ context.Context, r *connect.Request[dsecv1.SignalProcessRequest]) (*connect.Response[dsecv1.SignalProcessResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Msg.Pid == 404 {
		return nil, wire(sandbox.Errorf(sandbox.NotFound, "process_not_found", "there is no process 404"))
	}
	f.inside.signals = append(f.inside.signals, r.Msg)
	return connect.NewResponse(&dsecv1.SignalProcessResponse{}), nil
}

func (f *fakePlatform) WatchSandboxes(ctx context.Context, r *connect.Request[dsecv1.WatchSandboxesRequest], out *connect.ServerStream[dsecv1.WatchSandboxesResponse]) error {
	for _, m := range f.inside.watched {
		if err := out.Send(m); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

func (f *fakePlatform) CreatePortURL(_ context.Context, r *connect.Request[dsecv1.CreatePortURLRequest]) (*connect.Response[dsecv1.CreatePortURLResponse], error) {
	return connect.NewResponse(&dsecv1.CreatePortURLResponse{
		Url: "http://p" + strconv.Itoa(int(r.Msg.Port)) + ".example/?t=" + strconv.Itoa(int(r.Msg.ExpiresSeconds)), ExpiresAt: timestamppb.New(testTime),
	}), nil
}

func (f *fakePlatform) serveTree(w http.ResponseWriter, r *http.Request) {
	data, ok := f.inside.archives[path.Clean(r.FormValue("path"))]
	if !ok {
		byteError(w, http.StatusNotFound, sandbox.Errorf(sandbox.NotFound, "file_not_found", "there is no %s", r.FormValue("path")))
		return
	}
	w.Header().Set("Trailer", "Dsec-Archive, Dsec-Error")
	w.Write(data)
	w.Header().Set("Dsec-Archive", `{"entries":3,"skipped":2}`)
	if r.FormValue("path") == "/broken" {
		w.Header().Set("Dsec-Error", `{"code":"permission_denied","message":"/broken/x cannot be read"}`)
	}
}

func (f *fakePlatform) receiveTree(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inside.archives["PUT "+r.FormValue("path")] = data
	io.WriteString(w, `{"entries":3,"bytes":7,"skipped":0}`)
}

// servePort is a TCP port inside: what serves it gets the connection.
func (f *fakePlatform) servePort(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	serve := f.inside.ports[r.PathValue("port")]
	f.mu.Unlock()
	if serve == nil {
		byteError(w, http.StatusConflict, sandbox.Errorf(sandbox.FailedPrecondition, "port_closed", "nothing listens on port %s in the sandbox", r.PathValue("port")))
		return
	}
	if !strings.HasPrefix(r.Header.Get("Upgrade"), "dsec-tcp") {
		panic("no upgrade is asked for")
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: dsec-tcp\r\n\r\n")
	serve(struct {
		io.Reader
		io.Writer
	}{rw, conn})
}

var errFakeScreen = errors.New("the fake terminal has no raw mode")
