package client

import (
	"testing"

	"dsec/sandbox"
)

func FuzzParseByteError(f *testing.F) {
	f.Add([]byte(`{"code":"not_found","message":"m","details":[{"type":"dsec.v1.ErrorInfo","value":"CgF4","debug":{"reason":"y"}}]}`))
	f.Add([]byte(`{"code":"nonsense","details":[{"type":"dsec.v1.ErrorInfo","debug":{"reason":"y","facts":{"a":"b"}}}]}`))
	f.Add([]byte(`{"code":"internal","details":[{"type":"dsec.v1.ErrorInfo"}]}`))
	f.Add([]byte(`<html>`))
	f.Fuzz(func(t *testing.T, body []byte) {
		e, ok := parseByteError(body)
		if ok != (e != nil) {
			t.Fatalf("%v, %v", e, ok)
		}
		if ok {
			_ = clip(e.Message)
		}
	})
}

func TestParseByteErrorDetails(t *testing.T) {
	for body, reason := range map[string]string{
		`{"code":"not_found","message":"m","details":[{"type":"dsec.v1.ErrorInfo","value":"CgF4"}]}`:                        "x",
		`{"code":"not_found","message":"m","details":[{"type":"dsec.v1.ErrorInfo","value":"CgF4","debug":{"reason":"y"}}]}`: "x",
		`{"code":"not_found","message":"m","details":[{"type":"dsec.v1.ErrorInfo","debug":{"reason":"y","unknown":1}}]}`:    "y",
		`{"code":"not_found","message":"m","details":[{"type":"other","value":"CgF4"}]}`:                                    "",
		`{"code":"not_found","message":"m"}`: "",
	} {
		e, ok := parseByteError([]byte(body))
		if !ok || e.Reason != reason || e.Class != sandbox.NotFound || e.Message != "m" {
			t.Errorf("%s: %+v", body, e)
		}
	}
	if _, ok := parseByteError([]byte(`{"message":"m"}`)); ok {
		t.Error("no code, yet an error of ours")
	}
}

// What is asked for again: what may be over by itself, and of what there is too much only what passes in a moment.
func TestWhatPasses(t *testing.T) {
	for reason, want := range map[string]bool{"too_many_requests": true, sandbox.ReasonNoDescriptors: true, "quota_exceeded": false, "node_full": false} {
		if got := passes(sandbox.Errorf(sandbox.ResourceExhausted, reason, "x")); got != want {
			t.Errorf("%s: %v", reason, got)
		}
	}
	if !passes(sandbox.Errorf(sandbox.Unavailable, "x", "x")) || passes(sandbox.Errorf(sandbox.NotFound, "x", "x")) {
		t.Error("classes")
	}
}
