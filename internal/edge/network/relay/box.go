package relay

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/edge/network/allow"
)

// A box is one sandbox, as the relay knows it.
type box struct {
	slot      uint32
	addresses []netip.Addr

	mu      sync.Mutex
	gone    bool
	policy  allow.Policy
	streams map[stream]struct{} // what there is now
	reasons map[string]int64
	samples []allow.Refusal // the latest last

	in, out bucket
}

// A stream is a connection or a flow of datagrams. kill ends it at once, with a reset where there is such a thing.
type stream interface {
	kill()
	destination() (netip.AddrPort, uint8)
}

// admit judges a stream by the policy and, if it may, enters it. free is how many more the relay could carry: no sandbox takes more than
// half of that, so that something is left for others however many want all that they may have.
func (b *box) admit(s stream, free int64) bool {
	to, protocol := s.destination()
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.gone || !b.policy.Allows(to, protocol):
		b.refuseLocked(to, protocol, allow.NotAllowed)
	case len(b.streams) >= limit(b.policy), int64(len(b.streams)) > free/2:
		b.refuseLocked(to, protocol, allow.TooManyConnections)
	default:
		b.streams[s] = struct{}{}
		return true
	}
	return false
}

func limit(p allow.Policy) int {
	if p.Connections > 0 {
		return p.Connections
	}
	return allow.DefaultConnections
}

func (b *box) leave(s stream) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.streams, s)
}

func (b *box) refuse(to netip.AddrPort, protocol uint8, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refuseLocked(to, protocol, reason)
}

func (b *box) refuseLocked(to netip.AddrPort, protocol uint8, reason string) {
	b.reasons[reason]++
	r := allow.Refusal{Destination: to, Protocol: protocol, Reason: reason}
	i := slices.IndexFunc(b.samples, func(s allow.Refusal) bool {
		return s.Destination == to && s.Protocol == protocol && s.Reason == reason
	})
	if i < 0 && len(b.samples) == allow.MaxSamples {
		i = 0
	} else if i >= 0 {
		r.Count = b.samples[i].Count
	}
	if i >= 0 {
		b.samples = slices.Delete(b.samples, i, i+1)
	}
	r.Count++
	r.Last = time.Now()
	b.samples = append(b.samples, r)
}

// set replaces the policy, and ends what it does not allow.
func (b *box) set(p allow.Policy) {
	b.mu.Lock()
	b.policy = p
	b.in.limit(p.BytesPerSecond)
	b.out.limit(p.BytesPerSecond)
	var end []stream
	for s := range b.streams {
		if to, protocol := s.destination(); !p.Allows(to, protocol) {
			end = append(end, s)
		}
	}
	b.mu.Unlock()
	for _, s := range end {
		s.kill()
	}
}

// drop ends everything for good.
func (b *box) drop() {
	b.mu.Lock()
	b.gone, b.policy = true, allow.Policy{}
	all := make([]stream, 0, len(b.streams))
	for s := range b.streams {
		all = append(all, s)
	}
	b.mu.Unlock()
	for _, s := range all {
		s.kill()
	}
}

func (b *box) refusals() allow.Refusals {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := allow.Refusals{Reasons: make(map[string]int64, len(b.reasons)), Samples: slices.Clone(b.samples), Connections: len(b.streams)}
	for reason, n := range b.reasons {
		r.Packets += n
		r.Reasons[reason] = n
	}
	slices.Reverse(r.Samples)
	return r
}

// A bucket bounds bytes a second in one direction. Bytes are paid for after they went.
type bucket struct {
	rate atomic.Int64 // 0 = unbounded

	mu   sync.Mutex
	free time.Time // when all that went is paid for
}

func (b *bucket) limit(rate int64) { b.rate.Store(rate) }

// share is how many bytes may go at a time.
func (b *bucket) share() int64 {
	if r := b.rate.Load(); r > 0 {
		return min(max(r/20, 512), maxShare)
	}
	return maxShare
}

// maxShare bounds what goes between two looks at the bound.
const maxShare = 1 << 20

// behind reports whether so much is unpaid that nothing more should go now.
func (b *bucket) behind(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rate.Load() > 0 && b.free.Sub(now) > time.Second
}

// pay returns how long to wait for n bytes.
func (b *bucket) pay(n int64, now time.Time) time.Duration {
	r := b.rate.Load()
	if r <= 0 || n <= 0 {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.free.Before(now) {
		b.free = now
	}
	b.free = b.free.Add(time.Duration(float64(n) / float64(r) * float64(time.Second)))
	return b.free.Sub(now)
}
