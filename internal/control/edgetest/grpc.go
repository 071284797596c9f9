package edgetest

import (
	"context"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

func (e *Edge) verify(raw string) (*grant.Grant, error) {
	e.mu.Lock()
	v := e.verifier
	e.mu.Unlock()
	switch {
	case raw == "":
		return nil, sandbox.Errorf(sandbox.Unauthenticated, "no_grant", "no grant")
	case v == nil:
		return &grant.Grant{Project: "default", Role: grant.RoleUser}, nil
	}
	return v.Verify(raw)
}

func (e *Edge) caller(ctx context.Context) (*grant.Grant, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	return e.verify(append(md.Get(grant.MetadataKey), "")[0])
}

func unknown(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "the edge does not know %s", id)
}

// find gives a sandbox that the caller may see.
func (e *Edge) find(ctx context.Context, raw string) (*box, error) {
	g, err := e.caller(ctx)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.boxes[sandbox.ID(raw)]
	if b == nil || b.sandbox.GetProject() != g.Project {
		return nil, unknown(raw)
	}
	return b, nil
}

func (e *Edge) show(b *box) *dsecv1.Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	return proto.CloneOf(b.sandbox)
}

// CreateSandboxes creates concurrently and sends results as they come.
func (e *Edge) CreateSandboxes(r *edgev1.CreateSandboxesRequest, stream grpc.ServerStreamingServer[edgev1.CreateResult]) error {
	if _, err := e.caller(stream.Context()); err != nil {
		return grpcerr.ToStatus(err)
	}
	e.mu.Lock()
	e.batches++
	e.creates += len(r.GetCreates())
	e.mu.Unlock()
	results := make(chan *edgev1.CreateResult)
	var wg sync.WaitGroup
	for _, c := range r.GetCreates() {
		wg.Go(func() { results <- e.create(stream.Context(), c) })
	}
	go func() { wg.Wait(); close(results) }()
	var broken error
	for res := range results {
		if broken == nil && e.hook().DropResult {
			go e.Vanish()
			<-stream.Context().Done()
			broken = ErrDropped
			continue // and it lives on
		}
		if broken == nil {
			broken = stream.Send(res)
		}
		if broken != nil || stream.Context().Err() != nil {
			e.End(sandbox.ID(res.GetId()), sandbox.ReasonCanceled)
		}
	}
	return broken
}

func (e *Edge) create(ctx context.Context, c *edgev1.CreateSandbox) *edgev1.CreateResult {
	hooks := e.hook()
	fail := func(err error) *edgev1.CreateResult {
		return &edgev1.CreateResult{Id: c.GetId(), Failure: grpcerr.ToFailure(err)}
	}
	g, err := e.verify(c.GetGrant())
	if err != nil {
		return fail(err)
	}
	if hooks.Full {
		res := fail(sandbox.Errorf(sandbox.ResourceExhausted, "node_full", "the node is full").WithFact("short", "memory"))
		res.RetryElsewhere = true
		return res
	}
	ctx, cancel := context.WithDeadline(ctx, c.GetDeadline().AsTime())
	id := sandbox.ID(c.GetId())
	b := &box{sandbox: &dsecv1.Sandbox{Id: c.GetId(), State: dsecv1.State_STATE_CREATING, Spec: c.GetSpec(), Project: g.Project, Principal: g.Principal, Node: string(e.Code)},
		key: key{g.Project, c.GetIdempotencyKey()}, digest: c.GetSpecDigest(), layers: len(c.GetLayers()), cancel: cancel, wanted: true}
	e.mu.Lock()
	if known, ok := e.keys[b.key]; ok && b.key.key != "" {
		sb := proto.CloneOf(e.boxes[known].sandbox)
		e.mu.Unlock()
		cancel()
		return &edgev1.CreateResult{Id: c.GetId(), Sandbox: sb}
	}
	e.boxes[id] = b
	e.keys[b.key] = id
	e.mu.Unlock()
	if hooks.Create != nil {
		err = hooks.Create(ctx, c)
	}
	if err == nil {
		err = ctx.Err()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.endLocked(b, sandbox.ReasonStartFailed)
		return fail(err)
	}
	b.sandbox.State = dsecv1.State_STATE_READY
	return &edgev1.CreateResult{Id: c.GetId(), Sandbox: proto.CloneOf(b.sandbox)}
}

// GetSandbox answers.
func (e *Edge) GetSandbox(ctx context.Context, r *edgev1.GetSandboxRequest) (*dsecv1.Sandbox, error) {
	b, err := e.find(ctx, r.GetId())
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	return e.show(b), nil
}

// ListSandboxes gives pages by id.
func (e *Edge) ListSandboxes(ctx context.Context, r *edgev1.ListSandboxesRequest) (*edgev1.ListSandboxesResponse, error) {
	g, err := e.caller(ctx)
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.GetAllProjects() && e.verifier != nil && g.Role != grant.RoleWatcher {
		return nil, grpcerr.ToStatus(sandbox.Errorf(sandbox.PermissionDenied, "watcher_only", "watchers only"))
	}
	var ids []string
	for id, b := range e.boxes {
		if (r.GetAllProjects() || b.sandbox.GetProject() == g.Project) && string(id) > r.GetPageToken() && matches(b, r) {
			ids = append(ids, string(id))
		}
	}
	slices.Sort(ids)
	size := int(r.GetPageSize())
	if size <= 0 {
		size = 100
	}
	res := &edgev1.ListSandboxesResponse{}
	for i, id := range ids {
		if i == size {
			res.NextPageToken = ids[i-1]
			break
		}
		b := e.boxes[sandbox.ID(id)]
		res.Sandboxes = append(res.Sandboxes, &edgev1.Record{Sandbox: proto.CloneOf(b.sandbox), IdempotencyKey: b.key.key, SpecDigest: b.digest, HoldsQuota: b.wanted})
	}
	return res, nil
}

func matches(b *box, r *edgev1.ListSandboxesRequest) bool {
	for k, v := range r.GetLabels() {
		if got, ok := b.sandbox.GetSpec().GetLabels()[k]; !ok || got != v {
			return false
		}
	}
	if len(r.GetStates()) == 0 {
		return b.wanted
	}
	return slices.Contains(r.GetStates(), b.sandbox.GetState())
}

// DeleteSandbox is idempotent.
func (e *Edge) DeleteSandbox(ctx context.Context, r *edgev1.DeleteSandboxRequest) (*dsecv1.Sandbox, error) {
	e.mu.Lock()
	e.deletes = append(e.deletes, r)
	e.mu.Unlock()
	b, err := e.find(ctx, r.GetId())
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	if f := e.hook().Delete; f != nil {
		if err := f(ctx, sandbox.ID(r.GetId())); err != nil {
			return nil, grpcerr.ToStatus(err)
		}
	}
	reason := r.GetReasonCode()
	if reason == "" {
		reason = sandbox.ReasonDeleted
	}
	e.End(sandbox.ID(r.GetId()), reason)
	return e.show(b), nil
}

// Exec echoes, unless there is a hook.
func (e *Edge) Exec(ctx context.Context, r *dsecv1.ExecRequest) (*dsecv1.CommandResult, error) {
	if _, err := e.find(ctx, r.GetSandboxId()); err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	if f := e.hook().Exec; f != nil {
		res, err := f(ctx, r)
		return res, grpcerr.ToStatus(err)
	}
	out := []byte(r.GetCommand().GetShell())
	if len(out) > 64<<10 {
		out = out[:64<<10]
	}
	return &dsecv1.CommandResult{CommandId: r.GetCommandId(), Stdout: &dsecv1.Output{Data: out, Size: int64(len(r.GetCommand().GetShell()))}, Stderr: &dsecv1.Output{}}, nil
}

// GetCommand answers with an ended command.
func (e *Edge) GetCommand(ctx context.Context, r *dsecv1.GetCommandRequest) (*dsecv1.CommandResult, error) {
	if _, err := e.find(ctx, r.GetSandboxId()); err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	return &dsecv1.CommandResult{CommandId: r.GetCommandId(), ExitCode: 7}, nil
}

// ListCommands answers with none.
func (e *Edge) ListCommands(ctx context.Context, r *dsecv1.ListCommandsRequest) (*dsecv1.ListCommandsResponse, error) {
	if _, err := e.find(ctx, r.GetSandboxId()); err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	return &dsecv1.ListCommandsResponse{}, nil
}

// KillCommand does nothing.
func (e *Edge) KillCommand(ctx context.Context, r *dsecv1.KillCommandRequest) (*dsecv1.KillCommandResponse, error) {
	if _, err := e.find(ctx, r.GetSandboxId()); err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	return &dsecv1.KillCommandResponse{}, nil
}

// GetStatus says that there is room.
func (e *Edge) GetStatus(ctx context.Context, _ *edgev1.GetStatusRequest) (*edgev1.Status, error) {
	if _, err := e.caller(ctx); err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	s := &edgev1.Status{Edge: string(e.Code), Version: "test", Capacity: 100000, Accepting: true, Backends: []string{sandbox.BackendContainer}, MemoryBytes: 1 << 40, MemoryAvailableBytes: 1 << 40, Cpus: 64}
	s.Sandboxes = int64(len(e.Live()))
	if f := e.hook().Status; f != nil {
		f(s)
	}
	return s, nil
}
