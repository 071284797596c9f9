package control_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control"
	"dsec/internal/control/edgetest"
	"dsec/internal/control/iam"
	"dsec/internal/control/store"
	"dsec/sandbox"
)

func TestTheWholePath(t *testing.T) {
	p := start(t, nil)
	base := p.publish("base", "base:latest", "env=A=image&env=B=image&user=nobody&workdir=/image")
	p.publish("workspace", "ws:1", "env=B=workspace&env=C=workspace&workdir=/ws")
	p.publish("toolkit", "tool:1", "env=C=toolkit")
	sb, err := p.create(&dsecv1.SandboxSpec{Image: "base", Workspace: "ws:1", Toolkits: []string{"tool:1"}, Env: map[string]string{"D": "spec"}, Labels: map[string]string{"run": "1"}}, "")
	ok(t, err)
	spec := sb.GetSpec()
	if want := map[string]string{"A": "image", "B": "workspace", "C": "toolkit", "D": "spec"}; fmt.Sprint(spec.GetEnv()) != fmt.Sprint(want) {
		t.Errorf("env %v", spec.GetEnv())
	}
	if spec.GetUser() != "nobody" || spec.GetWorkdir() != "/ws" || spec.GetImage() != "base:latest@"+base.GetDigest() || spec.GetLimits().GetMemoryBytes() != sandbox.DefaultMemory {
		t.Errorf("spec %v", spec)
	}
	id := sandbox.ID(sb.GetId())
	if n := p.edges[0].Layers(id); n != 3 {
		t.Errorf("%d layers", n)
	}
	ctx := t.Context()
	got, err := p.sandboxes().GetSandbox(ctx, connect.NewRequest(&dsecv1.GetSandboxRequest{Id: sb.GetId()}))
	ok(t, err)
	if got.Msg.GetSandbox().GetState() != dsecv1.State_STATE_READY || got.Msg.GetSandbox().GetPrincipal() != iam.BootstrapPrincipal {
		t.Errorf("got %v", got.Msg)
	}
	ex, err := p.sandboxes().Exec(ctx, connect.NewRequest(&dsecv1.ExecRequest{SandboxId: sb.GetId(), CommandId: "c1", Command: &dsecv1.Command{Shell: "echo hi"}, WaitSeconds: -1}))
	ok(t, err)
	if string(ex.Msg.GetResult().GetStdout().GetData()) != "echo hi" || ex.Msg.GetResult().GetCommandId() != "c1" {
		t.Errorf("got %v", ex.Msg)
	}
	list, err := p.sandboxes().ListSandboxes(ctx, connect.NewRequest(&dsecv1.ListSandboxesRequest{Labels: map[string]string{"run": "1"}}))
	ok(t, err)
	if len(list.Msg.GetSandboxes()) != 1 {
		t.Errorf("got %v", list.Msg)
	}
	for range 2 { // delete is idempotent
		del, err := p.sandboxes().DeleteSandbox(ctx, connect.NewRequest(&dsecv1.DeleteSandboxRequest{Id: sb.GetId(), Wait: true}))
		ok(t, err)
		if del.Msg.GetSandbox().GetReason().GetCode() != sandbox.ReasonDeleted {
			t.Errorf("got %v", del.Msg)
		}
	}
	info, err := p.system().GetInfo(ctx, connect.NewRequest(&dsecv1.GetInfoRequest{}))
	ok(t, err)
	if n := info.Msg.GetNodes(); info.Msg.GetVersion() != "v-test" || len(n) != 1 || !n[0].GetHealthy() || n[0].GetId() != "eaaaa" {
		t.Errorf("got %v", info.Msg)
	}
}

// The names and forms that a client with nothing but a JSON library relies on.
func TestJSON(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	code, body := p.post("/dsec.v1.SandboxService/CreateSandbox", `{"spec":{"image":"base","limits":{"memoryBytes":"67108864","cpuCores":1.5},"idleTimeoutSeconds":60,"networkRules":{"pypi":false}},"idempotencyKey":"k","timeoutSeconds":"30"}`)
	if code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	var res struct {
		Sandbox struct {
			ID, State, Project string
			Spec               struct {
				IdleTimeoutSeconds string
				Limits             struct {
					MemoryBytes string
					CPUCores    float64
				}
			}
		}
	}
	ok(t, json.Unmarshal(body, &res))
	if s := res.Sandbox; s.State != "STATE_READY" || s.Spec.Limits.MemoryBytes != "67108864" || s.Spec.Limits.CPUCores != 1.5 || s.Spec.IdleTimeoutSeconds != "60" || s.Project != "default" {
		t.Errorf("%s", body)
	}
	code, body = p.post("/dsec.v1.SandboxService/Exec", fmt.Sprintf(`{"sandboxId":%q,"command":{"shell":"\u00e9","stdin":"AAE="},"waitSeconds":-1}`, res.Sandbox.ID))
	var ex struct {
		Result struct{ Stdout struct{ Data []byte } }
	}
	ok(t, json.Unmarshal(body, &ex))
	if code != 200 || string(ex.Result.Stdout.Data) != "é" {
		t.Errorf("%d %s", code, body)
	}
	code, body = p.post("/dsec.v1.EnvironmentService/GetEnvironment", `{"kind":"base","name":"base"}`)
	var env struct {
		Environment struct{ CreatedAt, Name string }
	}
	ok(t, json.Unmarshal(body, &env))
	if _, err := time.Parse(time.RFC3339, env.Environment.CreatedAt); code != 200 || err != nil || env.Environment.Name != "base:latest" {
		t.Errorf("%d %v %s", code, err, body)
	}
	code, body = p.post("/dsec.v1.SandboxService/CreateSandbox", `{"spec":{"image":"nothing:1"}}`)
	e := decodeError(t, body)
	if code != 404 || e.Code != "not_found" || e.reason() != "environment_not_found" || e.Details[0].Type != "dsec.v1.ErrorInfo" || !strings.Contains(e.Message, "dsec image") {
		t.Errorf("%d %s", code, body)
	}
}

func TestHTTP2WithoutTLS(t *testing.T) {
	p := start(t, nil)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: protocols}
	defer tr.CloseIdleConnections()
	r, err := http.NewRequest("POST", p.url+"/dsec.v1.SystemService/GetInfo", strings.NewReader("{}"))
	ok(t, err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+p.key)
	res, err := tr.RoundTrip(r)
	ok(t, err)
	defer res.Body.Close()
	if res.ProtoMajor != 2 || res.StatusCode != 200 {
		t.Errorf("%s %s", res.Proto, res.Status)
	}
}

func TestIdempotencyKey(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	spec := &dsecv1.SandboxSpec{Image: "base"}
	a, err := p.create(spec, "k")
	ok(t, err)
	again := &dsecv1.SandboxSpec{Image: "base", Backend: "container", LifetimeSeconds: 86400} // the same, with defaults written out
	b, err := p.create(again, "k")
	ok(t, err)
	if a.GetId() != b.GetId() {
		t.Errorf("%s and %s", a.GetId(), b.GetId())
	}
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base", User: "1"}, "k")
	wantReason(t, err, "idempotency_key_reused")
	if connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("%v", err)
	}
	if n := len(p.edges[0].Live()); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
	del, err := p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{IdempotencyKey: "k"}))
	ok(t, err)
	if del.Msg.GetSandbox().GetId() != a.GetId() || len(p.edges[0].Live()) != 0 {
		t.Errorf("got %v", del.Msg)
	}
	c, err := p.create(spec, "k")
	ok(t, err)
	if c.GetId() == a.GetId() {
		t.Error("a deleted sandbox was given out again")
	}
}

func TestQuotaIsFreeWhenDesiredStateIsGone(t *testing.T) {
	p := start(t, func(o *control.Options) { o.Quota = 2 })
	p.publish("base", "base:latest", "")
	a, _ := p.mustCreate(), p.mustCreate()
	_, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
	wantReason(t, err, "quota_exceeded")
	_, err = p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{Id: a.GetId()}))
	ok(t, err)
	b := p.mustCreate()
	// One ends by itself: the next statuses show it.
	p.edges[0].End(sandbox.ID(b.GetId()), sandbox.ReasonIdle)
	edgetest.Eventually(t, "its quota is free", func() bool {
		_, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
		return err == nil
	})
}

func TestForeignAndUnknownLookTheSame(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	sb := p.mustCreate()
	ok(t, p.store.AddProject(t.Context(), store.Project{Path: "rival", CreatedAt: time.Now()}))
	rival := p.as("rival", iam.RoleUser)
	ask := func(id string) string {
		var all []string
		for _, proc := range []string{"GetSandbox", "DeleteSandbox"} {
			all = append(all, raw(t, rival, p.url+"/dsec.v1.SandboxService/"+proc, fmt.Sprintf(`{"id":%q}`, id)))
		}
		for _, proc := range []string{"Exec", "GetCommand", "ListCommands", "KillCommand"} {
			body := fmt.Sprintf(`{"sandboxId":%q,"commandId":"c"}`, id)
			if proc == "ListCommands" {
				body = fmt.Sprintf(`{"sandboxId":%q}`, id)
			}
			all = append(all, raw(t, rival, p.url+"/dsec.v1.SandboxService/"+proc, body))
		}
		// The detail is there twice; its encoded form holds the id.
		return regexp.MustCompile(`"value":"[^"]*"`).ReplaceAllString(strings.ReplaceAll(strings.Join(all, "\n"), id, "ID"), "")
	}
	foreign, unknown, nowhere := ask(sb.GetId()), ask(string(sandbox.NewID("eaaaa"))), ask(string(sandbox.NewID("ezzzz")))
	if foreign != unknown || foreign != nowhere {
		t.Errorf("foreign:\n%s\nunknown:\n%s\nof no edge:\n%s", foreign, unknown, nowhere)
	}
	if strings.Count(foreign, "sandbox_not_found") != 6 {
		t.Errorf("%s", foreign)
	}
	if len(p.edges[0].Live()) != 1 {
		t.Error("a foreign sandbox was deleted")
	}
	// Names and keys are apart too.
	if body := raw(t, rival, p.url+"/dsec.v1.SandboxService/CreateSandbox", `{"spec":{"image":"base"}}`); !strings.Contains(body, "environment_not_found") {
		t.Errorf("%s", body)
	}
	if body := raw(t, rival, p.url+"/dsec.v1.SandboxService/ListSandboxes", `{}`); strings.Contains(body, sb.GetId()) {
		t.Errorf("%s", body)
	}
}

func raw(t *testing.T, c *http.Client, url, body string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "POST", url, strings.NewReader(body))
	ok(t, err)
	r.Header.Set("Content-Type", "application/json")
	res, err := c.Do(r)
	ok(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	ok(t, err)
	return res.Status + string(b)
}

func TestPagesAcrossEdgesUnderChange(t *testing.T) {
	p := start(t, nil, "eaaaa", "ebbbb", "ecccc")
	p.publish("base", "base:latest", "")
	stay := map[string]int{}
	for range 40 {
		stay[p.mustCreate().GetId()] = 0
	}
	for _, size := range []int32{1, 7, 100} {
		for id := range stay {
			stay[id] = 0
		}
		token, pages := "", 0
		for {
			res, err := p.sandboxes().ListSandboxes(t.Context(), connect.NewRequest(&dsecv1.ListSandboxesRequest{PageSize: size, PageToken: token}))
			ok(t, err)
			if len(res.Msg.GetSandboxes()) > int(size) {
				t.Fatalf("a page of %d has %d", size, len(res.Msg.GetSandboxes()))
			}
			for _, s := range res.Msg.GetSandboxes() {
				if _, ok := stay[s.GetId()]; ok {
					stay[s.GetId()]++
				}
			}
			if pages++; pages%3 == 0 { // others come and go
				sb := p.mustCreate()
				_, err := p.sandboxes().DeleteSandbox(t.Context(), connect.NewRequest(&dsecv1.DeleteSandboxRequest{Id: sb.GetId()}))
				ok(t, err)
			}
			if token = res.Msg.GetNextPageToken(); token == "" {
				break
			}
		}
		for id, n := range stay {
			if n != 1 {
				t.Errorf("size %d: %s was listed %d times", size, id, n)
			}
		}
	}
	p.edges[1].Vanish()
	_, err := p.sandboxes().ListSandboxes(t.Context(), connect.NewRequest(&dsecv1.ListSandboxesRequest{}))
	wantReason(t, err, "edge_unavailable") // not a short list
	p.edges[1].Appear(t)
}

func TestBatch(t *testing.T) {
	p := start(t, func(o *control.Options) { o.BatchWindow = 8 })
	p.publish("base", "base:latest", "")
	var failed string
	p.edges[0].Set(func(h *edgetest.Hooks) {
		h.Create = func(_ context.Context, r *edgev1.CreateSandbox) error {
			if r.GetIdempotencyKey() == "b/7" {
				return sandbox.Errorf(sandbox.ResourceExhausted, "disk_full", "full")
			}
			return nil
		}
	})
	stream, err := p.sandboxes().CreateSandboxes(t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Spec: &dsecv1.SandboxSpec{Image: "base"}, Count: 50, IdempotencyKey: "b"}))
	ok(t, err)
	seen := map[int32]string{}
	for stream.Receive() {
		m := stream.Msg()
		if m.GetFailure() != nil {
			failed = fmt.Sprint(m.GetIndex(), m.GetFailure().GetCode(), m.GetFailure().GetInfo().GetReason())
			continue
		}
		seen[m.GetIndex()] = m.GetSandbox().GetId()
	}
	ok(t, stream.Err())
	if len(seen) != 49 || failed != "7resource_exhausteddisk_full" {
		t.Errorf("%d, failed %s", len(seen), failed)
	}
	// The same key gives the same sandboxes, one by one.
	one, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "b/3")
	ok(t, err)
	if one.GetId() != seen[3] {
		t.Errorf("%s is not %s", one.GetId(), seen[3])
	}
	if live := p.edges[0].Live(); len(live) != 49 || !slices.Contains(live, sandbox.ID(seen[0])) {
		t.Errorf("%d live", len(live))
	}
}

// swapEnd gives id another last character: its checksum no longer fits.
func swapEnd(id string) string {
	last := "a"
	if id[len(id)-1] == 'a' {
		last = "b"
	}
	return id[:len(id)-1] + last
}

func TestBytesThroughTheWholePath(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	id := p.mustCreate().GetId()
	content := bytes.Repeat([]byte{0, 1, 2, 0xff, '\r', '\n'}, 500_000)
	path := "/v1/sandboxes/" + id + "/files?path=/tmp/%C3%A9%20x"
	if code, body := p.do("PUT", path, bytes.NewReader(content), nil); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	if code, body := p.do("GET", path, nil, nil); code != 200 || !bytes.Equal(body, content) {
		t.Fatalf("%d, %d bytes", code, len(body))
	}
	if code, body := p.do("GET", path+"0", nil, nil); code != 404 || decodeError(t, body).reason() != "file_not_found" {
		t.Fatalf("%d %s", code, body)
	}
	if code, _ := p.do("PUT", "/v1/sandboxes/"+id+"/commands/c-1/stdin?offset=0", strings.NewReader("in"), nil); code != 200 {
		t.Fatal(code)
	}
	if code, body := p.do("GET", "/v1/sandboxes/"+id+"/commands/c-1/stdout?offset=0", nil, nil); code != 404 {
		t.Fatalf("%d %s", code, body)
	}
	for _, h := range p.edges[0].Headers() {
		if h.Get("Authorization") != "" {
			t.Error("the key reached the edge")
		}
	}
	for path, want := range map[string]string{
		"/v1/sandboxes/x/files?path=/a":                                            "bad_id",
		"/v1/sandboxes/" + swapEnd(id) + "/files":                                  "bad_id",
		"/v1/sandboxes/" + string(sandbox.NewID("ezzzz")) + "/files":               "sandbox_not_found",
		"/v1/sandboxes/" + string(sandbox.NewID("eaaaa")) + "/files":               "sandbox_not_found",
		"/v1/sandboxes/" + id + "/commands/%2e%2e%2f/stdout":                       "bad_path",
		"/v1/sandboxes/" + id + "/commands/" + strings.Repeat("c", 65) + "/stdout": "invalid_command_id",
		"/v1/sandboxes/../files":                                                   "bad_path",
		"/v1/sandboxes/" + id + "/../" + id + "/files":                             "bad_path",
		"/v1/sandboxes/" + id + "/nothing":                                         "no_such_route",
	} {
		code, body := p.do("GET", path, nil, nil)
		if r := decodeError(t, body).reason(); r != want || code < 400 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}
