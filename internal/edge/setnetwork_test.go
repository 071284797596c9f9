package edge

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/network"
	"dsec/internal/edge/resolve"
	"dsec/internal/grpcerr"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

var registry = netip.MustParseAddr("10.1.1.1")

func oneAddress(context.Context, string) ([]netip.Addr, error) { return []netip.Addr{registry}, nil }

// sent is what an apiserver sends for rules that name no service.
func sent(asked map[string]bool, services ...sandbox.NetworkRule) []*edgev1.NetworkRule {
	rules := services
	for rule, allowed := range asked {
		if endpoints, err := sandbox.ParseNetworkRule(rule); err == nil {
			rules = append(rules, sandbox.NetworkRule{Rule: rule, Allowed: allowed, Endpoints: endpoints})
		}
	}
	return startspec.WireNetworkRules(rules)
}

func (w *world) setNetwork(id sandbox.ID, asked map[string]bool, services ...sandbox.NetworkRule) (*dsecv1.Sandbox, error) {
	r, err := w.s.SetNetwork(w.user(), &edgev1.SetNetworkRequest{SandboxId: string(id), NetworkRules: asked, Network: sent(asked, services...)})
	return r.GetSandbox(), grpcerr.FromStatus(err)
}

func (w *world) network(id sandbox.ID) *dsecv1.NetworkStatus {
	w.Helper()
	r, err := w.s.GetNetwork(w.user(), &dsecv1.GetNetworkRequest{SandboxId: string(id)})
	if err != nil {
		w.Fatal(err)
	}
	return r.Network
}

func rules(asked map[string]bool, services ...sandbox.NetworkRule) func(*edgev1.CreateSandbox) {
	return func(c *edgev1.CreateSandbox) { c.Spec.NetworkRules, c.Network = asked, sent(asked, services...) }
}

// nameServers answers what a test says.
type nameServers struct {
	mu    sync.Mutex
	names map[string][]string
	err   error
	asked int
}

func (n *nameServers) set(name string, addresses ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.names == nil {
		n.names = make(map[string][]string)
	}
	n.names[name] = addresses
}

func (n *nameServers) fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
}

func (n *nameServers) lookup(_ context.Context, name string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked++
	if n.err != nil {
		return nil, n.err
	}
	all, ok := n.names[name]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	}
	var out []netip.Addr
	for _, a := range all {
		out = append(out, netip.MustParseAddr(a))
	}
	return out, nil
}

func (n *nameServers) use(o *Options) {
	o.Lookup = n.lookup
	o.NodeAddresses = func() []netip.Addr { return []netip.Addr{netip.MustParseAddr("192.168.7.7")} }
}

func opens(p network.Policy) string {
	var all []string
	for _, d := range p.Open {
		all = append(all, d.Prefix.String())
	}
	return strings.Join(all, " ")
}

func TestNetworkRulesAtCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dns nameServers
		dns.set("pypi.org", "10.9.0.2", "10.9.0.1", "fd12::1")
		w := newWorld(t, dns.use)
		pypi := sandbox.NetworkRule{Rule: "pypi", Allowed: true, Endpoints: []sandbox.NetworkEndpoint{{Host: "PyPI.org.", FirstPort: 443, LastPort: 443, Protocol: sandbox.TCP}}}
		id := w.create(rules(map[string]bool{"pypi": true, "npm": false, "10.0.0.0/8:80-90/udp": true, "10.9.0.2": false}, pypi), func(c *edgev1.CreateSandbox) {
			c.Spec.Limits = &dsecv1.Limits{NetworkBytesPerSecond: 1 << 20, NetworkConnections: 7}
		})
		p := w.host.Policy(id)
		if len(p.Open) != 4 || len(p.Closed) != 2 || p.BytesPerSecond != 1<<20 || p.Connections != 7 {
			t.Errorf("policy %+v", p)
		}
		if want := (network.Destination{Prefix: netip.MustParsePrefix("10.9.0.1/32"), FirstPort: 443, LastPort: 443, Protocol: network.TCP}); !slices.Contains(p.Open, want) {
			t.Errorf("policy %+v", p)
		}
		if !slices.Contains(p.Closed, network.Destination{Prefix: netip.MustParsePrefix("10.9.0.2/32"), LastPort: 65535, Protocol: network.UDP}) {
			t.Errorf("policy %+v", p)
		}
		if got := w.host.HostsOf(id); got != "10.9.0.1\tpypi.org\n10.9.0.2\tpypi.org\nfd12::1\tpypi.org\n" {
			t.Errorf("hosts %q", got)
		}
		if r := w.get(id).Spec.NetworkRules; len(r) != 4 || !r["pypi"] {
			t.Errorf("rules %v", r)
		}
		n := w.network(id)
		if len(n.Rules) != 3 || len(n.Addresses) != 1 || n.RefusedPackets != 3 {
			t.Errorf("status %v", n)
		}
		for _, r := range n.Rules {
			if r.Rule == "pypi" && (len(r.Addresses) != 3 || r.Error != `10.9.0.2 is closed, because the rule "10.9.0.2" denies it` || r.Endpoints[0].Port != 443) {
				t.Errorf("rule %v", r)
			}
		}
		w.close()
	})
}

// Rules that allow nothing ask no name server: {"npm": False} works anywhere.
func TestDenialsAlone(t *testing.T) {
	var dns nameServers
	dns.fail(errors.New("the test has no name servers"))
	w := newWorld(t, dns.use)
	npm := sandbox.NetworkRule{Rule: "npm", Endpoints: []sandbox.NetworkEndpoint{{Host: "registry.npmjs.org", FirstPort: 443, LastPort: 443, Protocol: sandbox.TCP}}}
	id := w.create(rules(map[string]bool{"npm": false, "evil.example:443": false}, npm))
	if p := w.host.Policy(id); len(p.Open) != 0 || dns.asked != 0 {
		t.Errorf("policy %+v; %d look-ups", p, dns.asked)
	}
	w.close()
}

func TestNamesThatCannotBeResolved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dns nameServers
		dns.set("here.example", "10.1.1.1")
		dns.set("loop.example", "127.0.0.1", "192.168.7.7")
		w := newWorld(t, dns.use)
		service := func(host string) sandbox.NetworkRule {
			return sandbox.NetworkRule{Rule: "svc", Allowed: true, Endpoints: []sandbox.NetworkEndpoint{{Host: host, FirstPort: 443, LastPort: 443, Protocol: sandbox.TCP}}}
		}
		began := time.Now()
		for rule, says := range map[string]string{
			"gone.example:443": "no such host", "loop.example:443": "127.0.0.1",
		} {
			r, err := w.tryCreate(rules(map[string]bool{rule: true}))
			if e := sandbox.AsError(err); e == nil || e.Class != sandbox.FailedPrecondition || e.Reason != "network_name_unresolved" || !strings.Contains(e.Message, says) || e.Facts["rule"] != rule {
				t.Errorf("%s: %v", rule, err)
			}
			w.expect(sandbox.ID(r.Id), failed, sandbox.ReasonStartFailed)
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("it took %v", d)
		}
		// A name that does not exist need not be denied; one of which nobody knows must be known.
		w.create(rules(map[string]bool{"here.example:443": true, "gone.example:443": false}))
		dns.fail(errors.New("servers are away"))
		if _, err := w.tryCreate(rules(map[string]bool{"here.example:443": true, "other.example:443": false})); sandbox.ReasonOf(err) != "network_name_unresolved" {
			t.Errorf("%v", err)
		}
		// What a service stands for is its operator's: it is opened when it is found.
		id := w.create(rules(map[string]bool{"svc": true}, service("away.example")))
		if n := w.network(id); n.Rules[0].Error == "" || len(w.host.Policy(id).Open) != 0 {
			t.Errorf("status %v", n)
		}
		dns.fail(nil)
		dns.set("away.example", "10.2.2.2")
		time.Sleep(time.Minute)
		if n := w.network(id); n.Rules[0].Error != "" || opens(w.host.Policy(id)) != "10.2.2.2/32" || w.host.HostsOf(id) != "10.2.2.2\taway.example\n" {
			t.Errorf("status %v, policy %v, hosts %q", n, w.host.Policy(id), w.host.HostsOf(id))
		}
		w.close()
	})
}

// Where name servers are silent, a create with a service waits for them a little, and the next ones do not.
func TestSilentNameServersHoldUpNoCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent := func(ctx context.Context, _ string) ([]netip.Addr, error) {
			select {
			case <-time.After(6 * time.Second):
				return nil, &net.DNSError{Err: "i/o timeout", IsTimeout: true}
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		w := newWorld(t, func(o *Options) { o.Lookup = silent })
		service := sandbox.NetworkRule{Rule: "svc", Allowed: true, Endpoints: []sandbox.NetworkEndpoint{{Host: "away.example", FirstPort: 443, LastPort: 443, Protocol: sandbox.TCP}}}
		create := func() time.Duration {
			began := time.Now()
			w.create(rules(map[string]bool{"svc": true}, service))
			return time.Since(began)
		}
		if d := create(); d > firstWithin+time.Second {
			t.Errorf("the first create took %v", d)
		}
		time.Sleep(10 * time.Second)
		for range 5 {
			if d := create(); d > time.Second {
				t.Errorf("a later create took %v", d)
			}
		}
		began := time.Now()
		if _, err := w.tryCreate(rules(map[string]bool{"svc": true, "other.example:443": false}, service)); sandbox.ReasonOf(err) != "network_name_unresolved" {
			t.Errorf("%v", err)
		}
		if d := time.Since(began); d < 6*time.Second || d > namesWithin+firstWithin {
			t.Errorf("a name that must be known was waited for %v", d)
		}
		w.close()
	})
}

func TestAddressesChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dns nameServers
		dns.set("cdn.example", "10.1.0.1")
		w := newWorld(t, dns.use)
		id := w.create(rules(map[string]bool{"cdn.example:443": true}))
		want := func(policy, hosts string) {
			t.Helper()
			if got := opens(w.host.Policy(id)); got != policy {
				t.Errorf("open: %s; want %s", got, policy)
			}
			if got := w.host.HostsOf(id); got != hosts {
				t.Errorf("hosts: %q; want %q", got, hosts)
			}
		}
		want("10.1.0.1/32", "10.1.0.1\tcdn.example\n")
		dns.set("cdn.example", "10.1.0.2", "169.254.169.254")
		time.Sleep(31 * time.Second)
		want("10.1.0.2/32 10.1.0.1/32", "10.1.0.2\tcdn.example\n") // the old one for a while, the metadata service never
		if n := w.network(id); !strings.Contains(n.Rules[0].Error, "169.254.169.254") {
			t.Errorf("status %v", n)
		}
		dns.fail(errors.New("away"))
		time.Sleep(20 * time.Minute)
		want("10.1.0.2/32", "10.1.0.2\tcdn.example\n") // what was last known stays
		w.again()
		want("10.1.0.2/32", "10.1.0.2\tcdn.example\n") // also over a restart
		if n := w.network(id); n.Rules[0].Error == "" {
			time.Sleep(time.Minute)
			if n := w.network(id); n.Rules[0].Error == "" {
				t.Errorf("status %v", n)
			}
		}
		w.close()
	})
}

func TestSetNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dns nameServers
		dns.set("a.example", "10.1.0.1")
		w := newWorld(t, dns.use)
		id := w.create()
		sb, err := w.setNetwork(id, map[string]bool{"a.example:443": true})
		if err != nil || !sb.Spec.NetworkRules["a.example:443"] || opens(w.host.Policy(id)) != "10.1.0.1/32" || w.host.HostsOf(id) == "" {
			t.Errorf("%v, %v; %v", sb, err, w.host.Policy(id))
		}
		w.again()
		if r := w.get(id).Spec.NetworkRules; !r["a.example:443"] || opens(w.host.Policy(id)) != "10.1.0.1/32" {
			t.Errorf("after a restart: %v, %v", r, w.host.Policy(id))
		}
		for _, c := range []struct {
			asked  map[string]bool
			reason string
		}{
			{map[string]bool{"gone.example:443": true}, "network_name_unresolved"},
			{map[string]bool{"192.168.7.7:80": true}, "network_rule_forbidden"},
			{map[string]bool{"10.0.0.1/8": true}, "invalid_network_rule"},
			{map[string]bool{"10.1.0.0/16:80": true, "10.0.0.0/8": false}, "network_rules_conflict"},
			{map[string]bool{"svc": true}, "invalid_network_rule"}, // it came without its endpoints
		} {
			if _, err := w.setNetwork(id, c.asked); sandbox.ReasonOf(err) != c.reason {
				t.Errorf("%v: %v", c.asked, err)
			}
		}
		// What could not be applied is not in force, and not after a restart either.
		w.host.On("networks.SetPolicy", func(context.Context, sandbox.ID) error {
			w.host.On("networks.SetPolicy", nil)
			return errBoom
		})
		if _, err := w.setNetwork(id, nil); err == nil {
			t.Error("a policy that was not applied was acknowledged")
		}
		if r := w.get(id).Spec.NetworkRules; !r["a.example:443"] {
			t.Errorf("rules %v", r)
		}
		w.again()
		if opens(w.host.Policy(id)) != "10.1.0.1/32" {
			t.Errorf("policy %v", w.host.Policy(id))
		}
		if _, err := w.setNetwork(id, nil); err != nil || len(w.host.Policy(id).Open) != 0 || w.host.HostsOf(id) != "" {
			t.Errorf("%v, %v, %q", err, w.host.Policy(id), w.host.HostsOf(id))
		}
		w.delete(id, true)
		if _, err := w.setNetwork(id, nil); sandbox.ReasonOf(err) != "sandbox_ended" {
			t.Errorf("%v", err)
		}
		w.close()
	})
}

// A caller that goes away in the middle leaves the old rules or the new ones, wholly: no context of a request ends an
// application, and none ends a look-up.
func TestSetNetworkWithoutItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		w := newWorld(t, func(o *Options) {
			o.Lookup = func(ctx context.Context, name string) ([]netip.Addr, error) {
				if name == "slow.example" {
					select {
					case <-free:
					case <-ctx.Done():
						return nil, ctx.Err()
					}
				}
				return []netip.Addr{registry}, nil
			}
		})
		id := w.create()
		synctest.Wait() // what follows a create has taken its turn
		asked := map[string]bool{"slow.example:443": true}
		ctx, cancel := context.WithCancel(w.user())
		done := make(chan error)
		go func() {
			_, err := w.s.SetNetwork(ctx, &edgev1.SetNetworkRequest{SandboxId: string(id), NetworkRules: asked, Network: sent(asked)})
			done <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-done; err == nil || len(w.get(id).Spec.NetworkRules) != 0 {
			t.Errorf("%v, %v", err, w.get(id).Spec.NetworkRules)
		}
		close(free)
		synctest.Wait()
		if a := w.e.names.Get("slow.example"); len(a.Current) != 1 { // the look-up went on without who asked for it
			t.Errorf("%+v", a)
		}

		restore, _ := w.arm("network.policy:before:block") // of its context, which is not the caller's
		ctx, cancel = context.WithCancel(w.user())
		go func() {
			_, err := w.s.SetNetwork(ctx, &edgev1.SetNetworkRequest{SandboxId: string(id), NetworkRules: asked, Network: sent(asked)})
			done <- err
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("the caller's end ended the application: %v", err)
		default:
		}
		restore()
		<-done
		w.close()
	})
}

// A limit that nothing here keeps is refused before anything is made.
func TestInodesThatNobodyCounts(t *testing.T) {
	w := newWorld(t)
	r, err := w.tryCreate(func(c *edgev1.CreateSandbox) { c.Spec.Limits = &dsecv1.Limits{Inodes: 1000} })
	if sandbox.ClassOf(err) != sandbox.Unsupported || sandbox.ReasonOf(err) != "inodes_not_limited" || r.Sandbox != nil {
		t.Errorf("%v, %v", r, err)
	}
	w.nothingLeft("after the refusal")
	w.close()
}

// Services that share an address, as behind a mirror of many registries: the denial holds, and the other rule says so.
func TestDenialsOfASharedAddress(t *testing.T) {
	shared, own := netip.MustParseAddr("203.0.113.80"), netip.MustParseAddr("203.0.113.81")
	names := func(name string) resolve.Answer {
		return resolve.Answer{Current: map[string][]netip.Addr{"pypi.org": {shared, own}, "npm.org": {shared}}[name], Known: true}
	}
	at443 := func(host string) []sandbox.NetworkEndpoint {
		return []sandbox.NetworkEndpoint{{Host: host, FirstPort: 443, LastPort: 443, Protocol: sandbox.TCP}}
	}
	for _, c := range []struct {
		denied []sandbox.NetworkEndpoint
		want   string
	}{
		{at443("npm.org"), `203.0.113.80 is closed, because the rule "npm" denies it`},
		{at443("203.0.113.80/31"), `203.0.113.80 is closed, because the rule "npm" denies it; 203.0.113.81 is closed, because the rule "npm" denies it`},
		{[]sandbox.NetworkEndpoint{{Host: "npm.org", FirstPort: 444, LastPort: 500, Protocol: sandbox.TCP}}, ""},
	} {
		rules := []sandbox.NetworkRule{{Rule: "npm", Endpoints: c.denied}, {Rule: "pypi", Allowed: true, Endpoints: at443("pypi.org")}}
		r := reachOf(rules, sandbox.Limits{}, names, func(netip.Addr) string { return "" })
		if r.rules[1].trouble != c.want || r.rules[0].trouble != "" {
			t.Errorf("%v: %q, %q", c.denied, r.rules[1].trouble, r.rules[0].trouble)
		}
		if open := r.policy.Allows(netip.AddrPortFrom(shared, 443), network.TCP); open != (c.want == "") {
			t.Errorf("%v: open is %v", c.denied, open)
		}
	}
}

func TestRulesFromAnApiserverThatIsWrong(t *testing.T) {
	endpoint := &dsecv1.NetworkEndpoint{Host: "10.1.1.1", Port: 80}
	for what, c := range map[string]struct {
		asked map[string]bool
		sent  []*edgev1.NetworkRule
	}{
		"a rule that nobody asked for":   {nil, []*edgev1.NetworkRule{{Rule: "x", Allowed: true, Endpoints: []*dsecv1.NetworkEndpoint{endpoint}}}},
		"one that allows what is denied": {map[string]bool{"x": false}, []*edgev1.NetworkRule{{Rule: "x", Allowed: true}}},
		"one twice":                      {map[string]bool{"x": true}, []*edgev1.NetworkRule{{Rule: "x", Allowed: true}, {Rule: "x", Allowed: true}}},
		"the loopback":                   {map[string]bool{"x": true}, []*edgev1.NetworkRule{{Rule: "x", Allowed: true, Endpoints: []*dsecv1.NetworkEndpoint{{Host: "127.0.0.1", Port: 80}}}}},
		"a port that is none":            {map[string]bool{"x": true}, []*edgev1.NetworkRule{{Rule: "x", Allowed: true, Endpoints: []*dsecv1.NetworkEndpoint{{Host: "10.1.1.1", Port: 1 << 30}}}}},
	} {
		if _, err := rulesOf(c.asked, c.sent); sandbox.ClassOf(err) != sandbox.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func FuzzRulesOf(f *testing.F) {
	f.Add("pypi", "pypi.org", "tcp", uint32(443), uint32(0), true)
	f.Add("10.0.0.0/8", "10.0.0.0/8", "udp", uint32(0), uint32(0), false)
	f.Fuzz(func(t *testing.T, rule, host, protocol string, first, last uint32, allowed bool) {
		n, err := rulesOf(map[string]bool{rule: allowed}, []*edgev1.NetworkRule{{
			Rule: rule, Allowed: allowed, Endpoints: []*dsecv1.NetworkEndpoint{{Host: host, Port: first, LastPort: last, Protocol: protocol}},
		}})
		if err != nil {
			return
		}
		r := reachOf(n.Rules, sandbox.Limits{}, func(string) resolve.Answer { return resolve.Answer{Current: []netip.Addr{registry}, Known: true} }, func(netip.Addr) string { return "" })
		for _, d := range append(r.policy.Open, r.policy.Closed...) {
			if !d.Prefix.IsValid() || d.LastPort < d.FirstPort || d.Protocol == 0 {
				t.Errorf("%+v", d)
			}
		}
		if strings.Count(r.hosts, "\n") > 1 || strings.ContainsAny(host, "\n\t ") && r.hosts != "" {
			t.Errorf("hosts %q", r.hosts)
		}
	})
}

// Whoever waits for names of new rules must not keep others from learning what theirs have come to stand for.
func TestRulesThatWaitForNamesHoldUpNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dns nameServers
		dns.set("reg.example.org", "10.9.0.1")
		w := newWorld(t, func(o *Options) {
			dns.use(o)
			o.Lookup = func(ctx context.Context, name string) ([]netip.Addr, error) {
				if name == "silent.example.org" {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return dns.lookup(ctx, name)
			}
		})
		asked := map[string]bool{"reg.example.org:443": true}
		waits, other := w.create(rules(asked)), w.create(rules(asked))
		time.Sleep(27 * time.Second) // before they are looked up again
		dns.set("reg.example.org", "10.9.0.2")
		refused := make(chan error, 1)
		go func() {
			_, err := w.setNetwork(waits, map[string]bool{"silent.example.org:443": true})
			refused <- err
		}()
		time.Sleep(5 * time.Second)
		if got := opens(w.host.Policy(other)); !strings.Contains(got, "10.9.0.2/32") {
			t.Errorf("beside rules that wait: %s", got)
		}
		if err := <-refused; sandbox.ReasonOf(err) != "network_name_unresolved" {
			t.Errorf("%v", err)
		}
		synctest.Wait()
		if got := opens(w.host.Policy(waits)); !strings.Contains(got, "10.9.0.2/32") {
			t.Errorf("after rules that waited in vain: %s", got)
		}
		w.close()
	})
}
