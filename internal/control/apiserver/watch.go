package apiserver

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

const (
	maxWatchedIDs = 100_000
	watchRetry    = 500 * time.Millisecond // between two tries to reach an edge again
	// watchOverlap is how far back the ends of commands are asked for again after an edge was lost: for clocks that differ and
	// for what was on its way.
	watchOverlap = 10 * time.Second
)

// A watch merges the streams of all edges into one.
type watch struct {
	s   *Server
	req *dsecv1.WatchSandboxesRequest
	out func(*dsecv1.WatchSandboxesResponse) error

	mu      sync.Mutex // over sending
	missing int        // edges whose present state has not all been sent
	failed  error      // of sending: the caller is gone
	cancel  func()     // ends all when sending fails
}

// WatchSandboxes implements the service. An edge that goes away does not end it: see EdgeLost.
func (v sandboxService) WatchSandboxes(ctx context.Context, r *connect.Request[dsecv1.WatchSandboxesRequest], out *connect.ServerStream[dsecv1.WatchSandboxesResponse]) error {
	if n := len(r.Msg.GetIds()); n > maxWatchedIDs {
		return sandbox.Errorf(sandbox.InvalidArgument, "too_many_ids", "%d ids; at most %d: watch by labels, or the whole project", n, maxWatchedIDs)
	}
	byEdge, err := v.s.watchedEdges(r.Msg.GetIds())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := &watch{s: v.s, req: r.Msg, out: out.Send, missing: len(byEdge), cancel: cancel}
	if len(byEdge) == 0 {
		return w.send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}})
	}
	var edges sync.WaitGroup
	errs := make(chan error, len(byEdge))
	for code, ids := range byEdge {
		edges.Go(func() {
			errs <- w.follow(ctx, code, ids)
			cancel()
		})
	}
	edges.Wait()
	if w.failed != nil {
		return w.failed
	}
	return <-errs // of the first that gave up
}

// watchedEdges says whom to ask, and for which ids: nil for all.
func (s *Server) watchedEdges(ids []string) (map[sandbox.EdgeCode][]string, error) {
	byEdge := make(map[sandbox.EdgeCode][]string)
	if len(ids) == 0 {
		for code := range s.o.Edges {
			byEdge[code] = nil
		}
		return byEdge, nil
	}
	for _, raw := range ids {
		id, err := sandbox.ParseID(raw)
		if err != nil {
			return nil, err
		}
		if s.o.Edges[id.Edge()] != nil { // else it is unknown, which its absence says
			byEdge[id.Edge()] = append(byEdge[id.Edge()], raw)
		}
	}
	return byEdge, nil
}

// follow passes on what one edge sends, and reaches it again whenever it was lost, until ctx ends or the caller may not ask.
func (w *watch) follow(ctx context.Context, code sandbox.EdgeCode, ids []string) error {
	req := proto.CloneOf(w.req)
	req.Ids = ids
	synced := false
	for {
		err := w.stream(ctx, code, req, &synced)
		switch {
		case ctx.Err() != nil:
			return sandbox.AsError(ctx.Err())
		case sandbox.ClassOf(err) != sandbox.Unavailable:
			return err
		}
		if req.Commands {
			req.CommandsSince = timestamppb.New(w.s.o.Now().Add(-watchOverlap))
		}
		lost := &dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_EdgeLost{EdgeLost: &dsecv1.EdgeLost{Node: string(code)}}}
		if err := w.send(lost); err != nil {
			return err
		}
		if err := w.reach(ctx, code); err != nil {
			return err
		}
	}
}

// reach waits until the edge is there again.
func (w *watch) reach(ctx context.Context, code sandbox.EdgeCode) error {
	for {
		select {
		case <-ctx.Done():
			return sandbox.AsError(ctx.Err())
		case <-time.After(watchRetry):
		}
		err := w.s.o.Edges[code].Call(ctx, "", func(context.Context, edgev1.EdgeServiceClient) error { return nil })
		if err == nil || sandbox.ClassOf(err) != sandbox.Unavailable {
			return err
		}
		if err := w.send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Alive{Alive: true}}); err != nil {
			return err
		}
	}
}

// stream is one call to an edge. Only the first time its `synced` counts for the caller's.
func (w *watch) stream(ctx context.Context, code sandbox.EdgeCode, req *dsecv1.WatchSandboxesRequest, synced *bool) error {
	signed, err := w.s.o.IAM.Grant(exchangeOf(ctx).who, code)
	if err != nil {
		return err
	}
	return w.s.o.Edges[code].Call(ctx, signed, func(ctx context.Context, c edgev1.EdgeServiceClient) error {
		in, err := c.WatchSandboxes(ctx, req)
		if err != nil {
			return err
		}
		for {
			m, err := in.Recv()
			if errors.Is(err, io.EOF) {
				return sandbox.Errorf(sandbox.Unavailable, "edge_stopping", "node %s ended the stream", code)
			}
			if err != nil {
				return err
			}
			if m.GetSynced() {
				if !*synced {
					*synced = true
					err = w.synced()
				}
			} else {
				err = w.send(m)
			}
			if err != nil {
				return err
			}
		}
	})
}

func (w *watch) synced() error {
	w.mu.Lock()
	w.missing--
	all := w.missing == 0
	w.mu.Unlock()
	if !all {
		return nil
	}
	return w.send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}})
}

func (w *watch) send(m *dsecv1.WatchSandboxesResponse) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed != nil {
		return w.failed
	}
	if err := w.out(m); err != nil {
		w.failed = err
		w.cancel()
	}
	return w.failed
}
