//go:build rootful

package network

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"dsec/sandbox"
)

// within fails the test if f hangs.
func within(t *testing.T, d time.Duration, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(d):
		t.Fatalf("%s hangs", what)
	}
}

func TestRelayThatHangsIsReplacedByTheNextEdge(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	dir := privateDir(t)
	s := openLinked(t, dir, 0)
	p := Policy{Open: []Destination{x.dest(8080, TCP)}}
	id, ns := acquireOpen(t, s, p)
	pid := s.relay.client.PID
	s.Detach()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s = openLinked(t, dir, 0)
	defer closeSlots(t, s)
	within(t, time.Minute, "a policy beside a relay that hangs", func() {
		if err := s.SetPolicy(t.Context(), id, p); err != nil {
			t.Error(err)
		}
	})
	if exists(fmt.Sprintf("/proc/%d/ns", pid)) && s.relay.client.PID == pid {
		t.Error("the relay that hangs is still there")
	}
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(t, c, "by the next one")
	c.Close()
	release(t, s, id)
}

// A relay that no policy of this edge has needed yet carries what an earlier one left: that ends with its sandbox all the same.
func TestSweptSandboxesLeaveNothingInTheRelay(t *testing.T) {
	x := newSite(t)
	ended := make(chan error, 1)
	x.serve(t, 8080, func(c *net.TCPConn) {
		c.Write([]byte("x"))
		c.SetDeadline(time.Now().Add(30 * time.Second))
		_, err := io.Copy(io.Discard, c)
		ended <- err
		c.Close()
	})
	dir := privateDir(t)
	s := openLinked(t, dir, 0)
	p := Policy{Open: []Destination{x.dest(8080, TCP)}, Connections: 1}
	id, ns := acquireOpen(t, s, p)
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if more, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr)); err == nil { // one too many
		more.SetDeadline(time.Now().Add(30 * time.Second))
		io.Copy(io.Discard, more)
		more.Close()
	}
	if r, err := s.Refused(id); err != nil || r.Packets != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	link := s.ofID(id).link
	s.Detach()
	s = openLinked(t, dir, 0)
	defer closeSlots(t, s)
	if _, err := s.Sweep(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; os.IsTimeout(err) {
		t.Error("the connection of a sandbox that is gone lives on outside")
	}
	c.Close() // or its socket keeps the namespace, and so the link
	within(t, time.Minute, "the end of a link", func() {
		for name := fmt.Sprintf("s%d", link); ; time.Sleep(10 * time.Millisecond) {
			gone := false
			inside(t, s.routerPath(), func() error {
				_, err := net.InterfaceByName(name)
				gone = err != nil
				return nil
			})
			if gone {
				return
			}
		}
	})
	s.router.Load().numbers = numbers{next: maxLinks, free: []uint32{link}}
	next, _ := acquireOpen(t, s, p)
	if got := s.ofID(next).link; got != link {
		t.Fatalf("it has link %d, not %d", got, link)
	}
	if r, err := s.Refused(next); err != nil || r.Packets != 0 {
		t.Errorf("the next owner of a link begins with %+v, %v", r, err)
	}
	release(t, s, next)
}

func TestSlotsCloseWhileARelayStarts(t *testing.T) {
	x := newSite(t)
	dir := privateDir(t)
	script := filepath.Join(t.TempDir(), "slow")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nsleep 1\nexec \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), Options{RunDir: dir, Relay: []string{script, os.Args[0], "relay"}, RelayUID: relayUID})
	if err != nil {
		t.Fatal(err)
	}
	id, _ := acquireOpen(t, s, Policy{Open: []Destination{x.dest(8080, TCP)}})
	release(t, s, id)
	if err := s.relay.process.Kill(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); s.relay.mu.TryLock(); time.Sleep(time.Millisecond) { // until another one is started
		s.relay.mu.Unlock()
		if time.Now().After(deadline) {
			t.Fatal("no other relay is started")
		}
	}
	within(t, time.Minute, "Close", func() {
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.Acquire(t.Context(), sandbox.NewID(edge), Policy{}); err == nil {
		t.Error("a slot of closed ones")
	}
}
