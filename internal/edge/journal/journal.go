package journal

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"sync"
	"time"

	"dsec/internal/linux"
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
	broken  error                // set when the file's end is unknown, or with Close: nothing can be appended any more
	copying bool                 // a compaction is under way, in a goroutine of its own
	replace func()               // ends it; not while a batch is being written
	live    map[sandbox.ID]int64 // bytes of its records
	dead    int64                // bytes of records of forgotten sandboxes
	slack   int64                // compactAfter, less in tests
	copied  func()               // tests: called when a compaction has copied what there was when it began
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
	Network  *Network  // rules that replaced the Intent's; nil if none did
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
	case OpNetwork:
		e.Network = r.Network
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

// Open reads what is there, writes it anew without what was forgotten, and is ready to append. Where the disk is full it appends
// to the file as it is: what a node needs to get rid of its sandboxes must not depend on free space. A file of another edge
// or version is moved aside, with a warning: the sweep at start removes what it described.
func Open(o Options) (*Journal, Found, error) {
	j := &Journal{o: o, slack: compactAfter, live: make(map[sandbox.ID]int64), failed: make(map[uint64]error)}
	j.done.L = &j.mu
	found, err := j.load()
	if err != nil {
		return nil, found, err
	}
	err = j.compactNow()
	if linux.IsQuotaFull(err) && j.size > 0 {
		o.Log.Warn("the disk is full; the journal goes on in its old file", "error", err)
		err = j.keepFile(found.SameBoot)
	}
	if err != nil {
		return nil, found, err
	}
	return j, found, nil
}

// keepFile opens the file that load has read. One of an earlier boot begins anew in place, which takes no space: what it says
// of sandboxes is in memory by now, and they are gone; its header would make those of this boot look so too.
func (j *Journal) keepFile(sameBoot bool) error {
	f, err := os.OpenFile(j.o.Path, os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("opening journal: %w", err)
	}
	if !sameBoot {
		header, err := j.header()
		if err == nil {
			_, err = f.WriteAt(header, 0)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("writing journal: %w", err), f.Close())
		}
		j.size = int64(len(header))
		clear(j.live)
	}
	if err := f.Truncate(j.size); err != nil {
		return errors.Join(fmt.Errorf("cutting journal: %w", err), f.Close())
	}
	j.file = f
	return nil
}

// load reads the file. j.size is then how much of it is good, or 0 if it cannot be appended to.
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
	good, torn, err := read(f, func(r *Record, payload []byte) {
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
	j.size = good
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
	if r.Op == OpIntent || (j.live[r.ID] > 0 && !replaces(r.Op)) {
		j.live[r.ID] += n
		return
	}
	j.dead += n // of these only the last one is kept
}

// replaces reports whether of the records of this kind only the last one of a sandbox counts: there may be any number.
func replaces(op Op) bool { return op == OpActivity || op == OpNetwork }

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
		if j.replace != nil {
			j.replace()
		}
		if cap(batch) < 1<<20 {
			spare = batch
		}
		if j.dead > j.slack+j.size/2 && !j.copying && j.broken == nil {
			j.copying = true
			go j.compact(j.size, maps.Clone(j.live), j.dead)
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

// compact replaces the file while others append to it: first what there was when it began, without the lock, then what came
// since, as it is. Readers see the old file or the new one.
func (j *Journal) compact(size int64, live map[sandbox.ID]int64, dead int64) {
	tmp, copied, err := j.copyLive(size, live)
	if j.copied != nil {
		j.copied()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.replace = func() {
		j.copying, j.replace = false, nil
		j.dead -= dead // if it failed: tried again after as much growth
		if err == nil && j.broken == nil {
			err = j.replaceLocked(tmp, copied, size)
		} else if tmp != nil {
			err = errors.Join(err, tmp.Close(), os.Remove(tmp.Name()))
		}
		if err != nil {
			j.o.Log.Warn("journal cannot be compacted", "error", err)
		}
		j.done.Broadcast()
	}
	if !j.writing { // or who writes does it between two batches
		j.replace()
	}
}

// compactNow is compact for a journal that nobody else has yet.
func (j *Journal) compactNow() error {
	tmp, copied, err := j.copyLive(j.size, j.live)
	if err != nil {
		return err
	}
	return j.replaceLocked(tmp, copied, j.size)
}

// replaceLocked puts tmp in the file's place, with what was appended behind size.
func (j *Journal) replaceLocked(tmp *os.File, copied, size int64) error {
	err := error(nil)
	if n := j.size - size; n > 0 {
		_, err = io.Copy(io.NewOffsetWriter(tmp, copied), io.NewSectionReader(j.file, size, n))
	}
	if err == nil {
		err = os.Rename(tmp.Name(), j.o.Path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("compacting journal: %w", err), tmp.Close(), os.Remove(tmp.Name()))
	}
	if j.file != nil {
		_ = j.file.Close() // replaced
	}
	j.size += copied - size
	j.file = tmp
	return nil
}

func (j *Journal) header() ([]byte, error) {
	return appendFrame(nil, &Record{Op: OpHeader, At: time.Now(), Header: &Header{Version: Version, Edge: j.o.Edge, BootID: j.o.BootID}})
}

// copyLive copies the records of live sandboxes, of the first size bytes, to a new file. Its name is always the same: what a
// kill left is written over.
func (j *Journal) copyLive(size int64, live map[sandbox.ID]int64) (*os.File, int64, error) {
	tmp, err := os.OpenFile(j.o.Path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("compacting journal: %w", err)
	}
	n, err := j.copyLiveTo(tmp, size, live)
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("compacting journal: %w", err), tmp.Close(), os.Remove(tmp.Name()))
	}
	return tmp, n, nil
}

func (j *Journal) copyLiveTo(dst io.Writer, size int64, live map[sandbox.ID]int64) (int64, error) {
	header, err := j.header()
	if err != nil {
		return 0, err
	}
	w := newCounter(dst)
	w.write(header)
	if size == 0 {
		return w.finish()
	}
	src, err := os.Open(j.o.Path)
	if err != nil {
		return 0, err
	}
	defer src.Close()
	first := true
	type kind struct {
		id sandbox.ID
		op Op
	}
	last := make(map[kind][]byte)
	_, _, err = read(io.NewSectionReader(src, 0, size), func(r *Record, payload []byte) {
		switch {
		case first || live[r.ID] == 0:
		case replaces(r.Op):
			last[kind{r.ID, r.Op}] = payload
		default:
			w.write(frameOf(payload))
		}
		first = false
	})
	if err != nil {
		return 0, err
	}
	for _, payload := range last {
		w.write(frameOf(payload))
	}
	return w.finish()
}

// Close closes the file; what was appended stays.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken == nil {
		j.broken = errors.New("journal is closed")
	}
	for j.writing || j.copying {
		j.done.Wait()
	}
	return j.file.Close()
}

// Remove closes the file and removes it: nothing of what it described is left.
func (j *Journal) Remove() error {
	return errors.Join(j.Close(), os.Remove(j.o.Path))
}
