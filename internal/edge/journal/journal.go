package journal

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dsec/sandbox"
)

// Options of a Journal.
type Options struct {
	Path   string // the file; its directory must exist
	Edge   sandbox.EdgeCode
	BootID string // of this boot
	Log    *slog.Logger
}

// compactAfter is how many bytes of records of forgotten sandboxes a file may hold, on top of the live ones, before it is
// written anew.
const compactAfter = 16 << 20

// A Journal is the open file. It is safe for concurrent use.
type Journal struct {
	o Options

	mu      sync.Mutex
	done    sync.Cond // a batch was written
	file    *os.File
	size    int64 // of the file: what is good
	pending []byte
	queued  uint64 // records taken so far
	written uint64 // records whose batch has been written, or has failed
	lastErr error  // of the batch that ended at written
	failed  map[uint64]error
	writing bool
	broken  error                // set when the file's end is unknown: nothing can be appended any more
	live    map[sandbox.ID]int64 // bytes of its records
	dead    int64                // bytes of records of forgotten sandboxes
	slack   int64                // compactAfter, less in tests
}

// A Found is what Open read.
type Found struct {
	Entries   map[sandbox.ID]*Entry
	SameBoot  bool // the journal was written since the machine started
	Torn      bool // its tail was cut and has been dropped
	Discarded bool // it belonged to another edge or another version, and was set aside
}

// An Entry is everything the journal says of one sandbox: its last record of each kind.
type Entry struct {
	Intent   *Intent
	Running  *Running
	Activity time.Time // last recorded; zero if none
	Ending   *Reason
	Ended    *Reason
}

// apply folds one record into the entries.
func apply(entries map[sandbox.ID]*Entry, r *Record) {
	e := entries[r.ID]
	if e == nil {
		if r.Op != OpIntent || r.Intent == nil || r.ID == "" {
			return // a record without its intent describes nothing
		}
		e = &Entry{}
		entries[r.ID] = e
	}
	switch r.Op {
	case OpIntent:
		e.Intent = r.Intent
	case OpRunning:
		e.Running = r.Running
	case OpActivity:
		e.Activity = r.At
	case OpEnding:
		e.Ending = r.Reason
	case OpEnded:
		e.Ended = r.Reason
	case OpForgotten:
		delete(entries, r.ID)
	}
}

// Open reads what is there, writes it anew without what was forgotten, and is ready to append. A file of another edge
// or version is moved aside, with a warning: the sweep at start removes what it described.
func Open(o Options) (*Journal, Found, error) {
	j := &Journal{o: o, slack: compactAfter, live: make(map[sandbox.ID]int64), failed: make(map[uint64]error)}
	j.done.L = &j.mu
	found, err := j.load()
	if err != nil {
		return nil, found, err
	}
	if err := j.compactLocked(); err != nil { // nobody else has it yet
		return nil, found, err
	}
	return j, found, nil
}

func (j *Journal) load() (Found, error) {
	found := Found{Entries: make(map[sandbox.ID]*Entry), SameBoot: true}
	f, err := os.Open(j.o.Path)
	if errors.Is(err, os.ErrNotExist) {
		return found, nil
	} else if err != nil {
		return found, fmt.Errorf("opening journal: %w", err)
	}
	defer f.Close()
	var header *Header
	first := true
	_, torn, err := read(f, func(r *Record, payload []byte) {
		if first {
			header, first = r.Header, false
			return
		}
		apply(found.Entries, r)
		if found.Entries[r.ID] != nil {
			j.live[r.ID] += frameHeader + int64(len(payload))
		} else {
			delete(j.live, r.ID)
		}
	})
	if err != nil {
		return found, err
	}
	found.Torn = torn
	if header == nil && first { // empty, or cut within its first record: it described nothing
		return found, nil
	}
	if header == nil || header.Version != Version || header.Edge != j.o.Edge {
		found.Discarded, found.Entries = true, make(map[sandbox.ID]*Entry)
		clear(j.live)
		return found, os.Rename(j.o.Path, j.o.Path+".foreign")
	}
	found.SameBoot = header.BootID == j.o.BootID
	return found, nil
}

// Append records r. When it returns nil the record survives kill -9 of this process. Without At it is stamped now.
func (j *Journal) Append(r Record) error {
	if r.At.IsZero() {
		r.At = time.Now()
	}
	frame, err := appendFrame(nil, &r)
	if err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken != nil {
		return j.broken
	}
	j.accountLocked(&r, int64(len(frame)))
	j.pending = append(j.pending, frame...)
	j.queued++
	mine := j.queued
	if j.writing {
		for j.written < mine {
			j.done.Wait()
		}
	} else {
		j.writeLocked()
	}
	if err, ok := j.failed[mine]; ok {
		delete(j.failed, mine)
		return err
	}
	return nil
}

func (j *Journal) accountLocked(r *Record, n int64) {
	if r.Op == OpForgotten {
		j.dead += j.live[r.ID] + n
		delete(j.live, r.ID)
		return
	}
	if r.Op == OpIntent || (j.live[r.ID] > 0 && r.Op != OpActivity) {
		j.live[r.ID] += n
		return
	}
	j.dead += n // of activity only the last one is kept
}

// writeLocked writes batches until nothing is pending. One caller at a time does it, for all who wait.
func (j *Journal) writeLocked() {
	j.writing = true
	defer func() { j.writing = false }()
	var spare []byte
	for len(j.pending) > 0 {
		batch, last, from := j.pending, j.queued, j.written
		j.pending = spare[:0]
		j.mu.Unlock()
		_, err := j.file.WriteAt(batch, j.size)
		j.mu.Lock()
		if err != nil {
			j.failLocked(from, last, err)
		} else {
			j.size += int64(len(batch))
		}
		j.written = last
		j.done.Broadcast()
		if cap(batch) < 1<<20 {
			spare = batch
		}
		if j.dead > j.slack+j.size/2 {
			if err := j.compactLocked(); err != nil {
				j.o.Log.Warn("journal cannot be compacted", "error", err)
				j.dead = 0 // try again after as much growth
			}
		}
	}
}

// failLocked gives the error to every record of the batch. The next batch is written over whatever part of this one
// reached the file.
func (j *Journal) failLocked(from, last uint64, err error) {
	err = fmt.Errorf("writing journal: %w", err)
	for i := from + 1; i <= last; i++ {
		j.failed[i] = err
	}
	if terr := j.file.Truncate(j.size); terr != nil {
		j.broken = fmt.Errorf("journal's end is unknown after a failed write: %w", errors.Join(err, terr))
	}
}

// compactLocked copies the records of live sandboxes to a new file and puts it in the old one's place. Readers see the
// old file or the new one.
func (j *Journal) compactLocked() error {
	dir := filepath.Dir(j.o.Path)
	tmp, err := os.CreateTemp(dir, filepath.Base(j.o.Path)+".new-*")
	if err != nil {
		return fmt.Errorf("compacting journal: %w", err)
	}
	size, err := j.copyLive(tmp)
	if err == nil {
		err = os.Rename(tmp.Name(), j.o.Path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("compacting journal: %w", err), tmp.Close(), os.Remove(tmp.Name()))
	}
	if j.file != nil {
		_ = j.file.Close() // replaced
	}
	j.file, j.size, j.dead = tmp, size, 0
	return nil
}

func (j *Journal) copyLive(dst io.Writer) (int64, error) {
	frame, err := appendFrame(nil, &Record{Op: OpHeader, At: time.Now(), Header: &Header{Version: Version, Edge: j.o.Edge, BootID: j.o.BootID}})
	if err != nil {
		return 0, err
	}
	w := newCounter(dst)
	w.write(frame)
	src, err := os.Open(j.o.Path)
	if errors.Is(err, os.ErrNotExist) {
		return w.finish()
	} else if err != nil {
		return 0, err
	}
	defer src.Close()
	first := true
	activity := make(map[sandbox.ID][]byte) // the last one
	_, _, err = read(src, func(r *Record, payload []byte) {
		switch {
		case first || j.live[r.ID] == 0:
		case r.Op == OpActivity:
			activity[r.ID] = payload
		default:
			w.write(frameOf(payload))
		}
		first = false
	})
	if err != nil {
		return 0, err
	}
	for _, payload := range activity {
		w.write(frameOf(payload))
	}
	return w.finish()
}

// Close closes the file; what was appended stays.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	for j.writing {
		j.done.Wait()
	}
	if j.broken == nil {
		j.broken = errors.New("journal is closed")
	}
	return j.file.Close()
}

// Remove closes the file and removes it: nothing of what it described is left.
func (j *Journal) Remove() error {
	return errors.Join(j.Close(), os.Remove(j.o.Path))
}
