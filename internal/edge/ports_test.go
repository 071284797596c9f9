package edge

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"dsec/internal/grant"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// byteServer serves the edge's byte routes to an http client that carries a grant.
func byteServer(t *testing.T, w *world) (url string, client *http.Client) {
	srv := httptest.NewServer(w.e.ByteHandler())
	t.Cleanup(srv.Close)
	tr := &http.Transport{DisableCompression: true, ExpectContinueTimeout: time.Minute}
	t.Cleanup(tr.CloseIdleConnections)
	return srv.URL, &http.Client{Transport: granted{tr, w.grant("default", grant.RoleUser)}}
}

type granted struct {
	http.RoundTripper
	grant string
}

func (g granted) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set(grant.Header, g.grant)
	return g.RoundTripper.RoundTrip(r)
}

func portURL(base string, id sandbox.ID, l net.Addr, path string) string {
	return fmt.Sprintf("%s/v1/sandboxes/%s/ports/%d/http%s", base, id, l.(*net.TCPAddr).Port, path)
}

func TestPortHTTP(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	inner := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		for name := range r.Header {
			if strings.HasPrefix(name, "Dsec-") {
				t.Errorf("%s reached the server", name)
			}
		}
		rw.Header().Set("Dsec-Error", "forged")
		rw.Header().Set("Trailer", "X-End")
		rw.WriteHeader(http.StatusCreated)
		fmt.Fprintf(rw, "%s %s %s %s %s %s", r.Method, r.RequestURI, r.Host, r.Header.Get("X-Forwarded-Host"), body, r.Trailer.Get("X-Sum"))
		rw.Header().Set("X-End", "yes")
	}))
	defer inner.Close()
	base, client := byteServer(t, w)
	r, err := http.NewRequest("POST", portURL(base, id, inner.Listener.Addr(), "//a%2Fb/../c?x=%zz;"), struct{ io.Reader }{strings.NewReader("body")})
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(ports.Host, "localhost:1")
	r.Header.Set("X-Forwarded-Host", "api")
	r.Header.Set("Dsec-Other", "x")
	r.Trailer = http.Header{"X-Sum": {"42"}}
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if want := "POST //a%2Fb/../c?x=%zz; localhost:1 api body 42"; err != nil || string(body) != want || res.StatusCode != http.StatusCreated {
		t.Errorf("%d %q %v", res.StatusCode, body, err)
	}
	if res.Header.Get(ports.Error) != "" || res.Trailer.Get("X-End") != "yes" {
		t.Errorf("%v %v", res.Header, res.Trailer)
	}
}

func wantPortError(t *testing.T, res *http.Response, status int, reason string) {
	t.Helper()
	body, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if res.StatusCode != status || res.Header.Get(ports.Error) != reason || !bytes.Contains(body, []byte(reason)) {
		t.Errorf("%d %q %s; want %d %s", res.StatusCode, res.Header.Get(ports.Error), body, status, reason)
	}
}

func TestPortErrors(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr()
	l.Close()
	base, client := byteServer(t, w)
	get := func(url string, header ...string) *http.Response {
		t.Helper()
		r, err := http.NewRequest("GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		res, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	wantPortError(t, get(portURL(base, id, addr, "/")), 502, "port_refused")
	tcp := strings.TrimSuffix(portURL(base, id, addr, ""), "http") + "tcp"
	wantPortError(t, get(tcp), 426, "upgrade_required")
	wantPortError(t, get(tcp, "Connection", "Upgrade", "Upgrade", ports.UpgradeFrames), 502, "port_refused")
	wantPortError(t, get(portURL(base, sandbox.NewID(testEdge), addr, "/")), 404, "sandbox_not_found")
	fetch := base + "/v1/sandboxes/" + string(id) + "/http?url="
	for _, url := range []string{"", "ftp://x/", "http://", "http://u:p@h/", "http://h:99999/", "%01"} {
		wantPortError(t, get(fetch+url), 400, "invalid_url")
	}
	wantPortError(t, get(fetch+"http://"+addr.String()), 502, "port_refused")
	w.delete(id, true)
	wantPortError(t, get(portURL(base, id, addr, "/")), 400, "sandbox_ended")
}

// hostile is a server that answers each connection with what answer writes.
func hostile(t *testing.T, answer func(c net.Conn)) net.Addr {
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
			go func() {
				defer c.Close()
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					answer(c)
				}
			}()
		}
	}()
	return l.Addr()
}

func TestHostileServers(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	base, client := byteServer(t, w)
	flood := func(s string) func(net.Conn) {
		return func(c net.Conn) {
			for {
				if _, err := io.WriteString(c, s); err != nil {
					return
				}
			}
		}
	}
	heads := map[string]func(net.Conn){
		"garbage":      flood("\x00\xff garbage"),
		"endless line": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: "); flood("aaaaaaaaaaaaaaaa")(c) },
		"endless head": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\n"); flood("A: b\r\n")(c) },
		"1xx":          flood("HTTP/1.1 103 Early\r\nLink: x\r\nDsec-Error: y\r\n\r\n"),
		"two lengths": func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab")
		},
		"nothing": func(net.Conn) {},
	}
	for name, answer := range heads {
		res, err := client.Get(portURL(base, id, hostile(t, answer), "/"))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if res.Header.Get("Link") != "" {
			t.Errorf("%s: a header of an informational answer", name)
		}
		wantPortError(t, res, 502, "port_bad_response")
	}
	bodies := map[string]func(net.Conn){
		"chunk line": func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			flood("0")(c)
		},
		"trailers": func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
			flood("A: b\r\n")(c)
		},
		"short": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc") },
		"extensions": func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			flood("1;" + strings.Repeat("x", 4000) + "\r\na\r\n")(c)
		},
	}
	for name, answer := range bodies {
		res, err := client.Get(portURL(base, id, hostile(t, answer), "/"))
		if err != nil { // it broke before its head had gone out
			continue
		}
		if _, err := io.Copy(io.Discard, res.Body); err == nil {
			t.Errorf("%s: a whole body", name)
		}
		res.Body.Close()
	}
	res, err := client.Get(portURL(base, id, hostile(t, func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nX-A: b\rDsec-Error: c\r\nContent-Length: 0\r\n\r\n")
	}), "/"))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.Header.Get("Set-Cookie") != "" || (res.StatusCode == 200 && res.Header.Get(ports.Error) != "") {
		t.Errorf("%v", res.Header)
	}
}

func TestPortUpgradeHalfClose(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	addr := hostile(t, func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		b, _ := io.ReadAll(c) // its answer comes after our end
		c.Write(b)
	})
	base, client := byteServer(t, w)
	r, err := http.NewRequest("GET", portURL(base, id, addr, "/"), nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "echo")
	res, err := client.Do(r)
	if err != nil || res.StatusCode != 101 {
		t.Fatalf("%v %v", res, err)
	}
	s := res.Body.(ports.Stream)
	defer s.Close()
	io.WriteString(s, "hello")
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(s); err != nil || string(b) != "hello" {
		t.Errorf("%q %v", b, err)
	}
}

func TestContinueIsTheServersToGive(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	base, client := byteServer(t, w)
	inner := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			rw.WriteHeader(http.StatusRequestEntityTooLarge)
			return
		}
		b, _ := io.ReadAll(r.Body)
		rw.Write(b)
	}))
	defer inner.Close()
	for path, want := range map[string]int{"/refuse": 413, "/take": 200} {
		read := false
		r, err := http.NewRequest("POST", portURL(base, id, inner.Listener.Addr(), path), readFunc(func(p []byte) (int, error) {
			if read {
				return 0, io.EOF
			}
			read = true
			return copy(p, "x"), nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Expect", "100-continue")
		res, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want || read != (want == 200) {
			t.Errorf("%s: %d, body read: %v", path, res.StatusCode, read)
		}
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// What a client sends is seen before its request has ended, and answers before theirs.
func TestPortStreamsBothWays(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	base, client := byteServer(t, w)
	inner := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(rw)
		rc.EnableFullDuplex()
		in := bufio.NewReader(r.Body)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			io.WriteString(rw, "echo "+line)
			rc.Flush()
		}
	}))
	defer inner.Close()
	pr, pw := io.Pipe()
	r, err := http.NewRequest("POST", portURL(base, id, inner.Listener.Addr(), "/"), pr)
	if err != nil {
		t.Fatal(err)
	}
	go io.WriteString(pw, "0\n")
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	out := bufio.NewReader(res.Body)
	for i := range 5 {
		if line, err := out.ReadString('\n'); line != "echo "+strconv.Itoa(i)+"\n" {
			t.Fatalf("%q %v", line, err)
		}
		if i < 4 {
			io.WriteString(pw, strconv.Itoa(i+1)+"\n")
		}
	}
	pw.Close()
	if rest, err := io.ReadAll(out); err != nil || len(rest) > 0 {
		t.Errorf("%q %v", rest, err)
	}
}

// Connections are kept by instance: a later sandbox is never reached by one of an earlier.
func TestPortConnectionsEndWithTheirSandbox(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	conns := make(chan string, 16)
	inner := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { conns <- r.RemoteAddr }))
	closed := make(chan string, 16)
	inner.Config.ConnState = func(c net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			closed <- c.RemoteAddr().String()
		}
	}
	inner.Start()
	defer inner.Close()
	base, client := byteServer(t, w)
	ask := func(id sandbox.ID) string {
		t.Helper()
		res, err := client.Get(portURL(base, id, inner.Listener.Addr(), "/"))
		if err != nil || res.StatusCode != 200 {
			t.Fatalf("%v %v", res, err)
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		return <-conns
	}
	one, two := w.create(), w.create()
	first := ask(one)
	if again := ask(one); again != first {
		t.Errorf("a connection was not kept: %s %s", first, again)
	}
	if other := ask(two); other == first {
		t.Error("a connection of one sandbox served another")
	}
	w.delete(one, true)
	for c := range closed {
		if c == first {
			break
		}
	}
}

// An open connection alone is no activity.
func TestPortActivity(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	in, err := w.e.index.lookup(id, "default")
	if err != nil {
		t.Fatal(err)
	}
	addr := hostile(t, func(c net.Conn) { io.Copy(io.Discard, c) })
	c, err := w.e.dialInside(context.Background(), in, "", addr.(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if u := in.use(); u.busy {
		t.Error("a silent connection makes it busy")
	}
	before := in.use().last
	time.Sleep(time.Millisecond) // the clock goes on
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if !in.use().last.After(before) {
		t.Error("bytes were no activity")
	}
}

// What no server may answer is an error of the gateway, and no panic.
func TestPortImpossibleAnswers(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	base, client := byteServer(t, w)
	for _, status := range []string{"000", "099", "+12"} {
		addr := hostile(t, func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 "+status+" x\r\nContent-Length: 0\r\n\r\n")
		})
		res, err := client.Get(portURL(base, id, addr, "/"))
		if err != nil {
			t.Errorf("status %s: %v", status, err)
			continue
		}
		res.Body.Close()
		if res.StatusCode != http.StatusBadGateway || res.Header.Get(ports.Error) != "port_bad_response" {
			t.Errorf("status %s: %v", status, res)
		}
	}
}

// Nothing from inside has the platform's headers, after the body neither.
func TestPortForgedTrailers(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	id := w.create()
	base, client := byteServer(t, w)
	for _, announced := range []string{"X-End", "Dsec-Error, X-End"} {
		addr := hostile(t, func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: "+announced+"\r\n\r\n1\r\nx\r\n0\r\nDsec-Error: forged\r\nX-End: yes\r\n\r\n")
		})
		res, err := client.Get(portURL(base, id, addr, "/"))
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.ReadAll(res.Body)
		res.Body.Close()
		if _, forged := res.Trailer["Dsec-Error"]; err != nil || forged || res.Trailer.Get("X-End") != "yes" {
			t.Errorf("%v %v", res.Trailer, err)
		}
	}
}
