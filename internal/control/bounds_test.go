package control_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/control"
	"dsec/internal/control/edgetest"
	"dsec/internal/control/iam"
	"dsec/internal/control/store"
	"dsec/internal/inflight"
	"dsec/sandbox"
)

// tooMany checks a refusal, as each protocol has it.
func tooMany(t *testing.T, code int, h http.Header, body []byte) {
	t.Helper()
	if len(body) > 5 && body[0] == 2 { // the end of a Connect stream
		var end struct{ Error json.RawMessage }
		ok(t, json.Unmarshal(body[5:], &end))
		body, code = end.Error, 429
	}
	e := decodeError(t, body)
	if code != 429 || e.Code != "resource_exhausted" || e.reason() != inflight.Reason || h.Get("Retry-After") != "1" || !strings.Contains(e.Message, "try again") {
		t.Errorf("%d %v %s", code, h, body)
	}
}

const watchBody = "\x00\x00\x00\x00\x02{}"

// A project that has all of its streams under way gets no more, whatever kind they are of; others go on, and so do its calls.
func TestStreamsOfAProjectAreBounded(t *testing.T) {
	const most = 6
	p := start(t, func(o *control.Options) { o.Requests = inflight.Limits{Streams: most} })
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	going := make(chan struct{}, 2*most)
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Bytes = func(w http.ResponseWriter, r *http.Request) {
			going <- struct{}{}
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	open := func(c *http.Client, path string) {
		r, err := http.NewRequestWithContext(ctx, "GET", p.url+"/v1/sandboxes/"+id+path, nil)
		ok(t, err)
		res, err := c.Do(r)
		ok(t, err)
		if res.StatusCode != 200 {
			b, _ := io.ReadAll(res.Body)
			t.Fatalf("%s: %s %s", path, res.Status, b)
		}
		<-going
	}
	for _, path := range []string{"/files?path=/a", "/archive?path=/a", "/commands/c/stdout?follow=1", "/ports/80/http/", "/http?url=http://a/"} {
		open(p.client, path)
	}
	p.watch(ctx, &dsecv1.WatchSandboxesRequest{}).until(synced)

	for _, c := range []struct{ method, path, contentType, body string }{
		{"GET", "/v1/sandboxes/" + id + "/files?path=/a", "", ""},
		{"PUT", "/v1/sandboxes/" + id + "/files?path=/a", "", strings.Repeat("x", 1<<20)},
		{"PUT", "/v1/sandboxes/" + id + "/commands/c/stdin", "", "x"},
		{"GET", "/v1/sandboxes/" + id + "/ports/80/http/", "", ""},
		{"GET", "/v1/sandboxes/" + id + "/ports/80/tcp", "", ""},
		{"POST", "/v1/environments/base/a:1", "application/x-tar", "x"},
		{"POST", "/dsec.v1.SandboxService/WatchSandboxes", "application/connect+json", watchBody},
		{"POST", "/dsec.v1.SandboxService/WatchFiles", "application/connect+json", watchBody},
		{"POST", "/dsec.v1.SandboxService/ListFiles", "application/connect+json", watchBody},
	} {
		code, h, body := send(t, p.client, c.method, p.url+c.path, "", c.contentType, strings.NewReader(c.body))
		tooMany(t, code, h, body)
	}
	_, err := p.sandboxes().GetSandbox(t.Context(), connect.NewRequest(&dsecv1.GetSandboxRequest{Id: id}))
	ok(t, err)
	ok(t, p.store.AddProject(t.Context(), store.Project{Path: "second", CreatedAt: time.Now()}))
	other := p.as("second", iam.RoleUser)
	for range most {
		open(other, "/files?path=/a")
	}
	leave()
	p.edges[0].Set(func(h *edgetest.Hooks) { h.Bytes = nil })
	p.edges[0].Put(sandbox.ID(id), "/a", []byte("there"))
	edgetest.Eventually(t, "its places are free again", func() bool {
		code, _, body := send(t, p.client, "GET", p.url+"/v1/sandboxes/"+id+"/files?path=/a", "", "", nil)
		return code == 200 && string(body) == "there"
	})
}

// The same of calls, and of what their messages take.
func TestCallsOfAProjectAreBounded(t *testing.T) {
	const most = 4
	p := start(t, func(o *control.Options) { o.Requests = inflight.Limits{Calls: most, Bytes: 1 << 20} })
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	going, end := make(chan struct{}), make(chan struct{})
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Exec = func(ctx context.Context, r *dsecv1.ExecRequest) (*dsecv1.CommandResult, error) {
			going <- struct{}{}
			<-end
			return &dsecv1.CommandResult{CommandId: r.GetCommandId()}, nil
		}
	})
	exec := func(shell string) (int, http.Header, []byte) {
		b, err := json.Marshal(map[string]any{"sandboxId": id, "commandId": "c", "command": map[string]any{"shell": shell}})
		ok(t, err)
		return send(t, p.client, "POST", p.url+execPath, "", "application/json", strings.NewReader(string(b)))
	}
	answers := make(chan int, most)
	run := func(shell string) {
		go func() { code, _, _ := exec(shell); answers <- code }()
		<-going
	}
	run(strings.Repeat("x", 600<<10))
	code, h, body := exec(strings.Repeat("x", 600<<10)) // memory is short, places are not
	tooMany(t, code, h, body)
	for range most - 1 {
		run("x")
	}
	code, h, body = exec("x")
	tooMany(t, code, h, body)
	code, h, body = send(t, p.client, "POST", p.url+"/dsec.v1.SandboxService/ListSandboxes", "", "application/json", strings.NewReader("{}"))
	tooMany(t, code, h, body)
	_, err := p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{Id: id})) // what ends something goes on
	ok(t, err)
	ok(t, p.store.AddProject(t.Context(), store.Project{Path: "second", CreatedAt: time.Now()}))
	code, _, body = send(t, p.as("second", iam.RoleUser), "POST", p.url+"/dsec.v1.SandboxService/ListSandboxes", "", "application/json", strings.NewReader("{}"))
	if code != 200 {
		t.Errorf("another project: %d %s", code, body)
	}
	close(end)
	for range most {
		if code := <-answers; code != 200 {
			t.Errorf("one that was under way: %d", code)
		}
	}
}
