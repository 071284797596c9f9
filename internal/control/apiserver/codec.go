package apiserver

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strictJSON is protobuf's JSON, but refuses fields that it does not know. Connect would drop them.
type strictJSON struct{ name string }

// Name is the content type's ending.
func (c strictJSON) Name() string { return c.name }

// Marshal writes lowerCamelCase names, int64 as strings, bytes as base64, times as RFC 3339; zero values are left out.
func (c strictJSON) Marshal(v any) ([]byte, error) { return c.MarshalAppend(nil, v) }

// MarshalAppend is Marshal into a buffer.
func (c strictJSON) MarshalAppend(b []byte, v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no protobuf message", v)
	}
	return protojson.MarshalOptions{}.MarshalAppend(b, m)
}

// Unmarshal reads JSON; names may also be the protobuf ones.
func (c strictJSON) Unmarshal(b []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no protobuf message", v)
	}
	if len(b) == 0 {
		return errors.New("the body is empty; send at least {}")
	}
	return protojson.Unmarshal(b, m)
}
