package apiserver

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/control/store"
	"dsec/internal/image"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

const (
	maxKey = 128
	// maxNesting leaves room for "/<index>" in the keys of CreateSandboxes.
	maxNesting = 8
)

// readSpec checks what somebody asks for, with its defaults. The second result is the digest of the request.
func readSpec(p *dsecv1.SandboxSpec) (sandbox.Spec, string, error) {
	if p == nil {
		return sandbox.Spec{}, "", sandbox.Errorf(sandbox.InvalidArgument, "invalid_spec", "the request has no spec")
	}
	if startspec.Unknown(p) || len(p.ProtoReflect().GetUnknown()) > 0 || len(p.GetLimits().ProtoReflect().GetUnknown()) > 0 {
		return sandbox.Spec{}, "", sandbox.Errorf(sandbox.InvalidArgument, "unknown_field",
			"the spec has fields that this version does not know, and would not keep to; update the platform or use an older client")
	}
	s := sandbox.Spec{
		Backend: p.GetBackend(), Image: p.GetImage(), Workspace: p.GetWorkspace(), Toolkits: p.GetToolkits(),
		IdleTimeout: seconds(p.GetIdleTimeoutSeconds()), Lifetime: seconds(p.GetLifetimeSeconds()),
		Labels: p.GetLabels(), Env: p.GetEnv(), User: p.GetUser(), Workdir: p.GetWorkdir(), Network: p.GetNetworkRules(),
		Hostname: p.GetHostname(), Name: p.GetName(),
	}
	if err := startspec.FromWire(p, &s); err != nil {
		return sandbox.Spec{}, "", err
	}
	s = s.WithDefaults()
	if err := s.Validate(); err != nil {
		return sandbox.Spec{}, "", err
	}
	digest, err := specDigest(s)
	return s, digest, err
}

// specDigest is canonical: maps are sorted, defaults are filled in, and the wire format plays no part.
func specDigest(s sandbox.Spec) (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("digest spec: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// seconds does not overflow: what is too long stays too long.
func seconds(n int64) time.Duration {
	const most = int64(sandbox.MaxLifetime/time.Second) + 1
	return time.Duration(max(-1, min(n, most))) * time.Second
}

func writeSpec(s sandbox.Spec) *dsecv1.SandboxSpec {
	p := &dsecv1.SandboxSpec{
		Backend: s.Backend, Image: s.Image, Workspace: s.Workspace, Toolkits: s.Toolkits,
		IdleTimeoutSeconds: int64(s.IdleTimeout / time.Second), LifetimeSeconds: int64(s.Lifetime / time.Second),
		Labels: s.Labels, Env: s.Env, User: s.User, Workdir: s.Workdir, NetworkRules: s.Network, Hostname: s.Hostname, Name: s.Name,
	}
	startspec.ToWire(&s, p)
	return p
}

// createTimeout is how long a create may take.
func createTimeout(s int64) (time.Duration, error) {
	switch {
	case s == 0:
		return sandbox.DefaultCreateTimeout, nil
	case s < 0:
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_timeout", "Timeout must be greater than 0")
	case s > int64(sandbox.MaxCreateTimeout/time.Second):
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_timeout", "timeout of %d s; at most %v", s, sandbox.MaxCreateTimeout)
	}
	return time.Duration(s) * time.Second, nil
}

func checkKey(key string, most int) error {
	if len(key) > most || !utf8.ValidString(key) {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_idempotency_key", "an idempotency key is UTF-8 of at most %d bytes", most)
	}
	return nil
}

func writeLayers(layers []image.Layer) []*dsecv1.Layer {
	list := make([]*dsecv1.Layer, len(layers))
	for i, l := range layers {
		list[i] = &dsecv1.Layer{Metadata: writeBlob(l.Metadata)}
		for _, b := range l.Data {
			list[i].Data = append(list[i].Data, writeBlob(b))
		}
	}
	return list
}

func writeBlob(b image.Blob) *dsecv1.Blob { return &dsecv1.Blob{Digest: b.Digest, Size: b.Size} }

func writeEnvironment(n store.Name, m image.Manifest) *dsecv1.Environment {
	e := &dsecv1.Environment{
		Kind: n.Kind, Name: sandbox.EnvRef{Name: n.Name, Tag: n.Tag}.String(), Digest: n.Digest, Layers: writeLayers(m.Layers),
		Entries: m.Entries, FileBytes: m.FileBytes, CreatedAt: timestamppb.New(n.CreatedAt), CreatedBy: n.CreatedBy, Dropped: m.Dropped,
		Config: &dsecv1.EnvironmentConfig{Env: m.Config.Env, User: m.Config.User, Workdir: m.Config.Workdir},
	}
	seen := make(map[string]bool)
	for _, l := range m.Layers {
		for _, b := range append([]image.Blob{l.Metadata}, l.Data...) {
			if !seen[b.Digest] {
				seen[b.Digest] = true
				e.Size += b.Size
			}
		}
	}
	return e
}
