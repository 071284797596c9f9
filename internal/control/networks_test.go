package control_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/edgetest"
	"dsec/internal/control/iam"
	"dsec/internal/control/store"
	"dsec/internal/startspec"
)

func (p *platform) networks() dsecv1connect.NetworkServiceClient {
	return dsecv1connect.NewNetworkServiceClient(p.client, p.url)
}

func endpoint(host string, port uint32) *dsecv1.NetworkEndpoint {
	return &dsecv1.NetworkEndpoint{Host: host, Port: port}
}

func (p *platform) define(name string, endpoints ...*dsecv1.NetworkEndpoint) error {
	_, err := p.networks().PutService(p.t.Context(), connect.NewRequest(&dsecv1.PutServiceRequest{
		Service: &dsecv1.ServiceDefinition{Name: name, Endpoints: endpoints, Description: "of " + name},
	}))
	return err
}

func TestServices(t *testing.T) {
	p := start(t, nil)
	ok(t, p.define("pypi", endpoint("pypi.org", 443), endpoint("files.pythonhosted.org", 443)))
	get := func(name string) (*dsecv1.ServiceDefinition, error) {
		res, err := p.networks().GetService(t.Context(), connect.NewRequest(&dsecv1.GetServiceRequest{Name: name}))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetService(), nil
	}
	s, err := get("pypi")
	ok(t, err)
	if e := s.GetEndpoints(); len(e) != 2 || e[0].GetHost() != "pypi.org" || e[0].GetLastPort() != 443 || e[0].GetProtocol() != "tcp" ||
		s.GetChangedBy() != "admin" || !s.GetChangedAt().IsValid() || s.GetDescription() != "of pypi" {
		t.Errorf("got %v", s)
	}
	_, err = p.networks().PutService(t.Context(), connect.NewRequest(&dsecv1.PutServiceRequest{
		Service: &dsecv1.ServiceDefinition{Name: "pypi", Endpoints: s.GetEndpoints()}, CreateOnly: true,
	}))
	wantReason(t, err, "service_exists")
	ok(t, p.define("pypi", endpoint("pypi.org", 80)))
	if s, err = get("pypi"); err != nil || len(s.GetEndpoints()) != 1 {
		t.Errorf("got %v, %v", s, err)
	}
	for i := range 4 {
		ok(t, p.define(fmt.Sprintf("s%d", i), endpoint("10.0.0.0/8", 0)))
	}
	var names []string
	for token := ""; ; {
		res, err := p.networks().ListServices(t.Context(), connect.NewRequest(&dsecv1.ListServicesRequest{PageSize: 2, PageToken: token}))
		ok(t, err)
		for _, s := range res.Msg.GetServices() {
			names = append(names, s.GetName())
		}
		if token = res.Msg.GetNextPageToken(); token == "" {
			break
		}
	}
	if got := strings.Join(names, " "); got != "pypi s0 s1 s2 s3" {
		t.Errorf("listed %s", got)
	}
	remove := func(name string) error {
		_, err := p.networks().RemoveService(t.Context(), connect.NewRequest(&dsecv1.RemoveServiceRequest{Name: name}))
		return err
	}
	ok(t, remove("pypi"))
	wantReason(t, remove("pypi"), "service_not_found")
	_, err = get("pypi")
	wantReason(t, err, "service_not_found")
}

func TestServicesThatAreRefused(t *testing.T) {
	p := start(t, nil)
	for name, c := range map[string]struct {
		endpoints []*dsecv1.NetworkEndpoint
		reason    string
	}{
		"Upper":    {[]*dsecv1.NetworkEndpoint{endpoint("a.example", 1)}, "invalid_service"},
		"":         {[]*dsecv1.NetworkEndpoint{endpoint("a.example", 1)}, "invalid_service"},
		"none":     {nil, "invalid_service"},
		"noport":   {[]*dsecv1.NetworkEndpoint{endpoint("a.example", 0)}, "invalid_network_rule"},
		"largest":  {[]*dsecv1.NetworkEndpoint{endpoint("a.example", 4294967295)}, "invalid_network_rule"},
		"metadata": {[]*dsecv1.NetworkEndpoint{endpoint("169.254.169.254", 80)}, "network_rule_forbidden"},
		"sctp":     {[]*dsecv1.NetworkEndpoint{{Host: "a.example", Port: 1, Protocol: "sctp"}}, "invalid_network_rule"},
	} {
		if err := p.define(name, c.endpoints...); reason(err) != c.reason {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// What all projects have is changed by an administrator of the root alone, and read by anyone.
func TestWhoMayChangeServices(t *testing.T) {
	p := start(t, nil)
	ok(t, p.define("pypi", endpoint("pypi.org", 443)))
	const child = iam.RootProject + "/child"
	ok(t, p.store.AddProject(t.Context(), store.Project{Path: child, CreatedAt: time.Now()}))
	for name, client := range map[string]dsecv1connect.NetworkServiceClient{
		"user":           dsecv1connect.NewNetworkServiceClient(p.as("default", iam.RoleUser), p.url),
		"reader":         dsecv1connect.NewNetworkServiceClient(p.as("default", iam.RoleReader), p.url),
		"child's admin":  dsecv1connect.NewNetworkServiceClient(p.as(child, iam.RoleAdmin), p.url),
		"child's reader": dsecv1connect.NewNetworkServiceClient(p.as(child, iam.RoleReader), p.url),
	} {
		_, err := client.PutService(t.Context(), connect.NewRequest(&dsecv1.PutServiceRequest{
			Service: &dsecv1.ServiceDefinition{Name: "pypi", Endpoints: []*dsecv1.NetworkEndpoint{endpoint("evil.example", 443)}},
		}))
		if reason(err) != "permission_denied" {
			t.Errorf("%s changed a service: %v", name, err)
		}
		_, err = client.RemoveService(t.Context(), connect.NewRequest(&dsecv1.RemoveServiceRequest{Name: "pypi"}))
		if reason(err) != "permission_denied" {
			t.Errorf("%s removed a service: %v", name, err)
		}
		if res, err := client.GetService(t.Context(), connect.NewRequest(&dsecv1.GetServiceRequest{Name: "pypi"})); err != nil || res.Msg.GetService().GetEndpoints()[0].GetHost() != "pypi.org" {
			t.Errorf("%s: %v, %v", name, res, err)
		}
	}
	if log := p.log.String(); !strings.Contains(log, "network service defined") || !strings.Contains(log, "principal=admin") {
		t.Error("the log does not say who defined a service")
	}
}

// What rules stand for goes to the edge; sandboxes keep it when the service changes.
func TestNetworkRulesReachTheEdge(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	ok(t, p.define("pypi", endpoint("pypi.org", 443)))
	var mu sync.Mutex
	var got []*edgev1.NetworkRule
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Create = func(_ context.Context, r *edgev1.CreateSandbox) error {
			mu.Lock()
			defer mu.Unlock()
			got = r.GetNetwork()
			return nil
		}
	})
	sent := func() string {
		mu.Lock()
		defer mu.Unlock()
		var all []string
		for _, r := range got {
			text := fmt.Sprintf("%s=%v:", r.GetRule(), r.GetAllowed())
			for _, e := range startspec.Endpoints(r.GetEndpoints()) {
				text += " " + e.String()
			}
			all = append(all, text)
		}
		return strings.Join(all, ", ")
	}
	_, err := p.create(&dsecv1.SandboxSpec{Image: "base", NetworkRules: map[string]bool{"pypi": true, "npm": false, "10.0.0.0/8:80": true}}, "")
	ok(t, err)
	if want := "10.0.0.0/8:80=true: 10.0.0.0/8:80, npm=false:, pypi=true: pypi.org:443"; sent() != want {
		t.Errorf("sent %s; want %s", sent(), want)
	}
	ok(t, p.define("pypi", endpoint("mirror.example", 80)))
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base", NetworkRules: map[string]bool{"pypi": true}}, "")
	ok(t, err)
	if want := "pypi=true: mirror.example:80"; sent() != want {
		t.Errorf("sent %s; want %s", sent(), want)
	}
	for _, c := range []struct {
		rules  map[string]bool
		reason string
	}{
		{map[string]bool{"nmp": true}, "unknown_network_service"},
		{map[string]bool{"example.org": true}, "invalid_network_rule"},
		{map[string]bool{"169.254.169.254:80": true}, "network_rule_forbidden"},
		{map[string]bool{"pypi": true, "mirror.example:80": false}, "network_rules_conflict"},
	} {
		_, err := p.create(&dsecv1.SandboxSpec{Image: "base", NetworkRules: c.rules}, "")
		wantReason(t, err, c.reason)
		_, err = p.sandboxes().SetNetwork(t.Context(), connect.NewRequest(&dsecv1.SetNetworkRequest{SandboxId: "s", NetworkRules: c.rules}))
		wantReason(t, err, c.reason)
	}
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base", NetworkRules: map[string]bool{"nmp": true}}, "")
	if !strings.Contains(err.Error(), "there are pypi.") {
		t.Errorf("the error names no service that exists: %v", err)
	}
}

func TestSetNetworkPassesThrough(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	ok(t, p.define("pypi", endpoint("pypi.org", 443)))
	id := p.mustCreate().GetId()
	res, err := p.sandboxes().SetNetwork(t.Context(), connect.NewRequest(&dsecv1.SetNetworkRequest{SandboxId: id, NetworkRules: map[string]bool{"pypi": true}}))
	ok(t, err)
	if !res.Msg.GetSandbox().GetSpec().GetNetworkRules()["pypi"] {
		t.Errorf("%v", res.Msg)
	}
	n, err := p.sandboxes().GetNetwork(t.Context(), connect.NewRequest(&dsecv1.GetNetworkRequest{SandboxId: id}))
	ok(t, err)
	if r := n.Msg.GetNetwork().GetRules(); len(r) != 1 || r[0].GetEndpoints()[0].GetHost() != "pypi.org" {
		t.Errorf("%v", n.Msg)
	}
	other := dsecv1connect.NewSandboxServiceClient(p.as("default", iam.RoleReader), p.url)
	_, err = other.SetNetwork(t.Context(), connect.NewRequest(&dsecv1.SetNetworkRequest{SandboxId: id}))
	wantReason(t, err, "permission_denied")
}
