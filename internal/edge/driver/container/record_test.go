package container

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"dsec/internal/edge/driver"
	"dsec/sandbox"
)

var someID = sandbox.NewID("aaaaa")

func TestRecordRoundTrip(t *testing.T) {
	r := records{dir: t.TempDir()}
	if _, err := r.read(someID); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("read of nothing: %v", err)
	}
	if err := r.update(someID, record{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("update of nothing made it: %v", err)
	}
	rec := record{Slot: 7, Group: "/sys/fs/cgroup/x", Aether: "/sys/fs/cgroup/x/aether"}
	if err := r.create(someID, rec); err != nil {
		t.Fatal(err)
	}
	if err := r.create(someID, rec); !errors.Is(err, os.ErrExist) {
		t.Errorf("second create: %v", err)
	}
	rec.Pid, rec.Start = 12, 34
	if err := r.update(someID, rec); err != nil {
		t.Fatal(err)
	}
	if got, err := r.read(someID); err != nil || !reflect.DeepEqual(got, rec) {
		t.Errorf("read %+v, %v; want %+v", got, err, rec)
	}
	if ids, err := r.list(); err != nil || len(ids) != 1 || ids[0] != someID {
		t.Errorf("list %v, %v", ids, err)
	}
	for range 2 {
		if err := r.remove(someID); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
}

// A kill in the middle of a write leaves what was before.
func TestRecordTorn(t *testing.T) {
	whole := `{"slot":3,"group":"/g","aether":"/g/aether"}` + "\n"
	for torn, slot := range map[string]int{"": noSlot, whole[:10]: noSlot, whole: 3, whole + `{"slot":4,"gro`: 3} {
		if got, err := parseRecord([]byte(torn)); err != nil || got.Slot != slot {
			t.Errorf("%q: %+v, %v", torn, got, err)
		}
	}
}

// What a record says is used as paths and as a process to wait for.
func TestRecordRefused(t *testing.T) {
	for _, line := range []string{
		`{"slot":-2}`, `{"pid":-1}`, `{"aether":"relative","group":"."}`, `{"aether":"/g/../../etc","group":"/etc"}`,
		`{"aether":"/a/aether","group":"/b"}`, `{"slot":"x"}`, `[]`, `{`, strings.Repeat("x", maxRecord+1),
	} {
		if got, err := parseRecord([]byte(line + "\n")); err == nil {
			t.Errorf("%.60s: %+v", line, got)
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"slot":3,"group":"/g","aether":"/g/aether","pid":4,"start":5}` + "\n"))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		rec, err := parseRecord(data)
		if err != nil {
			return
		}
		if rec.Aether != "" && (filepath.Dir(rec.Aether) != rec.Group || !filepath.IsAbs(rec.Aether)) || rec.Pid < 0 || rec.Slot < noSlot {
			t.Errorf("accepted %+v", rec)
		}
	})
}

func TestHandles(t *testing.T) {
	rec := record{Slot: 2, Group: "/g", Aether: "/g/aether", Pid: 9, Start: 8}
	h, err := makeHandle(someID, rec)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := parseHandle(h); err != nil || got != rec {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := parseHandle(driver.Handle{ID: someID}); err != nil || got.Slot != noSlot || got.Group != "" {
		t.Errorf("handle with an id only: %+v, %v", got, err)
	}
	newer := h
	newer.Version++
	if _, err := parseHandle(newer); sandbox.ReasonOf(err) != "handle_too_new" {
		t.Errorf("newer: %v", err)
	}
	for name, bad := range map[string]driver.Handle{
		"path as id": {ID: "../../../etc/passwd"}, "no id": {}, "other driver": {ID: someID, Driver: "microvm"},
		"no json": {ID: someID, Data: []byte("{")}, "bad data": {ID: someID, Data: []byte(`{"pid":-4}`)},
	} {
		if _, err := parseHandle(bad); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
}
