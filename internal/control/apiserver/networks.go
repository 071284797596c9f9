package apiserver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/store"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

type networkService struct{ s *Server }

var _ dsecv1connect.NetworkServiceHandler = networkService{}

func writeService(v store.Service) *dsecv1.ServiceDefinition {
	return &dsecv1.ServiceDefinition{
		Name: v.Name, Endpoints: startspec.WireEndpoints(v.Endpoints), Description: v.Description,
		ChangedAt: timestamppb.New(v.ChangedAt), ChangedBy: v.ChangedBy,
	}
}

// PutService implements the service. Running sandboxes are not concerned: they keep what their rules stood for.
func (v networkService) PutService(ctx context.Context, r *connect.Request[dsecv1.PutServiceRequest]) (*connect.Response[dsecv1.PutServiceResponse], error) {
	p, who := r.Msg.GetService(), exchangeOf(ctx).who
	row := store.Service{
		Service:   sandbox.Service{Name: p.GetName(), Endpoints: startspec.Endpoints(p.GetEndpoints()), Description: p.GetDescription()},
		ChangedAt: v.s.o.Now().UTC().Truncate(time.Millisecond), ChangedBy: who.Principal,
	}
	if err := row.Validate(); err != nil {
		return nil, err
	}
	put := v.s.o.Store.PutService
	if r.Msg.GetCreateOnly() {
		put = v.s.o.Store.AddService
	}
	err := put(ctx, row)
	v.s.services.changed()
	if err != nil {
		return nil, fmt.Errorf("define service: %w", err)
	}
	v.s.o.Log.InfoContext(ctx, "network service defined", "service", row.Name, "endpoints", len(row.Endpoints), "principal", who.Principal, "key_id", who.KeyID)
	return connect.NewResponse(&dsecv1.PutServiceResponse{Service: writeService(row)}), nil
}

// noService is the answer for services that do not exist, or have a name that none can have.
func noService(name string) error {
	return sandbox.Errorf(sandbox.NotFound, "service_not_found", "there is no service %.100q; `dsec service ls` lists what there is", name)
}

// GetService implements the service.
func (v networkService) GetService(ctx context.Context, r *connect.Request[dsecv1.GetServiceRequest]) (*connect.Response[dsecv1.GetServiceResponse], error) {
	row, err := v.s.o.Store.Service(ctx, r.Msg.GetName())
	if err != nil {
		return nil, v.explain(r.Msg.GetName(), err)
	}
	return connect.NewResponse(&dsecv1.GetServiceResponse{Service: writeService(row)}), nil
}

func (networkService) explain(name string, err error) error {
	if sandbox.ClassOf(err) == sandbox.NotFound {
		return noService(name)
	}
	return fmt.Errorf("look service up: %w", err)
}

// ListServices implements the service.
func (v networkService) ListServices(ctx context.Context, r *connect.Request[dsecv1.ListServicesRequest]) (*connect.Response[dsecv1.ListServicesResponse], error) {
	size, err := pageSize(r.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	after, err := parseServiceToken(r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	rows, err := v.s.o.Store.Services(ctx, after, size)
	if err != nil {
		return nil, fmt.Errorf("list services: %w", err)
	}
	res := &dsecv1.ListServicesResponse{}
	for _, row := range rows {
		res.Services = append(res.Services, writeService(row))
	}
	if len(rows) == size {
		res.NextPageToken = serviceToken(rows[size-1].Name)
	}
	return connect.NewResponse(res), nil
}

// RemoveService implements the service.
func (v networkService) RemoveService(ctx context.Context, r *connect.Request[dsecv1.RemoveServiceRequest]) (*connect.Response[dsecv1.RemoveServiceResponse], error) {
	err := v.s.o.Store.RemoveService(ctx, r.Msg.GetName())
	v.s.services.changed()
	if err != nil {
		return nil, v.explain(r.Msg.GetName(), err)
	}
	who := exchangeOf(ctx).who
	v.s.o.Log.InfoContext(ctx, "network service removed", "service", r.Msg.GetName(), "principal", who.Principal, "key_id", who.KeyID)
	return connect.NewResponse(&dsecv1.RemoveServiceResponse{}), nil
}

// maxServices bounds what the look-up of services keeps. One changed through another apiserver is seen after nameTTL.
const maxServices = 4096

// serviceNames looks services up.
type serviceNames struct {
	store store.Store
	now   func() time.Time

	mu      sync.Mutex
	changes uint64 // as a resolver's
	known   map[string]foundService
}

type foundService struct {
	endpoints []sandbox.NetworkEndpoint // nil: there is none
	until     time.Time
}

func newServiceNames(st store.Store, now func() time.Time) *serviceNames {
	return &serviceNames{store: st, now: now, known: make(map[string]foundService)}
}

func (n *serviceNames) changed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changes++
	clear(n.known)
}

// find gives the endpoints of a service; none if there is no such service.
func (n *serviceNames) find(ctx context.Context, name string) ([]sandbox.NetworkEndpoint, error) {
	n.mu.Lock()
	f, ok := n.known[name]
	changes := n.changes
	n.mu.Unlock()
	now := n.now()
	if ok && now.Before(f.until) {
		return f.endpoints, nil
	}
	row, err := n.store.Service(ctx, name)
	if err != nil && sandbox.ClassOf(err) != sandbox.NotFound {
		return nil, fmt.Errorf("find service: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changes == changes {
		if len(n.known) >= maxServices {
			clear(n.known)
		}
		n.known[name] = foundService{row.Endpoints, now.Add(nameTTL)}
	}
	return row.Endpoints, nil
}

// rules gives what the rules of a request, which has been checked, stand for now. A service that does not exist can be denied, but
// not allowed.
func (n *serviceNames) rules(ctx context.Context, asked map[string]bool) ([]sandbox.NetworkRule, error) {
	var rules []sandbox.NetworkRule
	for _, rule := range slices.Sorted(maps.Keys(asked)) {
		r := sandbox.NetworkRule{Rule: rule, Allowed: asked[rule]}
		var err error
		if !sandbox.IsService(rule) {
			r.Endpoints, err = sandbox.ParseNetworkRule(rule)
		} else if r.Endpoints, err = n.find(ctx, rule); err == nil && r.Allowed && len(r.Endpoints) == 0 {
			err = n.unknown(ctx, rule)
		}
		if err != nil {
			return nil, err
		}
		rules = append(rules, r)
	}
	return rules, sandbox.ValidateNetwork(rules)
}

// maxNamed is how many services an error names.
const maxNamed = 20

func (n *serviceNames) unknown(ctx context.Context, name string) error {
	rows, err := n.store.Services(ctx, "", maxNamed+1)
	if err != nil {
		return fmt.Errorf("list services: %w", err)
	}
	var names []string
	for _, r := range rows {
		names = append(names, r.Name)
	}
	there := "there are " + strings.Join(names, ", ")
	switch {
	case len(names) == 0:
		there = "there are none"
	case len(names) > maxNamed:
		there = "there are " + strings.Join(names[:maxNamed], ", ") + " and others (`dsec service ls`)"
	}
	return sandbox.Errorf(sandbox.NotFound, "unknown_network_service",
		"network rule %q: there is no such service; %s. An administrator defines one with `dsec service add`; a host is allowed as host:port", name, there).
		WithFact("service", name)
}

// SetNetwork implements the service. Services are looked up anew.
func (v sandboxService) SetNetwork(ctx context.Context, r *connect.Request[dsecv1.SetNetworkRequest]) (*connect.Response[dsecv1.SetNetworkResponse], error) {
	if err := sandbox.ValidateNetworkRules(r.Msg.GetNetworkRules()); err != nil {
		return nil, err
	}
	rules, err := v.s.services.rules(ctx, r.Msg.GetNetworkRules())
	if err != nil {
		return nil, err
	}
	req := &edgev1.SetNetworkRequest{SandboxId: r.Msg.GetSandboxId(), NetworkRules: r.Msg.GetNetworkRules(), Network: startspec.WireNetworkRules(rules)}
	res, err := call(ctx, v.s, req, edgev1.EdgeServiceClient.SetNetwork)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// GetNetwork implements the service.
func (v sandboxService) GetNetwork(ctx context.Context, r *connect.Request[dsecv1.GetNetworkRequest]) (*connect.Response[dsecv1.GetNetworkResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.GetNetwork)
}
