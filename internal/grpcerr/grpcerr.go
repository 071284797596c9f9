// Package grpcerr is the one translation between sandbox.Error and what travels between apiserver and edge: a gRPC status
// with a dsec.v1.ErrorInfo detail, or a dsec.v1.Failure inside a stream of results. It has the statuses of byte routes, too.
//
// What surprises: a cause never travels. It belongs into the log of the side where it happened, and a peer sees only the
// message that was written for users. The fact "sandbox_id" travels in ErrorInfo's field of that name.
package grpcerr

import (
	"context"
	"errors"
	"maps"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// FactSandboxID is the fact that is carried as ErrorInfo.sandbox_id.
const FactSandboxID = "sandbox_id"

// wireForms are a class's code, and the HTTP status that Connect has for that code.
var wireForms = map[sandbox.Class]struct {
	code codes.Code
	http int
}{
	sandbox.Internal:           {codes.Internal, 500},
	sandbox.InvalidArgument:    {codes.InvalidArgument, 400},
	sandbox.Unauthenticated:    {codes.Unauthenticated, 401},
	sandbox.PermissionDenied:   {codes.PermissionDenied, 403},
	sandbox.NotFound:           {codes.NotFound, 404},
	sandbox.AlreadyExists:      {codes.AlreadyExists, 409},
	sandbox.FailedPrecondition: {codes.FailedPrecondition, 400},
	sandbox.ResourceExhausted:  {codes.ResourceExhausted, 429},
	sandbox.DeadlineExceeded:   {codes.DeadlineExceeded, 504},
	sandbox.Canceled:           {codes.Canceled, 499},
	sandbox.Unavailable:        {codes.Unavailable, 503},
	sandbox.Unsupported:        {codes.Unimplemented, 501},
	sandbox.DataLoss:           {codes.DataLoss, 500},
}

// Code is a class's code on the wire.
func Code(c sandbox.Class) codes.Code {
	if w, ok := wireForms[c]; ok {
		return w.code
	}
	return codes.Internal
}

// HTTPStatus is a class's status where an answer is plain HTTP.
func HTTPStatus(c sandbox.Class) int {
	if w, ok := wireForms[c]; ok {
		return w.http
	}
	return 500
}

var codeClasses = func() map[codes.Code]sandbox.Class {
	m := make(map[codes.Code]sandbox.Class, len(wireForms))
	for class, w := range wireForms {
		m[w.code] = class
	}
	return m
}()

// ToStatus makes the error a gRPC handler returns. nil stays nil. An error that is no sandbox.Error becomes Internal with
// a message that tells nothing of our insides; log it before.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	e := sandbox.AsError(err)
	st := status.New(Code(e.Class), e.Message)
	if detailed, derr := st.WithDetails(Info(e)); derr == nil { // fails only for facts that are not UTF-8
		st = detailed
	}
	return st.Err()
}

// FromStatus makes a *sandbox.Error of what a gRPC call returned. nil stays nil. A status without detail (made by gRPC
// itself) keeps its class; where the transport failed that is Unavailable with reason "edge_unavailable".
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	var known *sandbox.Error
	if errors.As(err, &known) {
		return known
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return sandbox.AsError(err)
	}
	st, ok := status.FromError(err)
	if !ok {
		return sandbox.AsError(err)
	}
	class, ok := codeClasses[st.Code()]
	if !ok {
		class = sandbox.Internal
	}
	for _, d := range st.Details() {
		if info, ok := d.(*dsecv1.ErrorInfo); ok {
			return FromInfo(class, st.Message(), info)
		}
	}
	return bare(class, st)
}

// bare is for a status that gRPC made: its message is for logs.
func bare(class sandbox.Class, st *status.Status) error {
	switch class {
	case sandbox.Unsupported: // a node of an older version than the control plane
		return sandbox.Errorf(class, "node_lacks_call", "the sandbox's node does not know this request: it runs another version of dsec; update it").WithCause(st.Err())
	case sandbox.Unavailable:
		return sandbox.Errorf(class, "edge_unavailable", "the node does not answer; try again").WithCause(st.Err())
	case sandbox.Canceled:
		return sandbox.Errorf(class, "canceled", "the request was cancelled").WithCause(st.Err())
	case sandbox.DeadlineExceeded:
		return sandbox.Errorf(class, "deadline_exceeded", "the request took longer than its deadline").WithCause(st.Err())
	case sandbox.ResourceExhausted: // gRPC's own: a message over its size limit
		return sandbox.Errorf(class, "message_too_large", "the message is larger than the node accepts").WithCause(st.Err())
	}
	return sandbox.Errorf(class, class.String(), "the node answered with an error it did not explain").WithCause(st.Err())
}

// Info is the detail of e.
func Info(e *sandbox.Error) *dsecv1.ErrorInfo {
	info := &dsecv1.ErrorInfo{Reason: e.Reason, SandboxId: e.Facts[FactSandboxID]}
	if len(e.Facts) == 0 {
		return info
	}
	info.Facts = maps.Clone(e.Facts)
	delete(info.Facts, FactSandboxID)
	return info
}

// FromInfo is the inverse of Info.
func FromInfo(class sandbox.Class, message string, info *dsecv1.ErrorInfo) *sandbox.Error {
	e := &sandbox.Error{Class: class, Reason: info.GetReason(), Message: message, Facts: maps.Clone(info.GetFacts())}
	if id := info.GetSandboxId(); id != "" {
		e = e.WithFact(FactSandboxID, id)
	}
	return e
}

// ToFailure is ToStatus for an error inside a stream of results.
func ToFailure(err error) *dsecv1.Failure {
	if err == nil {
		return nil
	}
	e := sandbox.AsError(err)
	return &dsecv1.Failure{Code: e.Class.String(), Message: e.Message, Info: Info(e)}
}

// FromFailure is the inverse of ToFailure.
func FromFailure(f *dsecv1.Failure) error {
	if f == nil {
		return nil
	}
	return FromInfo(sandbox.ClassByName(f.GetCode()), f.GetMessage(), f.GetInfo())
}
