package relay

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/edge/network/allow"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Options of New.
type Options struct {
	Router  *linux.NetnsThread // in which sockets for datagrams are made
	Routes  *linux.Netlink     // of the host
	Range   []netip.Prefix     // the sandboxes' own
	Streams int64              // at most, of all sandboxes
}

// A Relay carries connections of sandboxes.
type Relay struct {
	o         Options
	forbidden []netip.Prefix
	streams   atomic.Int64

	mu    sync.Mutex
	slots map[uint32]*box
	boxes map[netip.Addr]*box

	waiting atomic.Int64 // datagrams whose sandbox is not known yet
	making  sync.Mutex   // one flow at a time; above flowsMu
	flowsMu sync.Mutex
	flows   map[flowKey]*flow
}

// New makes a relay that knows no sandbox.
func New(o Options) *Relay {
	return &Relay{o: o, forbidden: slices.Concat(sandbox.Undeniable(), o.Range), slots: make(map[uint32]*box),
		boxes: make(map[netip.Addr]*box), flows: make(map[flowKey]*flow)}
}

func (r *Relay) set(slot uint32, addresses []netip.Addr, p allow.Policy) {
	r.mu.Lock()
	b := r.slots[slot]
	if b == nil {
		b = &box{slot: slot, addresses: addresses, streams: make(map[stream]struct{}), reasons: make(map[string]int64)}
		r.slots[slot] = b
		for _, a := range addresses {
			r.boxes[a] = b
		}
	}
	r.mu.Unlock()
	b.set(p)
}

func (r *Relay) drop(slot uint32) {
	r.mu.Lock()
	b := r.slots[slot]
	if b != nil {
		delete(r.slots, slot)
		for _, a := range b.addresses {
			delete(r.boxes, a)
		}
	}
	r.mu.Unlock()
	if b != nil {
		b.drop()
	}
}

// keep drops all but these.
func (r *Relay) keep(slots []uint32) {
	var others []uint32
	r.mu.Lock()
	for slot := range r.slots {
		if !slices.Contains(slots, slot) {
			others = append(others, slot)
		}
	}
	r.mu.Unlock()
	for _, slot := range others {
		r.drop(slot)
	}
}

func (r *Relay) refused(slot uint32) (f allow.Refusals) {
	r.mu.Lock()
	b := r.slots[slot]
	r.mu.Unlock()
	if b == nil {
		return f
	}
	return b.refusals()
}

func (r *Relay) boxOf(a netip.Addr) *box {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.boxes[a]
}

// awaitBox is boxOf with a little patience: the filter has let a connection pass, so that what the edge says of its sandbox is on its way.
func (r *Relay) awaitBox(a netip.Addr) *box {
	for range 100 {
		if b := r.boxOf(a); b != nil {
			return b
		}
		time.Sleep(acceptPause)
	}
	return nil
}

// isForbidden reports whether an address is one that no rule opens, or this host's.
func (r *Relay) isForbidden(a netip.Addr) bool {
	if slices.ContainsFunc(r.forbidden, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return true
	}
	kind, err := r.o.Routes.RouteTo(a)
	return err != nil || kind == linux.RouteLocal || kind == linux.RouteOther
}

// enter lets a stream of b begin, or says by false that it is refused. leave is its counterpart.
func (r *Relay) enter(b *box, s stream) bool {
	to, protocol := s.destination()
	used := r.streams.Add(1)
	if used > r.o.Streams {
		r.streams.Add(-1)
		b.refuse(to, protocol, allow.TooManyConnections)
		return false
	}
	if !b.admit(s, r.o.Streams-used) { // before the kernel is asked, which costs more
		r.streams.Add(-1)
		return false
	}
	if r.isForbidden(to.Addr()) {
		r.leave(b, s)
		b.refuse(to, protocol, allow.Forbidden)
		return false
	}
	return true
}

func (r *Relay) leave(b *box, s stream) {
	b.leave(s)
	r.streams.Add(-1)
}

// acceptPause is the pause after a connection could not be accepted, for example for want of descriptors.
const acceptPause = 10 * time.Millisecond

func (r *Relay) accept(ctx context.Context, f *os.File) error {
	l, err := net.FileListener(f)
	f.Close()
	if err != nil {
		return err
	}
	tcp := l.(*net.TCPListener)
	go func() {
		<-ctx.Done()
		tcp.Close()
	}()
	go func() {
		for {
			c, err := tcp.AcceptTCP()
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				time.Sleep(acceptPause)
				continue
			}
			go r.serve(ctx, c)
		}
	}()
	return nil
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
