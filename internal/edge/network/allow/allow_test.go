package allow

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"dsec/sandbox"
)

func dest(prefix string, first, last uint16, protocol uint8) Destination {
	return Destination{netip.MustParsePrefix(prefix), first, last, protocol}
}

func TestDenialBeatsEveryPermission(t *testing.T) {
	p := Policy{
		Open:   []Destination{dest("10.0.0.0/8", 0, 65535, TCP), dest("10.1.2.3/32", 443, 443, TCP), dest("10.1.2.3/32", 53, 53, UDP)},
		Closed: []Destination{dest("10.1.0.0/16", 400, 500, TCP)},
	}
	got, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	want := []Opened{
		{netip.MustParsePrefix("10.0.0.0/8"), []Range{{0, 65535, 6}}},
		{netip.MustParsePrefix("10.1.0.0/16"), []Range{{0, 399, 6}, {501, 65535, 6}}},
		{netip.MustParsePrefix("10.1.2.3/32"), []Range{{0, 399, 6}, {501, 65535, 6}, {53, 53, 17}}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v\nwant %v", got, want)
	}
}

// lookup is what the packet filter does with the compiled form.
func lookup(all []Opened, to netip.AddrPort, protocol uint8) bool {
	best := -1
	for i, o := range all {
		if o.Prefix.Contains(to.Addr()) && (best < 0 || o.Prefix.Bits() > all[best].Prefix.Bits()) {
			best = i
		}
	}
	if best < 0 {
		return false
	}
	for _, r := range all[best].Ranges {
		if r.Protocol == uint16(protocol) && r.First <= to.Port() && to.Port() <= r.Last {
			return true
		}
	}
	return false
}

func TestCompiledFormSaysWhatTheRulesSay(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	addr := func() netip.Addr {
		if r.IntN(2) == 0 {
			return netip.AddrFrom4([4]byte{10, byte(r.IntN(2)), byte(r.IntN(2)), byte(r.IntN(2))})
		}
		return netip.AddrFrom16([16]byte{0xfd, 14: byte(r.IntN(2)), 15: byte(r.IntN(2))})
	}
	some := func() (all []Destination) {
		for range r.IntN(5) {
			a := addr()
			p, _ := a.Prefix(a.BitLen() - r.IntN(20))
			first := uint16(r.IntN(8))
			all = append(all, Destination{p, first, first + uint16(r.IntN(4)), []uint8{TCP, UDP}[r.IntN(2)]})
		}
		return all
	}
	opened := 0
	for range 3000 {
		p := Policy{Open: some(), Closed: some()}
		compiled, err := p.Compile()
		if err != nil {
			t.Fatal(err)
		}
		for range 30 {
			to, protocol := netip.AddrPortFrom(addr(), uint16(r.IntN(12))), []uint8{TCP, UDP}[r.IntN(2)]
			want := p.Allows(to, protocol)
			if got := lookup(compiled, to, protocol); got != want {
				t.Fatalf("%+v compiled to %v: %s/%d is %v, the rules say %v", p, compiled, to, protocol, got, want)
			}
			if want {
				opened++
			}
		}
	}
	if opened == 0 {
		t.Error("nothing was open")
	}
}

func TestBoundsAreRefused(t *testing.T) {
	var p Policy
	for i := range uint16(MaxRanges + 1) {
		p.Open = append(p.Open, dest("10.0.0.1/32", 2*i, 2*i, TCP))
	}
	if _, err := p.Compile(); sandbox.ClassOf(err) != sandbox.ResourceExhausted {
		t.Errorf("too many ranges: %v", err)
	}
	for _, d := range []Destination{{}, dest("10.0.0.1/8", 1, 1, TCP), dest("10.0.0.0/8", 2, 1, TCP), dest("10.0.0.0/8", 1, 1, 1), dest("::ffff:10.0.0.0/104", 1, 1, TCP)} {
		if _, err := (Policy{Open: []Destination{d}}).Compile(); err == nil {
			t.Errorf("%+v was compiled", d)
		}
	}
}
