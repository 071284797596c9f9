package edge

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grant"
	"dsec/sandbox"
)

// byteWorld is a world with its byte server on a real socket, and one sandbox.
type byteWorld struct {
	*world
	srv *httptest.Server
	id  sandbox.ID
}

func newByteWorld(t *testing.T, change ...func(*Options)) *byteWorld {
	w := &byteWorld{world: newWorld(t, change...)}
	w.srv = httptest.NewServer(w.e.ByteHandler())
	w.id = w.create()
	t.Cleanup(func() {
		w.srv.Close()
		w.close()
	})
	return w
}

func (w *byteWorld) request(method, path, body string, header ...string) *http.Request {
	w.Helper()
	req, err := http.NewRequest(method, w.srv.URL+"/v1/sandboxes/"+string(w.id)+path, strings.NewReader(body))
	if err != nil {
		w.Fatal(err)
	}
	req.Header.Set(grant.Header, w.grant("default", grant.RoleUser))
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

func (w *byteWorld) do(req *http.Request) (*http.Response, string) {
	w.Helper()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.Fatal(err)
	}
	return resp, string(b)
}

func (w *byteWorld) run(id, shell string, wait float64) {
	w.Helper()
	_, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(w.id), CommandId: id, Command: &dsecv1.Command{Shell: shell, StdinFollows: shell == "cat"}, WaitSeconds: wait})
	if err != nil {
		w.Fatal(err)
	}
}

func TestFileRoutes(t *testing.T) {
	w := newByteWorld(t)
	content := "0123456789"
	resp, body := w.do(w.request("PUT", "/files?path=/tmp/f&mode=0640&parents=1", content))
	var done struct {
		Size   int64
		SHA256 string
	}
	if err := json.Unmarshal([]byte(body), &done); err != nil || resp.StatusCode != 200 || done.Size != 10 || len(done.SHA256) != 64 {
		t.Fatalf("PUT: %s %s", resp.Status, body)
	}
	for _, c := range []struct {
		query, rng, want, contentRange string
		status                         int
	}{
		{"", "", content, "", 200},
		{"&offset=3", "", "3456789", "", 200},
		{"&offset=3&length=2", "", "34", "", 200},
		{"&length=0", "", "", "", 200},
		{"&offset=99", "", "", "", 200},
		{"", "bytes=2-4", "234", "bytes 2-4/10", 206},
		{"", "bytes=7-", "789", "bytes 7-9/10", 206},
		{"", "bytes=7-99", "789", "bytes 7-9/10", 206},
		{"", "bytes=-3", "789", "bytes 7-9/10", 206},
		{"", "bytes=-99", content, "bytes 0-9/10", 206},
		{"", "bytes=5-2", content, "", 200}, // what cannot be understood is as if it were not there
		{"", "bytes=0-1,4-5", content, "", 200},
		{"", "lines=1", content, "", 200},
	} {
		resp, body := w.do(w.request("GET", "/files?path=/tmp/f"+c.query, "", "Range", c.rng))
		if resp.StatusCode != c.status || body != c.want || resp.Header.Get("Content-Range") != c.contentRange || resp.ContentLength != int64(len(c.want)) {
			t.Errorf("%q %q: %s %q %q", c.query, c.rng, resp.Status, body, resp.Header.Get("Content-Range"))
		}
		if h := resp.Header; h.Get("Dsec-Mode") != "0640" || h.Get("Dsec-Uid") != "7" || h.Get("Dsec-Gid") != "8" || h.Get("Dsec-Mtime") != "2027-01-15T08:00:00.000000005Z" {
			t.Errorf("headers: %v", h)
		}
	}
	if resp, body := w.do(w.request("GET", "/files?path=/tmp/f", "", "Range", "bytes=50-60")); resp.StatusCode != 416 || resp.Header.Get("Content-Range") != "bytes */10" || !strings.Contains(body, "range_not_satisfiable") {
		t.Errorf("beyond the end: %s %v %s", resp.Status, resp.Header, body)
	}
	if resp, body := w.do(w.request("HEAD", "/files?path=/tmp/f", "")); resp.StatusCode != 200 || resp.ContentLength != 10 || body != "" {
		t.Errorf("HEAD: %s %d %q", resp.Status, resp.ContentLength, body)
	}
}

// A file that shrinks while it is read must not look whole.
func TestShortFileCutsTheConnection(t *testing.T) {
	w := newByteWorld(t)
	w.do(w.request("PUT", "/files?path=/tmp/short", strings.Repeat("x", 1<<20)))
	resp, err := http.DefaultClient.Do(w.request("GET", "/files?path=/tmp/short", ""))
	if err != nil {
		return // cut before the headers were flushed
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%d bytes of %d, and no error", len(b), resp.ContentLength)
	}
}

func TestOutputRoutes(t *testing.T) {
	w := newByteWorld(t)
	w.run("c1", "echo hello", -1)
	if resp, body := w.do(w.request("GET", "/commands/c1/stdout", "")); body != "hello\n" || resp.StatusCode != 200 {
		t.Errorf("%s %q", resp.Status, body)
	}
	if _, body := w.do(w.request("GET", "/commands/c1/stdout?offset=2&follow=1", "")); body != "llo\n" {
		t.Errorf("from offset 2: %q", body)
	}
	if _, body := w.do(w.request("GET", "/commands/c1/stderr", "")); body != "" {
		t.Errorf("stderr: %q", body)
	}
	if resp, body := w.do(w.request("GET", "/commands/c1/stdout?offset=666", "")); resp.StatusCode != 404 || !strings.Contains(body, "output_dropped") || !strings.Contains(body, `"next_offset":`) {
		t.Errorf("dropped: %s %s", resp.Status, body)
	}
	// input and output of one command, live
	w.run("c2", "cat", 0)
	resp, err := http.DefaultClient.Do(w.request("GET", "/commands/c2/stdout?follow=1", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	out := bufio.NewReader(resp.Body)
	for i, line := range []string{"one\n", "two\n"} {
		end := ""
		if i == 1 {
			end = "&close=1"
		}
		if r, body := w.do(w.request("PUT", "/commands/c2/stdin?offset="+[]string{"0", "4"}[i]+end, line)); r.StatusCode != 200 || !strings.Contains(body, `"offset":`+[]string{"4", "8"}[i]) {
			t.Errorf("stdin: %s %s", r.Status, body)
		}
		if got, err := out.ReadString('\n'); err != nil || got != line {
			t.Errorf("got %q: %v", got, err)
		}
	}
	if rest, err := io.ReadAll(out); err != nil || len(rest) != 0 {
		t.Errorf("after the end: %q %v", rest, err)
	}
}

// A follower that goes away is noticed, and what it held is released.
func TestVanishedFollower(t *testing.T) {
	w := newByteWorld(t)
	w.run("c1", "wait", 0)
	in := w.e.index.byID[w.id]
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := http.DefaultClient.Do(w.request("GET", "/commands/c1/stdout?follow=1", "").WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	if n := in.requests.Load(); n != 1 {
		t.Errorf("%d requests", n)
	}
	cancel()
	resp.Body.Close()
	eventually(t, "the request ends", func() bool { return in.requests.Load() == 0 })
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func TestUploadThatBreaksOff(t *testing.T) {
	w := newByteWorld(t)
	conn, err := net.Dial("tcp", w.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	head := "PUT /v1/sandboxes/" + string(w.id) + "/files?path=/tmp/half HTTP/1.1\r\nHost: x\r\n" + grant.Header + ": " +
		w.grant("default", grant.RoleUser) + "\r\nContent-Length: 1000\r\n\r\nonly this"
	if _, err := io.WriteString(conn, head); err != nil {
		t.Fatal(err)
	}
	in := w.e.index.byID[w.id]
	eventually(t, "the request is served", func() bool { return in.requests.Load() == 1 })
	conn.Close()
	eventually(t, "the request ends", func() bool { return in.requests.Load() == 0 })
	if resp, body := w.do(w.request("GET", "/files?path=/tmp/half", "")); resp.StatusCode != 404 {
		t.Errorf("half a file is there: %s %q", resp.Status, body)
	}
}

func TestBadByteRequests(t *testing.T) {
	w := newByteWorld(t)
	w.run("c1", "echo x", -1)
	long := strings.Repeat("x", 5000)
	for _, c := range []struct {
		method, path, reason string
		status               int
		header               []string
	}{
		{"GET", "/files", "invalid_path", 400, nil},
		{"GET", "/files?path=" + long, "invalid_path", 400, nil},
		{"GET", "/files?path=/a%00b", "invalid_path", 400, nil},
		{"GET", "/files?path=/nothing", "file_not_found", 404, nil},
		{"GET", "/files?path=/a&offset=-1", "invalid_query", 400, nil},
		{"GET", "/files?path=/a&offset=99999999999999999999", "invalid_query", 400, nil},
		{"PUT", "/files?path=/a&mode=999", "invalid_query", 400, nil},
		{"PUT", "/files?path=/a&mode=77777", "invalid_query", 400, nil},
		{"PUT", "/files?path=/a&parents=maybe", "invalid_query", 400, nil},
		{"PUT", "/files?path=/a", "invalid_query", 400, []string{"Dsec-Sha256", "abcd"}},
		{"GET", "/commands/nope/stdout", "command_not_found", 404, nil},
		{"GET", "/commands/c1/stdfoo", "route_not_found", 404, nil},
		{"GET", "/commands/c1/stdout?follow=perhaps", "invalid_query", 400, nil},
		{"PUT", "/commands/c1/stdin?offset=x", "invalid_query", 400, nil},
		{"POST", "/files?path=/a", "route_not_found", 404, nil},
		{"GET", "/files?path=/a", "grant_missing", 401, []string{grant.Header, ""}},
		{"GET", "/files?path=/a", "grant_invalid", 401, []string{grant.Header, "AAAA"}},
		{"GET", "/files?path=/a", "role_denied", 403, []string{grant.Header, w.grant("", grant.RoleWatcher)}},
		{"GET", "/files?path=/a", "sandbox_not_found", 404, []string{grant.Header, w.grant("other", grant.RoleUser)}},
	} {
		resp, body := w.do(w.request(c.method, c.path, "", c.header...))
		var e struct {
			Code, Message string
			Details       []struct {
				Type  string
				Debug struct{ Reason string }
			}
		}
		if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != c.status || len(e.Details) != 1 ||
			e.Details[0].Type != "dsec.v1.ErrorInfo" || e.Details[0].Debug.Reason != c.reason || e.Code == "" || e.Message == "" {
			t.Errorf("%s %s: %s %s", c.method, c.path[:min(len(c.path), 60)], resp.Status, body)
		}
	}
	w.delete(w.id, true)
	if resp, body := w.do(w.request("GET", "/files?path=/a", "")); resp.StatusCode != 400 || !strings.Contains(body, "sandbox_ended") {
		t.Errorf("files of a sandbox that ended: %s %s", resp.Status, body)
	}
	if _, body := w.do(w.request("GET", "/commands/c1/stdout", "")); body != "x\n" {
		t.Errorf("kept output of a sandbox that ended: %q", body)
	}
}

func FuzzParseRange(f *testing.F) {
	for _, s := range []string{"bytes=0-1", "bytes=-5", "bytes=5-", "bytes=5-2", "bytes=--", "bytes=18446744073709551615-", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, v string) {
		sp, ok := parseRange(v)
		if ok && (sp.offset < 0 || sp.last < 0 || !sp.ranged || (sp.length < 0 && sp.length != -1) || sp.length == 0) {
			t.Fatalf("%q: %+v", v, sp)
		}
	})
}

// TestOutputQueries: what says that more may come, and where an answer begins.
func TestOutputQueries(t *testing.T) {
	w := newByteWorld(t)
	w.run("c1", "echo hello", -1)
	w.run("c2", "cat", 0)
	for _, c := range []struct {
		path, body, offset, final, trailer string
		status                             int
	}{
		{path: "/commands/c1/stdout?tail=2", body: "o\n", offset: "4", final: "1", status: 200},
		{path: "/commands/c1/stdout?tail=2&follow=1&wait=1", body: "o\n", offset: "4", final: "1", status: 200},
		{path: "/commands/c1/stderr", offset: "0", final: "1", status: 200},
		{path: "/commands/c2/stdout", offset: "0", status: 200},
		{path: "/commands/c2/stdout?follow=1&wait=0.001", offset: "0", status: 200},
		{path: "/commands/c2/stdout?wait=1", status: 400},
		{path: "/commands/c2/stdout?follow=1&wait=0", status: 400},
		{path: "/commands/c2/stdout?follow=1&wait=-1", status: 400},
		{path: "/commands/c2/stdout?follow=1&wait=NaN", status: 400},
		{path: "/commands/c2/stdout?tail=x", status: 400},
		{path: "/commands/c2/stdout?tail_lines=-1", status: 400},
		{path: "/commands/c2/stdout?since=yesterday", status: 400},
		{path: "/commands/c2/stdout?offset=99999999999999999999", status: 400},
	} {
		resp, body := w.do(w.request("GET", c.path, ""))
		if resp.StatusCode != c.status || resp.Header.Get("Dsec-Offset") != c.offset || resp.Header.Get("Dsec-Final") != c.final || resp.Trailer.Get("Dsec-Final") != c.trailer {
			t.Errorf("%s: %s %v, trailer %v", c.path, resp.Status, resp.Header, resp.Trailer)
		}
		if c.status == 200 && body != c.body {
			t.Errorf("%s: %q", c.path, body)
		}
	}
	resp, err := http.DefaultClient.Do(w.request("GET", "/commands/c2/stdout?follow=1&wait=3600", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	w.do(w.request("PUT", "/commands/c2/stdin?offset=0&close=1", "ping"))
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "ping" || resp.Header.Get("Dsec-Final") != "" || resp.Trailer.Get("Dsec-Final") != "1" {
		t.Errorf("%q, %v, trailer %v", b, err, resp.Trailer)
	}
}
