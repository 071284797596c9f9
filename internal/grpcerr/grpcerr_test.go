package grpcerr

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"dsec/sandbox"
)

func TestRoundTripOfEveryClass(t *testing.T) {
	for class := sandbox.Internal; class <= sandbox.DataLoss; class++ {
		e := sandbox.Errorf(class, "some_reason", "what happened; what to do").
			WithFact("free_bytes", "17").WithFact(FactSandboxID, "s123").WithCause(errors.New("secret"))
		for name, back := range map[string]error{
			"status":  FromStatus(ToStatus(fmt.Errorf("doing: %w", e))),
			"failure": FromFailure(ToFailure(e)),
		} {
			var got *sandbox.Error
			if !errors.As(back, &got) {
				t.Fatalf("%s %s: %T is no sandbox.Error", class, name, back)
			}
			if got.Class != class || got.Reason != e.Reason || got.Message != e.Message || !maps.Equal(got.Facts, e.Facts) {
				t.Errorf("%s %s: got %+v", class, name, got)
			}
			if got.Cause != nil || strings.Contains(got.Error(), "secret") {
				t.Errorf("%s %s: the cause travelled: %v", class, name, got)
			}
		}
	}
}

func TestForeignErrors(t *testing.T) {
	for _, c := range []struct {
		in     error
		class  sandbox.Class
		reason string
	}{
		{status.Error(codes.Unavailable, "dial unix"), sandbox.Unavailable, "edge_unavailable"},
		{status.Error(codes.Canceled, "x"), sandbox.Canceled, "canceled"},
		{status.Error(codes.DeadlineExceeded, "x"), sandbox.DeadlineExceeded, "deadline_exceeded"},
		{status.Error(codes.Unimplemented, "unknown method"), sandbox.Unsupported, "node_lacks_call"},
		{status.Error(codes.Aborted, "x"), sandbox.Internal, "internal"},
		{context.Canceled, sandbox.Canceled, "canceled"},
		{context.DeadlineExceeded, sandbox.DeadlineExceeded, "deadline_exceeded"},
		{errors.New("boom"), sandbox.Internal, "internal"},
	} {
		got := sandbox.AsError(FromStatus(c.in))
		if got.Class != c.class || got.Reason != c.reason {
			t.Errorf("%v: %s %s", c.in, got.Class, got.Reason)
		}
	}
	if FromStatus(nil) != nil || ToStatus(nil) != nil || FromFailure(nil) != nil || ToFailure(nil) != nil {
		t.Error("nil became an error")
	}
	if s := ToStatus(errors.New("disk sda1 broke")).Error(); strings.Contains(s, "sda1") {
		t.Errorf("our insides travelled: %s", s)
	}
}
