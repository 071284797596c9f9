package hostprep

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"dsec/internal/linux"
)

// A record is what was before, in the order of its changing.
type record struct {
	Version int      `json:"version"`
	BootID  string   `json:"boot_id"`
	Changes []Change `json:"changes"`
}

const recordVersion = 1

func (r *record) find(kind, name string) int {
	return slices.IndexFunc(r.Changes, func(c Change) bool { return c.Kind == kind && c.Name == name })
}

func (r *record) has(kind, name string) bool { return r.find(kind, name) >= 0 }

// note adds a change, and reports whether there is something new to save. What was before the first change is what counts.
func (r *record) note(c Change) bool {
	i := r.find(c.Kind, c.Name)
	if i < 0 {
		r.Changes = append(r.Changes, c)
		return true
	}
	if r.Changes[i].After == c.After {
		return false
	}
	r.Changes[i].Earlier = append(r.Changes[i].Earlier, r.Changes[i].After)
	r.Changes[i].After = c.After
	return true
}

func (r *record) forget(c Change) {
	if i := r.find(c.Kind, c.Name); i >= 0 {
		r.Changes = slices.Delete(r.Changes, i, i+1)
	}
}

// load reads the record. What another boot's record says of settings and modules is over.
func (h *Host) load() (*record, error) {
	r := &record{Version: recordVersion, BootID: h.BootID}
	b, err := os.ReadFile(h.Record)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	} else if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%s is damaged, and says what was before this host was prepared: %w", h.Record, err)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("%s was written by another version of dsec (%d); use that one", h.Record, r.Version)
	}
	if r.BootID != h.BootID {
		r.BootID = h.BootID
		r.Changes = slices.DeleteFunc(r.Changes, func(c Change) bool { return c.Kind != kindSwap })
	}
	return r, nil
}

// save replaces the record, so that it is on the disk, the old or the new one, whatever happens.
func (h *Host) save(r *record) (err error) {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	dir := filepath.Dir(h.Record)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	tmp := h.Record + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	h.at()
	if err := os.Rename(tmp, h.Record); err != nil {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (h *Host) removeRecord() error {
	if err := errors.Join(linux.RemoveFile(h.Record+".new"), linux.RemoveFile(h.Record)); err != nil {
		return err
	}
	return syncDir(filepath.Dir(h.Record))
}

// lock keeps two preparations apart.
func (h *Host) lock() (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(h.Record), 0o755); err != nil {
		return nil, err
	}
	f, err := linux.LockFile(h.Record + ".lock")
	if err != nil {
		return nil, fmt.Errorf("another dsec is preparing or restoring this host: %w", err)
	}
	return func() { f.Close() }, nil
}
