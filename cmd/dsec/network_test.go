package main

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

func (f *fakePlatform) service(name string) int {
	return slices.IndexFunc(f.services, func(s *dsecv1.ServiceDefinition) bool { return s.GetName() == name })
}

func (f *fakePlatform) PutService(_ context.Context, r *connect.Request[dsecv1.PutServiceRequest]) (*connect.Response[dsecv1.PutServiceResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := r.Msg.GetService()
	s.ChangedAt, s.ChangedBy = timestamppb.New(testTime.Add(-time.Hour)), "ann"
	switch i := f.service(s.GetName()); {
	case i >= 0 && r.Msg.GetCreateOnly():
		return nil, wire(sandbox.Errorf(sandbox.AlreadyExists, "service_exists", "there is a service %q", s.GetName()))
	case i >= 0:
		f.services[i] = s
	default:
		f.services = append(f.services, s)
	}
	return connect.NewResponse(&dsecv1.PutServiceResponse{Service: s}), nil
}

func (f *fakePlatform) noService(name string) error {
	return wire(sandbox.Errorf(sandbox.NotFound, "service_not_found", "there is no service %q", name))
}

func (f *fakePlatform) GetService(_ context.Context, r *connect.Request[dsecv1.GetServiceRequest]) (*connect.Response[dsecv1.GetServiceResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := f.service(r.Msg.GetName()); i >= 0 {
		return connect.NewResponse(&dsecv1.GetServiceResponse{Service: f.services[i]}), nil
	}
	return nil, f.noService(r.Msg.GetName())
}

func (f *fakePlatform) ListServices(context.Context, *connect.Request[dsecv1.ListServicesRequest]) (*connect.Response[dsecv1.ListServicesResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return connect.NewResponse(&dsecv1.ListServicesResponse{Services: f.services}), nil
}

func (f *fakePlatform) RemoveService(_ context.Context, r *connect.Request[dsecv1.RemoveServiceRequest]) (*connect.Response[dsecv1.RemoveServiceResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := f.service(r.Msg.GetName())
	if i < 0 {
		return nil, f.noService(r.Msg.GetName())
	}
	f.services = slices.Delete(f.services, i, i+1)
	return connect.NewResponse(&dsecv1.RemoveServiceResponse{}), nil
}

func (f *fakePlatform) SetNetwork(_ context.Context, r *connect.Request[dsecv1.SetNetworkRequest]) (*connect.Response[dsecv1.SetNetworkResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb := f.sandboxes[r.Msg.GetSandboxId()]
	sb.Spec.NetworkRules = r.Msg.GetNetworkRules()
	return connect.NewResponse(&dsecv1.SetNetworkResponse{Sandbox: sb}), nil
}

func (f *fakePlatform) GetNetwork(_ context.Context, r *connect.Request[dsecv1.GetNetworkRequest]) (*connect.Response[dsecv1.GetNetworkResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := &dsecv1.NetworkStatus{
		RefusedPackets: 12, Connections: 3,
		Refused: []*dsecv1.RefusedTraffic{
			{Destination: "10.9.9.9", Port: 80, Protocol: "tcp", Reason: "no_rule", Packets: 11, LastAt: timestamppb.New(testTime.Add(-time.Minute))},
			{Protocol: "icmp", Reason: "malformed", Packets: 1},
		},
	}
	for rule, allowed := range f.sandboxes[r.Msg.GetSandboxId()].GetSpec().GetNetworkRules() {
		n.Rules = append(n.Rules, &dsecv1.NetworkRuleStatus{
			Rule: rule, Allowed: allowed, Addresses: []string{"10.1.1.1"}, Error: "gone\x1b[31m",
			Endpoints: []*dsecv1.NetworkEndpoint{{Host: "a.example", Port: 53, LastPort: 53, Protocol: "udp"}},
		})
	}
	return connect.NewResponse(&dsecv1.GetNetworkResponse{Network: n}), nil
}

func TestServiceCommands(t *testing.T) {
	h := newHarness(t)
	h.want(h.run("service", "add", "pypi", "pypi.org:443", "[fd12::1]:80", "--description", "packages"), "pypi  pypi.org:443 [fd12::1]:80\n", "", 0)
	h.wantError(h.run("service", "add", "pypi", "pypi.org:443"), exitFailure, "there is a service")
	h.want(h.run("service", "add", "--replace", "pypi", "pypi.org:80"), "pypi  pypi.org:80\n", "", 0)
	// Ports are those of the hosts right before, and of no others.
	h.want(h.run("service", "add", "two", "--host", "a.example", "--host", "fd12::/16", "--port", "443,8000-8010", "--port", "53/udp", "--host", "b.example", "--port", "80"),
		"two  a.example:443 a.example:8000-8010 a.example:53/udp [fd12::/16]:443 [fd12::/16]:8000-8010 [fd12::/16]:53/udp b.example:80\n", "", 0)
	h.want(h.run("service", "add", "lan", "--host", "10.0.0.0/8"), "lan  10.0.0.0/8/tcp 10.0.0.0/8/udp\n", "", 0)
	h.want(h.run("service", "ls", "-q"), "pypi\ntwo\nlan\n", "", 0)
	if got := h.run("service", "ls"); !strings.Contains(got.stdout, "pypi   pypi.org:80") || !strings.Contains(got.stdout, "1 hour ago   ann") {
		t.Errorf("%s", got.stdout)
	}
	if got := h.run("service", "ls", "--json"); strings.Count(got.stdout, "\n") != 3 {
		t.Errorf("%s", got.stdout)
	}
	if got := h.run("service", "inspect", "pypi"); !strings.Contains(got.stdout, `"host": "pypi.org"`) {
		t.Errorf("%s", got.stdout)
	}
	h.want(h.run("service", "rm", "pypi"), "pypi\n", "", 0)
	h.wantError(h.run("service", "rm", "pypi"), exitFailure, "no service")
	for args, says := range map[string]string{
		"service add": "the name is missing", "service add x": "at least one", "service add x --port 80 --host a.example": "before the --host",
	} {
		h.wantError(h.run(strings.Split(args, " ")...), exitUsage, says)
	}
	h.wantError(h.run("service", "add", "x", "--host", "a.example"), exitFailure, "neither a service's name nor host:port")
	h.wantError(h.run("service", "add", "x", "127.0.0.1:80"), exitFailure, "nothing in 127.0.0.0/8")
	if len(h.f.services) != 2 {
		t.Errorf("%v", h.f.services)
	}
}

func TestNetworkCommands(t *testing.T) {
	h := newHarness(t)
	named(h)
	if got := h.run("network", "set", "box", "pypi", "10.0.0.0/8:443", "npm=false"); got.code != 0 || h.f.sandboxes[strings.TrimSpace(got.stdout)] == nil {
		t.Fatalf("%+v", got)
	}
	out := h.run("network", "inspect", "box").stdout
	for _, want := range []string{"10.0.0.0/8:443", "npm   ", "false", "a.example:53/udp", "3 connections, 12 packets refused", "10.9.9.9:80", "no_rule", "1 minute ago", "malformed"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.ContainsRune(out, 0x1b) {
		t.Error("what the platform says drives the terminal")
	}
	var inspected []struct {
		ID      string
		Network struct {
			Rules   []struct{ Rule string }
			Refused []struct{ Reason string }
		}
	}
	if err := json.Unmarshal([]byte(h.run("inspect", "box").stdout), &inspected); err != nil || len(inspected[0].Network.Rules) != 3 || inspected[0].ID == "" || len(inspected[0].Network.Refused) != 2 {
		t.Errorf("%+v, %v", inspected, err)
	}
	if got := h.run("network", "set", "box", "none"); got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := h.run("network", "inspect", "--json", "box"); !strings.Contains(got.stdout, `"rules":[]`) {
		t.Errorf("%s", got.stdout)
	}
	for args, says := range map[string]string{
		"network set box": "missing", "network set box a none": "contradicts", "network set box a=maybe": "true or false",
		"network set box a a=false": "twice", "network set box =false": "names nothing", "network inspect": "missing",
	} {
		h.wantError(h.run(strings.Split(args, " ")...), exitUsage, says)
	}
}
