package apiserver

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/internal/control/watcher"
	"dsec/sandbox"
)

type systemService struct{ s *Server }

var _ dsecv1connect.SystemServiceHandler = systemService{}

// GetInfo implements the service.
func (v systemService) GetInfo(ctx context.Context, _ *connect.Request[dsecv1.GetInfoRequest]) (*connect.Response[dsecv1.GetInfoResponse], error) {
	who := exchangeOf(ctx).who
	res := &dsecv1.GetInfoResponse{Version: v.s.o.Version, Principal: who.Principal, Project: who.Project}
	for _, o := range v.s.o.Nodes() {
		res.Nodes = append(res.Nodes, writeNode(o))
	}
	return connect.NewResponse(res), nil
}

func writeNode(o watcher.Observation) *dsecv1.Node {
	s := o.Status
	n := &dsecv1.Node{
		Id: string(o.Edge), Healthy: o.Healthy, Sandboxes: s.GetSandboxes(), Capacity: s.GetCapacity(), MemoryBytes: s.GetMemoryBytes(),
		MemoryAvailableBytes: s.GetMemoryAvailableBytes(), Cpus: s.GetCpus(), Backends: s.GetBackends(),
	}
	switch {
	case !o.Healthy && o.Err != nil:
		n.Reason = sandbox.AsError(o.Err).Message
	case !o.Healthy:
		n.Reason = "the node has not answered yet"
	case !s.GetAccepting():
		n.Reason = s.GetRefusingReason()
	}
	return n
}
