package apiserver

import (
	"context"
	"errors"
	"net/http"
	"os"

	"connectrpc.com/connect"

	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

var codes = map[sandbox.Class]connect.Code{
	sandbox.Internal:           connect.CodeInternal,
	sandbox.InvalidArgument:    connect.CodeInvalidArgument,
	sandbox.Unauthenticated:    connect.CodeUnauthenticated,
	sandbox.PermissionDenied:   connect.CodePermissionDenied,
	sandbox.NotFound:           connect.CodeNotFound,
	sandbox.AlreadyExists:      connect.CodeAlreadyExists,
	sandbox.FailedPrecondition: connect.CodeFailedPrecondition,
	sandbox.ResourceExhausted:  connect.CodeResourceExhausted,
	sandbox.DeadlineExceeded:   connect.CodeDeadlineExceeded,
	sandbox.Canceled:           connect.CodeCanceled,
	sandbox.Unavailable:        connect.CodeUnavailable,
	sandbox.Unsupported:        connect.CodeUnimplemented,
	sandbox.DataLoss:           connect.CodeDataLoss,
}

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
	err := connect.NewError(codes[e.Class], errors.New(e.Message))
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
		return sandbox.Errorf(sandbox.DeadlineExceeded, "request_too_slow", "the request's body made no progress for too long").WithCause(err)
	}
	return sandbox.AsError(err)
}

var errorWriter = connect.NewErrorWriter()

// fail answers with an error, in the form that the request's protocol wants: a Connect error as JSON, or the end of a
// Connect stream.
func (x *exchange) fail(r *http.Request, err error) {
	x.failure = classify(err)
	if x.code != 0 { // too late for an answer
		return
	}
	if werr := errorWriter.Write(x, r, toConnect(x.failure)); werr != nil && x.writeErr == nil {
		x.writeErr = werr
	}
}

// translator turns the errors of handlers into wire errors and notes them for the log.
func (s *Server) translator() connect.Interceptor { return translator{} }

type translator struct{}

func (translator) note(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	e := classify(err)
	exchangeOf(ctx).failure = e
	return toConnect(e)
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
