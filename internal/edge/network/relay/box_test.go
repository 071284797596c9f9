package relay

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"dsec/internal/edge/network/allow"
	"dsec/internal/linux"
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
	b.pay(10_000, now)
	if b.limit(0); b.behind(now) {
		t.Error("without a bound it is held up")
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

// pipe is a connection and its other end.
func pipe(t *testing.T) (*net.TCPConn, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

// A connection that pays for what it moved takes no place any more once its sandbox is gone.
func TestKilledConnectionsWaitForNothing(t *testing.T) {
	inside, a := pipe(t)
	outside, b := pipe(t)
	box := &box{streams: make(map[stream]struct{}), reasons: make(map[string]int64)}
	box.out.limit(1)
	c := &connection{inside: inside, outside: outside, cancel: func() {}, ended: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.carry(box)
	}()
	if _, err := a.Write(make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(b, make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
	c.kill()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Error("it still waits")
	}
}

type nothing struct{ to netip.AddrPort }

func (n *nothing) kill()                                {}
func (n *nothing) destination() (netip.AddrPort, uint8) { return n.to, allow.TCP }

func TestNoSandboxTakesAllThatTheRelayCarries(t *testing.T) {
	nl, err := linux.OpenNetlink()
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	r := New(Options{Routes: nl, Streams: 300})
	p := allow.Policy{Open: []allow.Destination{{Prefix: netip.MustParsePrefix("192.0.2.0/24"), LastPort: 65535, Protocol: allow.TCP}}}
	to := netip.MustParseAddrPort("192.0.2.1:443")
	for slot := range uint32(5) {
		a := netip.AddrFrom4([4]byte{198, 18, 0, byte(slot)})
		r.set(slot, []netip.Addr{a}, p)
		b, n := r.boxOf(a), 0
		for range 300 {
			if r.enter(b, &nothing{to}) {
				n++
			}
		}
		if n < 10 || n > 110 {
			t.Errorf("sandbox %d, which wants all, has %d of 300", slot, n)
		}
		if got := b.refusals().Reasons[allow.TooManyConnections]; got != int64(300-n) {
			t.Errorf("%d were refused, %d of them counted", 300-n, got)
		}
	}
	r.keep([]uint32{3})
	if len(r.slots) != 1 || len(r.boxes) != 1 || r.slots[3] == nil {
		t.Errorf("left are %v, %v", r.slots, r.boxes)
	}
}
