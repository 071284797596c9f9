package guest

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

func record(t *testing.T, m proto.Message) string {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(binary.AppendUvarint(nil, uint64(len(b)))) + string(b)
}

// answering is an aether that opens every stream, sends bytes and then a last message, and answers every call with reply.
func answering(t *testing.T, bytes string, last proto.Message, reply *aetherv1.Reply) *Client {
	t.Helper()
	c, err := hostile(t, nil, func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
		switch ty {
		case wire.MsgCall:
			f.post(wire.MsgReply, stream, reply)
		case wire.MsgOpen:
			f.post(wire.MsgOpened, stream, &aetherv1.Opened{})
			f.conn.Flush()
			f.conn.Ready(&wire.Source{Stream: stream, Channel: wire.Stdout, Fill: func(dst []byte, _ int) ([]byte, uint64, wire.Flags, bool) {
				if last == nil {
					return append(dst, bytes...), 0, 0, false
				}
				return append(dst, bytes...), 0, wire.End, false
			}})
			f.conn.Flush()
			if e, ok := last.(*aetherv1.Error); ok {
				f.post(wire.MsgError, stream, e)
			} else if last != nil {
				f.post(wire.MsgDone, stream, last)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestLiesAboutFiles: a listing that is not what an honest aether sends is an error, never a shorter or a stranger one.
func TestLiesAboutFiles(t *testing.T) {
	good := &aetherv1.FileEntry{Path: []byte("a"), Mode: 0o100644}
	with := func(change func(e *aetherv1.FileEntry)) string {
		e := proto.Clone(good).(*aetherv1.FileEntry)
		change(e)
		return record(t, e)
	}
	one := &aetherv1.Done{Entries: 1}
	for name, tc := range map[string]struct {
		bytes  string
		last   proto.Message
		reason string
	}{
		"honest":        {record(t, good), one, ""},
		"fewer":         {record(t, good), &aetherv1.Done{Entries: 2}, "guest_protocol"},
		"more":          {record(t, good) + record(t, good), one, "guest_protocol"},
		"cut":           {record(t, good)[:3], one, "guest_protocol"},
		"garbage":       {"\x05\xff\xff\xff\xff\xff", one, "guest_protocol"},
		"endless":       {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", one, "guest_protocol"},
		"too long":      {string(binary.AppendUvarint(nil, 1<<30)), one, "guest_protocol"},
		"an error":      {record(t, good), &aetherv1.Error{Code: aetherv1.Code_CODE_IO}, "io_error"},
		"no type":       {with(func(e *aetherv1.FileEntry) { e.Mode = 0o644 }), one, "guest_protocol"},
		"more mode":     {with(func(e *aetherv1.FileEntry) { e.Mode |= 1 << 20 }), one, "guest_protocol"},
		"huge":          {with(func(e *aetherv1.FileEntry) { e.Size = 1 << 63 }), one, "guest_protocol"},
		"huge on disk":  {with(func(e *aetherv1.FileEntry) { e.Blocks = 1 << 60 }), one, "guest_protocol"},
		"target":        {with(func(e *aetherv1.FileEntry) { e.LinkTarget = []byte("x") }), one, "guest_protocol"},
		"above":         {with(func(e *aetherv1.FileEntry) { e.Path = []byte("../x") }), one, "guest_protocol"},
		"absolute":      {with(func(e *aetherv1.FileEntry) { e.Path = []byte("/x") }), one, "guest_protocol"},
		"a NUL":         {with(func(e *aetherv1.FileEntry) { e.Path = []byte("x\x00") }), one, "guest_protocol"},
		"itself":        {with(func(e *aetherv1.FileEntry) { e.Path = nil }), one, "guest_protocol"},
		"a long target": {with(func(e *aetherv1.FileEntry) { e.Mode, e.LinkTarget = 0o120777, []byte(strings.Repeat("x", 5000)) }), one, "guest_protocol"},
	} {
		l, err := answering(t, tc.bytes, tc.last, nil).ListFiles(testContext(t), "/", "", 1)
		for err == nil {
			_, err = l.Next()
		}
		if l != nil {
			l.Close()
		}
		if tc.reason == "" && !errors.Is(err, io.EOF) || tc.reason != "" && sandbox.ReasonOf(err) != tc.reason {
			t.Errorf("%s: %v, want %q", name, err, tc.reason)
		}
	}
	for name, tc := range map[string]struct {
		m      *aetherv1.FileEvent
		reason string
	}{
		"no kind": {&aetherv1.FileEvent{Path: []byte("a")}, "guest_protocol"}, "unknown kind": {&aetherv1.FileEvent{Kind: 7}, "guest_protocol"},
		"above": {&aetherv1.FileEvent{Path: []byte(".."), Kind: 1}, "guest_protocol"}, "honest": {&aetherv1.FileEvent{Kind: 1}, ""},
	} {
		w, err := answering(t, record(t, tc.m), nil, nil).WatchFiles(testContext(t), "/", "", true)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Next(); (err == nil) != (tc.reason == "") || err != nil && sandbox.ReasonOf(err) != tc.reason {
			t.Errorf("an event with %s: %v", name, err)
		}
		w.Close()
	}
	w, err := answering(t, "", &aetherv1.Done{}, nil).WatchFiles(testContext(t), "/", "", true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Next(); sandbox.ReasonOf(err) != "guest_protocol" {
		t.Errorf("a watch that ends: %v", err)
	}
	w.Close()
}

func TestLiesAboutChanges(t *testing.T) {
	failed := &aetherv1.Error{Code: aetherv1.Code_CODE_EXISTS}
	two := []Change{{Kind: MakeDirectory, Path: "/a"}, {Kind: MakeDirectory, Path: "/b"}}
	for name, r := range map[string]*aetherv1.ChangeResult{
		"nothing": nil, "more": {Done: 3}, "fewer": {Done: 1}, "all and an error": {Done: 2, Error: failed}, "wrapped": {Done: 1 << 31},
	} {
		c := answering(t, "", nil, &aetherv1.Reply{Reply: &aetherv1.Reply_ChangeResult{ChangeResult: r}})
		if err := c.ChangeFiles(testContext(t), "", two); sandbox.ReasonOf(err) != "guest_protocol" {
			t.Errorf("%s: %v", name, err)
		}
	}
	file := &aetherv1.StatResult{File: &aetherv1.FileEntry{Mode: 0o100644}}
	for name, results := range map[string][]*aetherv1.StatResult{
		"none": nil, "more": {file, file}, "neither": {{}}, "a strange one": {{File: &aetherv1.FileEntry{Mode: 1}}},
	} {
		c := answering(t, "", nil, &aetherv1.Reply{Reply: &aetherv1.Reply_StatResults{StatResults: &aetherv1.StatResults{Results: results}}})
		if _, err := c.StatFiles(testContext(t), "", []string{"/a"}, false); sandbox.ReasonOf(err) != "guest_protocol" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestEndWithoutLastWord: an aether that sends all of an archive and never says how it went costs a deadline, not for ever.
func TestEndWithoutLastWord(t *testing.T) {
	c, err := hostile(t, nil, func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
		if ty == wire.MsgOpen {
			f.post(wire.MsgOpened, stream, &aetherv1.Opened{})
			f.conn.Ready(&wire.Source{Stream: stream, Channel: wire.Stdout, Fill: func(dst []byte, _ int) ([]byte, uint64, wire.Flags, bool) {
				return append(dst, "x"...), 0, wire.End, false
			}})
			f.conn.Flush()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.ReadArchive(testContext(t), ArchiveRead{Path: "/"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if n, err := r.Read(make([]byte, 9)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	_ = r.b.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := r.b.Read(make([]byte, 9)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

// TestLargeStats: what a sandbox lets links hold is not collected without bound.
func TestLargeStats(t *testing.T) {
	var results []*aetherv1.StatResult
	for range maxBatch / 2 {
		results = append(results, &aetherv1.StatResult{File: &aetherv1.FileEntry{Mode: 0o120777, LinkTarget: []byte(strings.Repeat("x", 4000))}})
	}
	c := answering(t, "", nil, &aetherv1.Reply{Reply: &aetherv1.Reply_StatResults{StatResults: &aetherv1.StatResults{Results: results}}})
	paths := make([]string, 100*len(results))
	for i := range paths {
		paths[i] = "/a"
	}
	if _, err := c.StatFiles(testContext(t), "", paths, false); sandbox.ReasonOf(err) != "answer_too_large" {
		t.Error(err)
	}
}
