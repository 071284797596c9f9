package control_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/control"
	"dsec/internal/control/apiserver"
	"dsec/internal/control/edgetest"
	"dsec/internal/image"
)

func TestImport(t *testing.T) {
	p := start(t, nil)
	tar := archive(map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "big": strings.Repeat("data", 10_000)})
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write(tar)
	z.Close()
	var digests []string
	for _, body := range [][]byte{tar, zipped.Bytes()} {
		code, b := p.do("POST", "/v1/environments/base/team/py:3.12?user=root&workdir=/w&env=A=1&env=B=x%3Dy", bytes.NewReader(body), nil)
		var e struct {
			Kind, Name, Digest, Entries, CreatedBy string
			Layers                                 []struct{ Metadata struct{ Digest, Size string } }
			Config                                 struct {
				Env           map[string]string
				User, Workdir string
			}
		}
		ok(t, json.Unmarshal(b, &e))
		if code != 200 || e.Kind != "base" || e.Name != "team/py:3.12" || len(e.Layers) != 1 || e.Config.Env["B"] != "x=y" || e.Config.User != "root" || e.CreatedBy != "admin" {
			t.Fatalf("%d %s", code, b)
		}
		digests = append(digests, e.Digest)
	}
	if digests[0] != digests[1] {
		t.Error("the same tree has two digests")
	}
	list, err := p.environments().ListEnvironments(t.Context(), connect.NewRequest(&dsecv1.ListEnvironmentsRequest{Kind: "base"}))
	ok(t, err)
	if l := list.Msg.GetEnvironments(); len(l) != 1 || l[0].GetDigest() != digests[0] || l[0].GetSize() < 40_000 {
		t.Errorf("%v", list.Msg)
	}
	got, err := p.environments().GetEnvironment(t.Context(), connect.NewRequest(&dsecv1.GetEnvironmentRequest{Kind: "base", Name: "team/py@" + digests[0]}))
	ok(t, err)
	if got.Msg.GetEnvironment().GetName() != "team/py@"+digests[0] {
		t.Errorf("%v", got.Msg)
	}
}

func TestTagsAreMutableAndSandboxesPinned(t *testing.T) {
	p := start(t, nil)
	first := p.publish("base", "base:latest", "env=V=1")
	old := p.mustCreate()
	second := p.publish("base", "base:latest", "env=V=2")
	sb := p.mustCreate() // at once: no cache may hide what was just pinned
	if first.GetDigest() == second.GetDigest() || sb.GetSpec().GetEnv()["V"] != "2" || old.GetSpec().GetImage() != "base:latest@"+first.GetDigest() {
		t.Errorf("%v %v", old.GetSpec(), sb.GetSpec())
	}
	_, err := p.environments().RemoveEnvironment(t.Context(), connect.NewRequest(&dsecv1.RemoveEnvironmentRequest{Kind: "base", Name: "base:latest"}))
	ok(t, err)
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base"}, "")
	wantReason(t, err, "environment_not_found")
	_, err = p.environments().RemoveEnvironment(t.Context(), connect.NewRequest(&dsecv1.RemoveEnvironmentRequest{Kind: "base", Name: "base:latest"}))
	wantReason(t, err, "environment_not_found")
	// What a sandbox shows can be created again.
	again, err := p.create(&dsecv1.SandboxSpec{Image: old.GetSpec().GetImage()}, "")
	ok(t, err)
	if again.GetSpec().GetEnv()["V"] != "1" {
		t.Errorf("%v", again.GetSpec())
	}
	// The digest counts alone, whatever the tag is now, and a name given without a tag is not given one.
	p.publish("base", "base:latest", "env=V=3")
	for _, name := range []string{old.GetSpec().GetImage(), "base@" + first.GetDigest(), "base:none@" + first.GetDigest()} {
		sb, err := p.create(&dsecv1.SandboxSpec{Image: name}, "")
		ok(t, err)
		if sb.GetSpec().GetImage() != name || sb.GetSpec().GetEnv()["V"] != "1" {
			t.Errorf("%s became %v", name, sb.GetSpec())
		}
	}
	// But only as what it is.
	_, err = p.create(&dsecv1.SandboxSpec{Image: old.GetSpec().GetImage(), Workspace: old.GetSpec().GetImage()}, "")
	wantReason(t, err, "environment_not_found")
}

// Who is told that something is missing is told what would make just that.
func TestHintsForWhatIsMissing(t *testing.T) {
	p := start(t, nil)
	digest := "@sha256:" + strings.Repeat("0", 64)
	for _, c := range []struct{ kind, name, want string }{
		{"base", "py:3.12", "there is no image py:3.12; `dsec image ls` lists what there is, `dsec image create py:3.12 --from-dir DIR` makes it"},
		{"workspace", "ws", "there is no workspace ws:latest; `dsec workspace ls` lists what there is, `dsec workspace create ws:latest --from-dir DIR` makes it"},
		{"toolkit", "tk:1" + digest, "there is no toolkit tk:1" + digest + "; `dsec toolkit ls` lists what there is"},
	} {
		_, err := p.environments().GetEnvironment(t.Context(), connect.NewRequest(&dsecv1.GetEnvironmentRequest{Kind: c.kind, Name: c.name}))
		wantReason(t, err, "environment_not_found")
		if ce := new(connect.Error); !errors.As(err, &ce) || ce.Message() != c.want {
			t.Errorf("%v", err)
		}
	}
}

// An uploaded file can have exactly the bytes of a manifest, and is then a blob with that digest. It must not count as one:
// it could name a file system that was made to break the kernel.
func TestAFileThatLooksLikeAManifestIsNone(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "base:latest", "")
	m := image.Manifest{Version: image.ManifestVersion, Kind: image.KindBase, Layers: []image.Layer{{Metadata: image.Blob{Digest: "sha256:" + strings.Repeat("0", 64), Size: 4096}}}}
	for pad := ""; ; pad += "x" { // a manifest of whole blocks, so that the data blob is the file
		m.Config.Workdir = "/" + pad
		b, err := m.Encode()
		ok(t, err)
		if len(b) < image.BlockSize {
			pad += strings.Repeat("x", image.BlockSize-len(b)-1)
			continue
		}
		if len(b)%image.BlockSize != 0 {
			t.Fatalf("%d bytes", len(b))
		}
		code, _ := p.do("POST", "/v1/environments/workspace/evil:1", bytes.NewReader(archive(map[string]string{"m": string(b)})), nil)
		if code != 200 {
			t.Fatal(code)
		}
		break
	}
	env, err := p.environments().GetEnvironment(t.Context(), connect.NewRequest(&dsecv1.GetEnvironmentRequest{Kind: "workspace", Name: "evil:1"}))
	ok(t, err)
	forged := env.Msg.GetEnvironment().GetLayers()[0].GetData()[0].GetDigest()
	if _, err := p.images.Manifest(t.Context(), forged); err != nil {
		t.Fatalf("the test forges nothing: %v", err)
	}
	_, err = p.create(&dsecv1.SandboxSpec{Image: "base@" + forged}, "")
	wantReason(t, err, "environment_not_found")
}

func TestBadImportsLeaveNothing(t *testing.T) {
	p := start(t, func(o *control.Options) { o.MaxArchiveBytes = 1 << 20 })
	good := archive(map[string]string{"a": strings.Repeat("a", 100_000)})
	p.publish("base", "keep:1", "")
	before := p.blobCount()
	for name, c := range map[string]struct {
		path   string
		body   []byte
		reason string
	}{
		"no tar":        {"base/a:1", []byte("hello"), "bad_archive"},
		"cut":           {"base/a:1", good[:60_000], "bad_archive"},
		"cut gzip":      {"base/a:1", gz(good)[:200], "bad_archive"},
		"escape":        {"base/a:1", archive(map[string]string{"../x": "y"}), "bad_entry"},
		"kind":          {"disk/a:1", good, "invalid_kind"},
		"upper case":    {"base/A:1", good, "invalid_name"},
		"digest":        {"base/a@sha256:" + strings.Repeat("0", 64), good, "invalid_name"},
		"path":          {"base/..%2f..%2fetc:1", good, "bad_path"},
		"encoded":       {"base/%2e%2e:1", good, "invalid_name"},
		"NUL":           {"base/a%00:1", good, "invalid_name"},
		"unknown query": {"base/a:1?memory=1", good, "invalid_query"},
		"two users":     {"base/a:1?user=a&user=b", good, "invalid_query"},
		"env":           {"base/a:1?env=x", good, "invalid_query"},
		"bad query":     {"base/a:1?user=%zz", good, "invalid_query"},
		"too large":     {"base/a:1", archive(map[string]string{"a": strings.Repeat("a", 2<<20)}), "request_too_large"},
	} {
		code, body := p.do("POST", "/v1/environments/"+c.path, bytes.NewReader(c.body), nil)
		if got := decodeError(t, body).reason(); got != c.reason || code < 400 {
			t.Errorf("%s: %d %s", name, code, body)
		}
	}
	// Chunked, so that the size is not announced.
	r, err := http.NewRequestWithContext(t.Context(), "POST", p.url+"/v1/environments/base/a:1", io.MultiReader(bytes.NewReader(archive(map[string]string{"a": strings.Repeat("a", 2<<20)}))))
	ok(t, err)
	res, err := p.client.Do(r)
	ok(t, err)
	b, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if res.StatusCode == 200 || decodeError(t, b).Code == "internal" {
		t.Errorf("%s %s", res.Status, b)
	}
	if n := p.blobCount(); n != before {
		t.Errorf("%d blobs instead of %d", n, before)
	}
	list, err := p.environments().ListEnvironments(t.Context(), connect.NewRequest(&dsecv1.ListEnvironmentsRequest{}))
	ok(t, err)
	if len(list.Msg.GetEnvironments()) != 1 {
		t.Errorf("%v", list.Msg)
	}
}

func gz(b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	z.Write(b)
	z.Close()
	return out.Bytes()
}

// A client that goes away in the middle of an upload leaves the name and the store as they were.
func TestUploadCutByTheClient(t *testing.T) {
	p := start(t, nil)
	p.publish("base", "a:1", "env=V=1")
	before := p.blobCount()
	ctx, cancel := context.WithCancel(t.Context())
	pr, pw := io.Pipe()
	r, err := http.NewRequestWithContext(ctx, "POST", p.url+"/v1/environments/base/a:1", pr)
	ok(t, err)
	failed := make(chan error)
	go func() {
		res, err := p.client.Do(r)
		if err == nil {
			res.Body.Close()
			err = fmt.Errorf("answered %s", res.Status)
		}
		failed <- err
	}()
	pw.Write(archive(map[string]string{"a": strings.Repeat("z", 200_000)})[:100_000])
	cancel()
	pw.Close()
	<-failed
	edgetest.Eventually(t, "nothing is left", func() bool { return p.blobCount() == before })
	got, err := p.environments().GetEnvironment(t.Context(), connect.NewRequest(&dsecv1.GetEnvironmentRequest{Kind: "base", Name: "a:1"}))
	ok(t, err)
	if got.Msg.GetEnvironment().GetConfig().GetEnv()["V"] != "1" {
		t.Errorf("%v", got.Msg)
	}
}

// announced says when an import has begun.
type announced struct {
	apiserver.Images
	began chan struct{}
}

func (a announced) Import(ctx context.Context, kind string, r io.Reader, c image.Config) (string, image.Manifest, error) {
	a.began <- struct{}{}
	return a.Images.Import(ctx, kind, r, c)
}

func TestImportsAreLimited(t *testing.T) {
	began := make(chan struct{}, 10)
	p := start(t, func(o *control.Options) { o.MaxImports, o.Images = 1, announced{o.Images, began} })
	pr, pw := io.Pipe()
	done := make(chan int)
	go func() {
		r, err := http.NewRequest("POST", p.url+"/v1/environments/base/a:1", pr)
		if err != nil {
			t.Error(err)
			return
		}
		res, err := p.client.Do(r)
		if err != nil {
			t.Error(err)
			return
		}
		res.Body.Close()
		done <- res.StatusCode
	}()
	b := archive(map[string]string{"a": strings.Repeat("b", 100_000)}) // more than a client keeps back
	pw.Write(b[:50_000])
	<-began
	code, body := p.do("POST", "/v1/environments/base/b:1", bytes.NewReader(b), nil)
	if code != 429 || decodeError(t, body).reason() != "too_many_imports" {
		t.Errorf("%d %s", code, body)
	}
	pw.Write(b[50_000:])
	pw.Close()
	if code := <-done; code != 200 {
		t.Errorf("%d", code)
	}
	p.publish("base", "c:1", "")
}

func TestADamagedEnvironmentHidesNoOther(t *testing.T) {
	p := start(t, nil)
	lost := p.publish("base", "a:1", "env=V=1")
	p.publish("base", "b:1", "env=V=2")
	posix := p.images.Store.(interface{ Path(string) string })
	ok(t, os.Remove(posix.Path(lost.GetDigest())))
	list, err := p.environments().ListEnvironments(t.Context(), connect.NewRequest(&dsecv1.ListEnvironmentsRequest{}))
	ok(t, err)
	if l := list.Msg.GetEnvironments(); len(l) != 2 || l[0].GetName() != "a:1" || l[0].GetDigest() != lost.GetDigest() || len(l[0].GetLayers()) != 0 || len(l[1].GetLayers()) != 1 {
		t.Errorf("%v", list.Msg)
	}
	_, err = p.environments().GetEnvironment(t.Context(), connect.NewRequest(&dsecv1.GetEnvironmentRequest{Kind: "base", Name: "a:1"}))
	wantReason(t, err, "blob_not_found")
	if !strings.Contains(err.Error(), "image a:1 cannot be read") {
		t.Errorf("%v", err)
	}
	_, err = p.create(&dsecv1.SandboxSpec{Image: "a:1"}, "")
	wantReason(t, err, "blob_not_found")
	p.publish("base", "a:1", "env=V=1") // made again, it works again
	_, err = p.create(&dsecv1.SandboxSpec{Image: "a:1"}, "")
	ok(t, err)
}

func TestEnvironmentPages(t *testing.T) {
	p := start(t, nil)
	for i := range 5 {
		p.publish("toolkit", fmt.Sprintf("t%d:1", i), "")
	}
	p.publish("base", "b:1", "")
	var names []string
	token := ""
	for {
		res, err := p.environments().ListEnvironments(t.Context(), connect.NewRequest(&dsecv1.ListEnvironmentsRequest{PageSize: 2, PageToken: token}))
		ok(t, err)
		for _, e := range res.Msg.GetEnvironments() {
			names = append(names, e.GetKind()+"/"+e.GetName())
		}
		if token = res.Msg.GetNextPageToken(); token == "" {
			break
		}
	}
	if got := strings.Join(names, " "); got != "base/b:1 toolkit/t0:1 toolkit/t1:1 toolkit/t2:1 toolkit/t3:1 toolkit/t4:1" {
		t.Errorf("%s", got)
	}
}
