package client

import (
	"context"
	"iter"

	dsecv1 "dsec/api/dsec/v1"
)

// PutService defines a service that network rules may name, in place of what its name stood for. Running sandboxes keep what
// their rules stood for.
func (c *Client) PutService(ctx context.Context, s *dsecv1.ServiceDefinition) (*dsecv1.ServiceDefinition, error) {
	res, err := invoke(ctx, c, c.networks.PutService, &dsecv1.PutServiceRequest{Service: s})
	return res.GetService(), err
}

// AddService defines a service whose name stands for nothing yet. It is sent once: a repeated one could find itself.
func (c *Client) AddService(ctx context.Context, s *dsecv1.ServiceDefinition) (*dsecv1.ServiceDefinition, error) {
	res, err := invokeOnce(ctx, c, c.networks.PutService, &dsecv1.PutServiceRequest{Service: s, CreateOnly: true})
	return res.GetService(), err
}

// GetService is one service.
func (c *Client) GetService(ctx context.Context, name string) (*dsecv1.ServiceDefinition, error) {
	res, err := invoke(ctx, c, c.networks.GetService, &dsecv1.GetServiceRequest{Name: name})
	return res.GetService(), err
}

// ListServices gives all services by name.
func (c *Client) ListServices(ctx context.Context) iter.Seq2[*dsecv1.ServiceDefinition, error] {
	return pages(func(token string) ([]*dsecv1.ServiceDefinition, string, error) {
		res, err := invoke(ctx, c, c.networks.ListServices, &dsecv1.ListServicesRequest{PageSize: pageSize, PageToken: token})
		return res.GetServices(), res.GetNextPageToken(), err
	})
}

// RemoveService removes a service. Sandboxes whose rules name it keep what it stood for.
func (c *Client) RemoveService(ctx context.Context, name string) error {
	_, err := invoke(ctx, c, c.networks.RemoveService, &dsecv1.RemoveServiceRequest{Name: name})
	return err
}

// SetNetwork replaces the sandbox's network rules: what is not named is closed.
func (s *Sandbox) SetNetwork(ctx context.Context, rules map[string]bool) (*dsecv1.Sandbox, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.SetNetwork, &dsecv1.SetNetworkRequest{SandboxId: s.ID, NetworkRules: rules})
	return res.GetSandbox(), err
}

// Network is what the sandbox's rules mean now, and what was refused.
func (s *Sandbox) Network(ctx context.Context) (*dsecv1.NetworkStatus, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.GetNetwork, &dsecv1.GetNetworkRequest{SandboxId: s.ID})
	return res.GetNetwork(), err
}
