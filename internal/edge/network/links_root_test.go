//go:build rootful

package network

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
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
	ns   string
	addr netip.Addr // of the servers
	host netip.Addr // of the host, on the joining link
}

func newSite(t testing.TB) *site {
	t.Helper()
	dir := t.TempDir()
	x := &site{ns: filepath.Join(dir, "site")}
	octet := byte(os.Getpid())
	x.host, x.addr = netip.AddrFrom4([4]byte{10, 213, octet, 1}), netip.AddrFrom4([4]byte{10, 213, octet, 2})
	host6, addr6 := netip.MustParseAddr(fmt.Sprintf("fd77:%x::1", octet)), netip.MustParseAddr(fmt.Sprintf("fd77:%x::2", octet))
	if err := linux.CreateNetns(x.ns, func() error { return linux.LinkUp("lo") }); err != nil {
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
	return x
}

// inside runs f in a namespace; sockets that it makes stay there.
func inside(t testing.TB, ns string, f func() error) {
	t.Helper()
	if err := linux.InNetns(ns, f); err != nil {
		t.Fatal(err)
	}
}

// echo serves TCP at port: each connection gets back what it sends.
func (x *site) serve(t testing.TB, port int, f func(*net.TCPConn)) {
	t.Helper()
	var l net.Listener
	inside(t, x.ns, func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf("%s:%d", x.addr, port))
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
	return Destination{netip.PrefixFrom(x.addr, 32), port, port, protocol}
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
	t.Logf("%+v %v", r, err)
	release(t, s, id)
}
