package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/internal/control/store"
	"dsec/internal/image"
	"dsec/sandbox"
)

type environmentService struct{ s *Server }

var _ dsecv1connect.EnvironmentServiceHandler = environmentService{}

func checkKind(kind string) error {
	if !image.ValidKind(kind) {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_kind", "%.64q is no kind of environment: base, workspace or toolkit", kind)
	}
	return nil
}

// damaged says that what a name pins is lost, and will be when asked again.
func damaged(err error) bool {
	c := sandbox.ClassOf(err)
	return err != nil && (c == sandbox.DataLoss || c == sandbox.NotFound)
}

// ListEnvironments implements the service. One that is damaged is listed with its name and digest alone, so that it hides no
// other and can be removed or made again; GetEnvironment says what is wrong with it.
func (v environmentService) ListEnvironments(ctx context.Context, r *connect.Request[dsecv1.ListEnvironmentsRequest]) (*connect.Response[dsecv1.ListEnvironmentsResponse], error) {
	kind := r.Msg.GetKind()
	if kind != "" {
		if err := checkKind(kind); err != nil {
			return nil, err
		}
	}
	size, err := pageSize(r.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	after, err := parseNameToken(r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	names, err := v.s.o.Store.Names(ctx, exchangeOf(ctx).who.Project, kind, after, size)
	if err != nil {
		return nil, fmt.Errorf("list names: %w", err)
	}
	res := &dsecv1.ListEnvironmentsResponse{}
	for _, n := range names {
		m, err := v.s.names.manifest(ctx, n)
		if damaged(err) {
			v.s.o.Log.WarnContext(ctx, "an environment is damaged", "kind", n.Kind, "name", n.Name, "tag", n.Tag, "digest", n.Digest, "error", err)
			m = image.Manifest{}
		} else if err != nil {
			return nil, err
		}
		res.Environments = append(res.Environments, writeEnvironment(n, m))
	}
	if len(names) == size {
		res.NextPageToken = nameToken(names[size-1].Key())
	}
	return connect.NewResponse(res), nil
}

// GetEnvironment implements the service.
func (v environmentService) GetEnvironment(ctx context.Context, r *connect.Request[dsecv1.GetEnvironmentRequest]) (*connect.Response[dsecv1.GetEnvironmentResponse], error) {
	if err := checkKind(r.Msg.GetKind()); err != nil {
		return nil, err
	}
	ref, err := sandbox.ParseEnvRef(r.Msg.GetName())
	if err != nil {
		return nil, err
	}
	n, err := v.s.names.find(ctx, exchangeOf(ctx).who.Project, r.Msg.GetKind(), ref)
	if err != nil {
		return nil, err
	}
	m, err := v.s.names.manifest(ctx, n)
	if err != nil {
		return nil, err
	}
	e := writeEnvironment(n, m)
	if ref.Digest != "" {
		e.Name = ref.String()
	}
	return connect.NewResponse(&dsecv1.GetEnvironmentResponse{Environment: e}), nil
}

// RemoveEnvironment implements the service. Sandboxes that use it are not concerned: they pin the digest.
func (v environmentService) RemoveEnvironment(ctx context.Context, r *connect.Request[dsecv1.RemoveEnvironmentRequest]) (*connect.Response[dsecv1.RemoveEnvironmentResponse], error) {
	if err := checkKind(r.Msg.GetKind()); err != nil {
		return nil, err
	}
	ref, err := tagged(r.Msg.GetName())
	if err != nil {
		return nil, err
	}
	err = v.s.o.Store.RemoveName(ctx, exchangeOf(ctx).who.Project, r.Msg.GetKind(), ref.Name, ref.Tag)
	v.s.names.changed()
	switch {
	case err == nil:
		return connect.NewResponse(&dsecv1.RemoveEnvironmentResponse{}), nil
	case sandbox.ClassOf(err) == sandbox.NotFound:
		return nil, noEnvironment(r.Msg.GetKind(), ref)
	}
	return nil, fmt.Errorf("remove name: %w", err)
}

// tagged parses a name that can be pinned or removed.
func tagged(name string) (sandbox.EnvRef, error) {
	ref, err := sandbox.ParseEnvRef(name)
	if err == nil && ref.Digest != "" {
		err = sandbox.Errorf(sandbox.InvalidArgument, "invalid_name", "a name:tag is needed here; a digest cannot be given or removed")
	}
	return ref, err
}

// importEnvironment makes an environment of an uploaded archive. The name is pinned when everything is durable, in place of
// what it pinned before.
func (s *Server) importEnvironment(w http.ResponseWriter, r *http.Request) {
	x := w.(*exchange)
	e, err := s.importArchive(x, r)
	if err != nil {
		x.fail(r, err)
		return
	}
	b, err := strictJSON{}.Marshal(e)
	if err != nil {
		x.fail(r, fmt.Errorf("encode environment: %w", err))
		return
	}
	x.Header().Set("Content-Type", "application/json")
	_, _ = x.Write(b) // the exchange notes it
}

func (s *Server) importArchive(x *exchange, r *http.Request) (*dsecv1.Environment, error) {
	kind := r.PathValue("kind")
	if err := checkKind(kind); err != nil {
		return nil, err
	}
	ref, err := tagged(r.PathValue("name"))
	if err != nil {
		return nil, err
	}
	config, err := parseConfig(r.URL.RawQuery)
	if err != nil {
		return nil, err
	}
	select {
	case s.imports <- struct{}{}:
		defer func() { <-s.imports }()
	default:
		return nil, sandbox.Errorf(sandbox.ResourceExhausted, "too_many_imports", "%d imports are running, which is the most here; try again when one has ended", cap(s.imports))
	}
	ctx := r.Context()
	digest, m, err := s.o.Images.Import(ctx, kind, r.Body, config)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil { // nobody would know that the name has changed
		return nil, err
	}
	n := store.Name{Project: x.who.Project, Kind: kind, Name: ref.Name, Tag: ref.Tag, Digest: digest, CreatedAt: s.o.Now().UTC(), CreatedBy: x.who.Principal}
	if err := s.o.Store.PutName(ctx, n); err != nil {
		return nil, fmt.Errorf("pin name: %w", err)
	}
	s.names.changed()
	return writeEnvironment(n, m), nil
}

// parseConfig reads the query of an import. What it does not know is refused.
func parseConfig(query string) (image.Config, error) {
	bad := func(format string, args ...any) (image.Config, error) {
		return image.Config{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", format, args...)
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return bad("the query of the request cannot be read")
	}
	var c image.Config
	for name, list := range values {
		switch {
		case name == "env":
			c.Env = make(map[string]string, len(list))
			for _, kv := range list {
				k, v, ok := strings.Cut(kv, "=")
				if !ok {
					return bad("env=%.64q is not of the form NAME=VALUE", kv)
				}
				c.Env[k] = v
			}
		case len(list) > 1:
			return bad("%.64q is given %d times", name, len(list))
		case name == "user":
			c.User = list[0]
		case name == "workdir":
			c.Workdir = list[0]
		default:
			return bad("%.64q is unknown here; user, workdir and env can be given", name)
		}
	}
	if err := c.Validate(); err != nil {
		return image.Config{}, err
	}
	return c, nil
}
