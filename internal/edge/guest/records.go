package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/sandbox"
)

const (
	maxEntryPath = 64 << 10 // bytes of a path in a listing
	maxTarget    = 4 << 10  // bytes of what a link holds
	maxRecord    = maxEntryPath + maxTarget + 1<<10
	recordBuffer = 32 << 10

	typeMask, typeDirectory, typeLink = 0o170000, 0o040000, 0o120000
)

// A FileEntry is a file as lstat tells of it. Names are bytes: nothing says that they are UTF-8.
type FileEntry struct {
	Path       []byte // relative to what was listed; not set by StatFiles
	LinkTarget []byte // of a symbolic link, where it is known
	Mode       uint32 // st_mode: with the type
	Size       int64
	UID, GID   uint32
	MTime      time.Time
	Blocks     int64 // of 512 bytes
	Links      uint32
	Inode      uint64
}

// records reads what aether sends as messages, each after its length. It holds one of them at a time.
type records struct {
	r   *bufio.Reader
	buf []byte
}

func newRecords(r io.Reader) *records { return &records{r: bufio.NewReaderSize(r, recordBuffer)} }

// next reads one message; io.EOF is returned only between two.
func (r *records) next(m proto.Message) error {
	n, err := binary.ReadUvarint(r.r)
	if err != nil {
		return recordError(err)
	}
	if n > maxRecord {
		return violation("a record that is too long")
	}
	if uint64(cap(r.buf)) < n {
		r.buf = make([]byte, max(n, 4<<10))
	}
	r.buf = r.buf[:n]
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return recordError(err)
	}
	return decode(r.buf, m)
}

// recordError keeps the errors of the stream, and tells one that ends inside a record from them.
func recordError(err error) error {
	var known *sandbox.Error
	if errors.Is(err, io.EOF) || errors.As(err, &known) {
		return err
	}
	return violation("a record that is cut or malformed")
}

// checkRelative accepts paths that stay below where they begin, component by component.
func checkRelative(p []byte) error {
	if len(p) == 0 || len(p) > maxEntryPath || bytes.IndexByte(p, 0) >= 0 {
		return violation("a path that no file has")
	}
	for len(p) > 0 {
		name, rest, more := bytes.Cut(p, []byte("/"))
		if len(name) == 0 || string(name) == "." || string(name) == ".." || (more && len(rest) == 0) {
			return violation("a path that no file below has")
		}
		p = rest
	}
	return nil
}

// entryFrom checks what aether says of a file, but for its path.
func entryFrom(m *aetherv1.FileEntry) (FileEntry, error) {
	if m == nil {
		return FileEntry{}, violation("nothing of a file")
	}
	kind := m.Mode & typeMask
	switch kind {
	case 0o100000, typeDirectory, typeLink, 0o010000, 0o140000, 0o020000, 0o060000:
	default:
		return FileEntry{}, violation("a file of no type")
	}
	if m.Mode > typeMask|0o7777 || m.Size > math.MaxInt64 || m.Blocks > math.MaxInt64/512 {
		return FileEntry{}, violation("a file of impossible size or mode")
	}
	if len(m.LinkTarget) > maxTarget || bytes.IndexByte(m.LinkTarget, 0) >= 0 || (len(m.LinkTarget) > 0 && kind != typeLink) {
		return FileEntry{}, violation("a link that cannot be")
	}
	return FileEntry{
		LinkTarget: m.LinkTarget, Mode: m.Mode, Size: int64(m.Size), UID: m.Uid, GID: m.Gid, MTime: time.Unix(0, m.MtimeNs),
		Blocks: int64(m.Blocks), Links: m.Links, Inode: m.Inode,
	}, nil
}

// A FileList is the listing of a directory as it comes. It must be closed, and ends with its context.
type FileList struct {
	stream *ByteStream
	in     *records
	count  uint64
}

// ListFiles lists a directory: depth 1 is its own entries, -1 all below.
func (c *Client) ListFiles(ctx context.Context, path, user string, depth int) (*FileList, error) {
	c.changed(true)
	req := &aetherv1.ListFiles{Path: []byte(path), User: user, Depth: int32(max(min(depth, math.MaxInt32), -1))}
	s, err := c.open(ctx, &aetherv1.Open{Open: &aetherv1.Open_ListFiles{ListFiles: req}}, "file_not_found", requestTimeout)
	if err != nil {
		return nil, err
	}
	return &FileList{stream: s, in: newRecords(s)}, nil
}

// Next is the next entry, or io.EOF after the last: then nothing is missing.
func (l *FileList) Next() (FileEntry, error) {
	m := new(aetherv1.FileEntry)
	err := l.in.next(m)
	if errors.Is(err, io.EOF) {
		if done, derr := l.stream.Done(); derr != nil || done.Entries != l.count {
			return FileEntry{}, errors.Join(derr, violation("fewer entries than it counted"))
		}
	}
	if err != nil {
		return FileEntry{}, err
	}
	e, err := entryFrom(m)
	if err == nil {
		err = checkRelative(m.Path)
	}
	e.Path = m.Path
	l.count++
	return e, err
}

// Close ends the listing.
func (l *FileList) Close() error { return l.stream.Close() }

// A FileEvent is one thing that happened below a watched directory.
type FileEvent struct {
	Path      []byte // relative to the directory; empty = itself
	Kind      int32  // dsec.v1.FileEventKind
	Directory bool
	Overflow  bool // events were lost
}

const lastEventKind = 6

// A FileWatch tells what happens below a directory, from when it was made. It must be closed, and ends with its context.
type FileWatch struct {
	stream *ByteStream
	in     *records
}

// WatchFiles watches a directory and, with recursive, all below it.
func (c *Client) WatchFiles(ctx context.Context, path, user string, recursive bool) (*FileWatch, error) {
	c.changed(true)
	req := &aetherv1.WatchFiles{Path: []byte(path), User: user, Recursive: recursive}
	s, err := c.open(ctx, &aetherv1.Open{Open: &aetherv1.Open_WatchFiles{WatchFiles: req}}, "file_not_found", requestTimeout)
	if err != nil {
		return nil, err
	}
	return &FileWatch{stream: s, in: newRecords(s)}, nil
}

// Next waits for the next event. It never returns io.EOF: a watch ends by its context, or by an error that says why.
func (w *FileWatch) Next() (FileEvent, error) {
	m := new(aetherv1.FileEvent)
	if err := w.in.next(m); err != nil {
		if errors.Is(err, io.EOF) {
			err = violation("a watch that ends without a reason")
		}
		return FileEvent{}, err
	}
	return eventFrom(m)
}

func eventFrom(m *aetherv1.FileEvent) (FileEvent, error) {
	if m.Overflow {
		return FileEvent{Overflow: true}, nil
	}
	if m.Kind == 0 || m.Kind > lastEventKind {
		return FileEvent{}, violation("an event of no kind")
	}
	if len(m.Path) > 0 {
		if err := checkRelative(m.Path); err != nil {
			return FileEvent{}, err
		}
	}
	return FileEvent{Path: m.Path, Kind: int32(m.Kind), Directory: m.Directory}, nil
}

// Buffered says whether Next has something at once.
func (w *FileWatch) Buffered() bool { return w.in.r.Buffered() > 0 }

// Close ends the watch.
func (w *FileWatch) Close() error { return w.stream.Close() }
