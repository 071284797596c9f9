package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"

	"connectrpc.com/connect"

	"dsec/internal/grpcerr"
	"dsec/internal/inflight"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// wireCode is a class's code. Connect's numbers are gRPC's.
func wireCode(c sandbox.Class) connect.Code { return connect.Code(grpcerr.Code(c)) }

// noSandbox is the one answer for ids that are unknown, foreign, or of an edge that does not exist. The edge uses the same
// words on byte routes, whose answers pass as they are.
func noSandbox(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "there is no sandbox %s; it may have ended and been forgotten", id).
		WithFact(grpcerr.FactSandboxID, id)
}

// about makes an edge's answer about a sandbox the same, whatever the edge knows of it.
func about(id sandbox.ID, err error) error {
	if err == nil {
		return nil
	}
	e := sandbox.AsError(err)
	switch {
	case e.Class == sandbox.NotFound && e.Reason == "sandbox_not_found":
		return noSandbox(string(id))
	case e.Facts[grpcerr.FactSandboxID] == "":
		return e.WithFact(grpcerr.FactSandboxID, string(id))
	}
	return e
}

// toConnect is the one place where errors become wire errors. A cause stays here, for the log.
func toConnect(e *sandbox.Error) *connect.Error {
	err := connect.NewError(wireCode(e.Class), errors.New(e.Message))
	if d, derr := connect.NewErrorDetail(grpcerr.Info(e)); derr == nil { // fails only for facts that are not UTF-8
		err.AddDetail(d)
	}
	return err
}

// classify is AsError for what reading a request's body can give.
func classify(err error) *sandbox.Error {
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &big):
		return sandbox.AsError(tooLarge(big.Limit))
	case errors.Is(err, os.ErrDeadlineExceeded):
		return sandbox.Errorf(sandbox.DeadlineExceeded, reasonTooSlow, "the request's body made no progress for too long").WithCause(err)
	}
	return sandbox.AsError(err)
}

// refused says in our words what Connect refused by itself, with its code: what came was no request that it can read.
func (x *exchange) refused(code, message string) *sandbox.Error {
	if x.bodyErr != nil {
		if e := classify(x.bodyErr); e.Class != sandbox.Internal {
			return e
		}
	}
	if code == connect.CodeUnknown.String() || x.bodyErr != nil { // Connect's own word for what it could not read
		return sandbox.Errorf(sandbox.InvalidArgument, reasonMalformed, "the request's body broke off").WithCause(errors.Join(x.bodyErr, errors.New(message)))
	}
	class := sandbox.ClassByName(code)
	switch class {
	case sandbox.Internal:
		return sandbox.AsError(errors.New(message))
	case sandbox.Canceled, sandbox.DeadlineExceeded:
		return sandbox.Errorf(class, class.String(), "%s", message)
	case sandbox.ResourceExhausted:
		return sandbox.Errorf(class, reasonTooLarge, "%s", message)
	}
	return sandbox.Errorf(class, reasonMalformed, "%s", message)
}

const (
	reasonMalformed = "malformed_request"
	reasonTooLarge  = "request_too_large"
	reasonTooSlow   = "request_too_slow"
	reasonWrongType = "unsupported_content_type"
)

var errorWriter = connect.NewErrorWriter()

// fail answers with an error, in the form that the request's protocol wants: a Connect error as JSON, or the end of a
// Connect stream.
func (x *exchange) fail(r *http.Request, err error) {
	x.failure = classify(err)
	if x.code != 0 { // too late for an answer
		return
	}
	x.Header().Set(ports.Error, x.failure.Reason)
	x.advise()
	if werr := errorWriter.Write(x, r, toConnect(x.failure)); werr != nil && x.writeErr == nil {
		x.writeErr = werr
	}
}

// advise says when to try again, where that is known.
func (x *exchange) advise() {
	if x.failure.Reason == inflight.Reason {
		x.Header().Set("Retry-After", inflight.RetryAfter)
	}
}

// translator turns the errors of handlers into wire errors and notes them for the log.
func (s *Server) translator() connect.Interceptor { return translator{} }

type translator struct{}

func (translator) note(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	x := exchangeOf(ctx)
	var known *sandbox.Error
	var refusal *connect.Error // a stream's request is read within the interceptor, and nothing else there makes one
	if !errors.As(err, &known) && errors.As(err, &refusal) {
		code := refusal.Code()
		if code == connect.CodeInternal { // Connect's "protocol error"
			code = connect.CodeUnknown
		}
		x.failure = x.refused(code.String(), refusal.Message())
	} else {
		x.failure = classify(err)
	}
	x.advise()
	return toConnect(x.failure)
}

func (t translator) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		res, err := next(ctx, r)
		if err != nil {
			return nil, t.note(ctx, err)
		}
		return res, nil
	}
}

func (translator) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (t translator) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return t.note(ctx, next(ctx, conn))
	}
}

// explained makes the errors of a Connect handler like all others. What it answers before any of our code runs, to a request
// that it cannot read, is held back and replaced.
func explained(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		held := &heldBack{exchange: x}
		h.ServeHTTP(held, r)
		if held.code == 0 {
			return
		}
		if held.code == http.StatusUnsupportedMediaType {
			x.status = held.code
			x.fail(r, sandbox.Errorf(sandbox.InvalidArgument, reasonWrongType, "a body of type %.100q is not taken here; Accept-Post lists what is", r.Header.Get("Content-Type")))
			return
		}
		var wire struct{ Code, Message string }
		if err := json.Unmarshal(held.body.Bytes(), &wire); err != nil {
			x.fail(r, fmt.Errorf("connect answered %d and no error: %w", held.code, err))
			return
		}
		x.fail(r, x.refused(wire.Code, wire.Message))
	})
}

// heldBack keeps an answer that tells of an error, unless it is one of ours.
type heldBack struct {
	*exchange
	code int
	body bytes.Buffer
}

// WriteHeader holds errors back.
func (h *heldBack) WriteHeader(code int) {
	if code >= 400 && h.failure == nil {
		h.code = code
		return
	}
	h.exchange.WriteHeader(code)
}

// Write holds errors back.
func (h *heldBack) Write(b []byte) (int, error) {
	if h.code != 0 {
		return h.body.Write(b)
	}
	return h.exchange.Write(b)
}
