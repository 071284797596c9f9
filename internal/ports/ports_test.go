package ports

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for path, want := range map[string]Route{
		"/v1/sandboxes/s1/ports/80/http":              {HTTP, "s1", 80, "/"},
		"/v1/sandboxes/s1/ports/80/http/":             {HTTP, "s1", 80, "/"},
		"/v1/sandboxes/s1/ports/65535/http/a%2Fb/../": {HTTP, "s1", 65535, "/a%2Fb/../"},
		"/v1/sandboxes/s1/ports/80/http//x//":         {HTTP, "s1", 80, "//x//"},
		"/v1/sandboxes/s1/ports/80/tcp":               {TCP, "s1", 80, ""},
		"/v1/sandboxes/s1/http":                       {Fetch, "s1", 0, ""},
		"/v1/sandboxes/s1/ports/80/httpx":             {},
		"/v1/sandboxes/s1/ports/080/http":             {},
		"/v1/sandboxes/s1/ports/0/http":               {},
		"/v1/sandboxes/s1/ports/65536/tcp":            {},
		"/v1/sandboxes/s1/ports/+80/tcp":              {},
		"/v1/sandboxes/s1/ports/80/tcp/":              {},
		"/v1/sandboxes//ports/80/tcp":                 {},
		"/v1/sandboxes/s1/files":                      {},
		"/v2/sandboxes/s1/ports/80/tcp":               {},
	} {
		if got, ok := Parse(path); got != want || ok != (want.Kind != 0) {
			t.Errorf("%s: %+v %v", path, got, ok)
		}
	}
}

func TestSetPathIsExact(t *testing.T) {
	for raw, want := range map[string]string{
		"/a%2Fb/c": "/a%2Fb/c", "//x": "//x", "/a/../b/./": "/a/../b/./", "/%7e~": "/%7e~", "/a\"%2F<": "/a%22%2F%3C", "/\xff": "/%FF", "/": "/",
	} {
		u := &url.URL{Scheme: "http", Host: "h", RawQuery: "q=%zz;1"}
		if err := SetPath(u, raw); err != nil || u.RequestURI() != want+"?q=%zz;1" {
			t.Errorf("%q: %q %v", raw, u.RequestURI(), err)
		}
	}
	if SetPath(new(url.URL), "/%") == nil {
		t.Error("half an escape was taken")
	}
}

func FuzzParse(f *testing.F) {
	f.Add("/v1/sandboxes/s1/ports/80/http/a%2Fb")
	f.Fuzz(func(t *testing.T, path string) {
		r, ok := Parse(path)
		if !ok || r.Kind != HTTP {
			return
		}
		if !strings.HasPrefix(r.Path, "/") || strings.Contains(r.Sandbox, "/") || r.Port < 1 || r.Port > 65535 {
			t.Fatalf("%+v", r)
		}
		u := &url.URL{Scheme: "http", Host: "h"}
		if SetPath(u, r.Path) != nil {
			return
		}
		again := u.EscapedPath()
		v := &url.URL{Scheme: "http", Host: "h"}
		if err := SetPath(v, again); err != nil || v.EscapedPath() != again {
			t.Fatalf("%q becomes %q, then %q (%v)", r.Path, again, v.EscapedPath(), err)
		}
		if strings.ContainsAny(u.RequestURI(), " \r\n") {
			t.Fatalf("%q", u.RequestURI())
		}
	})
}

func TestHeadersFromInside(t *testing.T) {
	h := http.Header{"Set-Cookie": {"a=1", "b=2"}, "Dsec-Error": {"forged"}, "Content-Type": {"text/html"}, "Access-Control-Allow-Origin": {"*"}, "Content-Security-Policy": {"x"}}
	FromInside(h)
	want := http.Header{
		"Dsec-Inner-Set-Cookie": {"a=1", "b=2"}, "Content-Type": {"text/html"}, "Dsec-Inner-Access-Control-Allow-Origin": {"*"},
		"Dsec-Inner-Content-Security-Policy": {"x"}, "Content-Security-Policy": {"sandbox"}, "X-Content-Type-Options": {"nosniff"},
	}
	if !reflect.DeepEqual(h, want) {
		t.Errorf("%v", h)
	}
	h = http.Header{"Set-Cookie": {"a=1; Path=/; Domain=example.com; Secure", " dsec_port=x", "c=2;domain=.com", "d=3"}}
	FromInsideToOwnOrigin(h, "dsec_port")
	if got := h["Set-Cookie"]; !reflect.DeepEqual(got, []string{"a=1; Path=/; Secure", "c=2", "d=3"}) {
		t.Errorf("%q", got)
	}
}

// pair is two ends of a TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	y, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close(); y.Close() })
	return x.(*net.TCPConn), y.(*net.TCPConn)
}

// chain joins client - (framed hop) - server, as apiserver and edge do.
func chain(t *testing.T) (client, server, hop *net.TCPConn) {
	client, c := pair(t)
	h1, h2 := pair(t)
	s, server := pair(t)
	done := make(chan error, 2)
	go func() { done <- Join(c, NewFrames(h1)) }()
	go func() { done <- Join(NewFrames(h2), s) }()
	t.Cleanup(func() { client.Close(); server.Close(); <-done; <-done })
	return client, server, h1
}

func TestHalfCloseBothWays(t *testing.T) {
	for _, clientFirst := range []bool{true, false} {
		client, server, _ := chain(t)
		a, b := client, server
		if !clientFirst {
			a, b = server, client
		}
		want := bytes.Repeat([]byte("0123456789"), 100_000)
		go func() { _, _ = a.Write(want); _ = a.CloseWrite() }()
		if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		go func() { _, _ = b.Write(want); _ = b.CloseWrite() }()
		if got, err := io.ReadAll(a); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("back: %d bytes, %v", len(got), err)
		}
	}
}

// A cut in the middle is no end: neither when a side resets, nor when the hop breaks.
func TestCutsAreTold(t *testing.T) {
	for name, cut := range map[string]func(client, server, hop *net.TCPConn){
		"server resets":   func(_, server, _ *net.TCPConn) { _ = server.SetLinger(0); server.Close() },
		"the hop is gone": func(_, _, hop *net.TCPConn) { hop.Close() },
	} {
		client, server, hop := chain(t)
		if _, err := server.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(client, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		_ = client.CloseWrite() // what is left to come could look complete
		cut(client, server, hop)
		if b, err := io.ReadAll(client); err == nil {
			t.Errorf("%s: a clean end after %q", name, b)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 'x', 0, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := io.ReadAll(NewFrames(closer{bytes.NewBuffer(bytes.Clone(b))}))
		if len(got) > len(b) {
			t.Fatal("more bytes than came")
		}
		if err != nil {
			return
		}
		// What ended in order is what was sent.
		var out bytes.Buffer
		w := NewFrames(closer{&out})
		if _, err := w.Write(got); err != nil || w.CloseWrite() != nil {
			t.Fatal(err)
		}
		if again, err := io.ReadAll(NewFrames(closer{&out})); err != nil || !bytes.Equal(again, got) {
			t.Fatalf("%q %v", again, err)
		}
	})
}

type closer struct{ *bytes.Buffer }

func (closer) Close() error { return nil }

func TestFramesCut(t *testing.T) {
	for _, b := range []string{"", "\x00", "\x00\x00\x00\x05abc", "\x00\x00\x00\x01a"} {
		if _, err := io.ReadAll(NewFrames(closer{bytes.NewBufferString(b)})); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q: %v", b, err)
		}
	}
}
