package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"dsec/sandbox"
)

func listen(t *testing.T, serve func(*net.TCPConn)) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); serve(c.(*net.TCPConn)) }()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func TestDialHalfClose(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	port := listen(t, func(c *net.TCPConn) { // answers only once it has everything
		b, _ := io.ReadAll(c)
		_, _ = c.Write(b)
	})
	s, err := c.Dial(testContext(t), "", port, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	if _, err := s.Write(want); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
	}
}

func TestDialRefused(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	_, err = c.Dial(testContext(t), "", port, time.Minute)
	if e := sandbox.AsError(err); e.Reason != "port_refused" {
		t.Errorf("%v", err)
	}
}

func TestDialOutlivesItsContext(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	gone := make(chan error, 1)
	port := listen(t, func(c *net.TCPConn) {
		_, _ = c.Write([]byte("x"))
		_, err := io.Copy(io.Discard, c)
		gone <- err
	})
	ctx, cancel := context.WithCancel(testContext(t))
	s, err := c.Dial(ctx, "", port, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if n, err := s.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Fatalf("%d %v", n, err)
	}
	read := make(chan error, 1)
	go func() { _, err := s.Read(make([]byte, 1)); read <- err }()
	s.Close()
	if err := <-read; err == nil || errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	if err := <-gone; err != nil { // aether has closed its side, in order
		t.Error(err)
	}
	if _, err := c.Dial(ctx, "", port, time.Minute); sandbox.ClassOf(err) != sandbox.Canceled {
		t.Errorf("%v", err)
	}
	if n := c.dials.Load(); n != 0 {
		t.Errorf("%d connections counted", n)
	}
}

// The port's end is told while our direction goes on.
func TestDialHalfCloseFromInside(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	got := make(chan string, 1)
	port := listen(t, func(c *net.TCPConn) {
		_, _ = c.Write([]byte("first"))
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	s, err := c.Dial(testContext(t), "localhost", port, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if b, err := io.ReadAll(s); err != nil || string(b) != "first" {
		t.Fatalf("%q %v", b, err)
	}
	if _, err := s.Write([]byte("second")); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if s := <-got; s != "second" {
		t.Errorf("%q", s)
	}
}

func TestDialTellsOfResets(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	seen := make(chan error, 1)
	port := listen(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		_, _ = c.Read(b)
		if b[0] == 'r' {
			_ = c.SetLinger(0)
			return
		}
		_, _ = c.Write([]byte("k"))
		_, err := io.Copy(io.Discard, c)
		seen <- err
	})
	dial := func(first string) *Conn {
		s, err := c.Dial(testContext(t), "127.0.0.1", port, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte(first)); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := dial("r")
	if _, err := io.ReadAll(s); sandbox.ReasonOf(err) != "connection_reset" {
		t.Errorf("%v", err)
	}
	s.Close()
	open := func() *Conn {
		s := dial("x")
		if _, err := s.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s = open()
	s.Reset()
	s.Close()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v", err)
	}
	s = open()
	defer s.Close()
	w.cut() // the edge is gone
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v", err)
	}
}

// What was sent arrives, though Close comes at once: a cancellation would overtake it.
func TestDialCloseAfterTheEndLosesNothing(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	got := make(chan int, 1)
	begin := make(chan struct{})
	port := listen(t, func(c *net.TCPConn) {
		_ = c.CloseWrite()
		<-begin
		n, _ := io.Copy(io.Discard, c)
		got <- int(n)
	})
	for range 20 {
		s, err := c.Dial(testContext(t), "", port, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(s); err != nil || len(b) > 0 {
			t.Fatalf("%q %v", b, err)
		}
		if _, err := s.Write(make([]byte, 100_000)); err != nil {
			t.Fatal(err)
		}
		if err := s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		s.Close()
		begin <- struct{}{}
		if n := <-got; n != 100_000 {
			t.Fatalf("%d bytes arrived", n)
		}
	}
}

func TestDialUnknownHost(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	if _, err := c.Dial(testContext(t), "no-such-host.example", 80, time.Minute); sandbox.ReasonOf(err) != "host_not_found" {
		t.Errorf("%v", err)
	}
}

func TestDialsAreBounded(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	hold := make(chan struct{})
	t.Cleanup(func() { close(hold) })
	port := listen(t, func(*net.TCPConn) { <-hold })
	var open []*Conn
	defer func() {
		for _, s := range open {
			s.Close()
		}
	}()
	var err error
	for len(open) < 2000 && err == nil {
		var s *Conn
		if s, err = c.Dial(testContext(t), "", port, time.Minute); err == nil {
			open = append(open, s)
		}
	}
	if sandbox.ReasonOf(err) != "too_many_connections" || len(open) != 1024 {
		t.Errorf("%d open, then %v", len(open), err)
	}
	if _, _, err := c.ReadFile(testContext(t), FileRead{Path: "/etc/hostname"}); err != nil { // they take no place of other requests
		t.Error(err)
	}
}

func TestByteStreamIsLostWithTheConnection(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	port := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	s, err := c.Dial(testContext(t), "", port, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l, err := c.current(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	_ = l.conn.Close()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, errBroken) {
		t.Errorf("%v", err)
	}
}
