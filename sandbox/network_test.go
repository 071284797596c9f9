package sandbox

import (
	"strings"
	"testing"
)

func TestParseNetworkRule(t *testing.T) {
	for rule, want := range map[string][]NetworkEndpoint{
		"pypi.org:443":              {{"pypi.org", 443, 443, TCP}},
		"pypi.org:443/tcp":          {{"pypi.org", 443, 443, TCP}},
		"ns.example.com:53/udp":     {{"ns.example.com", 53, 53, UDP}},
		"10.0.0.0/8":                {{"10.0.0.0/8", 0, 0, TCP}, {"10.0.0.0/8", 0, 0, UDP}},
		"10.0.0.0/8/udp":            {{"10.0.0.0/8", 0, 0, UDP}},
		"10.0.0.0/8:8000-8010":      {{"10.0.0.0/8", 8000, 8010, TCP}},
		"192.168.1.7":               {{"192.168.1.7", 0, 0, TCP}, {"192.168.1.7", 0, 0, UDP}},
		"192.168.1.7:80/tcp":        {{"192.168.1.7", 80, 80, TCP}},
		"fd00::/8":                  {{"fd00::/8", 0, 0, TCP}, {"fd00::/8", 0, 0, UDP}},
		"[fd12::1]:443":             {{"fd12::1", 443, 443, TCP}},
		"[2001:db8::/32]:443/udp":   {{"2001:db8::/32", 443, 443, UDP}},
		"0.0.0.0/0:443":             {{"0.0.0.0/0", 443, 443, TCP}},
		"xn--bcher-kva.example.:80": {{"xn--bcher-kva.example.", 80, 80, TCP}},
	} {
		got, err := ParseNetworkRule(rule)
		if err != nil || len(got) != len(want) {
			t.Errorf("%s: %v, %v", rule, got, err)
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("%s: %v", rule, got)
			}
			if again, err := ParseNetworkRule(got[i].String()); err != nil || len(again) != 1 || again[0] != got[i] {
				t.Errorf("%s: written as %s it is %v, %v", rule, got[i], again, err)
			}
		}
	}
	for rule, reason := range map[string]string{
		"": "invalid_network_rule", "example.com": "invalid_network_rule", "example.com:0": "invalid_network_rule",
		"example.com:70000": "invalid_network_rule", "example.com:443/sctp": "invalid_network_rule", "a:1/tcp/tcp": "invalid_network_rule",
		"10.0.0.1/8": "invalid_network_rule", "10.0.0.0/33": "invalid_network_rule", "fe80::1%eth0": "invalid_network_rule",
		"2001:db8::1:443x": "invalid_network_rule", "[2001:db8::1:443": "invalid_network_rule", "a b:1": "invalid_network_rule",
		"a\n:1": "invalid_network_rule", "localhost:80": "invalid_network_rule", "1.2.3:80": "invalid_network_rule", "-a.b:1": "invalid_network_rule",
		"h:9-8": "invalid_network_rule", strings.Repeat("a", 301): "invalid_network_rule", "..:1": "invalid_network_rule",
		"127.0.0.1:80": "network_rule_forbidden", "169.254.169.254:80": "network_rule_forbidden", "169.254.0.0/16": "network_rule_forbidden",
		"[::1]:80": "network_rule_forbidden", "224.0.0.1": "network_rule_forbidden", "[::ffff:10.0.0.1]:80": "network_rule_forbidden",
		"[fe80::1]:1": "network_rule_forbidden", "0.0.0.0": "network_rule_forbidden", "100.100.100.200:80": "network_rule_forbidden",
	} {
		if got, err := ParseNetworkRule(rule); ReasonOf(err) != reason {
			t.Errorf("%q: %v, %v", rule, got, err)
		}
	}
}

func TestNetworkRulesThatContradict(t *testing.T) {
	rule := func(text string, allowed bool) NetworkRule {
		e, err := ParseNetworkRule(text)
		if err != nil {
			t.Fatal(err)
		}
		return NetworkRule{text, allowed, e}
	}
	for _, c := range []struct {
		rules  []NetworkRule
		reason string
	}{
		{[]NetworkRule{rule("10.0.0.0/8", true), rule("10.1.0.0/16", false)}, ""},
		{[]NetworkRule{rule("10.0.0.0/8", false), rule("10.1.0.0/16", true)}, "network_rules_conflict"},
		{[]NetworkRule{rule("10.0.0.0/8:443", false), rule("10.1.0.0/16", true)}, ""},
		{[]NetworkRule{rule("10.0.0.0/8/udp", false), rule("10.1.0.0/16", true)}, ""},
		{[]NetworkRule{rule("Example.com:443", false), rule("example.com.:443", true)}, "network_rules_conflict"},
		{[]NetworkRule{rule("example.com:1-65535", false), rule("example.com:443", true)}, "network_rules_conflict"},
		{[]NetworkRule{{"nothing", true, nil}}, ""},
	} {
		if err := ValidateNetwork(c.rules); ReasonOf(err) != c.reason {
			t.Errorf("%v: %v", c.rules, err)
		}
	}
}

func TestServiceDefinitions(t *testing.T) {
	good := NetworkEndpoint{"pypi.org", 443, 443, TCP}
	for _, s := range []Service{
		{Name: "", Endpoints: []NetworkEndpoint{good}},
		{Name: "Pypi", Endpoints: []NetworkEndpoint{good}},
		{Name: "pypi"},
		{Name: "pypi", Endpoints: make([]NetworkEndpoint, MaxServiceEndpoints+1)},
		{Name: "pypi", Endpoints: []NetworkEndpoint{{"pypi.org", 0, 0, TCP}}},
		{Name: "pypi", Endpoints: []NetworkEndpoint{{"169.254.169.254", 80, 80, TCP}}},
		{Name: "pypi", Endpoints: []NetworkEndpoint{{"pypi.org", 443, 443, "icmp"}}},
	} {
		if s.Validate() == nil {
			t.Errorf("%v is taken", s)
		}
	}
	if err := (Service{Name: "pypi", Endpoints: []NetworkEndpoint{good, {"10.0.0.0/8", 0, 0, UDP}}}).Validate(); err != nil {
		t.Error(err)
	}
}

func FuzzNetworkRule(f *testing.F) {
	f.Add("[fd12::1]:443/udp")
	f.Add("10.0.0.0/8:1-2")
	f.Fuzz(func(t *testing.T, rule string) {
		all, err := ParseNetworkRule(rule)
		if (err == nil) != (len(all) > 0) {
			t.Fatalf("%q: %v, %v", rule, all, err)
		}
		if err == nil && ValidateNetwork([]NetworkRule{{rule, true, all}}) != nil {
			t.Fatalf("%q is taken once only", rule)
		}
	})
}
