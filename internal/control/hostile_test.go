package control_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/control"
	"dsec/internal/control/apiserver"
	"dsec/internal/control/edgetest"
	"dsec/internal/control/iam"
	"dsec/sandbox"
)

const (
	createPath = "/dsec.v1.SandboxService/CreateSandbox"
	execPath   = "/dsec.v1.SandboxService/Exec"
)

func send(t *testing.T, c *http.Client, method, url, auth, contentType string, body io.Reader) (int, http.Header, []byte) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	ok(t, err)
	r.Header.Set("Authorization", auth)
	if auth == "" {
		r.Header.Del("Authorization")
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	res, err := c.Do(r)
	ok(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	ok(t, err)
	return res.StatusCode, res.Header, b
}

// concrete fills in a route's pattern with things that exist in form only.
func concrete(pattern string) (method, path string) {
	method, path, _ = strings.Cut(pattern, " ")
	return method, strings.NewReplacer("{id}", string(sandbox.NewID("eaaaa")), "{cmd}", "c", "{kind}", "base", "{name...}", "a:1", "{port}", "80", "{path...}", "x").Replace(path)
}

func TestEveryRouteNeedsAKey(t *testing.T) {
	p := start(t, nil)
	plain := &http.Client{}
	defer plain.CloseIdleConnections()
	wrong := "Bearer dsec_" + strings.Repeat("0", 64)
	revoked, row, err := p.control.IAM().CreateKey(t.Context(), iam.KeyRequest{Principal: "r", Project: "default", Role: iam.RoleAdmin})
	ok(t, err)
	ok(t, p.control.IAM().RevokeKey(t.Context(), row.ID))
	patterns := append(p.control.Routes(), "GET /", "POST /nothing", "POST /healthz", "GET /healthz/x", "GET /debug/pprof/")
	if len(patterns) < 20 {
		t.Fatalf("%d routes", len(patterns))
	}
	for _, pattern := range patterns {
		method, path := concrete(pattern)
		for _, auth := range []string{"", wrong, "Bearer x", "Basic YTpi", "Bearer " + revoked.Reveal()} {
			for _, contentType := range []string{"application/json", "application/proto", "application/octet-stream"} {
				code, h, body := send(t, plain, method, p.url+path, auth, contentType, strings.NewReader("{}"))
				if e := decodeError(t, body); code != http.StatusUnauthorized || e.Code != "unauthenticated" || h.Get("WWW-Authenticate") == "" {
					t.Errorf("%s %.20s: %d %s", pattern, auth, code, body)
				}
			}
		}
		// A Connect stream wants its error as the end of the stream.
		if strings.HasSuffix(path, "CreateSandboxes") {
			code, _, body := send(t, plain, method, p.url+path, wrong, "application/connect+json", strings.NewReader("\x00\x00\x00\x00\x02{}"))
			if code != 200 || len(body) < 5 || body[0] != 2 || !bytes.Contains(body, []byte("unauthenticated")) {
				t.Errorf("%d %q", code, body)
			}
		}
	}
	code, _, body := send(t, plain, "GET", p.url+"/healthz", "", "", nil)
	if code != 200 || string(body) != "ok\n" {
		t.Errorf("%d %q", code, body)
	}
	if log := p.log.String(); strings.Contains(log, revoked.Reveal()[5:]) || strings.Contains(log, strings.Repeat("0", 64)) {
		t.Error("a key is in the log")
	}
}

func TestAReaderChangesNothing(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	reader := p.as("default", iam.RoleReader)
	reads := 0
	for _, pattern := range p.control.Routes() {
		method, path := concrete(pattern)
		code, _, body := send(t, reader, method, p.url+path, "", "application/json", strings.NewReader("{}"))
		read := method == "GET" || pattern == "POST /v1/sandboxes/{id}/archive" || regexp.MustCompile(`/(Get|List|Stat|Watch)`).MatchString(path)
		if read {
			reads++
		}
		if denied := strings.Contains(string(body), "permission_denied"); denied == read || (denied && code != 403) {
			t.Errorf("%s: %d %s", pattern, code, body)
		}
	}
	if reads != 23 {
		t.Errorf("%d routes to read", reads)
	}
	if live := p.edges[0].Live(); len(live) != 1 || string(live[0]) != id {
		t.Errorf("%v", live)
	}
}

func TestMalformedRequests(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	deep := strings.Repeat(`{"a":`, 20000)
	undecodable := map[string]bool{
		"no JSON": true, "empty": true, "an array": true, "two values": true, "deep": true, "unknown field": true, "twice the same": true,
		"bad UTF-8": true, "bad UTF-8 in proto": true, "wrong type": true, "too large a number": true, "no proto": true,
	}
	for name, c := range map[string]struct {
		path, contentType, body string
		status                  int
	}{
		"no JSON":             {createPath, "application/json", `{"spec":`, 400},
		"empty":               {createPath, "application/json", ``, 400},
		"an array":            {createPath, "application/json", `[]`, 400},
		"two values":          {createPath, "application/json", `{}{}`, 400},
		"deep":                {createPath, "application/json", deep, 400},
		"unknown field":       {createPath, "application/json", `{"spec":{"image":"base","memory":"1"}}`, 400},
		"twice the same":      {createPath, "application/json", `{"spec":{"image":"base","image":"x"}}`, 400},
		"bad UTF-8":           {createPath, "application/json", "{\"spec\":{\"image\":\"\xff\"}}", 400},
		"bad UTF-8 in proto":  {createPath, "application/proto", "\x0a\x03\x12\x01\xff", 400},
		"wrong type":          {createPath, "application/json", `{"spec":{"image":1}}`, 400},
		"too large a number":  {createPath, "application/json", `{"spec":{"image":"base","limits":{"memoryBytes":"9223372036854775808"}}}`, 400},
		"NaN":                 {createPath, "application/json", `{"spec":{"image":"base","limits":{"cpuCores":"NaN"}}}`, 400},
		"negative":            {createPath, "application/json", `{"spec":{"image":"base","lifetimeSeconds":"-1"}}`, 400},
		"overflowing seconds": {createPath, "application/json", `{"spec":{"image":"base","lifetimeSeconds":"9223372036854775807"}}`, 400},
		"timeout 0 s":         {createPath, "application/json", `{"spec":{"image":"base"},"timeoutSeconds":"-5"}`, 400},
		"timeout too long":    {createPath, "application/json", `{"spec":{"image":"base"},"timeoutSeconds":"999999"}`, 400},
		"no spec":             {createPath, "application/json", `{}`, 400},
		"little memory":       {createPath, "application/json", `{"spec":{"image":"base","limits":{"memoryBytes":"1"}}}`, 400},
		"name as path":        {createPath, "application/json", `{"spec":{"image":"../../etc/passwd"}}`, 400},
		"forged digest":       {createPath, "application/json", `{"spec":{"image":"base@sha256:` + strings.Repeat("0", 64) + `"}}`, 404},
		"rule that is true":   {createPath, "application/json", `{"spec":{"image":"base","networkRules":{"pypi":true}}}`, 404},
		"long key":            {createPath, "application/json", `{"spec":{"image":"base"},"idempotencyKey":"` + strings.Repeat("k", 129) + `"}`, 400},
		"wrong content type":  {createPath, "text/plain", `{}`, 415},
		"form":                {createPath, "application/x-www-form-urlencoded", `a=b`, 415},
		"no proto":            {createPath, "application/proto", "\xff\xff\xff\xff", 400},
		"bad id":              {execPath, "application/json", `{"sandboxId":"../../etc"}`, 400},
		"bad checksum":        {execPath, "application/json", `{"sandboxId":"` + id[:len(id)-2] + `zz"}`, 400},
		"empty id":            {"/dsec.v1.SandboxService/GetSandbox", "application/json", `{}`, 400},
		"delete of nothing":   {"/dsec.v1.SandboxService/DeleteSandbox", "application/json", `{}`, 400},
		"delete of two":       {"/dsec.v1.SandboxService/DeleteSandbox", "application/json", `{"id":"` + id + `","idempotencyKey":"k"}`, 400},
		"bad page token":      {"/dsec.v1.SandboxService/ListSandboxes", "application/json", `{"pageToken":"%%%"}`, 400},
		"negative page":       {"/dsec.v1.SandboxService/ListSandboxes", "application/json", `{"pageSize":-1}`, 400},
		"bad command id":      {"/dsec.v1.SandboxService/GetCommand", "application/json", `{"sandboxId":"` + id + `","commandId":"a/b"}`, 400},
		"bad kind":            {"/dsec.v1.EnvironmentService/GetEnvironment", "application/json", `{"kind":"..","name":"a"}`, 400},
		"over 1 MiB":          {createPath, "application/json", `{"spec":{"image":"` + strings.Repeat("a", 1<<20) + `"}}`, 429},
	} {
		code, _, body := send(t, p.client, "POST", p.url+c.path, "", c.contentType, strings.NewReader(c.body))
		if code != c.status {
			t.Errorf("%s: %d instead of %d: %.300s", name, code, c.status, body)
		}
		e := decodeError(t, body)
		if e.Code == "" || e.Message == "" || e.reason() == "" || strings.Contains(e.Message, "panic") {
			t.Errorf("%s: %s", name, body)
		}
		want := map[int]string{415: "unsupported_content_type", 429: "request_too_large"}[c.status]
		if undecodable[name] {
			want = "malformed_request"
		}
		if want != "" && e.reason() != want {
			t.Errorf("%s: %s instead of %s", name, e.reason(), want)
		}
	}
	if n := len(p.edges[0].Live()); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

// The same of a stream, whose errors come as its end.
func TestMalformedRequestOfAStream(t *testing.T) {
	p := start(t, nil)
	const path = "/dsec.v1.SandboxService/CreateSandboxes"
	envelope := func(body string) string {
		return string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body)))) + body
	}
	for name, c := range map[string]struct{ body, code, reason string }{
		"no JSON":       {envelope(`{"spec":`), "invalid_argument", "malformed_request"},
		"unknown field": {envelope(`{"spec":{"image":"base","memory":"1"}}`), "invalid_argument", "malformed_request"},
		"no envelope":   {`{}`, "invalid_argument", "malformed_request"},
		"cut envelope":  {envelope(`{"count":1}`)[:8], "invalid_argument", "malformed_request"},
		"nothing":       {"", "unimplemented", "malformed_request"},
		"over 1 MiB":    {envelope(`{"idempotencyKey":"` + strings.Repeat("a", 1<<20) + `"}`), "resource_exhausted", "request_too_large"},
		"long envelope": {"\x00\xff\xff\xff\xff{}", "resource_exhausted", "request_too_large"},
		"one of ours":   {envelope(`{"count":-1}`), "invalid_argument", "invalid_count"},
	} {
		r := io.MultiReader(strings.NewReader(c.body)) // chunked: its size is not announced
		code, _, body := send(t, p.client, "POST", p.url+path, "", "application/connect+json", r)
		if code != 200 || len(body) < 5 || body[0] != 2 {
			t.Errorf("%s: %d %.300q", name, code, body)
			continue
		}
		var end struct{ Error json.RawMessage }
		ok(t, json.Unmarshal(body[5:], &end))
		if e := decodeError(t, end.Error); e.Code != c.code || e.reason() != c.reason {
			t.Errorf("%s: %s", name, body[5:])
		}
	}
	if code, _, body := send(t, p.client, "POST", p.url+path, "", "application/json", strings.NewReader("{}")); code != 415 || decodeError(t, body).reason() != "unsupported_content_type" {
		t.Errorf("%d %s", code, body)
	}
}

// What the log says of requests: those that failed for our reasons stand out, and nobody can fill it with those that failed
// for theirs.
func TestWhatIsLoggedOfFailures(t *testing.T) {
	p := start(t, nil)
	for name, c := range map[string]struct {
		auth, path, body, want string
	}{
		"no key":     {"Bearer x", createPath, "{}", "level=DEBUG msg=\"request failed\""},
		"no request": {"", createPath, "{", "level=DEBUG msg=\"request failed\""},
		"no such id": {"", "/dsec.v1.SandboxService/GetSandbox", `{"id":"x"}`, "level=DEBUG msg=\"request failed\""},
	} {
		before := len(p.log.String())
		send(t, p.client, "POST", p.url+c.path, c.auth, "application/json", strings.NewReader(c.body))
		edgetest.Eventually(t, name+" is logged", func() bool { return strings.Contains(p.log.String()[before:], c.want) })
	}
	p.edges[0].Vanish()
	send(t, p.client, "POST", p.url+"/dsec.v1.SandboxService/ListSandboxes", "", "application/json", strings.NewReader("{}"))
	edgetest.Eventually(t, "an edge that is away is a warning", func() bool {
		return strings.Contains(p.log.String(), "level=WARN msg=\"request failed\"")
	})
	p.edges[0].Appear(t)
}

func TestSizeOfBodies(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	script := strings.Repeat("x", sandbox.MaxScript)
	res, err := p.sandboxes().Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: script}, WaitSeconds: -1}))
	ok(t, err)
	if n := res.Msg.GetResult().GetStdout().GetSize(); n != sandbox.MaxScript {
		t.Errorf("the edge got a script of %d bytes", n)
	}
	if code, body := p.post(execPath, `{"sandboxId":"`+id+`","command":{"shell":"`+script+`"}}`); code != 200 {
		t.Errorf("%d %.200s", code, body)
	}
	for name, c := range map[string]io.Reader{
		"announced": strings.NewReader(strings.Repeat("x", 20<<20+1)),
		"chunked":   io.MultiReader(strings.NewReader(strings.Repeat("x", 20<<20+1))),
	} {
		if status, body := answerWhileSending(t, p, execPath, c); status != http.StatusTooManyRequests || decodeError(t, body).reason() != "request_too_large" {
			t.Errorf("%s: %d %.200s", name, status, body)
		}
	}
	// Small on the wire, large in memory.
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	z.Write(bytes.Repeat([]byte(" "), 8<<20)) // eight times what may come
	z.Close()
	r, err := http.NewRequestWithContext(t.Context(), "POST", p.url+createPath, &bomb)
	ok(t, err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Content-Encoding", "gzip")
	bres, err := p.client.Do(r)
	ok(t, err)
	defer bres.Body.Close()
	if b, _ := io.ReadAll(bres.Body); bres.StatusCode != http.StatusTooManyRequests || decodeError(t, b).reason() != "request_too_large" {
		t.Errorf("%s %.200s", bres.Status, b)
	}
}

// answerWhileSending reads the answer while the body is on its way: a server that refuses it need not read it to its end, and
// http.Client can then lose the answer.
func answerWhileSending(t *testing.T, p *platform, path string, body io.Reader) (int, []byte) {
	t.Helper()
	c := dial(t, p)
	head := "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer " + p.key + "\r\n"
	sized, announced := body.(*strings.Reader)
	go func() { // errors: the server may have enough of it
		if announced {
			io.WriteString(c, head+"Content-Length: "+itoa(sized.Len())+"\r\n\r\n")
			io.Copy(c, body)
			return
		}
		io.WriteString(c, head+"Transfer-Encoding: chunked\r\n\r\n")
		w := httputil.NewChunkedWriter(c)
		io.Copy(w, body)
		w.Close()
		io.WriteString(c, "\r\n")
	}()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	ok(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	ok(t, err)
	return res.StatusCode, b
}

func dial(t *testing.T, p *platform) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
	ok(t, err)
	t.Cleanup(func() { c.Close() })
	ok(t, c.SetDeadline(time.Now().Add(time.Minute))) // a server that holds the connection is a failure, not a hang
	return c
}

// A body that does not go on ends the request.
func TestSlowBody(t *testing.T) {
	p := start(t, func(o *control.Options) { o.BodyIdle = 50 * time.Millisecond })
	c := dial(t, p)
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", createPath, p.key)
	b, err := io.ReadAll(c) // until the server closes
	ok(t, err)
	if !bytes.Contains(b, []byte("HTTP/1.1 504 Gateway Timeout\r\n")) || !bytes.Contains(b, []byte(`"reason":"request_too_slow"`)) {
		t.Errorf("%s", b)
	}
	// A slow upload of an archive too, and it leaves nothing.
	before := p.blobCount()
	c = dial(t, p)
	fmt.Fprintf(c, "POST /v1/environments/base/slow:1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 1000000\r\n\r\n%s", p.key, archive(map[string]string{"a": "b"})[:512])
	b, err = io.ReadAll(c)
	ok(t, err)
	if bytes.Contains(b, []byte(" 200 ")) {
		t.Errorf("%s", b)
	}
	if n := p.blobCount(); n != before {
		t.Errorf("%d blobs more", n-before)
	}
}

func TestALongCommandIsNoSlowBody(t *testing.T) {
	p := start(t, func(o *control.Options) { o.BodyIdle = time.Second }) // in which a slow machine sends a body, too
	p.publish("base", "base:latest", "")
	arrived, release := hold(p)
	go func() {
		<-arrived
		time.Sleep(2 * time.Second) // twice the idle time of bodies
		close(release)
	}()
	if _, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, ""); err != nil {
		t.Fatal(err)
	}
}

func TestHeadsAreBounded(t *testing.T) {
	p := start(t, nil)
	if p.server.ReadHeaderTimeout <= 0 || p.server.ReadHeaderTimeout > 30*time.Second || p.server.IdleTimeout <= 0 || p.server.WriteTimeout != 0 || p.server.ReadTimeout != 0 {
		t.Errorf("timeouts: %+v", p.server)
	}
	hasty := apiserver.NewHTTPServer(p.control.Handler(), p.slog)
	hasty.ReadHeaderTimeout = 50 * time.Millisecond
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	go hasty.Serve(l)
	defer hasty.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	ok(t, err)
	defer c.Close()
	io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
	if _, err := io.ReadAll(c); err != nil && !errors.Is(err, syscall.ECONNRESET) { // until the server closes, perhaps before it has read that
		t.Fatal(err)
	}
	code, _, _ := send(t, p.client, "GET", p.url+"/healthz", strings.Repeat("x", 80<<10), "", nil)
	if code != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%d", code)
	}
}

func TestPanicsAreContained(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	// A client that leaves in the middle of a download ends the copy; others go on.
	p.edges[0].Put(sandbox.ID(id), "/big", make([]byte, 64<<20))
	c := dial(t, p)
	fmt.Fprintf(c, "GET /v1/sandboxes/%s/files?path=/big HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", id, p.key)
	io.ReadFull(c, make([]byte, 1000))
	c.Close()
	if code, body := p.do("GET", "/v1/sandboxes/"+id+"/files?path=/big", nil, nil); code != 200 || len(body) != 64<<20 {
		t.Errorf("%d, %d bytes", code, len(body))
	}
}

// Who has no key may not hold a connection by a body that never comes either.
func TestSlowBodyWithoutAKey(t *testing.T) {
	p := start(t, func(o *control.Options) { o.BodyIdle = 50 * time.Millisecond })
	c := dial(t, p)
	io.WriteString(c, "POST "+createPath+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
	b, err := io.ReadAll(c) // until the server closes
	if err != nil || !bytes.Contains(b, []byte("401 Unauthorized")) {
		t.Errorf("%v %s", err, b)
	}
}

// Health needs no key, so whoever asks for it may not hold a connection either.
func TestSlowBodyOfAHealthCheck(t *testing.T) {
	p := start(t, func(o *control.Options) { o.BodyIdle = 50 * time.Millisecond })
	c := dial(t, p)
	io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
	b, err := io.ReadAll(c) // until the server closes
	if err != nil || !bytes.Contains(b, []byte("200 OK")) {
		t.Errorf("%v %s", err, b)
	}
	// Without a body the connection can be used again, however long after.
	c = dial(t, p)
	br := bufio.NewReader(c)
	for range 2 {
		io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		res, err := http.ReadResponse(br, nil)
		ok(t, err)
		io.Copy(io.Discard, res.Body)
		time.Sleep(100 * time.Millisecond) // twice the idle time of bodies
	}
}
