package client

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"unicode"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// maxErrorBody bounds what is read of an error's body, in bytes.
const maxErrorBody = 64 << 10

// explain turns what a call returned into a *sandbox.Error that a user can act upon, and notes whether the platform
// answered at all.
func (c *Client) explain(ctx context.Context, err error) error {
	var known *sandbox.Error
	var wire *connect.Error
	var output *WriteError
	var input *ReadError
	if errors.As(err, &known) || errors.As(err, &output) || errors.As(err, &input) {
		return err
	}
	if errors.As(err, &wire) && connect.IsWireError(err) {
		c.answered.Store(true)
		return wireError(wire)
	}
	if ctx.Err() != nil {
		return sandbox.AsError(ctx.Err()).WithCause(err)
	}
	if errors.As(err, &wire) && wire.Code() != connect.CodeUnavailable && !lostConnection(err) {
		// Neither the network nor the platform's word: something else answers at that URL.
		return sandbox.Errorf(sandbox.FailedPrecondition, "not_a_platform",
			"what answers at %s does not speak dsec's API (%s); check the URL%s", c.o.URL, clip(wire.Message()), c.from("from")).WithCause(err)
	}
	return c.unreachable(err)
}

// lostConnection reports whether err comes from the network.
func lostConnection(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed)
}

// unreachable describes a connection that failed.
func (c *Client) unreachable(err error) error {
	var dns *net.DNSError
	var certificate *tls.CertificateVerificationError
	what, hint := "the connection broke", "its log may say why"
	switch {
	case errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT):
		what, hint = "nothing listens there", "start it with `dsec up`, or check the URL"
	case errors.As(err, &certificate):
		what, hint = "its certificate is not trusted", "check the URL and this machine's certificates"
	case errors.Is(err, http.ErrSchemeMismatch):
		what, hint = "it speaks http and not https", "correct the URL"
	case errors.As(err, &dns):
		what, hint = "its host name cannot be resolved", "check the URL"
	case errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH):
		what, hint = "there is no route to it", "check the URL and the network"
	}
	return sandbox.Errorf(sandbox.Unavailable, "platform_unreachable",
		"the platform at %s%s does not answer: %s; %s", c.o.URL, c.from(""), what, hint).WithCause(err)
}

// wireError is the platform's own error.
func wireError(wire *connect.Error) *sandbox.Error {
	e := &sandbox.Error{Class: sandbox.ClassByName(wire.Code().String()), Message: wire.Message()}
	for _, d := range wire.Details() {
		v, err := d.Value()
		if info, ok := v.(*dsecv1.ErrorInfo); err == nil && ok {
			return withInfo(e, info)
		}
	}
	return e
}

func withInfo(e *sandbox.Error, info *dsecv1.ErrorInfo) *sandbox.Error {
	e.Reason = info.GetReason()
	for k, v := range info.GetFacts() {
		e = e.WithFact(k, v)
	}
	if id := info.GetSandboxId(); id != "" {
		e = e.WithFact("sandbox_id", id)
	}
	return e
}

// FailureError is the error inside a stream of results; nil if there is none.
func FailureError(f *dsecv1.Failure) error {
	if f == nil {
		return nil
	}
	return withInfo(&sandbox.Error{Class: sandbox.ClassByName(f.GetCode()), Message: f.GetMessage()}, f.GetInfo())
}

// responseError reads the error of a byte route: the JSON of a Connect error. It closes the body.
func (c *Client) responseError(r *http.Response) error {
	defer r.Body.Close()
	body, err := io.ReadAll(io.LimitReader(r.Body, maxErrorBody))
	if err != nil {
		return fmt.Errorf("reading the platform's error: %w", err)
	}
	e, ok := parseByteError(body)
	switch {
	case ok:
		c.answered.Store(true)
		return e
	case r.StatusCode == http.StatusBadGateway || r.StatusCode == http.StatusServiceUnavailable || r.StatusCode == http.StatusGatewayTimeout:
		return sandbox.Errorf(sandbox.Unavailable, "platform_unavailable", "the platform at %s answers %s; try again later", c.o.URL, r.Status)
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "not_a_platform",
		"what answers at %s does not speak dsec's API (status %s); check the URL%s", c.o.URL, clip(r.Status), c.from("from"))
}

// parseByteError decodes a Connect error in JSON; ok is false for anything else.
func parseByteError(body []byte) (_ *sandbox.Error, ok bool) {
	var w struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Details []struct {
			Type  string          `json:"type"`
			Value string          `json:"value"`
			Debug json.RawMessage `json:"debug"`
		} `json:"details"`
	}
	if err := json.Unmarshal(body, &w); err != nil || w.Code == "" {
		return nil, false
	}
	e := &sandbox.Error{Class: sandbox.ClassByName(w.Code), Message: w.Message}
	for _, d := range w.Details {
		if d.Type != "dsec.v1.ErrorInfo" {
			continue
		}
		var info dsecv1.ErrorInfo
		raw, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(d.Value, "="))
		if err != nil || len(raw) == 0 || proto.Unmarshal(raw, &info) != nil {
			if (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(d.Debug, &info) != nil {
				continue
			}
		}
		return withInfo(e, &info), true
	}
	return e, true
}

// from says where the URL comes from, with a word before it or in brackets.
func (c *Client) from(word string) string {
	switch {
	case c.o.Origin == "":
		return ""
	case word == "":
		return " (" + c.o.Origin + ")"
	}
	return " " + word + " " + c.o.Origin
}

// clip shortens foreign text and makes it printable.
func clip(s string) string {
	const most = 200
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// A WriteError is a failure of what output was to be written to, as opposed to the platform's.
type WriteError struct{ Err error }

func (e *WriteError) Error() string { return "writing the output: " + e.Err.Error() }

// Unwrap gives the failure itself.
func (e *WriteError) Unwrap() error { return e.Err }

// A ReadError is a failure to read what is to be sent.
type ReadError struct{ Err error }

func (e *ReadError) Error() string { return "reading the input: " + e.Err.Error() }

// Unwrap gives the failure itself.
func (e *ReadError) Unwrap() error { return e.Err }
