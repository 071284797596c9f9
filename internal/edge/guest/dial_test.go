package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
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

func TestByteStreamEndsWithItsContext(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	gone := make(chan struct{})
	port := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c); close(gone) })
	ctx, cancel := context.WithCancel(testContext(t))
	s, err := c.Dial(ctx, "", port, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() { _, err := s.Read(make([]byte, 1)); read <- err }()
	cancel()
	if err := <-read; sandbox.ClassOf(err) != sandbox.Canceled {
		t.Errorf("%v", err)
	}
	s.Close()
	<-gone // aether has closed its side
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
