package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/sandbox"
)

const testKey = "dsec_0123456789abcdef"

// testTime is the clock of every test.
var testTime = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// A fakePlatform speaks the public contract over real HTTP and keeps everything in memory. Commands are programs: Go functions.
type fakePlatform struct {
	dsecv1connect.UnimplementedSandboxServiceHandler
	dsecv1connect.UnimplementedEnvironmentServiceHandler
	dsecv1connect.UnimplementedNetworkServiceHandler
	dsecv1connect.UnimplementedSystemServiceHandler

	server   *httptest.Server
	programs map[string]program

	// intercept sees every request first; it returns true when it has answered it. It may panic with
	// http.ErrAbortHandler to cut the connection.
	intercept func(w http.ResponseWriter, r *http.Request) bool
	// cutOutput cuts the connection after that many bytes of every answer with output; 0 = never.
	cutOutput int
	// shortOutput ends that many answers with output early, as if they were complete.
	shortOutput int
	// startFailure is what starting a command answers, if set.
	startFailure *sandbox.Error

	mu           sync.Mutex
	sandboxes    map[string]*dsecv1.Sandbox
	keys         map[string]string // idempotency key -> id
	commands     map[string]*fakeCommand
	environments map[string]*dsecv1.Environment
	archives     map[string][]byte
	files        map[string]fakeFile
	calls        map[string]int // path -> count
	queries      []string       // of the byte routes
	execs        []*dsecv1.Command
	creates      []*dsecv1.SandboxSpec
	inside       fakeInside
	services     []*dsecv1.ServiceDefinition
	running      sync.WaitGroup
}

type fakeFile struct {
	data  []byte
	mode  string
	mtime string
	user  string
}

// A program is what a fake command does; it returns the exit code.
type program func(p *process) int

// A process is one run of a program.
type process struct {
	argv           []string
	stdin          io.Reader
	stdout, stderr io.Writer
	killed         <-chan struct{}
	sizes          <-chan [2]uint32 // of its terminal
}

type fakeCommand struct {
	mu      sync.Mutex
	result  *dsecv1.CommandResult
	streams [2]bytes.Buffer
	dropped [2][2]int64 // begin and end of what is no longer kept
	change  chan struct{}
	killed  chan struct{}
	kill    sync.Once
	stdinR  *io.PipeReader
	stdinW  *io.PipeWriter
	turn    sync.Mutex // of who writes input
	stdinAt int64
	sizes   chan [2]uint32
}

func newFakePlatform(t *testing.T) *fakePlatform {
	t.Helper()
	f := &fakePlatform{
		programs: builtinPrograms(), sandboxes: make(map[string]*dsecv1.Sandbox), keys: make(map[string]string),
		commands: make(map[string]*fakeCommand), environments: make(map[string]*dsecv1.Environment),
		archives: make(map[string][]byte), files: make(map[string]fakeFile), calls: make(map[string]int),
	}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(f))
	mux.Handle(dsecv1connect.NewEnvironmentServiceHandler(f))
	mux.Handle(dsecv1connect.NewNetworkServiceHandler(f))
	mux.Handle(dsecv1connect.NewSystemServiceHandler(f))
	mux.HandleFunc("GET /v1/sandboxes/{id}/commands/{cmd}/{stream}", f.serveOutput)
	mux.HandleFunc("PUT /v1/sandboxes/{id}/commands/{cmd}/stdin", f.serveStdin)
	mux.HandleFunc("GET /v1/sandboxes/{id}/files", f.serveFile)
	mux.HandleFunc("PUT /v1/sandboxes/{id}/files", f.receiveFile)
	mux.HandleFunc("POST /v1/environments/{kind}/{name...}", f.receiveArchive)
	f.inside.archives, f.inside.dirs = make(map[string][]byte), []string{"/tmp", "/new/dir"}
	mux.HandleFunc("GET /v1/sandboxes/{id}/archive", f.serveTree)
	mux.HandleFunc("PUT /v1/sandboxes/{id}/archive", f.receiveTree)
	mux.HandleFunc("GET /v1/sandboxes/{id}/ports/{port}/tcp", f.servePort)
	f.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.calls[r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]]++
		if strings.HasPrefix(r.URL.Path, "/v1/") {
			f.queries = append(f.queries, r.Method+" "+r.URL.String())
		}
		intercept := f.intercept
		f.mu.Unlock()
		if r.Header.Get("Authorization") != "Bearer "+testKey {
			connect.NewErrorWriter().Write(w, r, wire(sandbox.Errorf(sandbox.Unauthenticated, "bad_api_key", "the API key is not valid")))
			return
		}
		if intercept != nil && intercept(w, r) {
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		f.killAll()
		f.server.CloseClientConnections()
		f.server.Close()
		f.running.Wait()
	})
	return f
}

func builtinPrograms() map[string]program {
	return map[string]program{
		"echo": func(p *process) int { fmt.Fprintln(p.stdout, strings.Join(p.argv[1:], " ")); return 0 },
		"both": func(p *process) int {
			io.WriteString(p.stdout, "out\x00\xff")
			io.WriteString(p.stderr, "err\r\n")
			return 3
		},
		"cat":  func(p *process) int { io.Copy(p.stdout, p.stdin); return 0 },
		"hang": func(p *process) int { io.WriteString(p.stdout, "hanging\n"); <-p.killed; return 137 },
		"true": func(p *process) int { return 0 },
	}
}

// wire is an error as the platform sends it.
func wire(e *sandbox.Error) *connect.Error {
	var code connect.Code
	if err := code.UnmarshalText([]byte(e.Class.String())); err != nil {
		panic(err)
	}
	out := connect.NewError(code, fmt.Errorf("%s", e.Message))
	detail, err := connect.NewErrorDetail(&dsecv1.ErrorInfo{Reason: e.Reason, Facts: e.Facts})
	if err != nil {
		panic(err)
	}
	out.AddDetail(detail)
	return out
}

// byteError answers on a byte route.
func byteError(w http.ResponseWriter, status int, e *sandbox.Error) {
	raw, _ := proto.Marshal(&dsecv1.ErrorInfo{Reason: e.Reason, Facts: e.Facts})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]any{"code": e.Class.String(), "message": e.Message, "details": []any{
		map[string]any{"type": "dsec.v1.ErrorInfo", "value": base64.RawStdEncoding.EncodeToString(raw)}}})
}

// add puts a sandbox there that the tests did not create through the API.
func (f *fakePlatform) add(change func(*dsecv1.Sandbox)) *dsecv1.Sandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.addLocked(change)
}

func (f *fakePlatform) addLocked(change func(*dsecv1.Sandbox)) *dsecv1.Sandbox {
	s := &dsecv1.Sandbox{
		Id: string(sandbox.NewID("abcde")), State: dsecv1.State_STATE_READY, Spec: &dsecv1.SandboxSpec{Image: "debian@sha256:" + strings.Repeat("ab", 32)},
		CreatedAt: timestamppb.New(testTime.Add(-3 * time.Minute)), Project: "default", Node: "abcde",
	}
	if change != nil {
		change(s)
	}
	f.sandboxes[s.Id] = s
	return s
}

func (f *fakePlatform) live() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, s := range f.sandboxes {
		if s.State == dsecv1.State_STATE_READY {
			n++
		}
	}
	return n
}

func (f *fakePlatform) called(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[name]
}

func (f *fakePlatform) setIntercept(do func(http.ResponseWriter, *http.Request) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.intercept = do
}

func (f *fakePlatform) killAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.commands {
		c.end(true)
	}
}

// end makes the program stop.
func (c *fakeCommand) end(killed bool) {
	c.kill.Do(func() {
		c.mu.Lock()
		c.result.Killed = killed && c.result.Running
		c.mu.Unlock()
		close(c.killed)
		c.stdinW.CloseWithError(io.EOF)
	})
}

// changedLocked wakes whoever waits for a change.
func (c *fakeCommand) changedLocked() {
	close(c.change)
	c.change = make(chan struct{})
}

type fakeWriter struct {
	c *fakeCommand
	i int
}

func (w fakeWriter) Write(p []byte) (int, error) {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	n, err := w.c.streams[w.i].Write(p)
	w.c.changedLocked()
	return n, err
}

func (f *fakePlatform) CreateSandbox(ctx context.Context, r *connect.Request[dsecv1.CreateSandboxRequest]) (*connect.Response[dsecv1.CreateSandboxResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if id, ok := f.keys[r.Msg.IdempotencyKey]; ok {
		return connect.NewResponse(&dsecv1.CreateSandboxResponse{Sandbox: f.sandboxes[id]}), nil
	}
	if r.Msg.Spec.Image == "missing" {
		return nil, wire(sandbox.Errorf(sandbox.NotFound, "environment_not_found", "there is no image missing:latest; `dsec image ls` lists what there is"))
	}
	f.creates = append(f.creates, r.Msg.Spec)
	s := f.addLocked(func(s *dsecv1.Sandbox) { s.Spec = r.Msg.Spec })
	f.keys[r.Msg.IdempotencyKey] = s.Id
	return connect.NewResponse(&dsecv1.CreateSandboxResponse{Sandbox: s}), nil
}

var errNoSandbox = wire(sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "there is no such sandbox"))

func (f *fakePlatform) GetSandbox(_ context.Context, r *connect.Request[dsecv1.GetSandboxRequest]) (*connect.Response[dsecv1.GetSandboxResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, ok := f.sandboxes[r.Msg.Id]
	if !ok {
		return nil, errNoSandbox
	}
	return connect.NewResponse(&dsecv1.GetSandboxResponse{Sandbox: proto.Clone(s).(*dsecv1.Sandbox)}), nil
}

// ListSandboxes gives two a page, so that every test pages.
func (f *fakePlatform) ListSandboxes(_ context.Context, r *connect.Request[dsecv1.ListSandboxesRequest]) (*connect.Response[dsecv1.ListSandboxesResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	states := r.Msg.States
	if len(states) == 0 {
		states = []dsecv1.State{dsecv1.State_STATE_CREATING, dsecv1.State_STATE_READY, dsecv1.State_STATE_STOPPING}
	}
	var out dsecv1.ListSandboxesResponse
	for _, id := range slices.Sorted(maps.Keys(f.sandboxes)) {
		s := f.sandboxes[id]
		fits := slices.Contains(states, s.State) && id > r.Msg.PageToken
		for k, v := range r.Msg.Labels {
			fits = fits && s.Spec.Labels[k] == v
		}
		if !fits {
			continue
		}
		if len(out.Sandboxes) == 2 {
			out.NextPageToken = out.Sandboxes[1].Id
			break
		}
		out.Sandboxes = append(out.Sandboxes, proto.Clone(s).(*dsecv1.Sandbox))
	}
	return connect.NewResponse(&out), nil
}

func (f *fakePlatform) DeleteSandbox(_ context.Context, r *connect.Request[dsecv1.DeleteSandboxRequest]) (*connect.Response[dsecv1.DeleteSandboxResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := r.Msg.Id
	if id == "" {
		id = f.keys[r.Msg.IdempotencyKey]
	}
	s, ok := f.sandboxes[id]
	if !ok {
		return nil, errNoSandbox
	}
	for name, c := range f.commands {
		if strings.HasPrefix(name, id+"/") {
			c.end(true)
		}
	}
	s.State, s.Reason = dsecv1.State_STATE_STOPPED, &dsecv1.Reason{Code: "deleted"}
	return connect.NewResponse(&dsecv1.DeleteSandboxResponse{Sandbox: proto.Clone(s).(*dsecv1.Sandbox)}), nil
}

func (f *fakePlatform) Exec(ctx context.Context, r *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	f.mu.Lock()
	s, ok := f.sandboxes[r.Msg.SandboxId]
	if !ok || s.State != dsecv1.State_STATE_READY {
		f.mu.Unlock()
		return nil, errNoSandbox
	}
	c, known := f.commands[s.Id+"/"+r.Msg.CommandId]
	if !known {
		argv := r.Msg.Command.Argv
		if r.Msg.Command.Shell != "" {
			argv = []string{"echo", "script:", r.Msg.Command.Shell}
		}
		if f.startFailure != nil {
			f.mu.Unlock()
			return nil, wire(f.startFailure)
		}
		run, found := f.programs[argv[0]]
		if !found {
			f.mu.Unlock()
			return nil, wire(sandbox.Errorf(sandbox.NotFound, "program_not_found", "there is no program %q in the sandbox", argv[0]))
		}
		f.execs = append(f.execs, r.Msg.Command)
		c = f.startLocked(s.Id, r.Msg.CommandId, r.Msg.Command, argv, run)
	}
	f.mu.Unlock()
	return connect.NewResponse(&dsecv1.ExecResponse{Result: c.await(ctx, r.Msg.WaitSeconds, r.Msg.InlineLimit)}), nil
}

func (f *fakePlatform) startLocked(sandboxID, id string, cmd *dsecv1.Command, argv []string, run program) *fakeCommand {
	c := &fakeCommand{
		result: &dsecv1.CommandResult{CommandId: id, Running: true, StartedAt: timestamppb.New(testTime.Add(time.Duration(len(f.commands)) * time.Second)), Description: strings.Join(argv, " ")},
		change: make(chan struct{}), killed: make(chan struct{}), sizes: make(chan [2]uint32, 16),
	}
	c.result.Tag, c.result.Session, c.result.Terminal = cmd.Tag, cmd.Session, cmd.Terminal != nil
	c.stdinR, c.stdinW = io.Pipe()
	if !cmd.StdinFollows && cmd.Terminal == nil {
		c.stdinW.Close()
	}
	f.commands[sandboxID+"/"+id] = c
	f.running.Go(func() {
		code := run(&process{argv: argv, stdin: c.stdinR, stdout: fakeWriter{c, 0}, stderr: fakeWriter{c, 1}, killed: c.killed, sizes: c.sizes})
		c.stdinR.CloseWithError(io.ErrClosedPipe)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.result.Running, c.result.ExitCode = false, int32(code)
		switch code {
		case -124:
			c.result.TimedOut, c.result.ExitCode = true, 137
		case -9:
			c.result.OomKilled, c.result.ExitCode = true, 137
		}
		c.changedLocked()
	})
	return c
}

// await waits for the end up to wait seconds. No fake program takes time of itself, so any wait is until the end.
func (c *fakeCommand) await(ctx context.Context, wait float64, limit int32) *dsecv1.CommandResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.result.Running && wait != 0 && ctx.Err() == nil {
		change := c.change
		c.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
		}
		c.mu.Lock()
	}
	r := proto.Clone(c.result).(*dsecv1.CommandResult)
	r.StdinSize = c.stdinAt
	for i, o := range []**dsecv1.Output{&r.Stdout, &r.Stderr} {
		data := c.streams[i].Bytes()
		*o = &dsecv1.Output{Size: int64(len(data)), HeadSize: int64(len(data)), Data: bytes.Clone(data[:min(len(data), int(limit))])}
		if d := c.dropped[i]; d[1] > 0 {
			(*o).HeadSize, (*o).TailSize = d[0], int64(len(data))-d[1]
		}
	}
	return r
}

func (f *fakePlatform) command(sandboxID, id string) (*fakeCommand, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, ok := f.commands[sandboxID+"/"+id]
	if !ok {
		return nil, wire(sandbox.Errorf(sandbox.NotFound, "command_unknown", "there is no such command"))
	}
	return c, nil
}

func (f *fakePlatform) GetCommand(ctx context.Context, r *connect.Request[dsecv1.GetCommandRequest]) (*connect.Response[dsecv1.GetCommandResponse], error) {
	c, err := f.command(r.Msg.SandboxId, r.Msg.CommandId)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetCommandResponse{Result: c.await(ctx, r.Msg.WaitSeconds, r.Msg.InlineLimit)}), nil
}

func (f *fakePlatform) ListCommands(ctx context.Context, r *connect.Request[dsecv1.ListCommandsRequest]) (*connect.Response[dsecv1.ListCommandsResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out dsecv1.ListCommandsResponse
	for _, name := range slices.Sorted(maps.Keys(f.commands)) {
		if c := f.commands[name].await(ctx, 0, 0); strings.HasPrefix(name, r.Msg.SandboxId+"/") && (r.Msg.Tag == "" || c.Tag == r.Msg.Tag) {
			out.Commands = append(out.Commands, c)
		}
	}
	return connect.NewResponse(&out), nil
}

func (f *fakePlatform) KillCommand(_ context.Context, r *connect.Request[dsecv1.KillCommandRequest]) (*connect.Response[dsecv1.KillCommandResponse], error) {
	c, err := f.command(r.Msg.SandboxId, r.Msg.CommandId)
	if err != nil {
		return nil, err
	}
	c.end(true)
	return connect.NewResponse(&dsecv1.KillCommandResponse{}), nil
}

func (f *fakePlatform) ListEnvironments(_ context.Context, r *connect.Request[dsecv1.ListEnvironmentsRequest]) (*connect.Response[dsecv1.ListEnvironmentsResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out dsecv1.ListEnvironmentsResponse
	for _, k := range slices.Sorted(maps.Keys(f.environments)) {
		if e := f.environments[k]; e.Kind == r.Msg.Kind {
			out.Environments = append(out.Environments, e)
		}
	}
	return connect.NewResponse(&out), nil
}

func (f *fakePlatform) GetEnvironment(_ context.Context, r *connect.Request[dsecv1.GetEnvironmentRequest]) (*connect.Response[dsecv1.GetEnvironmentResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e, ok := f.environments[r.Msg.Kind+"/"+r.Msg.Name]
	if !ok {
		return nil, wire(sandbox.Errorf(sandbox.NotFound, "environment_not_found", "there is no %s %s", r.Msg.Kind, r.Msg.Name))
	}
	return connect.NewResponse(&dsecv1.GetEnvironmentResponse{Environment: e}), nil
}

func (f *fakePlatform) RemoveEnvironment(_ context.Context, r *connect.Request[dsecv1.RemoveEnvironmentRequest]) (*connect.Response[dsecv1.RemoveEnvironmentResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := r.Msg.Kind + "/" + r.Msg.Name
	if _, ok := f.environments[key]; !ok {
		return nil, wire(sandbox.Errorf(sandbox.NotFound, "environment_not_found", "there is no %s", key))
	}
	delete(f.environments, key)
	return connect.NewResponse(&dsecv1.RemoveEnvironmentResponse{}), nil
}

func (f *fakePlatform) GetInfo(context.Context, *connect.Request[dsecv1.GetInfoRequest]) (*connect.Response[dsecv1.GetInfoResponse], error) {
	return connect.NewResponse(&dsecv1.GetInfoResponse{Version: "9.9", Principal: "admin", Project: "default", Nodes: []*dsecv1.Node{
		{Id: "abcde", Healthy: true, Sandboxes: 1, Capacity: 100, MemoryBytes: 8 << 30, MemoryAvailableBytes: 4 << 30, Cpus: 2, Backends: []string{"container"}},
	}}), nil
}
