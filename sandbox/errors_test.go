package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestWhatIsWrappedIsFoundAndToldOnce(t *testing.T) {
	for _, c := range []struct {
		err  *Error
		text string
	}{
		{Errorf(DataLoss, "x", "read it: %w", io.ErrUnexpectedEOF), "read it: unexpected EOF"},
		{Errorf(DataLoss, "x", "read it: %w, %w", io.EOF, io.ErrUnexpectedEOF), "read it: EOF, unexpected EOF"},
		{Errorf(DataLoss, "x", "read it").WithCause(io.ErrUnexpectedEOF), "read it: unexpected EOF"},
		{Errorf(DataLoss, "x", "read it: %w", io.EOF).WithCause(io.ErrUnexpectedEOF), "read it: EOF: unexpected EOF"},
		{Errorf(DataLoss, "x", "read it: %w", io.ErrUnexpectedEOF).WithFact("a", "b"), "read it: unexpected EOF"},
	} {
		if !errors.Is(c.err, io.ErrUnexpectedEOF) || c.err.Error() != c.text {
			t.Errorf("%q, want %q; cause %v", c.err, c.text, c.err.Cause)
		}
	}
	if e := Errorf(NotFound, "x", "nothing at %d", 1); e.Cause != nil || e.Error() != "nothing at 1" {
		t.Errorf("%v, cause %v", e, e.Cause)
	}
}

func TestAsError(t *testing.T) {
	inner := Errorf(NotFound, "x", "none")
	for _, c := range []struct {
		err   error
		class Class
	}{
		{fmt.Errorf("look: %w", inner), NotFound},
		{fmt.Errorf("look: %w", context.Canceled), Canceled},
		{fmt.Errorf("look: %w", context.DeadlineExceeded), DeadlineExceeded},
		{Errorf(DataLoss, "x", "look: %w", inner), DataLoss}, // the outer one counts
		{io.EOF, Internal},
	} {
		if got := AsError(c.err).Class; got != c.class {
			t.Errorf("%v: %v", c.err, got)
		}
	}
	if AsError(nil) != nil || ClassByName(DataLoss.String()) != DataLoss || ClassByName("none such") != Internal {
		t.Error("the ends of the table")
	}
}
