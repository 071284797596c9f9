package apiserver

import (
	"net/http"
	"path"
	"strings"
	"time"

	"connectrpc.com/connect"

	"dsec/api/dsec/v1/dsecv1connect"
	"dsec/internal/control/iam"
	"dsec/internal/inflight"
	"dsec/sandbox"
)

// Bounds of request bodies, in bytes.
const (
	maxMessage      = 1 << 20
	maxExecMessage  = 20 << 20 // a script of 16 MiB, as JSON with escapes
	maxWatchMessage = 4 << 20  // 100,000 ids
	maxNameList     = 2 << 20  // of files, in a list
	noLimit         = -1
)

// A route is one thing that can be asked. Every route has a permission; there is no way to leave it out.
type route struct {
	pattern    string // of http.ServeMux
	permission iam.Permission
	limit      int64         // of the body; noLimit where a quota further in bounds it
	idle       time.Duration // longest pause within the body; 0 = none
	kind       inflight.Kind
	handler    http.Handler
}

func (s *Server) table() []route {
	options := []connect.HandlerOption{
		connect.WithInterceptors(s.translator()),
		connect.WithCodec(strictJSON{"json"}), connect.WithCodec(strictJSON{"json; charset=utf-8"}),
		connect.WithCompressMinBytes(4 << 10),
		connect.WithConditionalHandlerOptions(func(spec connect.Spec) []connect.HandlerOption {
			return []connect.HandlerOption{connect.WithReadMaxBytes(messageLimit(spec.Procedure))}
		}),
	}
	_, sandboxes := dsecv1connect.NewSandboxServiceHandler(sandboxService{s}, options...)
	_, environments := dsecv1connect.NewEnvironmentServiceHandler(environmentService{s}, options...)
	_, networks := dsecv1connect.NewNetworkServiceHandler(networkService{s}, options...)
	_, system := dsecv1connect.NewSystemServiceHandler(systemService{s}, options...)
	const files, archive, commands = "/v1/sandboxes/{id}/files", "/v1/sandboxes/{id}/archive", "/v1/sandboxes/{id}/commands/{cmd}/"
	return []route{
		s.rpc(dsecv1connect.SandboxServiceCreateSandboxProcedure, iam.Use, sandboxes),
		s.streaming(dsecv1connect.SandboxServiceCreateSandboxesProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceGetSandboxProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceListSandboxesProcedure, iam.Read, sandboxes),
		s.ending(dsecv1connect.SandboxServiceDeleteSandboxProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceExecProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceGetCommandProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceListCommandsProcedure, iam.Read, sandboxes),
		s.ending(dsecv1connect.SandboxServiceKillCommandProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceResizeTerminalProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceCreateSessionProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceListSessionsProcedure, iam.Read, sandboxes),
		s.ending(dsecv1connect.SandboxServiceDeleteSessionProcedure, iam.Use, sandboxes),
		s.streaming(dsecv1connect.SandboxServiceListFilesProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceStatFilesProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceChangeFilesProcedure, iam.Use, sandboxes),
		s.streaming(dsecv1connect.SandboxServiceWatchFilesProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceGetMetricsProcedure, iam.Read, sandboxes),
		s.streaming(dsecv1connect.SandboxServiceWatchMetricsProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceListProcessesProcedure, iam.Read, sandboxes),
		s.ending(dsecv1connect.SandboxServiceSignalProcessProcedure, iam.Use, sandboxes),
		s.streaming(dsecv1connect.SandboxServiceWatchSandboxesProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceSetNetworkProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceGetNetworkProcedure, iam.Read, sandboxes),
		s.rpc(dsecv1connect.SandboxServiceCreatePortURLProcedure, iam.Use, sandboxes),
		s.rpc(dsecv1connect.EnvironmentServiceListEnvironmentsProcedure, iam.Read, environments),
		s.rpc(dsecv1connect.EnvironmentServiceGetEnvironmentProcedure, iam.Read, environments),
		s.rpc(dsecv1connect.EnvironmentServiceRemoveEnvironmentProcedure, iam.Publish, environments),
		s.rpc(dsecv1connect.NetworkServicePutServiceProcedure, iam.Operate, networks),
		s.rpc(dsecv1connect.NetworkServiceGetServiceProcedure, iam.Read, networks),
		s.rpc(dsecv1connect.NetworkServiceListServicesProcedure, iam.Read, networks),
		s.rpc(dsecv1connect.NetworkServiceRemoveServiceProcedure, iam.Operate, networks),
		s.rpc(dsecv1connect.SystemServiceGetInfoProcedure, iam.Read, system),

		s.bytes("GET "+files, iam.Read, 0, 0),
		s.bytes("PUT "+files, iam.Use, noLimit, s.o.BodyIdle),
		s.bytes("GET "+archive, iam.Read, 0, 0),
		s.bytes("POST "+archive, iam.Read, maxNameList, s.o.BodyIdle), // names of what is packed
		s.bytes("PUT "+archive, iam.Use, noLimit, s.o.BodyIdle),
		s.bytes("GET "+commands+"stdout", iam.Read, 0, 0),
		s.bytes("GET "+commands+"stderr", iam.Read, 0, 0),
		s.bytes("PUT "+commands+"stdin", iam.Use, noLimit, 0), // a person may think for hours
		insideRoute("/v1/sandboxes/{id}/ports/{port}/http/{path...}", s.servePort),
		insideRoute("/v1/sandboxes/{id}/ports/{port}/tcp", s.servePort),
		insideRoute("/v1/sandboxes/{id}/http", s.servePort),
		{"POST /v1/environments/{kind}/{name...}", iam.Publish, s.o.MaxArchiveBytes, s.o.BodyIdle, inflight.Stream, http.HandlerFunc(s.importEnvironment)},
	}
}

// rpc is the route of a unary call.
func (s *Server) rpc(procedure string, p iam.Permission, h http.Handler) route {
	return route{"POST " + procedure, p, int64(messageLimit(procedure)), s.o.BodyIdle, inflight.Call, held(explained(h))}
}

// ending is that of one that ends something.
func (s *Server) ending(procedure string, p iam.Permission, h http.Handler) route {
	r := s.rpc(procedure, p, h)
	r.kind = inflight.End
	return r
}

// streaming is that of one that is answered with many messages.
func (s *Server) streaming(procedure string, p iam.Permission, h http.Handler) route {
	r := s.rpc(procedure, p, h)
	r.kind = inflight.Stream
	return r
}

// bytes is a byte route.
func (s *Server) bytes(pattern string, p iam.Permission, limit int64, idle time.Duration) route {
	return route{pattern, p, limit, idle, inflight.Stream, http.HandlerFunc(s.serveBytes)}
}

// insideRoute is a route to servers inside, by any method. It is found by ports.Parse and not by its pattern: see dispatch.
func insideRoute(pattern string, h http.HandlerFunc) route {
	return route{pattern, iam.Use, noLimit, 0, inflight.Stream, h} // a server inside may be sent something for hours
}

// Routes is the patterns of the table.
func (s *Server) Routes() []string {
	list := make([]string, len(s.routes))
	for i, r := range s.routes {
		list[i] = r.pattern
		if !strings.Contains(r.pattern, " ") { // by any method: one stands for all
			list[i] = "POST " + r.pattern
		}
	}
	return list
}

func messageLimit(procedure string) int {
	switch procedure {
	case dsecv1connect.SandboxServiceExecProcedure:
		return maxExecMessage
	case dsecv1connect.SandboxServiceWatchSandboxesProcedure:
		return maxWatchMessage
	}
	return maxMessage
}

// healthPath is the one thing that needs no key. It says that this process answers, and nothing else.
const healthPath = "/healthz"

func (s *Server) build() http.Handler {
	mux := http.NewServeMux()
	for _, r := range s.routes {
		mux.Handle(r.pattern, s.guard(r))
	}
	s.inside = s.guard(insideRoute("", s.servePort))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := &exchange{ResponseWriter: w, control: http.NewResponseController(w)}
		if r.Body != nil && r.Body != http.NoBody {
			x.readWithin(s.o.BodyIdle) // whoever it is and whatever they get: the server reads what they send to its end
		}
		if label, ok := s.o.PortSite.match(r.Host); ok {
			s.serveSite(x, r, label)
			return
		}
		if r.URL.Path == healthPath && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_, _ = w.Write([]byte("ok\n")) // the prober went away
			return
		}
		s.exchange(x, r, mux)
	})
}

// dispatch finds the route. A path that tries to be another one is refused instead of redirected, which is what ServeMux
// would do.
func (s *Server) dispatch(x *exchange, r *http.Request, mux *http.ServeMux) {
	if rt, ok := portRoute(r); ok { // whose paths are the inner server's
		s.inside.ServeHTTP(x, withRoute(r, rt))
		return
	}
	if p := r.URL.Path; p == "" || p[0] != '/' || path.Clean(p) != p {
		x.fail(r, sandbox.Errorf(sandbox.InvalidArgument, "bad_path", "the path of the request is not in its shortest form"))
		return
	}
	if _, pattern := mux.Handler(r); pattern == "" {
		x.fail(r, sandbox.Errorf(sandbox.NotFound, "no_such_route", "there is nothing at %s %.100q", r.Method, r.URL.Path))
		return
	}
	mux.ServeHTTP(x, r)
}

// guard checks the permission, takes a place among what the project has under way, and bounds the body.
func (s *Server) guard(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		if !x.who.May(rt.permission) {
			x.fail(r, sandbox.Errorf(sandbox.PermissionDenied, "permission_denied", "the role %q of this key may not do this", string(x.who.Role)))
			return
		}
		if rt.limit >= 0 && r.ContentLength > rt.limit {
			x.fail(r, tooLarge(rt.limit))
			return
		}
		place, err := s.under.Enter(x.who.Project, rt.kind)
		if err != nil {
			x.fail(r, err)
			return
		}
		defer place.Leave()
		x.place = place
		if r.Body != nil && r.Body != http.NoBody {
			x.boundBody(r, rt.limit, rt.idle)
		}
		rt.handler.ServeHTTP(x, r)
	})
}

func tooLarge(limit int64) error {
	return sandbox.Errorf(sandbox.ResourceExhausted, reasonTooLarge, "the request's body is larger than the %d bytes that this route takes", limit)
}
