//go:build rootful

package network

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"
)

// marker is in every packet that must arrive nowhere.
var marker = []byte("DSEC-HOSTILE")

// A capture counts packets with the marker that reach a namespace behind the packet filter.
type capture struct {
	mu   sync.Mutex
	seen [][]byte
	stop func()
}

// captureOn sees what the interface hands up: with the protocol of all packets a socket is before the filter, with one of its
// own (IP, ARP) behind it.
func captureOn(t *testing.T, ns string) *capture {
	t.Helper()
	c := &capture{}
	var fds []int
	inside(t, ns, func() error {
		for _, protocol := range []uint16{syscall.ETH_P_IP, syscall.ETH_P_IPV6, syscall.ETH_P_ARP, 0x8100, 0x88a8} {
			fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, int(swap16(protocol)))
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		return nil
	})
	var wg sync.WaitGroup
	for _, fd := range fds {
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Usec: 50_000})
		done := make(chan struct{})
		wg.Go(func() {
			buf := make([]byte, 70000)
			for {
				n, from, err := syscall.Recvfrom(fd, buf, 0)
				if err != nil {
					select {
					case <-done:
						return
					default:
						continue
					}
				}
				if ll, ok := from.(*syscall.SockaddrLinklayer); ok && ll.Pkttype == 4 { // outgoing
					continue
				}
				c.mu.Lock()
				c.seen = append(c.seen, append([]byte(nil), buf[:n]...))
				c.mu.Unlock()
			}
		})
		last := c.stop
		c.stop = func() {
			if last != nil {
				last()
			}
			close(done)
		}
	}
	closeAll := c.stop
	c.stop = func() {
		closeAll()
		wg.Wait()
		for _, fd := range fds {
			syscall.Close(fd)
		}
	}
	return c
}

func (c *capture) packets() [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([][]byte(nil), c.seen...)
}

func swap16(v uint16) uint16 { return v<<8 | v>>8 }

// raw sends frames from inside a slot, as a helper with all capabilities can.
type raw struct {
	fd, index int
	mac       [6]byte
	src, src6 netip.Addr
}

func openRaw(t *testing.T, s *Slots, ns string, link uint32) *raw {
	t.Helper()
	addresses := s.ranged.addresses(link)
	r := &raw{index: peerIndex, mac: s.ranged.mac(link), src: addresses[0], src6: addresses[1]}
	inside(t, ns, func() (err error) {
		r.fd, err = syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, 0)
		return err
	})
	t.Cleanup(func() { syscall.Close(r.fd) })
	return r
}

func (r *raw) send(t *testing.T, frame []byte) {
	t.Helper()
	err := syscall.Sendto(r.fd, frame, 0, &syscall.SockaddrLinklayer{Ifindex: r.index, Halen: 6})
	if err != nil {
		t.Errorf("send: %v", err)
	}
}

func (r *raw) eth(kind uint16, payload []byte) []byte {
	f := append(append([]byte(nil), r.mac[:]...), r.mac[:]...)
	return append(binary.BigEndian.AppendUint16(f, kind), payload...)
}

func sum16(b []byte) uint16 {
	var s uint32
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

type ip4 struct {
	src, dst netip.Addr
	protocol byte
	frag     uint16
	options  []byte
	payload  []byte
}

func (p ip4) bytes() []byte {
	h := make([]byte, 20+len(p.options))
	h[0] = 0x40 | byte(len(h)/4)
	binary.BigEndian.PutUint16(h[2:], uint16(len(h)+len(p.payload)))
	binary.BigEndian.PutUint16(h[6:], p.frag)
	h[8], h[9] = 64, p.protocol
	copy(h[12:], p.src.AsSlice())
	copy(h[16:], p.dst.AsSlice())
	copy(h[20:], p.options)
	binary.BigEndian.PutUint16(h[10:], sum16(h))
	return append(h, p.payload...)
}

func ip6(src, dst netip.Addr, next byte, payload []byte) []byte {
	h := make([]byte, 40)
	h[0] = 0x60
	binary.BigEndian.PutUint16(h[4:], uint16(len(payload)))
	h[6], h[7] = next, 64
	copy(h[8:], src.AsSlice())
	copy(h[24:], dst.AsSlice())
	return append(h, payload...)
}

// udp has no checksum, which IPv4 allows.
func udp(from, to uint16, payload []byte) []byte {
	h := binary.BigEndian.AppendUint16(nil, from)
	h = binary.BigEndian.AppendUint16(h, to)
	h = binary.BigEndian.AppendUint16(h, uint16(8+len(payload)))
	return append(append(h, 0, 0), payload...)
}

func tcp(from, to uint16, flags byte, payload []byte) []byte {
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h[0:], from)
	binary.BigEndian.PutUint16(h[2:], to)
	binary.BigEndian.PutUint32(h[4:], 1000)
	h[12], h[13] = 5<<4, flags
	h[14] = 0xff
	return append(h, payload...)
}

func TestNothingThatIsNotAllowedArrives(t *testing.T) {
	x := newSite(t)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	p := Policy{Open: []Destination{x.dest(8080, TCP), x.dest(8080, UDP), opened("fd99::/64", 0, 65535, UDP)}}
	id, ns := acquireOpen(t, s, p)
	other, _ := acquireOpen(t, s, p)
	a, b := s.ofID(id), s.ofID(other)
	r := openRaw(t, s, ns, a.link)
	otherAddr := s.ranged.addresses(b.link)
	behind := captureOn(t, s.routerPath())
	atSite := captureOn(t, x.ns)
	lo := netip.MustParseAddr("127.0.0.1")
	far6 := netip.MustParseAddr("fd99::1")
	good := func(dst netip.Addr, port uint16) []byte {
		return ip4{src: r.src, dst: dst, protocol: 17, payload: udp(5000, port, marker)}.bytes()
	}
	wrongMAC := r.eth(syscall.ETH_P_IP, good(x.addr, 8080))
	wrongMAC[11] ^= 1
	wrongTarget := r.eth(syscall.ETH_P_IP, good(x.addr, 8080))
	copy(wrongTarget, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	inner := good(x.addr, 8080)
	gre := append([]byte{0, 0, 8, 0}, inner...)
	arp := append([]byte{0, 1, 8, 0, 6, 4, 0, 2}, append(append(append([]byte(nil), r.mac[:]...), otherAddr[0].AsSlice()...), make([]byte, 10)...)...)
	vlan := append([]byte{0, 5, 8, 0}, inner...)
	na := append([]byte{136, 0, 0, 0, 0x20, 0, 0, 0}, append(otherAddr[1].AsSlice(), append([]byte{2, 1}, r.mac[:]...)...)...)
	frames := map[string][]byte{
		"a wrong source MAC":             wrongMAC,
		"broadcast MAC":                  wrongTarget,
		"another sandbox's address":      r.eth(syscall.ETH_P_IP, ip4{src: otherAddr[0], dst: x.addr, protocol: 17, payload: udp(5000, 8080, marker)}.bytes()),
		"the loopback's address":         r.eth(syscall.ETH_P_IP, ip4{src: lo, dst: x.addr, protocol: 17, payload: udp(5000, 8080, marker)}.bytes()),
		"a first fragment":               r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 17, frag: 0x2000, payload: udp(5000, 8080, append(marker, make([]byte, 12)...))}.bytes()),
		"a later fragment":               r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 17, frag: 100, payload: udp(5000, 8080, marker)}.bytes()),
		"options":                        r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 17, options: []byte{131, 7, 4, 10, 0, 0, 1, 0}, payload: udp(5000, 8080, marker)}.bytes()),
		"a VLAN":                         r.eth(0x8100, vlan),
		"a VLAN of a provider":           r.eth(0x88a8, append([]byte{0, 5, 0x81, 0}, vlan...)),
		"GRE":                            r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 47, payload: gre}.bytes()),
		"IP in IP":                       r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 4, payload: inner}.bytes()),
		"IPv6 in IP":                     r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 41, payload: ip6(r.src6, far6, 17, udp(1, 2, marker))}.bytes()),
		"ICMP":                           r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 1, payload: append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, marker...)}.bytes()),
		"SCTP":                           r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 132, payload: append(udp(5000, 8080, nil), marker...)}.bytes()),
		"multicast":                      r.eth(syscall.ETH_P_IP, good(netip.MustParseAddr("224.0.0.251"), 5353)),
		"broadcast":                      r.eth(syscall.ETH_P_IP, good(netip.MustParseAddr("255.255.255.255"), 67)),
		"a closed port":                  r.eth(syscall.ETH_P_IP, good(x.addr, 8081)),
		"a closed host":                  r.eth(syscall.ETH_P_IP, good(netip.MustParseAddr("1.1.1.1"), 8080)),
		"TCP data to a closed port":      r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 6, payload: tcp(5000, 8081, 0x18, marker)}.bytes()),
		"a TCP opening to a closed port": r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 6, payload: tcp(5000, 8081, 2, marker)}.bytes()),
		"TCP of no flags":                r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 6, payload: tcp(5000, 22, 0, marker)}.bytes()),
		"a short TCP header":             r.eth(syscall.ETH_P_IP, ip4{src: r.src, dst: x.addr, protocol: 6, payload: marker}.bytes()),
		"another sandbox":                r.eth(syscall.ETH_P_IP, good(otherAddr[0], 8080)),
		"the gateway":                    r.eth(syscall.ETH_P_IP, good(s.ranged.addresses(1)[0], 8080)),
		"the relay itself":               r.eth(syscall.ETH_P_IP, good(lo, 7)),
		"the host":                       r.eth(syscall.ETH_P_IP, good(x.host, 22)),
		"metadata":                       r.eth(syscall.ETH_P_IP, good(netip.MustParseAddr("169.254.169.254"), 80)),
		"metadata of Azure":              r.eth(syscall.ETH_P_IP, good(netip.MustParseAddr("168.63.129.16"), 80)),
		"ARP for another":                r.eth(syscall.ETH_P_ARP, append(arp, marker...)),
		"an IPv6 hop-by-hop header":      r.eth(syscall.ETH_P_IPV6, ip6(r.src6, far6, 0, append([]byte{17, 0, 1, 4, 0, 0, 0, 0}, udp(1, 2, marker)...))),
		"an IPv6 routing header":         r.eth(syscall.ETH_P_IPV6, ip6(r.src6, far6, 43, append([]byte{17, 0, 0, 0, 0, 0, 0, 0}, udp(1, 2, marker)...))),
		"an IPv6 fragment":               r.eth(syscall.ETH_P_IPV6, ip6(r.src6, far6, 44, append([]byte{17, 0, 0, 1, 0, 0, 0, 9}, udp(1, 2, marker)...))),
		"IPv6 destination options":       r.eth(syscall.ETH_P_IPV6, ip6(r.src6, far6, 60, append([]byte{17, 0, 1, 4, 0, 0, 0, 0}, udp(1, 2, marker)...))),
		"another's IPv6 address":         r.eth(syscall.ETH_P_IPV6, ip6(otherAddr[1], far6, 17, udp(1, 2, marker))),
		"IPv4 mapped to IPv6":            r.eth(syscall.ETH_P_IPV6, ip6(r.src6, netip.MustParseAddr("::ffff:10.0.0.1"), 17, udp(1, 2, marker))),
		"NAT64":                          r.eth(syscall.ETH_P_IPV6, ip6(r.src6, netip.MustParseAddr("64:ff9b::a00:1"), 17, udp(1, 2, marker))),
		"another sandbox by IPv6":        r.eth(syscall.ETH_P_IPV6, ip6(r.src6, otherAddr[1], 17, udp(1, 2, marker))),
		"a neighbour advertisement":      r.eth(syscall.ETH_P_IPV6, ip6(r.src6, netip.MustParseAddr("ff02::1"), 58, append(na, marker...))),
		"IPv6 multicast":                 r.eth(syscall.ETH_P_IPV6, ip6(r.src6, netip.MustParseAddr("ff02::fb"), 17, udp(1, 2, marker))),
		"LLDP":                           r.eth(0x88cc, marker),
		"a frame of nothing":             r.eth(0x9000, nil),
	}
	for _, f := range frames {
		r.send(t, f)
	}
	time.Sleep(200 * time.Millisecond) // to be seen, which fails the test
	for where, c := range map[string]*capture{"the router": behind, "the site": atSite} {
		for _, got := range c.packets() {
			if c == behind || bytes.Contains(got, marker) {
				t.Errorf("%s got %d bytes: %x", where, len(got), got[:min(len(got), 64)])
			}
		}
	}
	got, err := s.Refused(id)
	if err != nil || got.Packets < int64(len(frames)) {
		t.Errorf("of %d frames %d were counted: %v, %v", len(frames), got.Packets, got.Reasons, err)
	}
	for _, reason := range []string{BadFrame, BadPacket, BadProtocol, Forbidden, NotAllowed} {
		if got.Reasons[reason] == 0 {
			t.Errorf("no packet was counted as %s: %v", reason, got.Reasons)
		}
	}
	if one, err := s.Refused(other); err != nil || one.Packets != 0 {
		t.Errorf("another's were counted, too: %+v, %v", one, err)
	}
	// That the captures see what does pass.
	r.send(t, r.eth(syscall.ETH_P_IP, good(x.addr, 8080)))
	deadline := time.Now().Add(30 * time.Second)
	for (len(behind.packets()) == 0 || len(atSite.packets()) == 0) && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	if len(behind.packets()) == 0 || len(atSite.packets()) == 0 {
		t.Error("what is allowed was not seen either")
	}
	behind.stop()
	atSite.stop()
	release(t, s, id)
	release(t, s, other)
}
