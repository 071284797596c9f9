package edge

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/internal/inflight"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// bodyIdle is how long a peer may neither send nor take a byte before its connection is cut. There is no bound on a whole
// transfer, and none on a pause of a running command's input.
const bodyIdle = time.Minute

// ByteHandler serves the byte routes of ARCHITECTURE.md. Grants come in the header Dsec-Grant.
func (e *Edge) ByteHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/sandboxes/{id}/files", e.route(e.getFile))
	mux.HandleFunc("PUT /v1/sandboxes/{id}/files", e.route(e.putFile))
	mux.HandleFunc("GET /v1/sandboxes/{id}/archive", e.route(e.getArchive))
	mux.HandleFunc("PUT /v1/sandboxes/{id}/archive", e.route(e.putArchive))
	mux.HandleFunc("POST /v1/sandboxes/{id}/archive", e.route(e.postArchive))
	mux.HandleFunc("GET /v1/sandboxes/{id}/commands/{cmd}/{stream}", e.route(e.getOutput))
	mux.HandleFunc("PUT /v1/sandboxes/{id}/commands/{cmd}/stdin", e.route(e.putStdin))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, sandbox.Errorf(sandbox.NotFound, "route_not_found", "there is no %s %s", r.Method, clip(r.URL.Path)))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rt, ok := ports.Parse(r.URL.EscapedPath()); ok { // before the mux cleans the path
			e.servePort(w, r, rt)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// errStarted wraps what went wrong after the answer had begun: all that is left is to cut the connection, so that the
// peer does not take what it has for the whole.
type errStarted struct{ error }

func (e errStarted) Unwrap() error { return e.error }

// route checks the grant, finds the sandbox, counts the request as activity and writes what goes wrong.
func (e *Edge) route(f func(http.ResponseWriter, *http.Request, *instance) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		g, err := e.authorize(r.Header.Get(grant.Header), grant.RoleUser)
		if err != nil {
			writeError(w, err)
			return
		}
		id := sandbox.ID(r.PathValue("id"))
		in, err := e.index.lookup(id, g.Project)
		if err != nil {
			writeError(w, about(id, err))
			return
		}
		place, err := e.under.Enter(g.Project, inflight.Stream)
		if err != nil {
			writeError(w, err)
			return
		}
		defer place.Leave()
		defer e.begin(in)()
		err = f(w, r, in)
		var started errStarted
		switch {
		case err == nil:
		case errors.As(err, &started):
			_ = e.seen(r.Context(), r.Pattern, started.error)
			panic(http.ErrAbortHandler)
		default:
			writeError(w, about(id, e.seen(r.Context(), r.Pattern, err)))
		}
	}
}

// about says in an error which sandbox it is about.
func about(id sandbox.ID, err error) *sandbox.Error {
	se := sandbox.AsError(err)
	if se.Facts[grpcerr.FactSandboxID] != "" {
		return se
	}
	return se.WithFact(grpcerr.FactSandboxID, string(id))
}

// writeError answers with the JSON of a Connect error.
func writeError(w http.ResponseWriter, err error) {
	se := sandbox.AsError(err)
	writeErrorStatus(w, grpcerr.HTTPStatus(se.Class), se)
}

func writeErrorStatus(w http.ResponseWriter, status int, se *sandbox.Error) {
	w.Header().Set(ports.Error, se.Reason)
	if se.Reason == inflight.Reason {
		w.Header().Set("Retry-After", inflight.RetryAfter)
	}
	writeJSON(w, status, errorBody(se))
}

// A connectError is the JSON of one.
type connectError struct {
	Code    string          `json:"code"`
	Message string          `json:"message"`
	Details []connectDetail `json:"details"`
}

type connectDetail struct {
	Type  string          `json:"type"`
	Debug json.RawMessage `json:"debug"`
}

func errorBody(se *sandbox.Error) connectError {
	body := connectError{Code: se.Class.String(), Message: se.Message}
	if debug, err := protojson.Marshal(grpcerr.Info(se)); err == nil { // fails only for facts that are not UTF-8
		body.Details = append(body.Details, connectDetail{Type: string((*dsecv1.ErrorInfo)(nil).ProtoReflect().Descriptor().FullName()), Debug: debug})
	}
	return body
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(http.ErrAbortHandler) // plain structs always encode
	}
	for _, h := range []string{"Accept-Ranges", "Content-Length"} {
		w.Header().Del(h)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // a peer that is gone does not read errors either
}

// queryInt is a non-negative number of the query, or absent.
func queryInt(r *http.Request, name string, absent int64) (int64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", "%s=%q is not a whole number of at least 0", name, clip(s))
	}
	return n, nil
}

// queryBools reads those of the query; one that is not given stays as it is.
func queryBools(r *http.Request, wanted map[string]*bool) error {
	for name, to := range wanted {
		s := r.URL.Query().Get(name)
		if s == "" {
			continue
		}
		b, err := strconv.ParseBool(s)
		if err != nil {
			return sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", "%s=%q is neither 0 nor 1", name, clip(s))
		}
		*to = b
	}
	return nil
}

// steady moves the connection's deadlines along with its progress.
type steady struct {
	rc   *http.ResponseController
	w    io.Writer
	r    io.Reader
	idle time.Duration // longest pause; 0 = bodyIdle
}

func (s *steady) Write(p []byte) (int, error) {
	_ = s.rc.SetWriteDeadline(time.Now().Add(cmp.Or(s.idle, bodyIdle))) // not every ResponseWriter can; then the server's own holds
	return s.w.Write(p)
}

func (s *steady) Read(p []byte) (int, error) {
	_ = s.rc.SetReadDeadline(time.Now().Add(cmp.Or(s.idle, bodyIdle)))
	return s.r.Read(p)
}

// copyBody copies until src's end. Where it fails the connection is cut.
func copyBody(dst io.Writer, src io.Reader) error {
	buf := make([]byte, 64<<10)
	for {
		n, rerr := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return errStarted{err}
			}
		}
		switch {
		case errors.Is(rerr, io.EOF):
			return nil
		case rerr != nil:
			return errStarted{rerr}
		}
	}
}

// untilEnd lets the reads of a request's body wait for as long as a command runs: a person may think for hours, and a client
// that is gone closes its connection. After that bodyIdle is left, for what is on its way, and for the server, which reads an
// unread body to its end.
func untilEnd(ctx context.Context, rc *http.ResponseController, c GuestCommand) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = c.Wait(ctx) // until the command's end, its sandbox's, or stop
		_ = rc.SetReadDeadline(time.Now().Add(bodyIdle))
	}()
	return func() { cancel(); <-exited }
}

// putStdin writes input at an offset; the answer is the offset up to which the command has been given input.
func (e *Edge) putStdin(w http.ResponseWriter, r *http.Request, in *instance) error {
	if _, err := in.live(); err != nil {
		return err
	}
	c, err := in.command(r.PathValue("cmd"))
	if err != nil {
		return err
	}
	offset, err := queryInt(r, "offset", 0)
	if err != nil {
		return err
	}
	var end, exact bool
	if err := queryBools(r, map[string]*bool{"close": &end, "exact": &exact}); err != nil {
		return err
	}
	write := c.WriteStdin
	if exact {
		write = c.WriteStdinExactly
	}
	stop := untilEnd(r.Context(), http.NewResponseController(w), c)
	at, err := write(r.Context(), offset, r.Body, end)
	stop()
	if err != nil {
		return err
	}
	w.Header().Set("Dsec-Offset", strconv.FormatInt(at, 10))
	writeJSON(w, http.StatusOK, struct {
		Offset int64 `json:"offset"`
	}{at})
	return nil
}

// putFile replaces or makes a file: all of it, or nothing. With append or offset it writes to the file itself.
func (e *Edge) putFile(w http.ResponseWriter, r *http.Request, in *instance) error {
	g, err := in.live()
	if err != nil {
		return err
	}
	f, err := fileWriteOf(r, in)
	if err != nil {
		return err
	}
	size, sum, err := g.WriteFile(r.Context(), f, &steady{rc: http.NewResponseController(w), r: r.Body})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, struct {
		Size   int64  `json:"size"`
		SHA256 string `json:"sha256"`
	}{size, hex.EncodeToString(sum)})
	return nil
}

func fileWriteOf(r *http.Request, in *instance) (FileWrite, error) {
	bad := func(format string, args ...any) (FileWrite, error) {
		return FileWrite{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", format, args...)
	}
	path, err := pathOf(r)
	if err != nil {
		return FileWrite{}, err
	}
	f := FileWrite{Path: path, User: in.userOf(r.URL.Query().Get("user")), Size: r.ContentLength}
	if s := r.URL.Query().Get("mode"); s != "" {
		mode, err := strconv.ParseUint(s, 8, 32)
		if err != nil || mode > 0o7777 {
			return bad("mode=%q is not an octal file mode", clip(s))
		}
		f.Mode = uint32(mode)
	}
	if err := queryBools(r, map[string]*bool{"parents": &f.MakeParents, "exclusive": &f.Exclusive}); err != nil {
		return FileWrite{}, err
	}
	if err := inPlaceOf(r, &f); err != nil {
		return FileWrite{}, err
	}
	if s := r.Header.Get("Dsec-Sha256"); s != "" {
		if f.SHA256, err = hex.DecodeString(s); err != nil || len(f.SHA256) != 32 {
			return bad("Dsec-Sha256 is not 64 hex digits")
		}
	}
	return f, nil
}

// inPlaceOf reads whether the file itself is written to: at its end, or at an offset.
func inPlaceOf(r *http.Request, f *FileWrite) (err error) {
	if err := queryBools(r, map[string]*bool{"append": &f.Append, "truncate": &f.Truncate}); err != nil {
		return err
	}
	if f.Offset, err = queryInt(r, "offset", 0); err != nil {
		return err
	}
	f.InPlace = r.URL.Query().Get("offset") != ""
	if f.Append && f.InPlace || f.Truncate && !f.InPlace {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", "give append or offset, and truncate only with offset")
	}
	return nil
}
