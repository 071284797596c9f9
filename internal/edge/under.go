package edge

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/internal/inflight"
)

// What the projects have under way over gRPC is bounded here; over the byte routes, where they find their sandbox.

// ServerOptions are those that a server of the edge's contract must have.
func (e *Edge) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.UnaryInterceptor(e.boundUnary), grpc.StreamInterceptor(e.boundStream)}
}

// ending are the calls that there is room for where there is none for others.
var ending = map[string]bool{
	edgev1.EdgeService_DeleteSandbox_FullMethodName: true, edgev1.EdgeService_KillCommand_FullMethodName: true,
	edgev1.EdgeService_DeleteSession_FullMethodName: true, edgev1.EdgeService_SignalProcess_FullMethodName: true,
}

// place takes one for a call; nil if it needs none. Whose grant is no good is told so by the call itself; the control plane's own
// calls, and creates, which come in batches of many projects and are bounded by admission, need none.
func (e *Edge) place(ctx context.Context, method string, k inflight.Kind) (*inflight.Place, error) {
	if method == edgev1.EdgeService_CreateSandboxes_FullMethodName {
		return nil, nil
	}
	var raw string
	if v := metadata.ValueFromIncomingContext(ctx, grant.MetadataKey); len(v) == 1 {
		raw = v[0]
	}
	g, err := e.o.Verifier.Verify(raw)
	if err != nil || g.Role != grant.RoleUser {
		return nil, nil
	}
	if ending[method] {
		k = inflight.End
	}
	return e.under.Enter(g.Project, k)
}

func (e *Edge) boundUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	place, err := e.place(ctx, info.FullMethod, inflight.Call)
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	if place != nil {
		defer place.Leave()
		if err := place.Hold(int64(proto.Size(req.(proto.Message)))); err != nil {
			return nil, grpcerr.ToStatus(err)
		}
	}
	return handle(ctx, req)
}

func (e *Edge) boundStream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	place, err := e.place(s.Context(), info.FullMethod, inflight.Stream)
	if err != nil {
		return grpcerr.ToStatus(err)
	}
	if place == nil {
		return handle(srv, s)
	}
	defer place.Leave()
	return handle(srv, &heldStream{s, place})
}

// A heldStream counts what it receives, which stays in memory until its end.
type heldStream struct {
	grpc.ServerStream
	place *inflight.Place
}

func (s *heldStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return grpcerr.ToStatus(s.place.Hold(int64(proto.Size(m.(proto.Message)))))
}
