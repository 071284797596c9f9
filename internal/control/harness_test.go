package control_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/internal/control"
	"dsec/internal/control/apiserver"
	"dsec/internal/control/edgetest"
	"dsec/internal/control/iam"
	"dsec/internal/control/store"
	"dsec/internal/grant"
	imagestore "dsec/internal/image/store"
	"dsec/sandbox"
)

// A platform is a whole control plane over edges in memory, served on a real socket.
type platform struct {
	t       testing.TB
	control *control.Control
	edges   []*edgetest.Edge
	store   store.Store
	images  control.Images
	slog    *slog.Logger
	blobs   string // directory of the image store
	url     string
	key     string
	log     *safeBuffer
	client  *http.Client
	server  *http.Server
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// start makes a platform with these edges ("eaaaa" if none are given).
func start(t testing.TB, change func(*control.Options), codes ...sandbox.EdgeCode) *platform {
	t.Helper()
	if len(codes) == 0 {
		codes = []sandbox.EdgeCode{"eaaaa"}
	}
	p := &platform{t: t, log: &safeBuffer{}, blobs: t.TempDir()}
	st, err := store.OpenSQLite(t.Context(), "")
	ok(t, err)
	p.store = st
	blobs, err := imagestore.OpenPosix(p.blobs)
	ok(t, err)
	p.images = control.Images{Store: blobs}
	p.slog = slog.New(slog.NewTextHandler(p.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	o := control.Options{
		Store: st, Images: p.images, Version: "v-test", Poll: 20 * time.Millisecond, AwayTimeout: 200 * time.Millisecond,
		Log: p.slog,
	}
	for _, code := range codes {
		e := edgetest.New(t, code, nil)
		p.edges = append(p.edges, e)
		o.Edges = append(o.Edges, control.Edge{Code: code, Address: "test", Dial: e.Dial, DialBytes: e.DialBytes})
	}
	if change != nil {
		change(&o)
	}
	p.control, err = control.New(t.Context(), o)
	ok(t, err)
	for _, e := range p.edges {
		e.Trust(grant.NewVerifier(e.Code, p.control.PublicKey()))
	}
	p.key, err = p.control.BootstrapKey(t.Context(), "")
	ok(t, err)
	p.serve(o.Log)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	first, server := p.control, p.server
	go func() { first.Run(ctx); close(done) }()
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		server.Close()
		cancel()
		<-done
		for _, err := range []error{first.Close(), blobs.Close(), st.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
		if strings.Contains(p.log.String(), p.key[5:]) {
			t.Error("the log has the API key")
		}
	})
	edgetest.Eventually(t, "the edges are seen", func() bool {
		res, err := p.system().GetInfo(t.Context(), connect.NewRequest(&dsecv1.GetInfoRequest{}))
		if err != nil {
			return false
		}
		for _, n := range res.Msg.GetNodes() {
			if !n.GetHealthy() {
				return false
			}
		}
		return true
	})
	return p
}

func (p *platform) serve(log *slog.Logger) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(p.t, err)
	p.url = "http://" + l.Addr().String()
	p.server = apiserver.NewHTTPServer(p.control.Handler(), log)
	go p.server.Serve(l)
	p.client = &http.Client{Transport: withKey{p, &http.Transport{MaxIdleConnsPerHost: 64}}}
}

// withKey adds the platform's key, unless the request has one.
type withKey struct {
	p  *platform
	rt *http.Transport
}

func (w withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Header.Get("Authorization") == "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+w.p.key)
	}
	return w.rt.RoundTrip(r)
}

func (w withKey) CloseIdleConnections() { w.rt.CloseIdleConnections() }

func (p *platform) sandboxes() dsecv1connect.SandboxServiceClient {
	return dsecv1connect.NewSandboxServiceClient(p.client, p.url)
}

func (p *platform) environments() dsecv1connect.EnvironmentServiceClient {
	return dsecv1connect.NewEnvironmentServiceClient(p.client, p.url)
}

func (p *platform) system() dsecv1connect.SystemServiceClient {
	return dsecv1connect.NewSystemServiceClient(p.client, p.url)
}

func itoa(n int) string { return strconv.Itoa(n) }

// as is a client with a key for another principal, project or role.
func (p *platform) as(project string, role iam.Role) *http.Client {
	p.t.Helper()
	k, _, err := p.control.IAM().CreateKey(p.t.Context(), iam.KeyRequest{Principal: "other", Project: project, Role: role})
	ok(p.t, err)
	return &http.Client{Transport: withKey{&platform{key: k.Reveal()}, p.client.Transport.(withKey).rt}}
}

func archive(files map[string]string) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, content := range files {
		w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))})
		io.WriteString(w, content)
	}
	w.Close()
	return b.Bytes()
}

// publish imports an environment and fails the test if that does not work.
func (p *platform) publish(kind, name, query string) *dsecv1.Environment {
	p.t.Helper()
	code, body := p.do("POST", "/v1/environments/"+kind+"/"+name+"?"+query, bytes.NewReader(archive(map[string]string{"who": kind + name})), nil)
	if code != 200 {
		p.t.Fatalf("import: %d %s", code, body)
	}
	var e struct{ Digest string }
	ok(p.t, json.Unmarshal(body, &e))
	return &dsecv1.Environment{Digest: e.Digest}
}

func (p *platform) do(method, path string, body io.Reader, header http.Header) (int, []byte) {
	p.t.Helper()
	r, err := http.NewRequestWithContext(p.t.Context(), method, p.url+path, body)
	ok(p.t, err)
	for k, v := range header {
		r.Header[k] = v
	}
	res, err := p.client.Do(r)
	ok(p.t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	ok(p.t, err)
	return res.StatusCode, b
}

// post sends JSON to a procedure.
func (p *platform) post(procedure, body string) (int, []byte) {
	p.t.Helper()
	return p.do("POST", procedure, strings.NewReader(body), http.Header{"Content-Type": {"application/json"}})
}

func (p *platform) create(spec *dsecv1.SandboxSpec, key string) (*dsecv1.Sandbox, error) {
	res, err := p.sandboxes().CreateSandbox(p.t.Context(), connect.NewRequest(&dsecv1.CreateSandboxRequest{Spec: spec, IdempotencyKey: key}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

func (p *platform) mustCreate() *dsecv1.Sandbox {
	p.t.Helper()
	sb, err := p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
	ok(p.t, err)
	return sb
}

// reason reads the reason from an error's detail.
func reason(err error) string {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return fmt.Sprint(err)
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if info, ok := v.(*dsecv1.ErrorInfo); ok {
				return info.GetReason()
			}
		}
	}
	return ce.Error()
}

func wantReason(t testing.TB, err error, want string) {
	t.Helper()
	if err == nil || reason(err) != want {
		t.Fatalf("got %v (%s); want %s", err, reason(err), want)
	}
}

// wireError is an error as JSON.
type wireError struct {
	Code, Message string
	Details       []struct {
		Type  string
		Debug struct {
			Reason string
			Facts  map[string]string
		}
	}
}

func decodeError(t testing.TB, body []byte) (w wireError) {
	t.Helper()
	if err := json.Unmarshal(body, &w); err != nil {
		t.Fatalf("%v: %.300s", err, body)
	}
	return w
}

func (w wireError) reason() string {
	if len(w.Details) == 0 {
		return ""
	}
	return w.Details[0].Debug.Reason
}

// blobCount is the number of files in the image store, whatever they are.
func (p *platform) blobCount() int {
	n := 0
	ok(p.t, filepath.WalkDir(p.blobs, func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			n++
		}
		return err
	}))
	return n
}
