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
