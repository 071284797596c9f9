package edgetest

import (
	"context"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grpcerr"
)

// SetNetwork keeps the rules.
func (e *Edge) SetNetwork(ctx context.Context, r *edgev1.SetNetworkRequest) (*dsecv1.SetNetworkResponse, error) {
	b, err := e.find(ctx, r.GetSandboxId())
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	e.mu.Lock()
	b.sandbox.Spec.NetworkRules, b.network = r.GetNetworkRules(), r.GetNetwork()
	e.mu.Unlock()
	return &dsecv1.SetNetworkResponse{Sandbox: e.show(b)}, nil
}

// GetNetwork gives the rules that SetNetwork kept.
func (e *Edge) GetNetwork(ctx context.Context, r *dsecv1.GetNetworkRequest) (*dsecv1.GetNetworkResponse, error) {
	b, err := e.find(ctx, r.GetSandboxId())
	if err != nil {
		return nil, grpcerr.ToStatus(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	n := &dsecv1.NetworkStatus{}
	for _, rule := range b.network {
		n.Rules = append(n.Rules, &dsecv1.NetworkRuleStatus{Rule: rule.GetRule(), Allowed: rule.GetAllowed(), Endpoints: rule.GetEndpoints()})
	}
	return &dsecv1.GetNetworkResponse{Network: n}, nil
}
