package apiserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/control/store"
	"dsec/internal/image"
	"dsec/sandbox"
)

// Bounds of what the resolver keeps. A name pinned through another apiserver is seen after nameTTL, one pinned here at
// once. Manifests never change.
const (
	nameTTL      = time.Second
	maxNames     = 4096
	maxManifests = 1024
)

// A resolver turns names of environments into manifests.
type resolver struct {
	store  store.Store
	images Images
	now    func() time.Time

	mu        sync.Mutex
	changes   uint64 // counts pinned and removed names: what was read before a change is not kept after it
	names     map[nameKey]pinned
	manifests map[string]image.Manifest
}

type nameKey struct {
	project, kind string
	ref           sandbox.EnvRef
}

type pinned struct {
	name  store.Name
	until time.Time
}

func newResolver(st store.Store, im Images, now func() time.Time) *resolver {
	return &resolver{store: st, images: im, now: now, names: make(map[nameKey]pinned), manifests: make(map[string]image.Manifest)}
}

// changed forgets the names: one of them was pinned anew or removed.
func (r *resolver) changed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changes++
	clear(r.names)
}

// word is what people call a kind: as the commands do.
func word(kind string) string {
	if kind == image.KindBase {
		return "image"
	}
	return kind
}

func noEnvironment(kind string, ref sandbox.EnvRef) error {
	w := word(kind)
	hint := fmt.Sprintf("; `dsec %s ls` lists what there is", w)
	if ref.Digest == "" { // what has a digest cannot be made to order
		hint += fmt.Sprintf(", `dsec %s create %s --from-dir DIR` makes it", w, ref)
	}
	return sandbox.Errorf(sandbox.NotFound, "environment_not_found", "there is no %s %s%s", w, ref, hint).WithFact("kind", kind).WithFact("name", ref.String())
}

// find looks a name up, by tag or, where there is one, by digest alone. A digest counts only if an import of this project has recorded it.
func (r *resolver) find(ctx context.Context, project, kind string, ref sandbox.EnvRef) (store.Name, error) {
	k := nameKey{project, kind, ref}
	r.mu.Lock()
	p, ok := r.names[k]
	changes := r.changes
	r.mu.Unlock()
	now := r.now()
	if ok && now.Before(p.until) {
		return p.name, nil
	}
	n, err := r.read(ctx, project, kind, ref)
	if sandbox.ClassOf(err) == sandbox.NotFound && err != nil {
		return store.Name{}, noEnvironment(kind, ref)
	}
	if err != nil {
		return store.Name{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changes == changes {
		if len(r.names) >= maxNames {
			clear(r.names)
		}
		r.names[k] = pinned{n, now.Add(nameTTL)}
	}
	return n, nil
}

func (r *resolver) read(ctx context.Context, project, kind string, ref sandbox.EnvRef) (store.Name, error) {
	if ref.Digest == "" {
		n, err := r.store.Name(ctx, project, kind, ref.Name, ref.Tag)
		if err != nil {
			return store.Name{}, fmt.Errorf("find environment: %w", err)
		}
		return n, nil
	}
	m, err := r.store.Manifest(ctx, project, ref.Digest)
	if err != nil {
		return store.Name{}, fmt.Errorf("find manifest: %w", err)
	}
	if m.Kind != kind {
		return store.Name{}, noEnvironment(kind, ref)
	}
	return store.Name{Project: project, Kind: kind, Name: ref.Name, Tag: ref.Tag, Digest: m.Digest, CreatedAt: m.CreatedAt, CreatedBy: m.CreatedBy}, nil
}

// manifest reads what a name pins. An error names the environment: of a digest alone nobody knows which one is damaged.
func (r *resolver) manifest(ctx context.Context, n store.Name) (image.Manifest, error) {
	m, err := r.load(ctx, n.Digest)
	var e *sandbox.Error
	if errors.As(err, &e) {
		ref := sandbox.EnvRef{Name: n.Name, Tag: n.Tag}
		named := *e
		named.Message = fmt.Sprintf("%s %s cannot be read: %s", word(n.Kind), ref, e.Message)
		return image.Manifest{}, &named
	}
	return m, err
}

func (r *resolver) load(ctx context.Context, digest string) (image.Manifest, error) {
	r.mu.Lock()
	m, ok := r.manifests[digest]
	r.mu.Unlock()
	if ok {
		return m, nil
	}
	m, err := r.images.Manifest(ctx, digest)
	if err != nil {
		return image.Manifest{}, fmt.Errorf("read manifest: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.manifests) >= maxManifests {
		clear(r.manifests)
	}
	r.manifests[digest] = m
	return m, nil
}

// A resolved is what an edge needs of a spec.
type resolved struct {
	spec   *dsecv1.SandboxSpec
	layers []*dsecv1.Layer // lowest first
}

// resolve pins the names of a spec and merges what its environments say of the commands in them: a later one of image,
// workspace, toolkits and the spec itself wins, variable by variable.
func (r *resolver) resolve(ctx context.Context, project string, s sandbox.Spec) (resolved, error) {
	out := s.Clone()
	var layers []image.Layer
	var config image.Config
	add := func(kind string, name *string) error {
		if *name == "" {
			return nil
		}
		ref, err := sandbox.ParseEnvRef(*name)
		if err != nil {
			return err
		}
		n, err := r.find(ctx, project, kind, ref)
		if err != nil {
			return err
		}
		m, err := r.manifest(ctx, n)
		if err != nil {
			return err
		}
		*name = sandbox.EnvRef{Name: ref.Name, Tag: ref.Tag, Digest: n.Digest}.String()
		layers = append(layers, m.Layers...)
		merge(&config, m.Config)
		return nil
	}
	if err := add(image.KindBase, &out.Image); err != nil {
		return resolved{}, err
	}
	if err := add(image.KindWorkspace, &out.Workspace); err != nil {
		return resolved{}, err
	}
	for i := range out.Toolkits {
		if out.Toolkits[i] == "" {
			return resolved{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_name", "toolkit %d has no name", i)
		}
		if err := add(image.KindToolkit, &out.Toolkits[i]); err != nil {
			return resolved{}, err
		}
	}
	if len(layers) > image.MaxLayers {
		return resolved{}, sandbox.Errorf(sandbox.InvalidArgument, "too_many_layers", "image, workspace and toolkits have %d layers together; at most %d", len(layers), image.MaxLayers)
	}
	merge(&config, image.Config{Env: s.Env, User: s.User, Workdir: s.Workdir})
	out.Env, out.User, out.Workdir = config.Env, config.User, config.Workdir
	return resolved{spec: writeSpec(out), layers: writeLayers(layers)}, nil
}

func merge(c *image.Config, over image.Config) {
	if len(over.Env) > 0 {
		if c.Env == nil {
			c.Env = make(map[string]string, len(over.Env))
		}
		maps.Copy(c.Env, over.Env)
	}
	if over.User != "" {
		c.User = over.User
	}
	if over.Workdir != "" {
		c.Workdir = over.Workdir
	}
}
