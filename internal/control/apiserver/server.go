// Package apiserver is the public API: Connect (protobuf and JSON over HTTP/1.1 and unencrypted HTTP/2) and the byte routes
// of ARCHITECTURE.md.
//
// The way of a request: the table of routes (routes.go) names its permission and its bound; exchange.go authenticates it,
// bounds and times its body, and logs it; the handlers parse ids, look nothing up before that, and pass on to the edge that
// the id names. Errors become wire errors in one place (errors.go).
//
// What surprises:
//
//   - Every route needs a key but /healthz, also routes that do not exist.
//   - JSON with unknown fields is refused: a limit with a misspelt name must not be a sandbox without that limit.
//   - Answers to creates are flushed and looked after: one that could not be written is taken back (package launch).
//   - What a project has under way is bounded (package inflight): one more request is refused before anything of it is done.
//   - Bytes are copied between two HTTP connections, and nothing here knows what they are.
package apiserver

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/iam"
	"dsec/internal/control/launch"
	"dsec/internal/control/store"
	"dsec/internal/control/watcher"
	"dsec/internal/image"
	"dsec/internal/inflight"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// An Edge is what is asked of one edge beside creates: *edgeclient.Client.
type Edge interface {
	GetSandbox(ctx context.Context, signed string, r *edgev1.GetSandboxRequest) (*dsecv1.Sandbox, error)
	ListSandboxes(ctx context.Context, signed string, r *edgev1.ListSandboxesRequest) (*edgev1.ListSandboxesResponse, error)
	// Call makes one call of the contract within f.
	Call(ctx context.Context, signed string, f func(context.Context, edgev1.EdgeServiceClient) error) error
	// ServePort passes a request to a server inside; DialPort connects to one. Its error may be a ports.Answer.
	ServePort(w http.ResponseWriter, r *http.Request, signed string, req ports.Request, onError func(http.ResponseWriter, *http.Request, error))
	DialPort(ctx context.Context, signed, target string) (ports.Stream, error)
	ServeBytes(w http.ResponseWriter, r *http.Request, signed string, onError func(http.ResponseWriter, *http.Request, error))
}

// An Images is where environments are kept.
type Images interface {
	// Import reads a tar archive (plain or gzip) to its end and returns when the manifest and everything it names are
	// durable. A source that ends early leaves nothing.
	Import(ctx context.Context, kind string, archive io.Reader, config image.Config) (digest string, m image.Manifest, err error)
	Manifest(ctx context.Context, digest string) (image.Manifest, error)
}

// Options of a Server. Zero numbers mean the defaults.
type Options struct {
	IAM      *iam.IAM
	Store    store.Store
	Launcher *launch.Launcher
	Edges    map[sandbox.EdgeCode]Edge
	Nodes    func() []watcher.Observation
	Images   Images
	Version  string
	Now      func() time.Time
	Log      *slog.Logger

	MaxImports      int   // at a time
	MaxArchiveBytes int64 // of an upload, as it is sent
	BatchWindow     int   // creates in flight of one CreateSandboxes
	BodyIdle        time.Duration
	PortSite        PortSite // where browsers reach ports
	Requests        inflight.Limits
}

// Defaults.
const (
	defaultMaxImports  = 2
	defaultMaxArchive  = 64 << 30
	defaultBatchWindow = 256
	defaultBodyIdle    = 30 * time.Second
)

// A Server answers the public API.
type Server struct {
	o        Options
	names    *resolver
	services *serviceNames
	imports  chan struct{} // one token for each import that may run
	under    *inflight.Counter
	routes   []route
	inside   http.Handler // of requests to servers inside
	handler  http.Handler
}

// New makes a server.
func New(o Options) *Server {
	setDefault(&o.MaxImports, defaultMaxImports)
	setDefault(&o.MaxArchiveBytes, defaultMaxArchive)
	setDefault(&o.BatchWindow, defaultBatchWindow)
	setDefault(&o.BodyIdle, defaultBodyIdle)
	s := &Server{o: o, names: newResolver(o.Store, o.Images, o.Now), services: newServiceNames(o.Store, o.Now), imports: make(chan struct{}, o.MaxImports), under: inflight.New(o.Requests)}
	s.routes = s.table()
	s.handler = s.build()
	return s
}

func setDefault[T comparable](p *T, d T) {
	var zero T
	if *p == zero {
		*p = d
	}
}

// Handler is the whole API. Serve it with NewHTTPServer.
func (s *Server) Handler() http.Handler { return s.handler }

// Bounds of connections. There is no bound on the time of a whole request or answer: commands run for hours, and archives
// are large. Bodies must make progress (Options.BodyIdle), heads must come whole and soon.
const (
	headTimeout    = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
	maxStreams     = 1000
	pingAfter      = 30 * time.Second
)

// NewHTTPServer makes the server that a Handler is meant for: bounded heads, idle connections ended, HTTP/1.1 and HTTP/2
// without TLS.
func NewHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams, SendPingTimeout: pingAfter},
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug), // mostly clients that went away
	}
}

func (s *Server) edge(id sandbox.ID) (Edge, error) {
	if e := s.o.Edges[id.Edge()]; e != nil {
		return e, nil
	}
	return nil, noSandbox(string(id))
}

// target finds the edge of a sandbox and the grant for it.
func (s *Server) target(who iam.Identity, raw string) (sandbox.ID, Edge, string, error) {
	id, err := sandbox.ParseID(raw)
	if err != nil {
		return "", nil, "", err
	}
	e, err := s.edge(id)
	if err != nil {
		return "", nil, "", err
	}
	signed, err := s.o.IAM.Grant(who, id.Edge())
	return id, e, signed, err
}
