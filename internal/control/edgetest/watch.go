package edgetest

import (
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grpcerr"
)

// WatchSandboxes sends what there is, then nothing until the caller leaves.
func (e *Edge) WatchSandboxes(r *dsecv1.WatchSandboxesRequest, out grpc.ServerStreamingServer[dsecv1.WatchSandboxesResponse]) error {
	g, err := e.caller(out.Context())
	if err != nil {
		return grpcerr.ToStatus(err)
	}
	e.mu.Lock()
	var present []*dsecv1.WatchSandboxesResponse
	for id, b := range e.boxes {
		asked := len(r.GetIds()) == 0 || slices.Contains(r.GetIds(), string(id))
		if asked && b.sandbox.GetProject() == g.Project && matches(b, &edgev1.ListSandboxesRequest{Labels: r.GetLabels()}) {
			present = append(present, &dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Sandbox{Sandbox: proto.CloneOf(b.sandbox)}})
		}
	}
	e.mu.Unlock()
	for _, m := range append(present, &dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}}) {
		if err := out.Send(m); err != nil {
			return err
		}
	}
	<-out.Context().Done()
	return grpcerr.ToStatus(out.Context().Err())
}
