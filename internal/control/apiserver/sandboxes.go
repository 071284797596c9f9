package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/launch"
	"dsec/internal/grpcerr"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

const maxCount = 100_000 // of one CreateSandboxes

type sandboxService struct{ s *Server }

var _ dsecv1connect.SandboxServiceHandler = sandboxService{}

// prepare checks and resolves what all sandboxes of a request have in common.
func (v sandboxService) prepare(ctx context.Context, spec *dsecv1.SandboxSpec, key string, mostKey int, timeout int64) (launch.Request, error) {
	limit, err := createTimeout(timeout)
	if err != nil {
		return launch.Request{}, err
	}
	if err := checkKey(key, mostKey); err != nil {
		return launch.Request{}, err
	}
	s, digest, err := readSpec(spec)
	if err != nil {
		return launch.Request{}, err
	}
	who := exchangeOf(ctx).who
	r, err := v.s.names.resolve(ctx, who.Project, s)
	if err != nil {
		return launch.Request{}, err
	}
	rules, err := v.s.services.rules(ctx, s.Network)
	if err != nil {
		return launch.Request{}, err
	}
	return launch.Request{
		Caller: who, Key: key, Digest: digest, Spec: r.spec, Layers: r.layers, Network: startspec.WireNetworkRules(rules), Timeout: limit,
	}, nil
}

// CreateSandbox implements the service.
func (v sandboxService) CreateSandbox(ctx context.Context, r *connect.Request[dsecv1.CreateSandboxRequest]) (*connect.Response[dsecv1.CreateSandboxResponse], error) {
	req, err := v.prepare(ctx, r.Msg.GetSpec(), r.Msg.GetIdempotencyKey(), maxKey, r.Msg.GetTimeoutSeconds())
	if err != nil {
		return nil, err
	}
	sb, release, err := v.s.o.Launcher.Create(ctx, req)
	if err != nil {
		return nil, err
	}
	exchangeOf(ctx).release = release // the answer counts once it is written
	return connect.NewResponse(&dsecv1.CreateSandboxResponse{Sandbox: sb}), nil
}

type created struct {
	response *dsecv1.CreateSandboxesResponse
	release  launch.Release
}

// CreateSandboxes implements the service. At most BatchWindow creates are in flight; while the caller does not read, none
// is begun.
func (v sandboxService) CreateSandboxes(ctx context.Context, r *connect.Request[dsecv1.CreateSandboxesRequest], stream *connect.ServerStream[dsecv1.CreateSandboxesResponse]) error {
	n := int(r.Msg.GetCount())
	if n < 1 || n > maxCount {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_count", "count of %d; it must be between 1 and %d", n, maxCount)
	}
	req, err := v.prepare(ctx, r.Msg.GetSpec(), r.Msg.GetIdempotencyKey(), maxKey-maxNesting, r.Msg.GetTimeoutSeconds())
	if err != nil {
		return err
	}
	work, cancel := context.WithCancel(ctx)
	results := make(chan created)
	var workers sync.WaitGroup
	indexes := make(chan int)
	workers.Go(func() {
		defer close(indexes)
		for i := 0; i < n && work.Err() == nil; i++ { // select alone might go on
			select {
			case indexes <- i:
			case <-work.Done():
				return
			}
		}
	})
	for range min(n, v.s.o.BatchWindow) {
		workers.Go(func() {
			for i := range indexes {
				results <- v.createOne(work, req, i)
			}
		})
	}
	go func() { workers.Wait(); close(results) }() // ends before the loop below does
	var broken error
	for c := range results {
		if broken == nil {
			broken = ctx.Err() // not after Send: who has read a result may be gone a moment later, and keeps that sandbox
		}
		if broken == nil {
			broken = stream.Send(c.response)
		}
		if broken != nil {
			cancel()
		}
		c.release(broken == nil)
	}
	cancel()
	if broken != nil {
		return sandbox.Errorf(sandbox.Canceled, "canceled", "the caller went away").WithCause(broken)
	}
	return ctx.Err()
}

func (v sandboxService) createOne(ctx context.Context, req launch.Request, i int) created {
	if req.Key != "" {
		req.Key += "/" + strconv.Itoa(i)
	}
	sb, release, err := v.s.o.Launcher.Create(ctx, req)
	res := &dsecv1.CreateSandboxesResponse{Index: int32(i), Sandbox: sb}
	if err != nil {
		e := sandbox.AsError(err)
		if e.Class == sandbox.Internal {
			v.s.o.Log.ErrorContext(ctx, "create failed", "index", i, "error", err)
		}
		res.Failure = grpcerr.ToFailure(e)
	}
	return created{res, release}
}

// GetSandbox implements the service.
func (v sandboxService) GetSandbox(ctx context.Context, r *connect.Request[dsecv1.GetSandboxRequest]) (*connect.Response[dsecv1.GetSandboxResponse], error) {
	id, e, signed, err := v.s.target(exchangeOf(ctx).who, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	sb, err := e.GetSandbox(ctx, signed, &edgev1.GetSandboxRequest{Id: string(id)})
	if err != nil {
		return nil, about(id, err)
	}
	return connect.NewResponse(&dsecv1.GetSandboxResponse{Sandbox: sb}), nil
}

// DeleteSandbox implements the service.
func (v sandboxService) DeleteSandbox(ctx context.Context, r *connect.Request[dsecv1.DeleteSandboxRequest]) (*connect.Response[dsecv1.DeleteSandboxResponse], error) {
	who, raw, key := exchangeOf(ctx).who, r.Msg.GetId(), r.Msg.GetIdempotencyKey()
	if (raw == "") == (key == "") {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_request", "exactly one of id and idempotency_key must be given")
	}
	if key != "" {
		if err := checkKey(key, maxKey); err != nil {
			return nil, err
		}
		sb, err := v.s.o.Launcher.DeleteByKey(ctx, who, key, r.Msg.GetWait())
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&dsecv1.DeleteSandboxResponse{Sandbox: sb}), nil
	}
	id, err := sandbox.ParseID(raw)
	if err != nil {
		return nil, err
	}
	sb, err := v.s.o.Launcher.Delete(ctx, who, id, r.Msg.GetWait())
	if err != nil {
		return nil, about(id, err)
	}
	return connect.NewResponse(&dsecv1.DeleteSandboxResponse{Sandbox: sb}), nil
}

const (
	defaultPage = 100
	maxPage     = 1000
	maxLabels   = 64
)

func pageSize(n int32) (int, error) {
	switch {
	case n < 0:
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_page_size", "page_size must not be negative")
	case n == 0:
		return defaultPage, nil
	}
	return min(int(n), maxPage), nil
}

// ListSandboxes implements the service. Edges are listed one after the other by code; within an edge its own order and
// token count. An edge that is away makes the list fail: a list is never silently short.
func (v sandboxService) ListSandboxes(ctx context.Context, r *connect.Request[dsecv1.ListSandboxesRequest]) (*connect.Response[dsecv1.ListSandboxesResponse], error) {
	size, err := pageSize(r.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	if len(r.Msg.GetLabels()) > maxLabels {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_labels", "%d labels; at most %d", len(r.Msg.GetLabels()), maxLabels)
	}
	codes := v.s.edgeCodes()
	at, token, err := parseSandboxToken(r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	first, _ := slices.BinarySearch(codes, at)
	res := &dsecv1.ListSandboxesResponse{}
	for i := first; i < len(codes); i++ {
		if codes[i] != at {
			token = ""
		}
		if len(res.Sandboxes) >= size {
			res.NextPageToken = sandboxToken(codes[i], token)
			break
		}
		next, err := v.listEdge(ctx, codes[i], r.Msg, size-len(res.Sandboxes), token, res)
		if err != nil {
			return nil, err
		}
		if next != "" {
			res.NextPageToken = sandboxToken(codes[i], next)
			break
		}
	}
	return connect.NewResponse(res), nil
}

// listEdge appends one page of an edge. An edge may give fewer than it is asked for, and say that there are more.
func (v sandboxService) listEdge(ctx context.Context, code sandbox.EdgeCode, r *dsecv1.ListSandboxesRequest, size int, token string, out *dsecv1.ListSandboxesResponse) (next string, err error) {
	signed, err := v.s.o.IAM.Grant(exchangeOf(ctx).who, code)
	if err != nil {
		return "", err
	}
	page, err := v.s.o.Edges[code].ListSandboxes(ctx, signed, &edgev1.ListSandboxesRequest{
		Labels: r.GetLabels(), States: r.GetStates(), PageSize: int32(size), PageToken: token,
	})
	if err != nil {
		return "", fmt.Errorf("list node %s: %w", code, err)
	}
	for _, rec := range page.GetSandboxes() {
		out.Sandboxes = append(out.Sandboxes, rec.GetSandbox())
	}
	return page.GetNextPageToken(), nil
}

func (s *Server) edgeCodes() []sandbox.EdgeCode {
	codes := make([]sandbox.EdgeCode, 0, len(s.o.Edges))
	for c := range s.o.Edges {
		codes = append(codes, c)
	}
	slices.Sort(codes)
	return codes
}
