package pax

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
)

// A Reader reads an archive. Content is read by Read after Next, or skipped by the following Next.
type Reader struct {
	r       io.Reader
	block   [blockLen]byte
	left    int64 // stored content of the entry
	pad     int   // after it
	read    int64
	globals records
	ended   bool

	// Hold, if set, is asked before much memory is taken for one entry, and told with a negative number that it is free
	// again: at the next entry. Its error is that of Next. So many readers can share a bound.
	Hold func(n int) error
	need int // memory of the entry, about
	held int // as much of it as Hold knows of
}

const (
	// freeMemory is how much an entry may take unasked.
	freeMemory = 16 << 10
	// extendedCost is how much more than their length extended headers take while they are read.
	extendedCost = 4
)

func (r *Reader) take(n int) error {
	r.need += n
	if r.Hold == nil || r.need <= freeMemory {
		return nil
	}
	more := r.need - r.held
	if err := r.Hold(more); err != nil {
		return err
	}
	r.held += more
	return nil
}

func (r *Reader) release() {
	if r.held > 0 {
		_ = r.Hold(-r.held) // never fails
	}
	r.need, r.held = 0, 0
}

// NewReader makes a Reader, which reads no more than it needs; r should give large pieces.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Offset is how many bytes of the archive have been read.
func (r *Reader) Offset() int64 { return r.read }

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}

// Next returns the header of the next entry, and io.EOF at the end marker.
func (r *Reader) Next() (*Header, error) {
	if r.ended {
		return nil, io.EOF
	}
	if err := r.skip(r.left + int64(r.pad)); err != nil {
		return nil, err
	}
	r.left, r.pad = 0, 0
	r.release()
	x := records{sparse: sparseMap{r: r}} // of this entry
	budget := int64(MaxExtended)
	for {
		first := r.read == 0
		err := r.full(r.block[:])
		if first {
			err = errors.Join(compressed(r.block[:]), err)
		}
		if err != nil {
			return nil, err
		}
		if r.block == [blockLen]byte{} {
			if x.any {
				return nil, malformed("an extended header without its entry")
			}
			r.ended = true
			return nil, io.EOF
		}
		f, err := parseFields(&r.block)
		if err != nil {
			return nil, err
		}
		more, err := r.extended(f, &x, &budget)
		if err != nil {
			return nil, err
		}
		if !more {
			return r.entry(f, &x)
		}
	}
}

// compressed says how an archive must not begin.
func compressed(b []byte) error {
	for magic, name := range map[string]string{"\x1f\x8b": "gzip", "\x28\xb5\x2f\xfd": "zstd", "\xfd7zXZ": "xz", "BZh": "bzip2"} {
		if bytes.HasPrefix(b, []byte(magic)) {
			return malformed("it is compressed by %s; send it uncompressed", name)
		}
	}
	return nil
}

// Read returns stored content of the entry.
func (r *Reader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	n, err := r.r.Read(p[:min(int64(len(p)), r.left)])
	r.left -= int64(n)
	r.read += int64(n)
	if errors.Is(err, io.EOF) {
		err = nil
		if n == 0 {
			return 0, ErrTruncated
		}
	}
	return n, err
}

// maxTrailer is how much may follow the end marker: writers fill up their last record.
const maxTrailer = 1 << 20

// Drain reads what follows the end marker.
func (r *Reader) Drain() error {
	n, err := io.Copy(io.Discard, io.LimitReader(r.r, maxTrailer+1))
	r.read += n
	if err == nil && n > maxTrailer {
		return malformed("more than %d bytes follow its end marker", maxTrailer)
	}
	return err
}

func (r *Reader) full(b []byte) error {
	n, err := io.ReadFull(r.r, b)
	r.read += int64(n)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrTruncated
	}
	return err
}

func (r *Reader) skip(n int64) error {
	if n == 0 {
		return nil
	}
	got, err := io.CopyN(io.Discard, r.r, n)
	r.read += got
	if errors.Is(err, io.EOF) {
		return ErrTruncated
	}
	return err
}

// extended takes a header that speaks of the next one, and reports whether it was such.
func (r *Reader) extended(f *rawFields, x *records, budget *int64) (bool, error) {
	switch f.kind {
	case 'x', 'X', 'g', 'L', 'K':
	case 'V': // a label
		return true, r.skip(f.size + int64(padding(f.size)))
	default:
		return false, nil
	}
	if *budget -= f.size; *budget < 0 {
		return false, malformed("extended headers of more than %d bytes", MaxExtended)
	}
	if err := r.take(extendedCost * int(f.size)); err != nil {
		return false, err
	}
	b := make([]byte, f.size+int64(padding(f.size)))
	if err := r.full(b); err != nil {
		return false, err
	}
	b = b[:f.size]
	switch f.kind {
	case 'g':
		g := records{sparse: sparseMap{r: r}}
		err := g.parse(b)
		r.globals.times(&g)
		return true, err
	case 'L':
		x.any, x.path = true, text(b)
		return true, nil
	case 'K':
		x.any, x.link = true, text(b)
		return true, nil
	}
	return true, x.parse(b)
}

// entry makes the header of an entry.
func (r *Reader) entry(f *rawFields, x *records) (*Header, error) {
	h := &Header{Name: f.name, Link: f.link, Type: f.kind, Mode: uint32(f.mode) & 0o7777, Sec: f.mtime}
	x.defaults(&r.globals)
	if x.path != "" {
		h.Name = x.path
	}
	if x.link != "" {
		h.Link = x.link
	}
	if x.hasSize {
		f.size = x.size
	}
	if x.hasTime {
		h.Sec, h.Nsec = x.sec, x.nsec
	}
	h.Xattrs = x.xattrs
	var err error
	if h.UID, err = idOf(f.uid, x.uid); err == nil {
		h.GID, err = idOf(f.gid, x.gid)
	}
	if err != nil {
		return nil, malformed("%v of entry %.200q", err, h.Name)
	}
	if f.size > MaxSize {
		return nil, malformed("entry %.200q of %d bytes is larger than any file can be", h.Name, f.size)
	}
	switch h.Type {
	case 0, '7':
		h.Type = File
		fallthrough
	case File:
		if strings.HasSuffix(h.Name, "/") && x.sparse.kind == notSparse {
			h.Type = Dir
			break
		}
		return h, r.file(h, f, x)
	case 'S':
		h.Type = File
		if err := x.sparse.oldGNU(r, f); err != nil {
			return nil, err
		}
		return h, r.file(h, f, x)
	case Link, Symlink, Char, Block, FIFO:
		return h, nil
	case Dir:
	default:
		return nil, malformed("entry %.200q of unknown type %q", h.Name, h.Type)
	}
	r.left = f.size // dump directories have a list of names
	r.pad = padding(f.size)
	return h, nil
}

// file sets up the content of a regular file.
func (r *Reader) file(h *Header, f *rawFields, x *records) error {
	h.Size = f.size
	r.left, r.pad = f.size, padding(f.size)
	if x.sparse.kind == notSparse {
		return nil
	}
	if x.sparse.name != "" {
		h.Name = x.sparse.name
	}
	if x.sparse.kind == sparse10 {
		if err := x.sparse.readMap(r); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
	h.Size, h.Data = x.sparse.size, x.sparse.data
	if h.Data == nil {
		h.Data = []Segment{}
	}
	if err := checkSegments(h, r.left); err != nil {
		return fmt.Errorf("entry %.200q: %w", h.Name, err)
	}
	return nil
}

// checkSegments makes sure that the data lies in the file, in order, and is what is stored.
func checkSegments(h *Header, stored int64) error {
	if h.Size < 0 || h.Size > MaxSize {
		return malformed("a file of %d bytes is larger than any file can be", h.Size)
	}
	end := int64(0)
	kept := h.Data[:0]
	for _, s := range h.Data {
		if s.Off < end || s.Len < 0 || s.Off > h.Size || s.Len > h.Size-s.Off {
			return malformed("the map of its holes is out of order or beyond its end")
		}
		end = s.Off + s.Len
		stored -= s.Len
		if s.Len > 0 {
			kept = append(kept, s)
		}
	}
	h.Data = kept
	if stored != 0 {
		return malformed("the map of its holes does not fit its content")
	}
	return nil
}
