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
	"dsec/internal/inflight"
	"dsec/sandbox"
)

// An exchange is one request and its answer. It is the ResponseWriter of every handler.
type exchange struct {
	http.ResponseWriter
	control *http.ResponseController
	who     iam.Identity
	place   *inflight.Place // among what its project has under way

	status   int // answer with this one, whatever the failure's class has; 0 = no
	code     int
	bodyErr  error // that ended the request's body
	writeErr error
	failure  *sandbox.Error
	release  launch.Release // of the sandbox in the answer
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange { return ctx.Value(exchangeKey{}).(*exchange) }

// exchange authenticates a request, lets it be handled, and looks after its answer.
func (s *Server) exchange(x *exchange, r *http.Request, mux *http.ServeMux) {
	began := s.o.Now()
	defer s.finish(x, r, began)
	who, err := s.o.IAM.Authenticate(r.Context(), credentials(r))
	if err != nil {
		x.Header().Set("WWW-Authenticate", "Bearer")
		x.fail(r, err)
		return
	}
	x.who = who
	s.dispatch(x, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x)), mux)
}

// finish gives the answer's sandbox to the caller, or takes it back, and logs. It also runs when a handler panicked, which
// is how a byte stream that broke is ended.
func (s *Server) finish(x *exchange, r *http.Request, began time.Time) {
	if x.release != nil {
		// Looked at before the rest is sent: a caller who has read all of it may well be gone a moment later, and keeps its sandbox.
		gone := r.Context().Err() != nil
		if err := x.control.Flush(); err != nil && x.writeErr == nil {
			x.writeErr = err
		}
		x.release(!gone && x.writeErr == nil && x.failure == nil)
	}
	ctx, level, msg := r.Context(), slog.LevelDebug, "request"
	if x.failure != nil {
		level, msg = failureLevel(x.failure.Class), "request failed"
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

// failureLevel is high for what an operator can do something about. Who can merely reach the port cannot fill the log.
func failureLevel(c sandbox.Class) slog.Level {
	switch c {
	case sandbox.Internal, sandbox.DataLoss, sandbox.Unavailable, sandbox.DeadlineExceeded:
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// Unwrap is for http.ResponseController.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// WriteHeader notes the code.
func (x *exchange) WriteHeader(code int) {
	if x.status != 0 {
		code = x.status
	}
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
		r.Body = &movingBody{r.Body, x, idle}
	} else {
		x.readWithin(0)
	}
}

// readWithin bounds the reads of the request's body from now on; 0 takes the bound away.
func (x *exchange) readWithin(d time.Duration) {
	var t time.Time
	if d > 0 {
		t = time.Now().Add(d)
	}
	_ = x.control.SetReadDeadline(t) // fails on a connection that is gone, as the next read will
}

// A movingBody sets a new deadline for each read. At the end it takes the deadline away: the server goes on reading the
// connection to see whether the client is still there. Where the body broke the deadline stays: the server would else wait
// for the rest of it, without any bound.
type movingBody struct {
	io.ReadCloser
	x    *exchange
	idle time.Duration
}

func (b *movingBody) Read(p []byte) (int, error) {
	b.x.readWithin(b.idle)
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		b.x.readWithin(0)
	case err != nil:
		b.x.bodyErr = err
	}
	return n, err
}

// A heldBody is a message, which stays in memory until it is answered: it counts with the others of its project.
type heldBody struct {
	io.ReadCloser
	x *exchange
}

func held(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		if r.Body != nil && r.Body != http.NoBody {
			r.Body = &heldBody{r.Body, x}
		}
		h.ServeHTTP(x, r)
	})
}

func (b *heldBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if full := b.x.place.Hold(int64(n)); full != nil {
		b.x.bodyErr = full
		return 0, full
	}
	return n, err
}
