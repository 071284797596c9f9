package inflight

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// served is a server behind a Listener that answers "ok".
func served(t *testing.T, l net.Listener, most int) *Listener {
	t.Helper()
	bounded := Listen(l, most)
	server := &http.Server{ConnState: bounded.Note, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hijack" {
			c, _, _ := http.NewResponseController(w).Hijack()
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n\r\n")
			_ = c.Close()
			return
		}
		_, _ = io.WriteString(w, "ok")
	})}
	done := make(chan struct{})
	go func() { _ = server.Serve(bounded); close(done) }()
	t.Cleanup(func() { _ = server.Close(); <-done })
	return bounded
}

func loopback(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// ask sends a request over a connection and reads the answer.
func ask(t *testing.T, c net.Conn, request string) (*http.Response, string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	_, _ = io.WriteString(c, request) // who is refused may find it closed
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r, string(body)
}

const get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"

func dial(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func isRefusal(t *testing.T, r *http.Response, body, what string) {
	t.Helper()
	var e struct {
		Code, Message string
		Details       []struct {
			Type, Value string
			Debug       struct {
				Reason string
				Facts  map[string]string
			}
		}
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatalf("%v: %q", err, body)
	}
	if r.StatusCode != 429 || r.Header.Get("Retry-After") != RetryAfter || r.Header.Get("Dsec-Error") != Reason || e.Code != "resource_exhausted" ||
		len(e.Details) != 1 || e.Details[0].Debug.Reason != Reason || e.Details[0].Debug.Facts["what"] != what || e.Details[0].Value == "" {
		t.Errorf("%s %v %s", r.Status, r.Header, body)
	}
}

func TestOneConnectionTooManyIsToldSo(t *testing.T) {
	l := served(t, loopback(t), 2)
	first, second := dial(t, l), dial(t, l)
	for _, c := range []net.Conn{first, second} {
		if _, body := ask(t, c, get); body != "ok" {
			t.Fatalf("%q", body)
		}
	}
	for _, request := range []string{get, "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + strings.Repeat("x", 300_000)} {
		r, body := ask(t, dial(t, l), request)
		isRefusal(t, r, body, "connections")
	}
	if _, body := ask(t, first, get); body != "ok" {
		t.Errorf("who is there goes on: %q", body)
	}
	_ = second.Close()
	again(t, func() bool { r, _ := ask(t, dial(t, l), get); return r.StatusCode == 200 })
	if r, _ := ask(t, first, strings.Replace(get, "/ ", "/hijack ", 1)); r.StatusCode != 101 {
		t.Error(r.Status)
	}
	again(t, func() bool { return l.open.Load() <= 1 })
}

func again(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 30 s")
		}
	}
}

// A short listener has no descriptor for some time.
type short struct {
	*net.TCPListener
	none    atomic.Bool
	spared  func() bool // whether the one in reserve was given up
	accepts atomic.Int64
}

func (s *short) Accept() (net.Conn, error) {
	s.accepts.Add(1)
	if s.none.Load() && !s.spared() {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return s.TCPListener.Accept()
}

func TestWithoutDescriptorsItAnswersAndDoesNotSpin(t *testing.T) {
	s := &short{TCPListener: loopback(t).(*net.TCPListener)}
	var l *Listener
	s.spared = func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.spare == nil
	}
	l = Listen(s, 0)
	s.none.Store(true)
	accepted := make(chan net.Conn)
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	for range 3 {
		r, body := ask(t, dial(t, l), get)
		isRefusal(t, r, body, "descriptors")
	}
	before, began := s.accepts.Load(), time.Now()
	time.Sleep(4 * noDescriptors)
	// Two for each pause that can have fit, and as many again: far from a loop without any.
	if n := s.accepts.Load() - before; n > 4+4*int64(time.Since(began)/noDescriptors) {
		t.Errorf("%d accepts in %v", n, time.Since(began))
	}
	s.none.Store(false)
	dial(t, l)
	if c := <-accepted; c == nil {
		t.Error("it accepts no more")
	} else {
		_ = c.Close()
	}
	_ = l.Close()
	for range accepted {
	}
	if l.reserve(); l.spare != nil {
		t.Error("a descriptor is kept after the end")
	}
}
