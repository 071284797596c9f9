package relay

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"dsec/internal/edge/network/allow"
)

// What a flood of datagrams exceeds the bound by is dropped, and not owed.
func TestDroppedDatagramsAreNotPaidFor(t *testing.T) {
	var b bucket
	b.limit(1000)
	now := time.Now()
	sent := 0
	for range 100_000 {
		if !b.behind(now) {
			b.pay(100, now)
			sent += 100
		}
	}
	if sent < 1000 || sent > 1200 {
		t.Errorf("%d bytes at once, at 1000 a second", sent)
	}
	if b.behind(now.Add(200 * time.Millisecond)) {
		t.Error("what was dropped is owed")
	}
}

// However many destinations are tried, the latest few are kept, and all are counted.
func TestSamplesOfRefusalsAreBounded(t *testing.T) {
	b := box{reasons: make(map[string]int64)}
	to := func(i int) netip.AddrPort {
		return netip.MustParseAddrPort(fmt.Sprintf("10.0.%d.%d:443", i/256, i%256))
	}
	for i := range 1000 {
		b.refuse(to(i), allow.TCP, allow.NotAllowed)
	}
	b.refuse(to(990), allow.TCP, allow.NotAllowed)
	r := b.refusals()
	if r.Packets != 1001 || len(r.Samples) != allow.MaxSamples || r.Samples[0].Destination != to(990) || r.Samples[0].Count != 2 || r.Samples[1].Destination != to(999) {
		t.Errorf("%d in all, %d samples, the first %+v", r.Packets, len(r.Samples), r.Samples[:2])
	}
}
