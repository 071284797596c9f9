package main

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
func (cl *client) explain(ctx context.Context, err error) error {
	var known *sandbox.Error
	var wire *connect.Error
	var output *writeError
	var input *readError
	if errors.As(err, &known) || errors.As(err, &output) || errors.As(err, &input) {
		return err
	}
	if errors.As(err, &wire) && connect.IsWireError(err) {
		cl.answered.Store(true)
		return wireError(wire)
	}
	if ctx.Err() != nil {
		return sandbox.AsError(ctx.Err()).WithCause(err)
	}
	if errors.As(err, &wire) && wire.Code() != connect.CodeUnavailable && !lostConnection(err) {
		// Neither the network nor the platform's word: something else answers at that URL.
		return sandbox.Errorf(sandbox.FailedPrecondition, "not_a_platform",
			"what answers at %s does not speak dsec's API (%s); check the URL from %s", cl.target.URL, clipText(wire.Message()), cl.target.Origin).WithCause(err)
	}
	return cl.unreachable(err)
}

// lostConnection reports whether err comes from the network.
func lostConnection(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed)
}

// unreachable describes a connection that failed.
func (cl *client) unreachable(err error) error {
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
		"the platform at %s (%s) does not answer: %s; %s", cl.target.URL, cl.target.Origin, what, hint).WithCause(err)
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

// failureError is the error inside a stream of results.
func failureError(f *dsecv1.Failure) error {
	return withInfo(&sandbox.Error{Class: sandbox.ClassByName(f.GetCode()), Message: f.GetMessage()}, f.GetInfo())
}

// responseError reads the error of a byte route: the JSON of a Connect error. It closes the body.
func (cl *client) responseError(r *http.Response) error {
	defer r.Body.Close()
	body, err := io.ReadAll(io.LimitReader(r.Body, maxErrorBody))
	if err != nil {
		return fmt.Errorf("reading the platform's error: %w", err)
	}
	e, ok := parseByteError(body)
	switch {
	case ok:
		cl.answered.Store(true)
		return e
	case r.StatusCode == http.StatusBadGateway || r.StatusCode == http.StatusServiceUnavailable || r.StatusCode == http.StatusGatewayTimeout:
		return sandbox.Errorf(sandbox.Unavailable, "platform_unavailable", "the platform at %s answers %s; try again later", cl.target.URL, r.Status)
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "not_a_platform",
		"what answers at %s does not speak dsec's API (status %s); check the URL from %s", cl.target.URL, clipText(r.Status), cl.target.Origin)
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

// clipText shortens foreign text.
func clipText(s string) string {
	const most = 200
	if s = printable(s); len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
