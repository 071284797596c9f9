//go:build rootful

package network

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// swapEnv makes the test binary an edge that swaps the policy of one sandbox between two until it is killed: run directory, id
// and how the address of both.
const swapEnv = "DSEC_TEST_NETWORK_SWAP"

const swapPorts = 7000 // port of policy 0; that of policy 1 is the next, and the one behind it is never open

func init() {
	if args := os.Getenv(swapEnv); args != "" {
		swap(strings.Fields(args))
	}
}

// swap says before and after each change what it does, and when.
func swap(args []string) {
	s, err := Open(context.Background(), Options{RunDir: args[0], Relay: []string{os.Args[0], "relay"}, RelayUID: relayUID})
	id := sandbox.ID(args[1])
	for n := 0; err == nil; n = 1 - n {
		p := Policy{Open: []Destination{opened(args[2]+"/32", uint16(swapPorts+n), uint16(swapPorts+n), UDP)}}
		fmt.Printf("%d begin %d\n", linux.Monotonic(), n)
		if _, err = s.Acquire(context.Background(), id, p); err == nil {
			err = s.SetPolicy(context.Background(), id, p)
		}
		fmt.Printf("%d end %d\n", linux.Monotonic(), n)
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// A forced is a time in which one policy was certainly in force.
type forced struct {
	policy     int
	from, till time.Duration
}

type swapLog struct {
	mu    sync.Mutex
	sure  []forced
	since *forced
	ends  int
}

func (l *swapLog) read(r io.Reader) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		var at time.Duration
		var what string
		var n int
		if c, err := fmt.Sscanf(lines.Text(), "%d %s %d", &at, &what, &n); c != 3 || err != nil {
			continue
		}
		l.mu.Lock()
		if what == "begin" && l.since != nil {
			l.since.till = at
			l.sure = append(l.sure, *l.since)
			l.since = nil
		} else if what == "end" {
			l.since = &forced{policy: n, from: at}
			l.ends++
		}
		l.mu.Unlock()
	}
}

func (l *swapLog) swaps() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ends
}

// TestNothingOutsideThePolicyInForceIsEverSeen streams packets to three ports while the policy changes 1,000 times and the edge is
// killed again and again.
func TestNothingOutsideThePolicyInForceIsEverSeen(t *testing.T) {
	x := newSite(t)
	dir := privateDir(t)
	type arrival struct {
		port       int
		sent, came time.Duration
	}
	var mu sync.Mutex
	var arrivals []arrival
	for n := range 3 {
		var c *net.UDPConn
		inside(t, x.ns, func() (err error) {
			c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(x.addr, uint16(swapPorts+n))))
			return err
		})
		defer c.Close()
		go func() {
			b := make([]byte, 64)
			for {
				got, _, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				if got == 8 {
					mu.Lock()
					arrivals = append(arrivals, arrival{n, time.Duration(binary.BigEndian.Uint64(b)), linux.Monotonic()})
					mu.Unlock()
				}
			}
		}()
	}
	s := openLinked(t, dir, 0)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(swapPorts, UDP)}})
	s.Detach()
	stop := make(chan struct{})
	var streams sync.WaitGroup
	for n := range 3 {
		streams.Go(func() {
			c, err := dial(ns, "udp", netip.AddrPortFrom(x.addr, uint16(swapPorts+n)).String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(linux.Monotonic())))
				time.Sleep(100 * time.Microsecond)
			}
		})
	}
	log := &swapLog{}
	for deadline := time.Now().Add(2 * time.Minute); log.swaps() < 1000 && time.Now().Before(deadline); {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s", swapEnv, dir, id, x.addr))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		read := make(chan struct{})
		go func() {
			log.read(out)
			close(read)
		}()
		before := log.swaps()
		for hang := time.Now().Add(30 * time.Second); log.swaps() < before+150 && time.Now().Before(hang); {
			time.Sleep(time.Millisecond)
		}
		_ = cmd.Process.Kill()
		<-read
		_ = cmd.Wait()
		log.mu.Lock()
		log.since = nil // what it began last may or may not be done
		log.mu.Unlock()
	}
	close(stop)
	streams.Wait()
	if n := log.swaps(); n < 1000 {
		t.Errorf("only %d swaps", n)
	}
	checked := 0
	mu.Lock()
	for _, a := range arrivals {
		if a.port == 2 {
			t.Fatal("a packet to a port that was never open arrived")
		}
		for _, f := range log.sure {
			if f.from < a.sent && a.came < f.till { // it was judged in between
				checked++
				if f.policy != a.port {
					t.Errorf("a packet sent %v after policy %d was in force, and seen %v before it was not, arrived at port %d", a.sent-f.from, f.policy, f.till-a.came, a.port)
				}
			}
		}
	}
	mu.Unlock()
	if checked == 0 {
		t.Errorf("none of %d arrivals was in a time of certainty", len(arrivals))
	}
	t.Logf("%d swaps, %d arrivals, %d of them checked", log.swaps(), len(arrivals), checked)
	s = openLinked(t, dir, 0)
	defer closeSlots(t, s)
	release(t, s, id)
}

func TestConnectionsEndAsTheyShould(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	got := make(chan string, 1)
	x.serve(t, 8081, func(c *net.TCPConn) { // reads to the end, and only then answers
		b, _ := io.ReadAll(c)
		c.Write([]byte(fmt.Sprintf("%d bytes", len(b))))
		c.Close()
		got <- "done"
	})
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	p := Policy{Open: []Destination{opened(x.addr.String()+"/32", 1, 65535, TCP), opened("10.254.0.0/16", 1, 65535, TCP)}, Connections: 3}
	id, ns := acquireOpen(t, s, p)
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8081", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	c.Write([]byte("half"))
	c.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(c); string(b) != "4 bytes" || err != nil {
		t.Errorf("after half an end: %q, %v", b, err)
	}
	c.Close()
	<-got
	// Nobody listens there: the connection is reset at once.
	if c, err := dial(ns, "tcp", fmt.Sprintf("%s:9", x.addr)); err == nil {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
			t.Errorf("a refused destination: %v", err)
		}
		c.Close()
	}
	var open []net.Conn
	for range 3 {
		c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
		if err != nil {
			t.Fatal(err)
		}
		wantEcho(t, c, "one of three")
		open = append(open, c)
	}
	if c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr)); err == nil {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
			t.Errorf("a connection too many: %v", err)
		}
		c.Close()
	}
	for _, c := range open {
		wantEcho(t, c, "they last")
		c.Close()
	}
	r, err := s.Refused(id)
	if err != nil || r.Reasons[TooManyConnections] != 1 || r.Reasons[Unreachable] != 1 {
		t.Errorf("refused: %+v, %v", r, err)
	}
	release(t, s, id)
}

func TestSlowReaderLosesNothing(t *testing.T) {
	const size = 256 << 20
	x := newSite(t)
	x.serve(t, 8080, func(c *net.TCPConn) {
		b := make([]byte, 1<<20)
		for n := 0; n < size; n += len(b) {
			for i := 0; i < len(b); i += 8 {
				binary.BigEndian.PutUint64(b[i:], uint64(n+i))
			}
			if _, err := c.Write(b); err != nil {
				return
			}
		}
		c.Close()
	})
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	time.Sleep(time.Second) // until every buffer on the way is full
	b, n := make([]byte, 1<<20), 0
	for {
		_, err := io.ReadFull(c, b)
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		for i := 0; i < len(b); i += 8 {
			if v := binary.BigEndian.Uint64(b[i:]); v != uint64(n+i) {
				t.Fatalf("at %d came what was at %d", n+i, v)
			}
		}
		n += len(b)
	}
	if n != size {
		t.Errorf("%d of %d bytes came", n, size)
	}
	release(t, s, id)
}

func BenchmarkAcquireLinkedReused(b *testing.B) {
	s := openLinked(b, privateDir(b), 8)
	defer closeSlots(b, s)
	p := Policy{Open: []Destination{opened("10.0.0.1/32", 443, 443, TCP)}}
	id, _ := acquireOpen(b, s, p)
	release(b, s, id)
	for b.Loop() {
		id, _ := acquireOpen(b, s, p)
		release(b, s, id)
	}
}

func BenchmarkMakeRemoveLinked(b *testing.B) {
	s := openLinked(b, privateDir(b), 0)
	defer closeSlots(b, s)
	if err := s.needLinks(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		x, err := s.make(true)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.remove(x); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSetPolicy(b *testing.B) {
	s := openLinked(b, privateDir(b), 0)
	defer closeSlots(b, s)
	policies := [2]Policy{}
	for i := range policies {
		for n := range 20 {
			policies[i].Open = append(policies[i].Open, opened(fmt.Sprintf("10.%d.0.%d/32", i, n), 443, 443, TCP))
		}
	}
	id, _ := acquireOpen(b, s, policies[0])
	n := 0
	for b.Loop() {
		n++
		if err := s.SetPolicy(b.Context(), id, policies[n%2]); err != nil {
			b.Fatal(err)
		}
	}
	release(b, s, id)
}

func BenchmarkConnect(b *testing.B) {
	x := newSite(b)
	x.serve(b, 8080, echo)
	s := openLinked(b, privateDir(b), 0)
	defer closeSlots(b, s)
	id, ns := acquireOpen(b, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	one := func(b *testing.B, in string) {
		inside(b, in, func() error {
			for b.Loop() {
				c, err := net.Dial("tcp", fmt.Sprintf("%s:8080", x.addr))
				if err != nil {
					return err
				}
				c.Write([]byte("x"))
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
					return err
				}
				c.Close()
			}
			return nil
		})
	}
	b.Run("relay", func(b *testing.B) { one(b, ns) })
	b.Run("direct", func(b *testing.B) { one(b, "/proc/self/ns/net") })
	release(b, s, id)
}

func BenchmarkThroughput(b *testing.B) {
	x := newSite(b)
	const size = 1 << 20
	x.serve(b, 8080, func(c *net.TCPConn) {
		buf := make([]byte, size)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	})
	s := openLinked(b, privateDir(b), 0)
	defer closeSlots(b, s)
	id, ns := acquireOpen(b, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	for name, in := range map[string]string{"relay": ns, "direct": "/proc/self/ns/net"} {
		b.Run(name, func(b *testing.B) {
			c, err := dial(in, "tcp", fmt.Sprintf("%s:8080", x.addr))
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			b.SetBytes(size)
			buf := make([]byte, size)
			for b.Loop() {
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	release(b, s, id)
}

// What both ends have ended and the sandbox does not read is in the node's memory still, and counts.
func TestUnreadConnectionsCount(t *testing.T) {
	const size = 1 << 20 // less than the relay's buffer
	x := newSite(t)
	ended := make(chan struct{}, 10)
	x.serve(t, 8080, func(c *net.TCPConn) {
		io.Copy(io.Discard, c)
		c.Write(make([]byte, size))
		c.Close()
		ended <- struct{}{}
	})
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	id, ns := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}, Connections: 2})
	begin := func() net.Conn {
		c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.(*net.TCPConn).SetReadBuffer(32 << 10)
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		return c
	}
	open := []net.Conn{begin(), begin()}
	<-ended
	<-ended
	time.Sleep(time.Second) // for the relay to do what it does with them
	more, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err == nil {
		defer more.Close()
		more.SetReadDeadline(time.Now().Add(30 * time.Second))
		_ = more.(*net.TCPConn).CloseWrite()
		_, err = io.Copy(io.Discard, more)
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("one connection more than the sandbox may have: %v", err)
	}
	for _, c := range open {
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if n, err := io.Copy(io.Discard, c); n != size || err != nil {
			t.Errorf("of %d bytes came %d: %v", size, n, err)
		}
		c.Close()
	}
	release(t, s, id)
}
