package edge

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

// RegisterGRPC serves the edge's contract on s.
func (e *Edge) RegisterGRPC(s *grpc.Server) { edgev1.RegisterEdgeServiceServer(s, &server{e: e}) }

// maxBatch is how many creates one message may carry.
const maxBatch = 64

// server is the gRPC side. Errors become statuses here and nowhere else.
type server struct {
	edgev1.UnimplementedEdgeServiceServer
	e *Edge
}

// wire translates an error once, and logs what the caller does not get to see.
func (s *server) wire(ctx context.Context, method string, err error) error {
	return grpcerr.ToStatus(s.e.seen(ctx, method, err))
}

// seen logs faults of ours before they are reduced to what users may read.
func (e *Edge) seen(ctx context.Context, call string, err error) error {
	if err != nil && sandbox.ClassOf(err) == sandbox.Internal && ctx.Err() == nil {
		e.log.Error("call failed", "call", call, "error", err)
	}
	return err
}

// caller checks the grant of a gRPC call.
func (s *server) caller(ctx context.Context, roles ...string) (*grant.Grant, error) {
	var raw string
	if v := metadata.ValueFromIncomingContext(ctx, grant.MetadataKey); len(v) == 1 {
		raw = v[0]
	}
	return s.e.authorize(raw, roles...)
}

// authorize checks a grant, that its role is one of roles, and that the edge serves.
func (e *Edge) authorize(raw string, roles ...string) (*grant.Grant, error) {
	g, err := e.o.Verifier.Verify(raw)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(roles, g.Role) {
		return nil, sandbox.Errorf(sandbox.PermissionDenied, "role_denied", "role %q may not do this", g.Role)
	}
	return g, e.serving()
}

// find is the sandbox of a call by a user.
func (s *server) find(ctx context.Context, id string) (*instance, error) {
	g, err := s.caller(ctx, grant.RoleUser)
	if err != nil {
		return nil, err
	}
	return s.e.index.lookup(sandbox.ID(id), g.Project)
}

// guest is the live sandbox of a call by a user.
func (s *server) guest(ctx context.Context, id string) (*instance, Guest, error) {
	in, err := s.find(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	g, err := in.live()
	return in, g, err
}

// CreateSandboxes makes a batch and sends each result as it is known. What was not told when the stream breaks is rolled
// back.
func (s *server) CreateSandboxes(req *edgev1.CreateSandboxesRequest, stream grpc.ServerStreamingServer[edgev1.CreateResult]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	creates := req.GetCreates()
	if len(creates) == 0 || len(creates) > maxBatch {
		return grpcerr.ToStatus(sandbox.Errorf(sandbox.InvalidArgument, "invalid_batch", "a batch of %d creates; it must be 1 to %d", len(creates), maxBatch))
	}
	if err := s.e.serving(); err != nil {
		return grpcerr.ToStatus(err)
	}
	results := make(chan created, len(creates))
	var wg sync.WaitGroup
	for _, c := range creates {
		wg.Go(func() { results <- s.createOne(ctx, c) })
	}
	var broken error
	for range creates {
		r := <-results
		if broken == nil {
			broken = stream.Send(r.result)
		}
		if broken != nil {
			cancel() // those that still wait need not
		}
		if r.in != nil {
			s.e.leave(r.in, broken == nil)
		}
	}
	wg.Wait()
	return broken
}

// created is a result on its way to the caller; in is nil where nothing was begun.
type created struct {
	result *edgev1.CreateResult
	in     *instance
}

func (s *server) createOne(ctx context.Context, c *edgev1.CreateSandbox) created {
	in, err := s.beginCreate(c)
	if err == nil {
		s.e.creating.Add(1)
		err = s.e.outcome(ctx, in)
		s.e.creating.Add(-1)
	}
	r := &edgev1.CreateResult{Id: c.GetId()}
	if err != nil {
		r.Failure = grpcerr.ToFailure(s.e.seen(ctx, "CreateSandboxes", err))
		r.RetryElsewhere = refusedByAdmission(err)
	} else {
		r.Id, r.Sandbox = string(in.id), s.e.viewOf(in)
	}
	return created{result: r, in: in}
}

func (s *server) beginCreate(c *edgev1.CreateSandbox) (*instance, error) {
	g, err := s.e.authorize(c.GetGrant(), grant.RoleUser)
	if err != nil {
		return nil, err
	}
	o, err := s.e.orderOf(c, g.Project, g.Principal)
	if err != nil {
		return nil, err
	}
	return s.e.create(o)
}

func (s *server) GetSandbox(ctx context.Context, req *edgev1.GetSandboxRequest) (*dsecv1.Sandbox, error) {
	in, err := s.find(ctx, req.GetId())
	if err != nil {
		return nil, s.wire(ctx, "GetSandbox", err)
	}
	return s.e.viewOf(in), nil
}

func (s *server) DeleteSandbox(ctx context.Context, req *edgev1.DeleteSandboxRequest) (*dsecv1.Sandbox, error) {
	in, err := s.find(ctx, req.GetId())
	if err != nil {
		return nil, s.wire(ctx, "DeleteSandbox", err)
	}
	code := req.GetReasonCode()
	switch {
	case code == "":
		code = sandbox.ReasonDeleted
	case !sandbox.Ended(code):
		return nil, s.wire(ctx, "DeleteSandbox", sandbox.Errorf(sandbox.InvalidArgument, "invalid_reason", "%q is no reason to end a sandbox", clip(code)))
	}
	if err := s.e.delete(ctx, in, code, req.GetWait()); err != nil {
		return nil, s.wire(ctx, "DeleteSandbox", err)
	}
	return s.e.viewOf(in), nil
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1000
)

// ListSandboxes pages by id, so that a page stays what it is while sandboxes come and go.
func (s *server) ListSandboxes(ctx context.Context, req *edgev1.ListSandboxesRequest) (*edgev1.ListSandboxesResponse, error) {
	g, err := s.caller(ctx, grant.RoleUser, grant.RoleWatcher)
	if err == nil && req.GetAllProjects() != (g.Role == grant.RoleWatcher) {
		err = sandbox.Errorf(sandbox.PermissionDenied, "role_denied", "role %q may not list this", g.Role)
	}
	if err == nil && req.GetPageToken() != "" {
		if _, bad := sandbox.ParseID(req.GetPageToken()); bad != nil {
			err = sandbox.Errorf(sandbox.InvalidArgument, "invalid_page_token", "the page token is not one that this node gave")
		}
	}
	if err != nil {
		return nil, s.wire(ctx, "ListSandboxes", err)
	}
	size := int(req.GetPageSize())
	if size <= 0 {
		size = defaultPage
	}
	size = min(size, maxPage)
	var matching []*instance
	for _, in := range s.e.index.all() {
		if string(in.id) > req.GetPageToken() && (req.GetAllProjects() || in.intent.Project == g.Project) && matches(in, req) {
			matching = append(matching, in)
		}
	}
	slices.SortFunc(matching, func(a, b *instance) int { return strings.Compare(string(a.id), string(b.id)) })
	resp := &edgev1.ListSandboxesResponse{}
	if len(matching) > size {
		matching = matching[:size]
		resp.NextPageToken = string(matching[size-1].id)
	}
	for _, in := range matching {
		resp.Sandboxes = append(resp.Sandboxes, s.e.recordOf(in))
	}
	return resp, nil
}

func matches(in *instance, req *edgev1.ListSandboxesRequest) bool {
	if !hasLabels(in, req.GetLabels()) {
		return false
	}
	state := in.snapshot().life.state
	if len(req.GetStates()) == 0 {
		return !state.Terminal()
	}
	return slices.Contains(req.GetStates(), stateTo[state])
}

func (s *server) Exec(ctx context.Context, req *dsecv1.ExecRequest) (*dsecv1.CommandResult, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "Exec", err)
	}
	cmd, err := startspec.Command(req.GetCommand())
	if err != nil {
		return nil, s.wire(ctx, "Exec", err)
	}
	wait, err := waitOf(req.GetWaitSeconds())
	if err != nil {
		return nil, s.wire(ctx, "Exec", err)
	}
	defer s.e.begin(in)()
	c, err := s.e.exec(ctx, in, req.GetCommandId(), cmd, wait)
	if err == nil {
		err = c.Known(ctx)
	}
	if err != nil {
		return nil, s.wire(ctx, "Exec", err)
	}
	return resultOf(c, inlineOf(req.GetInlineLimit())), nil
}

func (s *server) GetCommand(ctx context.Context, req *dsecv1.GetCommandRequest) (*dsecv1.CommandResult, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "GetCommand", err)
	}
	wait, err := waitOf(req.GetWaitSeconds())
	if err != nil {
		return nil, s.wire(ctx, "GetCommand", err)
	}
	c, err := in.command(req.GetCommandId())
	if err != nil {
		return nil, s.wire(ctx, "GetCommand", err)
	}
	defer s.e.begin(in)()
	if err := s.e.await(ctx, in, c, wait); err != nil {
		return nil, s.wire(ctx, "GetCommand", err)
	}
	if err := c.Known(ctx); err != nil {
		return nil, s.wire(ctx, "GetCommand", err)
	}
	return resultOf(c, inlineOf(req.GetInlineLimit())), nil
}

func (s *server) ListCommands(ctx context.Context, req *dsecv1.ListCommandsRequest) (*dsecv1.ListCommandsResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "ListCommands", err)
	}
	g, err := in.kept()
	if err != nil {
		return nil, s.wire(ctx, "ListCommands", err)
	}
	defer s.e.begin(in)()
	resp := &dsecv1.ListCommandsResponse{}
	for _, c := range g.Commands() {
		if err := c.Known(ctx); err != nil {
			return nil, s.wire(ctx, "ListCommands", err)
		}
		if r := resultOf(c, -1); wanted(r, req) {
			resp.Commands = append(resp.Commands, r)
		}
	}
	slices.SortStableFunc(resp.Commands, func(a, b *dsecv1.CommandResult) int { // newest first
		return cmp.Or(b.GetStartedAt().AsTime().Compare(a.GetStartedAt().AsTime()), strings.Compare(a.CommandId, b.CommandId))
	})
	return resp, nil
}

func wanted(r *dsecv1.CommandResult, req *dsecv1.ListCommandsRequest) bool {
	return (req.GetTag() == "" || req.GetTag() == r.GetTag()) && (req.GetSession() == "" || req.GetSession() == r.GetSession()) &&
		(!req.GetRunning() || r.GetRunning())
}

func (s *server) KillCommand(ctx context.Context, req *dsecv1.KillCommandRequest) (*dsecv1.KillCommandResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "KillCommand", err)
	}
	if n := req.GetSignal(); n < 0 || n > maxSignal {
		return nil, s.wire(ctx, "KillCommand", sandbox.Errorf(sandbox.InvalidArgument, "invalid_signal", "signal %d; it must be 0 to %d", n, maxSignal))
	}
	c, err := in.command(req.GetCommandId())
	if err != nil {
		return nil, s.wire(ctx, "KillCommand", err)
	}
	defer s.e.begin(in)()
	if !c.Result().Running {
		return &dsecv1.KillCommandResponse{}, nil
	}
	if err := c.Kill(ctx, int(req.GetSignal())); err != nil {
		return nil, s.wire(ctx, "KillCommand", err)
	}
	return &dsecv1.KillCommandResponse{}, nil
}

func (s *server) ResizeTerminal(ctx context.Context, req *dsecv1.ResizeTerminalRequest) (*dsecv1.ResizeTerminalResponse, error) {
	in, err := s.find(ctx, req.GetSandboxId())
	if err != nil {
		return nil, s.wire(ctx, "ResizeTerminal", err)
	}
	c, err := in.command(req.GetCommandId())
	if err != nil {
		return nil, s.wire(ctx, "ResizeTerminal", err)
	}
	defer s.e.begin(in)()
	if err := c.Resize(ctx, int(req.GetRows()), int(req.GetCols())); err != nil {
		return nil, s.wire(ctx, "ResizeTerminal", err)
	}
	return &dsecv1.ResizeTerminalResponse{}, nil
}

func (s *server) GetStatus(ctx context.Context, _ *edgev1.GetStatusRequest) (*edgev1.Status, error) {
	if _, err := s.caller(ctx, grant.RoleWatcher); err != nil {
		return nil, s.wire(ctx, "GetStatus", err)
	}
	return s.e.statusOf(ctx), nil
}
