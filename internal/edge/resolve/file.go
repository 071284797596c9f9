package resolve

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"time"
)

// maxFile bounds what is read of the file.
const maxFile = 16 << 20

// A savedName is one name in the file. Times are ms since 1970.
type savedName struct {
	Current []netip.Addr         `json:"current"`
	Left    map[netip.Addr]int64 `json:"left,omitempty"`
}

// load begins with what the file says. One that cannot be read says nothing: it is a cache.
func (r *Resolver) load() {
	if r.o.Path == "" {
		return
	}
	var saved map[string]savedName
	info, err := os.Stat(r.o.Path)
	if err == nil && info.Size() <= maxFile {
		var raw []byte
		if raw, err = os.ReadFile(r.o.Path); err == nil {
			err = json.Unmarshal(raw, &saved)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.o.Log.Warn("what names stood for cannot be read", "error", err)
	}
	for name, s := range saved {
		e := r.entryLocked(Canonical(name))
		e.current = canonical(s.Current)
		for a, ms := range s.Left {
			if len(e.left) < MaxAddresses {
				e.left[a] = time.UnixMilli(ms)
			}
		}
	}
}

// save writes the file if anything changed.
func (r *Resolver) save() {
	r.saving.Lock() // above mu: who finds nothing to write knows that it is written
	defer r.saving.Unlock()
	r.mu.Lock()
	if !r.dirty || r.o.Path == "" {
		r.mu.Unlock()
		return
	}
	r.dirty = false
	saved := make(map[string]savedName, len(r.names))
	for name, e := range r.names {
		if len(e.current) == 0 {
			continue
		}
		s := savedName{Current: e.current, Left: make(map[netip.Addr]int64, len(e.left))}
		for a, at := range e.left {
			s.Left[a] = at.UnixMilli()
		}
		saved[name] = s
	}
	r.mu.Unlock()
	raw, err := json.Marshal(saved)
	if err == nil {
		err = os.WriteFile(r.o.Path+".new", raw, 0o600)
	}
	if err == nil {
		err = os.Rename(r.o.Path+".new", r.o.Path)
	}
	if err != nil {
		r.o.Log.Warn("what names stand for cannot be written", "error", err)
	}
}

func (r *Resolver) removeFile() {
	if r.o.Path == "" {
		return
	}
	for _, path := range []string{r.o.Path, r.o.Path + ".new"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			r.o.Log.Warn("what names stood for cannot be removed", "error", err)
		}
	}
}
