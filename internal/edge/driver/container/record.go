package container

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"dsec/sandbox"
)

// A record is what a later process of the edge must know to find and end a sandbox: written before anything of it exists,
// and once more with the process before aether may run. It lives on the run directory's tmpfs: it has to survive a
// kill of the edge, not a reset of the machine.
type record struct {
	Slot   int    `json:"slot"`            // range of ids and user namespace
	Group  string `json:"group"`           // v2 directory of the whole sandbox
	Aether string `json:"aether"`          // v2 directory of aether
	Pid    int    `json:"pid,omitempty"`   // of aether
	Start  uint64 `json:"start,omitempty"` // its start time in clock ticks since boot
}

const maxRecord = 64 << 10

// isID reports whether s may become a path: a name that was listed, or the id of a handle.
func isID(s string) bool {
	_, err := sandbox.ParseID(s)
	return err == nil
}

// records is the directory of record files, one per sandbox, named by its id.
type records struct{ dir string }

func (r records) path(id sandbox.ID) string { return filepath.Join(r.dir, string(id)) }

// create writes the first state of a sandbox. os.ErrExist if there is one.
func (r records) create(id sandbox.ID, rec record) error {
	return r.write(id, rec, os.O_CREATE|os.O_EXCL)
}

// update adds a newer state. One write: a kill of this process cannot cut it.
func (r records) update(id sandbox.ID, rec record) error { return r.write(id, rec, os.O_APPEND) }

func (r records) write(id sandbox.ID, rec record, flags int) error {
	line, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	f, err := os.OpenFile(r.path(id), os.O_WRONLY|flags, 0o600)
	if err != nil {
		return fmt.Errorf("open record: %w", err)
	}
	_, err = f.Write(append(line, '\n'))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

// read returns the newest state. os.ErrNotExist if there is no record.
func (r records) read(id sandbox.ID) (record, error) {
	if !isID(string(id)) {
		return record{}, fmt.Errorf("record of %q: %w", id, os.ErrNotExist)
	}
	data, err := os.ReadFile(r.path(id))
	if err != nil {
		return record{}, fmt.Errorf("read record: %w", err)
	}
	return parseRecord(data)
}

// parseRecord takes the last whole line. A record without one is that of a sandbox of which nothing was made yet.
func parseRecord(data []byte) (record, error) {
	if len(data) > maxRecord {
		return record{}, fmt.Errorf("record of %d bytes", len(data))
	}
	end := bytes.LastIndexByte(data, '\n')
	if end < 0 {
		return record{Slot: noSlot}, nil
	}
	line := data[:end]
	line = line[bytes.LastIndexByte(line, '\n')+1:]
	rec := record{Slot: noSlot}
	if err := json.Unmarshal(line, &rec); err != nil {
		return record{}, fmt.Errorf("decode record: %w", err)
	}
	return rec, rec.check()
}

// check refuses what could make a later step touch something that is not a sandbox's.
func (r record) check() error {
	switch {
	case r.Pid < 0 || r.Slot < noSlot:
		return fmt.Errorf("record with pid %d and slot %d", r.Pid, r.Slot)
	case r.Aether != "" && (!filepath.IsAbs(r.Aether) || filepath.Clean(r.Aether) != r.Aether || filepath.Dir(r.Aether) != r.Group):
		return fmt.Errorf("record with control group %q in %q", r.Aether, r.Group)
	}
	return nil
}

func (r records) remove(id sandbox.ID) error {
	if err := os.Remove(r.path(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove record: %w", err)
	}
	return nil
}

// list returns the ids that have a record.
func (r records) list() ([]sandbox.ID, error) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var ids []sandbox.ID
	for _, e := range entries {
		if isID(e.Name()) {
			ids = append(ids, sandbox.ID(e.Name()))
		}
	}
	return ids, nil
}
