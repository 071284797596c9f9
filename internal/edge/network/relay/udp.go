package relay

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dsec/internal/edge/network/allow"
	"dsec/internal/linux"
)

// flowIdle is how long a flow of datagrams lasts without one.
const flowIdle = time.Minute

// maxDatagram is the largest of UDP.
const maxDatagram = 1 << 16

type flowKey struct{ from, to netip.AddrPort }

// A flow is datagrams between a port of a sandbox and one outside.
type flow struct {
	key  flowKey
	used atomic.Int64 // ns since 1970

	mu              sync.Mutex
	killed          bool
	inside, outside *net.UDPConn // set once, before it carries anything
}

func (f *flow) destination() (netip.AddrPort, uint8) { return f.key.to, allow.UDP }

func (f *flow) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.killed = true
	if f.inside != nil {
		f.inside.Close()
		f.outside.Close()
	}
}

// datagrams reads those that belong to no flow yet.
func (r *Relay) datagrams(ctx context.Context, f *os.File) error {
	pc, err := net.FilePacketConn(f)
	f.Close()
	if err != nil {
		return err
	}
	conn := pc.(*net.UDPConn)
	go func() {
		<-ctx.Done()
		conn.Close()
	}()
	go func() {
		buf, oob := make([]byte, maxDatagram), make([]byte, 256)
		for {
			n, oobn, _, from, err := conn.ReadMsgUDPAddrPort(buf, oob)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				time.Sleep(acceptPause)
				continue
			}
			to, ok := linux.Destination(oob[:oobn])
			if !ok {
				continue
			}
			key := flowKey{unmap(from), unmap(to)}
			if r.boxOf(key.from.Addr()) != nil {
				r.datagram(key, buf[:n])
			} else {
				r.early(key, slices.Clone(buf[:n]))
			}
		}
	}()
	return nil
}

// maxEarly is how many datagrams wait at a time for word of their sandbox. Others are lost, as datagrams are.
const maxEarly = 64

// early sends a datagram once the edge has told of its sandbox.
func (r *Relay) early(key flowKey, b []byte) {
	if r.waiting.Add(1) > maxEarly {
		r.waiting.Add(-1)
		return
	}
	go func() {
		defer r.waiting.Add(-1)
		if r.awaitBox(key.from.Addr()) != nil {
			r.datagram(key, b)
		}
	}()
}

// datagram sends one that came without a flow, and makes the flow.
func (r *Relay) datagram(key flowKey, b []byte) {
	if f := r.flowOf(key); f != nil {
		f.used.Store(time.Now().UnixNano())
		_, _ = f.outside.Write(b)
	}
}

// flowOf is the flow of a key, a new one if need be; nil where there is to be none.
func (r *Relay) flowOf(key flowKey) *flow {
	r.making.Lock()
	defer r.making.Unlock()
	r.flowsMu.Lock()
	f := r.flows[key]
	r.flowsMu.Unlock()
	if f == nil {
		f = r.newFlow(key)
	}
	return f
}

func (r *Relay) newFlow(key flowKey) *flow {
	b := r.boxOf(key.from.Addr())
	if b == nil {
		return nil
	}
	f := &flow{key: key}
	if !r.enter(b, f) {
		return nil
	}
	if err := r.openFlow(f); err != nil {
		r.leave(b, f)
		b.refuse(key.to, allow.UDP, allow.Unreachable)
		return nil
	}
	r.flowsMu.Lock()
	r.flows[key] = f
	r.flowsMu.Unlock()
	f.used.Store(time.Now().UnixNano())
	go r.carryFlow(b, f)
	return f
}

func (r *Relay) openFlow(f *flow) error {
	out, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(f.key.to))
	if err != nil {
		return err
	}
	var file *os.File
	err = r.o.Router.Do(func() (err error) {
		file, err = linux.ConnectRelayUDP(f.key.to, f.key.from)
		return err
	})
	if err != nil {
		out.Close()
		return err
	}
	in, err := net.FileConn(file)
	file.Close()
	if err != nil {
		out.Close()
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.killed {
		in.Close()
		out.Close()
		return net.ErrClosed
	}
	f.inside, f.outside = in.(*net.UDPConn), out
	return nil
}

func (r *Relay) carryFlow(b *box, f *flow) {
	var wg sync.WaitGroup
	wg.Go(func() { f.move(f.outside, f.inside, &b.out) })
	wg.Go(func() { f.move(f.inside, f.outside, &b.in) })
	wg.Wait()
	r.flowsMu.Lock()
	delete(r.flows, f.key)
	r.flowsMu.Unlock()
	r.leave(b, f)
}

var buffers = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// move sends on what comes, until nothing came for a while either way. What exceeds the bound of bytes is dropped.
func (f *flow) move(to, from *net.UDPConn, b *bucket) {
	defer f.kill()
	raw, err := from.SyscallConn()
	if err != nil {
		return
	}
	for {
		_ = from.SetReadDeadline(time.Now().Add(flowIdle))
		if err := raw.Read(linux.Readable); err != nil { // so that a flow at rest has no buffer
			if errors.Is(err, os.ErrDeadlineExceeded) && time.Since(time.Unix(0, f.used.Load())) < flowIdle {
				continue
			}
			return
		}
		if !f.moveOne(to, from, b) {
			return
		}
	}
}

func (f *flow) moveOne(to, from *net.UDPConn, b *bucket) bool {
	buf := buffers.Get().(*[maxDatagram]byte)
	defer buffers.Put(buf)
	n, err := from.Read(buf[:])
	if err != nil {
		return false
	}
	f.used.Store(time.Now().UnixNano())
	now := time.Now()
	if b.behind(now) { // what is dropped is not paid for: a flood must not close the link for longer than it lasts
		return true
	}
	b.pay(int64(n), now)
	_, err = to.Write(buf[:n])
	return err == nil || errors.Is(err, syscall.EMSGSIZE)
}
