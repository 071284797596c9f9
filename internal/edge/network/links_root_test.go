//go:build rootful

package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/edge/network/relay"
	"dsec/internal/linux"
	"dsec/sandbox"
)

func relayMain(args []string) {
	c, err := relay.ParseArgs(args)
	if err == nil {
		err = relay.Main(context.Background(), c)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const relayUID = 0xf0000001

func openLinked(t testing.TB, dir string, ready int) *Slots {
	t.Helper()
	s, err := Open(t.Context(), Options{RunDir: dir, Ready: ready, Relay: []string{os.Args[0], "relay"}, RelayUID: relayUID})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A site is a network beside the host, joined to it by a veth, with servers in it.
type site struct {
	ns          string
	addr, addr6 netip.Addr // of the servers
	host        netip.Addr // of the host, on the joining link
}

func newSite(t testing.TB) *site {
	t.Helper()
	dir := t.TempDir()
	x := &site{ns: filepath.Join(dir, "site")}
	octet := byte(os.Getpid())
	x.host, x.addr = netip.AddrFrom4([4]byte{10, 213, octet, 1}), netip.AddrFrom4([4]byte{10, 213, octet, 2})
	x.addr6 = netip.MustParseAddr(fmt.Sprintf("fd77:%x::2", octet))
	host6, addr6 := netip.MustParseAddr(fmt.Sprintf("fd77:%x::1", octet)), netip.MustParseAddr(fmt.Sprintf("fd77:%x::2", octet))
	if err := linux.CreateNetns(x.ns, func() error { return errors.Join(linux.LinkUp("lo"), writeSysctls(quietIPv6)) }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { linux.RemoveNetns(x.ns) })
	ns, err := os.Open(x.ns)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	nl, err := linux.OpenNetlink()
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	index := 50000 + os.Getpid()%10000
	var b linux.NetlinkBatch
	mac := [6]byte{2, 0x65, 0, 0, 0, octet}
	b.AddVeth(linux.Veth{Name: fmt.Sprintf("site%d", os.Getpid()), PeerName: "eth0", Index: index, PeerIndex: 2, MAC: mac, MTU: 1500, PeerNamespace: ns})
	b.LinkUp(index)
	for _, p := range [][2]netip.Addr{{x.host, x.addr}, {host6, addr6}} {
		b.AddAddress(index, p[0])
		b.AddRoute(linux.Route{To: netip.PrefixFrom(p[1], p[1].BitLen()), Index: index, Table: mainTable})
		b.AddNeighbor(index, p[1], mac)
	}
	if err := nl.Do(&b); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		nl, _ := linux.OpenNetlink()
		defer nl.Close()
		var b linux.NetlinkBatch
		b.DeleteLink(index)
		nl.Do(&b)
	})
	err = linux.InNetnsFile(ns, func() error {
		nl, err := linux.OpenNetlink()
		if err != nil {
			return err
		}
		defer nl.Close()
		var b linux.NetlinkBatch
		b.LinkUp(2)
		for _, p := range [][2]netip.Addr{{x.addr, x.host}, {addr6, host6}} {
			b.AddAddress(2, p[0])
			everywhere, _ := p[0].Prefix(0)
			b.AddNeighbor(2, p[1], mac)
			b.AddRoute(linux.Route{To: everywhere, Via: p[1], Index: 2, Table: mainTable})
		}
		return nl.Do(&b)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := linux.SettleLink(fmt.Sprintf("site%d", os.Getpid())); err != nil {
		t.Fatal(err)
	}
	return x
}

// inside runs f in a namespace; sockets that it makes stay there.
func inside(t testing.TB, ns string, f func() error) {
	t.Helper()
	if err := linux.InNetns(ns, f); err != nil {
		t.Fatal(err)
	}
}

// serve answers each connection to port with f.
func (x *site) serve(t testing.TB, port int, f func(*net.TCPConn)) {
	t.Helper()
	serveAt(t, x.ns, netip.AddrPortFrom(x.addr, uint16(port)), f)
}

func serveAt(t testing.TB, ns string, at netip.AddrPort, f func(*net.TCPConn)) {
	t.Helper()
	var l net.Listener
	inside(t, ns, func() (err error) {
		l, err = net.Listen("tcp", at.String())
		return err
	})
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go f(c.(*net.TCPConn))
		}
	}()
}

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
	c.Close()
}

func (x *site) dest(port uint16, protocol uint8) Destination {
	return opened(x.addr.String()+"/32", port, port, protocol)
}

func opened(prefix string, first, last uint16, protocol uint8) Destination {
	return Destination{Prefix: netip.MustParsePrefix(prefix), FirstPort: first, LastPort: last, Protocol: protocol}
}

// dial connects from inside a slot.
func dial(ns string, network, to string) (conn net.Conn, err error) {
	err = linux.InNetns(ns, func() error {
		conn, err = net.DialTimeout(network, to, 5*time.Second)
		return err
	})
	return conn, err
}

func acquireOpen(t testing.TB, s *Slots, p Policy) (sandbox.ID, string) {
	t.Helper()
	id := sandbox.NewID(edge)
	n, err := s.Acquire(t.Context(), id, p)
	if err != nil {
		t.Fatal(err)
	}
	return id, n.Namespace
}

func TestOpenDestinationsAreReachedAndNoOthers(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	x.serve(t, 8081, echo)
	s := openLinked(t, privateDir(t), 2)
	defer closeSlots(t, s)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	c.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(c); string(b) != "hello" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	c.Close()
	for _, to := range []string{fmt.Sprintf("%s:8081", x.addr), fmt.Sprintf("%s:22", x.host), "169.254.169.254:80", "198.18.0.1:7", "198.18.0.17:80", "1.1.1.1:443"} {
		at := time.Now()
		if c, err := dial(ns, "tcp", to); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s: %v, %v", to, c, err)
		}
		if d := time.Since(at); d > 3*time.Second {
			t.Errorf("%s was refused after %v", to, d)
		}
	}
	r, err := s.Refused(id)
	if err != nil || r.Packets != 6 || r.Reasons[NotAllowed] != 2 || r.Reasons[Forbidden] != 4 || len(r.Samples) != 6 {
		t.Errorf("refused: %+v, %v", r, err)
	} else if last := r.Samples[0]; last.Destination != netip.MustParseAddrPort("1.1.1.1:443") || last.Count != 1 || last.Protocol != TCP || time.Since(last.Last) > time.Minute {
		t.Errorf("the last refused was %+v", last)
	}
	release(t, s, id)
	again, ns2 := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	if ns2 == ns {
		t.Error("a slot that was used has another owner")
	}
	if r, err := s.Refused(again); err != nil || r.Packets != 0 || len(r.Samples) != 0 {
		t.Errorf("another sandbox begins with %+v, %v", r, err)
	}
	release(t, s, again)
}

func TestSlotWithALinkThatNobodyUsedIsUsedAgain(t *testing.T) {
	x := newSite(t)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	var first string
	for i := range 3 {
		id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
		if i == 0 {
			first = ns
			time.Sleep(200 * time.Millisecond) // late counters, if there were any, would show now
		} else if ns != first {
			t.Errorf("%s, and then %s", first, ns)
		}
		release(t, s, id)
	}
}

func (x *site) serveUDP(t testing.TB, addr netip.Addr, port int) {
	t.Helper()
	var c *net.UDPConn
	inside(t, x.ns, func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, uint16(port))))
		return err
	})
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
}

func wantEcho(t *testing.T, c net.Conn, message string) {
	t.Helper()
	c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Write([]byte(message)); err != nil {
		t.Error(err)
		return
	}
	buf := make([]byte, len(message))
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != message {
		t.Errorf("%.20q came back as %.20q, %v", message, buf, err)
	}
}

func TestDatagramsAndIPv6PassBothWays(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	serveAt(t, x.ns, netip.AddrPortFrom(x.addr6, 8080), echo)
	x.serveUDP(t, x.addr, 53)
	x.serveUDP(t, x.addr6, 53)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(53, UDP), opened(netip.PrefixFrom(x.addr6, 64).Masked().String(), 53, 8080, UDP), opened(x.addr6.String()+"/128", 8080, 8080, TCP)}})
	for _, to := range []netip.Addr{x.addr, x.addr6} {
		c, err := dial(ns, "udp", netip.AddrPortFrom(to, 53).String())
		if err != nil {
			t.Fatal(err)
		}
		wantEcho(t, c, "question")
		wantEcho(t, c, "another")
		wantEcho(t, c, strings.Repeat("large", 6000)) // more than a packet of the site's network holds
		c.Close()
	}
	if c, err := dial(ns, "tcp", netip.AddrPortFrom(x.addr6, 8080).String()); err != nil {
		t.Error(err)
	} else {
		wantEcho(t, c, "over IPv6")
		c.Close()
	}
	for _, to := range []netip.Addr{x.addr, netip.MustParseAddr("fd99::1")} {
		c, err := dial(ns, "udp", netip.AddrPortFrom(to, 54).String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(30 * time.Second))
		c.Write([]byte("x"))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a refused datagram to %s gives %v, not an error at once", to, err)
		}
		c.Close()
	}
	release(t, s, id)
}

func TestDrainedConnectionsDieWithTheirPolicy(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	x.serve(t, 8081, echo)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	both := Policy{Open: []Destination{x.dest(8080, TCP), x.dest(8081, TCP)}}
	id, ns := acquireOpen(t, s, both)
	closed, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	kept, err := dial(ns, "tcp", fmt.Sprintf("%s:8081", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(t, closed, "a")
	wantEcho(t, kept, "a")
	if err := s.SetPolicy(t.Context(), id, Policy{Open: both.Open, Closed: []Destination{x.dest(8080, TCP)}}); err != nil {
		t.Fatal(err)
	}
	closed.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := closed.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection to what was closed: %v, want a reset", err)
	}
	wantEcho(t, kept, "still")
	// Nothing at all, and back: the link stays, and what was held is reset.
	if err := s.SetPolicy(t.Context(), id, Policy{}); err != nil {
		t.Fatal(err)
	}
	if _, err := kept.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection after all was closed: %v, want a reset", err)
	}
	if _, err := dial(ns, "tcp", fmt.Sprintf("%s:8081", x.addr)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialling after all was closed: %v", err)
	}
	if err := s.SetPolicy(t.Context(), id, both); err != nil {
		t.Fatal(err)
	}
	if c, err := dial(ns, "tcp", fmt.Sprintf("%s:8081", x.addr)); err != nil {
		t.Error(err)
	} else {
		wantEcho(t, c, "again")
		c.Close()
	}
	release(t, s, id)
}

func TestLiveSandboxGetsALinkLater(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	s := openLinked(t, privateDir(t), 1)
	defer closeSlots(t, s)
	id := sandbox.NewID(edge)
	ns := acquire(t, s, id)
	if _, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr)); !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("without a link: %v", err)
	}
	if err := s.SetPolicy(t.Context(), id, Policy{}); err != nil || s.ofID(id).link != 0 {
		t.Errorf("a policy of nothing: %v, link %d", err, s.ofID(id).link)
	}
	if err := s.SetPolicy(t.Context(), id, Policy{Open: []Destination{x.dest(8080, TCP)}}); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Acquire(t.Context(), id, Policy{}); err != nil || n.Namespace != ns || len(n.Addresses) != 2 {
		t.Errorf("the slot is now %+v, %v", n, err)
	}
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(t, c, "now")
	c.Close()
	release(t, s, id)
	if exists(ns) {
		t.Error("the slot is still there")
	}
}

func TestRestartFindsLinksPoliciesAndConnections(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	x.serve(t, 8081, echo)
	dir := privateDir(t)
	s := openLinked(t, dir, 2)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	gone, goneNS := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8081, TCP)}})
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(t, c, "before")
	pid := s.relay.client.PID
	// Killed while a link was made for a live sandbox, and while one was made for nobody.
	late := sandbox.NewID(edge)
	acquire(t, s, late)
	os.Symlink(strconv.Itoa(s.ofID(late).n), s.linkRecord(9000)+".new")
	os.Symlink("77", s.linkRecord(9001))
	s.Detach()
	wantEcho(t, c, "without an edge")

	s = openLinked(t, dir, 2)
	defer closeSlots(t, s)
	if s.relay.client != nil && s.relay.client.PID != pid {
		t.Error("another relay was started")
	}
	wantEcho(t, c, "after")
	if _, err := s.Sweep(t.Context(), map[sandbox.ID]bool{id: true, late: true}); err != nil {
		t.Fatal(err)
	}
	if exists(goneNS) || s.ofID(gone) != nil {
		t.Error("the slot of a sandbox that is gone is left")
	}
	if exists(s.linkRecord(9000)+".new") || exists(s.linkRecord(9001)) || s.ofID(late).link != 0 {
		t.Error("a half-made link is left")
	}
	if err := s.SetPolicy(t.Context(), id, Policy{Open: []Destination{x.dest(8081, TCP)}}); err != nil {
		t.Fatal(err)
	}
	if s.relay.client.PID != pid {
		t.Error("another relay was started")
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("what an earlier process let begin is not reset: %v", err)
	}
	if c, err := dial(ns, "tcp", fmt.Sprintf("%s:8081", x.addr)); err != nil {
		t.Error(err)
	} else {
		wantEcho(t, c, "new")
		c.Close()
	}
	four, six, err := s.router.Load().filter.written()
	if err != nil || len(four) != 1 || len(six) != 0 {
		t.Errorf("rules in the filter: %v %v, %v; want those of one policy", four, six, err)
	}
	release(t, s, id)
	release(t, s, late)
	if four, _, _ := s.router.Load().filter.written(); len(four) != 0 {
		t.Errorf("rules of nobody are left: %v", four)
	}
}

func TestKilledRelayIsStartedAgain(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(t, c, "before")
	if err := s.relay.process.Kill(); err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection of a killed relay: %v", err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
		if err == nil {
			wantEcho(t, c, "again")
			c.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the relay did not come back: %v", err)
		}
	}
	release(t, s, id)
}

func TestRelayHasNoRights(t *testing.T) {
	x := newSite(t)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	id, _ := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", s.relay.client.PID))
	if err != nil || len(tasks) < 2 {
		t.Fatal(tasks, err)
	}
	for _, path := range tasks {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		for _, want := range []string{fmt.Sprintf("\nUid:\t%[1]d\t%[1]d\t%[1]d\t%[1]d\n", uint32(relayUID)), "\nCapPrm:\t0000000000000000\n", "\nCapEff:\t0000000000000000\n", "\nNoNewPrivs:\t1\n"} {
			if !strings.Contains(string(b), want) {
				t.Errorf("%s has no %q", path, want)
			}
		}
	}
	if root, err := os.Readlink(fmt.Sprintf("/proc/%d/root", s.relay.client.PID)); err != nil || root != s.emptyDir() {
		t.Errorf("its root is %s, %v", root, err)
	}
	release(t, s, id)
}

func TestRangeThatTheHostUsesIsRefused(t *testing.T) {
	x := newSite(t)
	dir := privateDir(t)
	_, err := Open(t.Context(), Options{RunDir: dir, Range: "10.213.0.0/16", Relay: []string{os.Args[0], "relay"}, RelayUID: relayUID})
	if sandbox.ReasonOf(err) != "network_range_overlaps" || !strings.Contains(err.Error(), "--network-range") || !strings.Contains(err.Error(), x.addr.String()[:6]) {
		t.Errorf("%v", err)
	}
	s := openLinked(t, dir, 0)
	closeSlots(t, s)
}

// A process that was killed while it made the router leaves directories: the next one makes router and relay all the same.
func TestHalfMadeRouterIsMadeAgain(t *testing.T) {
	dir := privateDir(t)
	if err := os.MkdirAll(filepath.Join(dir, "links"), 0o700); err != nil {
		t.Fatal(err)
	}
	s := openLinked(t, dir, 0)
	x := newSite(t)
	x.serve(t, 443, echo)
	_, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(443, TCP)}})
	c, err := dial(ns, "tcp", netip.AddrPortFrom(x.addr, 443).String())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	closeSlots(t, s)
}
