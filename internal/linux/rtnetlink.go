package linux

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Netlink is a socket to the routing tables, links and neighbours of the network namespace in which it was opened, wherever
// the caller's thread is. It is safe for concurrent use.
type Netlink struct {
	mu  sync.Mutex
	fd  int
	seq uint32
	buf []byte
}

// OpenNetlink opens one in the calling thread's network namespace.
func OpenNetlink() (*Netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	// Errors come without the request, and nothing waits for ever.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &Netlink{fd: fd}, nil
}

// Close closes the socket.
func (n *Netlink) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fd < 0 {
		return nil
	}
	err := unix.Close(n.fd)
	n.fd = -1
	return err
}

// A NetlinkBatch is requests that are sent at once and carried out in order; after one that fails the others are still tried.
type NetlinkBatch struct {
	buf   []byte
	names []string
	begin int
}

func (b *NetlinkBatch) start(name string, kind, flags uint16, fixed []byte) {
	b.begin = len(b.buf)
	b.names = append(b.names, name)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, 0)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, kind)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b.buf = append(b.buf, 0, 0, 0, 0, 0, 0, 0, 0)
	b.buf = append(b.buf, fixed...)
}

func (b *NetlinkBatch) end() {
	binary.NativeEndian.PutUint32(b.buf[b.begin:], uint32(len(b.buf)-b.begin))
}

func (b *NetlinkBatch) attr(kind uint16, data []byte) {
	at := b.open(kind)
	b.buf = append(b.buf, data...)
	b.close(at)
}

func (b *NetlinkBatch) u32(kind uint16, v uint32) {
	b.attr(kind, binary.NativeEndian.AppendUint32(nil, v))
}

// open begins an attribute that close ends: what is between is inside.
func (b *NetlinkBatch) open(kind uint16) int {
	at := len(b.buf)
	b.buf = append(b.buf, 0, 0)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, kind)
	return at
}

func (b *NetlinkBatch) close(at int) {
	binary.NativeEndian.PutUint16(b.buf[at:], uint16(len(b.buf)-at))
	for len(b.buf)%unix.NLMSG_ALIGNTO != 0 {
		b.buf = append(b.buf, 0)
	}
}

// A Veth is a pair of linked interfaces, each in a namespace of its own. None of them does ARP or neighbour discovery.
type Veth struct {
	Name, PeerName   string
	Index, PeerIndex int
	MAC              [6]byte // of both ends
	MTU              int
	PeerNamespace    *os.File
}

const (
	vethInfoPeer = 1
	iflaNetNSFD  = 28
)

func ifinfo(index int, flags, change uint32) []byte {
	f := make([]byte, 0, unix.SizeofIfInfomsg)
	f = append(f, unix.AF_UNSPEC, 0, 0, 0)
	f = binary.NativeEndian.AppendUint32(f, uint32(index))
	f = binary.NativeEndian.AppendUint32(f, flags)
	return binary.NativeEndian.AppendUint32(f, change)
}

func (b *NetlinkBatch) linkOf(name string, v *Veth) {
	b.attr(unix.IFLA_IFNAME, append([]byte(name), 0))
	b.attr(unix.IFLA_ADDRESS, v.MAC[:])
	b.u32(unix.IFLA_MTU, uint32(v.MTU))
	b.u32(unix.IFLA_NUM_TX_QUEUES, 1)
	b.u32(unix.IFLA_NUM_RX_QUEUES, 1)
}

// AddVeth makes a pair whose ends are down, the peer where it belongs.
func (b *NetlinkBatch) AddVeth(v Veth) {
	b.start("add "+v.Name, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, ifinfo(v.Index, unix.IFF_NOARP, unix.IFF_NOARP))
	b.linkOf(v.Name, &v)
	info := b.open(unix.IFLA_LINKINFO)
	b.attr(unix.IFLA_INFO_KIND, []byte("veth"))
	data := b.open(unix.IFLA_INFO_DATA)
	peer := b.open(vethInfoPeer)
	b.buf = append(b.buf, ifinfo(v.PeerIndex, unix.IFF_NOARP, unix.IFF_NOARP)...)
	b.linkOf(v.PeerName, &v)
	b.u32(iflaNetNSFD, uint32(v.PeerNamespace.Fd()))
	b.close(peer)
	b.close(data)
	b.close(info)
	b.end()
}

// LinkUp brings an interface up.
func (b *NetlinkBatch) LinkUp(index int) {
	b.start("bring a link up", unix.RTM_NEWLINK, 0, ifinfo(index, unix.IFF_UP, unix.IFF_UP))
	b.end()
}

// DeleteLink removes an interface, and a pair's other end with it.
func (b *NetlinkBatch) DeleteLink(index int) {
	b.start("delete a link", unix.RTM_DELLINK, 0, ifinfo(index, 0, 0))
	b.end()
}

func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// AddAddress gives an interface an address, alone in its prefix, without looking for others that have it.
func (b *NetlinkBatch) AddAddress(index int, a netip.Addr) {
	f := append(make([]byte, 0, unix.SizeofIfAddrmsg), family(a), uint8(a.BitLen()), unix.IFA_F_NODAD|unix.IFA_F_PERMANENT, unix.RT_SCOPE_UNIVERSE)
	b.start("add an address", unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, binary.NativeEndian.AppendUint32(f, uint32(index)))
	b.attr(unix.IFA_LOCAL, a.AsSlice())
	b.attr(unix.IFA_ADDRESS, a.AsSlice())
	b.end()
}

// AddNeighbor says for good which MAC an address has.
func (b *NetlinkBatch) AddNeighbor(index int, a netip.Addr, mac [6]byte) {
	f := append(make([]byte, 0, unix.SizeofNdMsg), family(a), 0, 0, 0)
	f = binary.NativeEndian.AppendUint32(f, uint32(index))
	f = binary.NativeEndian.AppendUint16(f, unix.NUD_PERMANENT)
	b.start("add a neighbour", unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, append(f, 0, 0))
	b.attr(unix.NDA_DST, a.AsSlice())
	b.attr(unix.NDA_LLADDR, mac[:])
	b.end()
}

// A Route is where packets for a destination go.
type Route struct {
	To    netip.Prefix
	Via   netip.Addr // invalid: directly
	Index int
	Local bool // to this namespace itself, whatever addresses it has
	Table uint8
}

// AddRoute adds or replaces one.
func (b *NetlinkBatch) AddRoute(r Route) {
	kind, scope, table := uint8(unix.RTN_UNICAST), uint8(unix.RT_SCOPE_LINK), r.Table
	if r.Local {
		kind, scope = unix.RTN_LOCAL, unix.RT_SCOPE_HOST
	}
	flags := uint32(0)
	if r.Via.IsValid() {
		scope, flags = unix.RT_SCOPE_UNIVERSE, unix.RTNH_F_ONLINK
	}
	if r.To.Addr().Is6() {
		scope = unix.RT_SCOPE_UNIVERSE
	}
	f := append(make([]byte, 0, unix.SizeofRtMsg), family(r.To.Addr()), uint8(r.To.Bits()), 0, 0, table, unix.RTPROT_STATIC, scope, kind)
	b.start("add a route", unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, binary.NativeEndian.AppendUint32(f, flags))
	if r.To.Bits() > 0 {
		b.attr(unix.RTA_DST, r.To.Addr().AsSlice())
	}
	if r.Via.IsValid() {
		b.attr(unix.RTA_GATEWAY, r.Via.AsSlice())
	}
	b.u32(unix.RTA_OIF, uint32(r.Index))
	b.end()
}

// Do sends a batch and waits until all of it is done. The error is the first one.
func (n *Netlink) Do(b *NetlinkBatch) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	first := n.seq + 1
	for at := 0; at < len(b.buf); at += int(binary.NativeEndian.Uint32(b.buf[at:])) {
		n.seq++
		binary.NativeEndian.PutUint32(b.buf[at+8:], n.seq)
	}
	if err := retryEINTR(func() error { return unix.Sendto(n.fd, b.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) }); err != nil {
		return fmt.Errorf("send netlink requests: %w", err)
	}
	var failed error
	for left := len(b.names); left > 0; {
		answers, err := n.receive()
		if err != nil {
			return err
		}
		for _, a := range answers {
			if a.seq < first || a.kind != unix.NLMSG_ERROR || len(a.data) < 4 {
				continue
			}
			left--
			if code := int32(binary.NativeEndian.Uint32(a.data)); code != 0 && failed == nil {
				failed = fmt.Errorf("%s: %w", b.names[a.seq-first], unix.Errno(-code))
			}
		}
	}
	return failed
}

type netlinkAnswer struct {
	kind uint16
	seq  uint32
	data []byte
}

// receive reads one datagram of answers; they are valid until the next.
func (n *Netlink) receive() ([]netlinkAnswer, error) {
	if n.buf == nil {
		n.buf = make([]byte, 32<<10)
	}
	var got int
	err := retryEINTR(func() (err error) {
		got, _, err = unix.Recvfrom(n.fd, n.buf, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("receive netlink answers: %w", err)
	}
	var all []netlinkAnswer
	for b := n.buf[:got]; len(b) >= unix.SizeofNlMsghdr; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return nil, fmt.Errorf("netlink answer of %d bytes", size)
		}
		all = append(all, netlinkAnswer{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.SizeofNlMsghdr:size]})
		b = b[min((size+3)&^3, len(b)):]
	}
	return all, nil
}

// RouteKind is what the kernel does with packets to an address.
type RouteKind int

// Kinds of routes.
const (
	RouteNone RouteKind = iota
	RouteUnicast
	RouteLocal // to this host itself
	RouteOther // broadcast, multicast, prohibited, ...
)

// RouteTo asks how a packet to a would be routed.
func (n *Netlink) RouteTo(a netip.Addr) (RouteKind, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := append(make([]byte, 0, unix.SizeofRtMsg), family(a), uint8(a.BitLen()), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	var b NetlinkBatch
	b.start("", unix.RTM_GETROUTE, 0, f)
	b.attr(unix.RTA_DST, a.AsSlice())
	b.end()
	binary.NativeEndian.PutUint16(b.buf[6:], unix.NLM_F_REQUEST)
	n.seq++
	binary.NativeEndian.PutUint32(b.buf[8:], n.seq)
	if err := retryEINTR(func() error { return unix.Sendto(n.fd, b.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) }); err != nil {
		return 0, fmt.Errorf("ask for a route: %w", err)
	}
	for {
		answers, err := n.receive()
		if err != nil {
			return 0, err
		}
		for _, x := range answers {
			switch {
			case x.seq != n.seq:
			case x.kind == unix.NLMSG_ERROR && len(x.data) >= 4:
				switch code := unix.Errno(-int32(binary.NativeEndian.Uint32(x.data))); code {
				case unix.ENETUNREACH, unix.EHOSTUNREACH:
					return RouteNone, nil
				case unix.EACCES, unix.EINVAL:
					return RouteOther, nil
				default:
					return 0, fmt.Errorf("ask for a route: %w", code)
				}
			case x.kind == unix.RTM_NEWROUTE && len(x.data) >= unix.SizeofRtMsg:
				switch x.data[7] {
				case unix.RTN_UNICAST:
					return RouteUnicast, nil
				case unix.RTN_LOCAL:
					return RouteLocal, nil
				}
				return RouteOther, nil
			}
		}
	}
}

// Routes lists the destinations of the host's routes that lead anywhere.
func Routes() ([]netip.Prefix, error) {
	var all []netip.Prefix
	for path, parse := range map[string]func(fields []string) (netip.Prefix, bool){
		"/proc/net/route": parseRoute4, "/proc/net/ipv6_route": parseRoute6,
	} {
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(b)) {
			if p, ok := parse(strings.Fields(line)); ok {
				all = append(all, p)
			}
		}
	}
	return all, nil
}

// parseRoute4 reads "eth0 000010AC 010010AC 0003 0 0 0 0000FFFF 0 0 0": destination, gateway and mask in the host's order.
func parseRoute4(f []string) (netip.Prefix, bool) {
	if len(f) < 8 {
		return netip.Prefix{}, false
	}
	to, err := strconv.ParseUint(f[1], 16, 32)
	mask, err2 := strconv.ParseUint(f[7], 16, 32)
	if err != nil || err2 != nil {
		return netip.Prefix{}, false // the heads
	}
	var a [4]byte
	binary.NativeEndian.PutUint32(a[:], uint32(to))
	return netip.PrefixFrom(netip.AddrFrom4(a), bits.OnesCount32(uint32(mask))).Masked(), true
}

// parseRoute6 reads "<32 hex digits of the destination> <length in hex> ...", the last field the interface.
func parseRoute6(f []string) (netip.Prefix, bool) {
	if len(f) < 10 {
		return netip.Prefix{}, false
	}
	b, err := hex.DecodeString(f[0])
	length, err2 := strconv.ParseUint(f[1], 16, 8)
	a, ok := netip.AddrFromSlice(b)
	if err != nil || err2 != nil || !ok || !a.Is6() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, int(length)).Masked(), true
}

// Monotonic is the kernel's monotonic clock, as BPF programs read it.
func Monotonic() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func tc(index int, handle, parent, info uint32) []byte {
	f := append(make([]byte, 0, 20), unix.AF_UNSPEC, 0, 0, 0)
	f = binary.NativeEndian.AppendUint32(f, uint32(index))
	f = binary.NativeEndian.AppendUint32(f, handle)
	f = binary.NativeEndian.AppendUint32(f, parent)
	return binary.NativeEndian.AppendUint32(f, info)
}

const (
	tcClsact     = 0xfffffff1
	tcIngress    = 0xfffffff2
	tcEgress     = 0xfffffff3
	tcaKind      = 1
	tcaOptions   = 2
	tcaBPFFD     = 6
	tcaBPFName   = 7
	tcaBPFFlags  = 8
	tcBPFActions = 1 // the program's result says what becomes of the packet
)

// AddFilters puts BPF programs on an interface, one for what comes in there and one for what goes out. They stay as long as it does,
// whatever becomes of this process. The interface has none yet.
func (b *NetlinkBatch) AddFilters(index, in, out int) {
	b.start("add the hooks of filters", unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL, tc(index, 0xffff0000, tcClsact, 0))
	b.attr(tcaKind, []byte("clsact\x00"))
	b.end()
	b.SetFilters(index, in, out)
}

// SetFilters replaces those of AddFilters.
func (b *NetlinkBatch) SetFilters(index, in, out int) {
	for parent, fd := range map[uint32]int{tcIngress: in, tcEgress: out} {
		const priority, everything = 1 << 16, 0x0300 // ETH_P_ALL in the network's order
		b.start("set a filter", unix.RTM_NEWTFILTER, unix.NLM_F_CREATE, tc(index, 1, parent, priority|everything))
		b.attr(tcaKind, []byte("bpf\x00"))
		options := b.open(tcaOptions)
		b.u32(tcaBPFFD, uint32(fd))
		b.attr(tcaBPFName, []byte("dsec\x00"))
		b.u32(tcaBPFFlags, tcBPFActions)
		b.close(options)
		b.end()
	}
}
