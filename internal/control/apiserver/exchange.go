package apiserver

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"dsec/internal/control/iam"
	"dsec/internal/control/launch"
	"dsec/sandbox"
)

// An exchange is one request and its answer. It is the ResponseWriter of every handler.
type exchange struct {
	http.ResponseWriter
	control *http.ResponseController
	who     iam.Identity

	code     int
	writeErr error
	failure  *sandbox.Error
	release  launch.Release // of the sandbox in the answer
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange { return ctx.Value(exchangeKey{}).(*exchange) }

// exchange authenticates a request, lets it be handled, and looks after its answer.
func (s *Server) exchange(w http.ResponseWriter, r *http.Request, mux *http.ServeMux) {
	x := &exchange{ResponseWriter: w, control: http.NewResponseController(w)}
	began := s.o.Now()
	defer s.finish(x, r, began)
	who, err := s.o.IAM.Authenticate(r.Context(), r.Header.Get("Authorization"))
	r.Header.Del("Authorization") // nothing further in needs it, so nothing further in can leak it
	if err != nil {
		w.Header().Set("WWW-Authenticate", "Bearer")
		x.fail(r, err)
		return
	}
	x.who = who
	dispatch(x, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x)), mux)
}

// finish gives the answer's sandbox to the caller, or takes it back, and logs. It also runs when a handler panicked, which
// is how a byte stream that broke is ended.
func (s *Server) finish(x *exchange, r *http.Request, began time.Time) {
	if x.release != nil {
		if err := x.control.Flush(); err != nil && x.writeErr == nil {
			x.writeErr = err
		}
		x.release(x.writeErr == nil && r.Context().Err() == nil)
	}
	ctx, level, msg := r.Context(), slog.LevelDebug, "request"
	if x.failure != nil && x.failure.Class != sandbox.Canceled {
		level, msg = slog.LevelWarn, "request failed"
	}
	if !s.o.Log.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("method", r.Method), slog.String("path", r.URL.Path), slog.Int("code", x.code),
		slog.Duration("took", s.o.Now().Sub(began)), slog.String("key_id", x.who.KeyID), slog.String("principal", x.who.Principal),
	}
	if x.failure != nil {
		attrs = append(attrs, slog.String("class", x.failure.Class.String()), slog.String("reason", x.failure.Reason), slog.String("message", x.failure.Message))
		if x.failure.Cause != nil {
			attrs = append(attrs, slog.Any("cause", x.failure.Cause))
		}
	}
	s.o.Log.LogAttrs(ctx, level, msg, attrs...)
}

// Unwrap is for http.ResponseController.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// WriteHeader notes the code.
func (x *exchange) WriteHeader(code int) {
	if x.code < 200 { // informational answers are followed by another
		x.code = code
	}
	x.ResponseWriter.WriteHeader(code)
}

// Write notes errors.
func (x *exchange) Write(b []byte) (int, error) {
	if x.code == 0 {
		x.code = http.StatusOK
	}
	n, err := x.ResponseWriter.Write(b)
	if err != nil && x.writeErr == nil {
		x.writeErr = err
	}
	return n, err
}

// Flush is for handlers that look for http.Flusher.
func (x *exchange) Flush() {
	if err := x.control.Flush(); err != nil && x.writeErr == nil {
		x.writeErr = err
	}
}

// boundBody makes the body end with an error past the limit, and when it makes no progress.
func (x *exchange) boundBody(r *http.Request, limit int64, idle time.Duration) {
	if limit >= 0 {
		r.Body = http.MaxBytesReader(x, r.Body, limit)
	}
	if idle > 0 {
		r.Body = &movingBody{r.Body, x.control, idle}
	}
}

// A movingBody sets a new deadline for each read. At the end it takes the deadline away: the server goes on reading the
// connection to see whether the client is still there.
type movingBody struct {
	io.ReadCloser
	control *http.ResponseController
	idle    time.Duration
}

func (b *movingBody) Read(p []byte) (int, error) {
	if err := b.control.SetReadDeadline(time.Now().Add(b.idle)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		// Where the body broke, the connection ends with the request, whatever its deadline.
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return n, err
}
