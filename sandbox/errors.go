package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"syscall"
)

// A Class says what kind of failure an error is. It decides the code on the wire and nothing else reads an error's text.
type Class uint8

const (
	Internal           Class = iota // a fault of ours
	InvalidArgument                 // the request can never succeed as it is
	Unauthenticated                 // no valid credentials
	PermissionDenied                // known caller, not allowed
	NotFound                        // also what foreign things answer
	AlreadyExists                   // a name or key is taken
	FailedPrecondition              // the thing is in the wrong state
	ResourceExhausted               // capacity, quota, limit; may succeed later or elsewhere
	DeadlineExceeded                // it took longer than allowed
	Canceled                        // the caller went away or cancelled
	Unavailable                     // a part is away; retry
	Unsupported                     // this host or version cannot do it
	DataLoss                        // something stored is damaged
)

var classNames = [...]string{
	"internal", "invalid_argument", "unauthenticated", "permission_denied", "not_found", "already_exists",
	"failed_precondition", "resource_exhausted", "deadline_exceeded", "canceled", "unavailable", "unimplemented",
	"data_loss",
}

// String is Connect's name for the class's code.
func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return "internal"
}

// ClassByName is the inverse of String; unknown names are Internal.
func ClassByName(s string) Class {
	for i, n := range classNames {
		if n == s {
			return Class(i)
		}
	}
	return Internal
}

// An Error is a failure that a user may read: what happened, why, and what to do. Reason is a stable snake_case word for
// programs. Facts are numbers and names that belong to it. Cause stays in the logs.
type Error struct {
	Class   Class
	Reason  string
	Message string
	Facts   map[string]string
	Cause   error

	told bool // the message has the cause's text in it
}

func (e *Error) Error() string {
	if e.Cause != nil && !e.told {
		return e.Message + ": " + e.Cause.Error()
	}
	return e.Message
}

func (e *Error) Unwrap() error { return e.Cause }

// Errorf makes an Error; what a %w in the format stands for becomes its cause as well, and is not told twice.
func Errorf(c Class, reason, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	e := &Error{Class: c, Reason: reason, Message: err.Error()}
	switch w := err.(type) {
	case interface{ Unwrap() error }:
		e.Cause, e.told = w.Unwrap(), true
	case interface{ Unwrap() []error }:
		e.Cause, e.told = err, true
	}
	return e
}

// WithCause attaches what belongs in the log but not before the user.
func (e *Error) WithCause(err error) *Error {
	c := *e
	c.Cause, c.told = err, false
	return &c
}

// WithFact adds a number or a name to the error.
func (e *Error) WithFact(key, value string) *Error {
	c := *e
	c.Facts = maps.Clone(e.Facts)
	if c.Facts == nil {
		c.Facts = make(map[string]string)
	}
	c.Facts[key] = value
	return &c
}

// ReasonNoDescriptors is that of an error for there being no descriptor left, of a process or the machine.
const ReasonNoDescriptors = "out_of_descriptors"

// AsError finds the Error in a chain. Context errors become Canceled and DeadlineExceeded, a lack of descriptors ResourceExhausted; anything else is Internal
// with a message that tells the user nothing of our insides.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.Canceled):
		return Errorf(Canceled, "canceled", "the request was cancelled").WithCause(err)
	case errors.Is(err, context.DeadlineExceeded):
		return Errorf(DeadlineExceeded, "deadline_exceeded", "the request took longer than its deadline").WithCause(err)
	case errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE):
		return Errorf(ResourceExhausted, ReasonNoDescriptors, "the platform has no descriptor left for this; try again in a moment").WithCause(err)
	}
	return Errorf(Internal, "internal", "internal error; the server's log has the details").WithCause(err)
}

// ClassOf is the class of err, Internal if it has none.
func ClassOf(err error) Class {
	if err == nil {
		return Internal
	}
	return AsError(err).Class
}

// ReasonOf is the reason of err, or "".
func ReasonOf(err error) string {
	if e := AsError(err); e != nil {
		return e.Reason
	}
	return ""
}
