package pax

import (
	"errors"
	"io"
	"strconv"
)

const (
	maxOctal7  = 1<<21 - 1
	maxOctal11 = 1<<33 - 1
	nameLen    = 100

	writeBuffer = 64 << 10
)

var zeros [2 * blockLen]byte

// A Writer makes an archive. After each Header comes its content, as much as Header.Stored says, by Write or by Space and
// Advance; then the next Header, or Close.
type Writer struct {
	w    io.Writer
	b    []byte // not yet written
	rec  []byte // records of an extended header
	left int64  // content of the entry that is still to come
	pad  int    // after it
	sent int64
	err  error
}

// NewWriter makes a Writer, which buffers.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w, b: make([]byte, 0, writeBuffer)} }

// Header begins an entry.
func (w *Writer) Header(h *Header) error {
	if w.err == nil && w.left > 0 {
		w.err = errors.New("an entry's content is incomplete")
	}
	w.endEntry()
	stored := h.Stored()
	var table []byte
	if h.Type == File && h.Data != nil {
		table = appendMap(nil, h)
		stored += int64(len(table))
	}
	w.rec = appendRecords(w.rec[:0], h, stored)
	if len(w.rec) > MaxExtended {
		return errors.New("more extended attributes than an archive can hold")
	}
	name := h.Name
	if table != nil {
		name = "GNUSparseFile.0/" + base(h.Name)
	}
	if len(w.rec) > 0 {
		x := fields{name: "PaxHeaders.0/" + base(h.Name), kind: 'x', mode: 0o644, size: int64(len(w.rec))}
		w.put(x.append(nil))
		w.put(w.rec)
		w.put(zeros[:padding(int64(len(w.rec)))])
	}
	f := fields{name: name, link: h.Link, kind: h.Type, mode: int64(h.Mode), uid: int64(h.UID), gid: int64(h.GID), size: stored, mtime: h.Sec, major: int64(h.Major), minor: int64(h.Minor)}
	w.put(f.append(nil))
	w.put(table)
	w.left = h.Stored()
	w.pad = padding(w.left)
	return w.err
}

// Write adds content.
func (w *Writer) Write(p []byte) (int, error) {
	if int64(len(p)) > w.left {
		return 0, errors.New("more content than the entry's size")
	}
	w.put(p)
	w.left -= int64(len(p))
	return len(p), w.err
}

// Space is where more content may be put, at most as much as the entry needs and at least some of it: then call Advance.
func (w *Writer) Space() []byte {
	if cap(w.b)-len(w.b) < min(writeBuffer/4, int(min(w.left, writeBuffer))) {
		w.flush()
	}
	free := w.b[len(w.b):cap(w.b)]
	return free[:min(int64(len(free)), w.left)]
}

// Advance says how much was put into Space.
func (w *Writer) Advance(n int) error {
	w.b = w.b[:len(w.b)+n]
	w.left -= int64(n)
	if len(w.b) == cap(w.b) {
		w.flush()
	}
	return w.err
}

// Left is how much content of the entry is still to come.
func (w *Writer) Left() int64 { return w.left }

// Sent is how many bytes have been made.
func (w *Writer) Sent() int64 { return w.sent }

// Close ends the archive with its marker.
func (w *Writer) Close() error {
	if w.err == nil && w.left > 0 {
		w.err = errors.New("an entry's content is incomplete")
	}
	w.endEntry()
	w.put(zeros[:])
	w.flush()
	return w.err
}

func (w *Writer) endEntry() {
	w.put(zeros[:w.pad])
	w.pad = 0
}

func (w *Writer) put(p []byte) {
	for len(p) > 0 && w.err == nil {
		n := copy(w.b[len(w.b):cap(w.b)], p)
		w.b = w.b[:len(w.b)+n]
		p = p[n:]
		if len(w.b) == cap(w.b) {
			w.flush()
		}
	}
}

func (w *Writer) flush() {
	if w.err == nil && len(w.b) > 0 {
		_, w.err = w.w.Write(w.b)
		w.sent += int64(len(w.b))
	}
	w.b = w.b[:0]
}

// appendMap encodes the map of a file's data, which ends at the file's size, as whole blocks.
func appendMap(b []byte, h *Header) []byte {
	b = strconv.AppendInt(b, int64(len(h.Data))+1, 10)
	for _, s := range h.Data {
		b = strconv.AppendInt(append(b, '\n'), s.Off, 10)
		b = strconv.AppendInt(append(b, '\n'), s.Len, 10)
	}
	b = strconv.AppendInt(append(b, '\n'), h.Size, 10)
	b = append(b, "\n0\n"...)
	return append(b, zeros[:padding(int64(len(b)))]...)
}

// appendRecords adds the records for what does not fit a plain header.
func appendRecords(b []byte, h *Header, stored int64) []byte {
	if h.Type == File && h.Data != nil {
		b = appendRecord(b, "GNU.sparse.major", "1")
		b = appendRecord(b, "GNU.sparse.minor", "0")
		b = appendRecord(b, "GNU.sparse.name", h.Name)
		b = appendRecord(b, "GNU.sparse.realsize", strconv.FormatInt(h.Size, 10))
	} else if len(h.Name) > nameLen {
		b = appendRecord(b, "path", h.Name)
	}
	if len(h.Link) > nameLen {
		b = appendRecord(b, "linkpath", h.Link)
	}
	if h.UID > maxOctal7 {
		b = appendRecord(b, "uid", strconv.FormatUint(uint64(h.UID), 10))
	}
	if h.GID > maxOctal7 {
		b = appendRecord(b, "gid", strconv.FormatUint(uint64(h.GID), 10))
	}
	if stored > maxOctal11 {
		b = appendRecord(b, "size", strconv.FormatInt(stored, 10))
	}
	if h.Nsec != 0 || h.Sec < 0 || h.Sec > maxOctal11 {
		b = appendRecord(b, "mtime", formatTime(h.Sec, h.Nsec))
	}
	for _, x := range h.Xattrs {
		b = appendRecord(b, xattrPrefix+x.Name, x.Value)
	}
	return b
}

const xattrPrefix = "SCHILY.xattr."

// formatTime is a decimal number of seconds: of times before 1970 the fraction counts backwards as well.
func formatTime(sec int64, nsec uint32) string {
	var b []byte
	if sec < 0 && nsec > 0 {
		sec, nsec = sec+1, 1e9-nsec
		if sec == 0 {
			b = append(b, '-')
		}
	}
	b = strconv.AppendInt(b, sec, 10)
	if nsec == 0 {
		return string(b)
	}
	return string(append(append(b, '.'), strconv.Itoa(1e9 + int(nsec))[1:]...))
}

// appendRecord adds one record, whose length counts its own digits.
func appendRecord(b []byte, key, value string) []byte {
	rest := len(key) + len(value) + 3
	n := rest + 1
	for n != rest+digits(n) {
		n = rest + digits(n)
	}
	b = strconv.AppendInt(b, int64(n), 10)
	b = append(append(append(b, ' '), key...), '=')
	return append(append(b, value...), '\n')
}

func digits(n int) int {
	d := 1
	for ; n >= 10; n /= 10 {
		d++
	}
	return d
}

func base(name string) string {
	for len(name) > 0 && name[len(name)-1] == '/' {
		name = name[:len(name)-1]
	}
	for i := len(name) - 1; i >= 0; i-- {
		if name[i] == '/' {
			return name[i+1:]
		}
	}
	return name
}

// fields are those of a plain header. What does not fit is cut, or 0: the extended header has the real one.
type fields struct {
	name, link                  string
	kind                        byte
	mode, uid, gid, size, mtime int64
	major, minor                int64
}

func (f *fields) append(b []byte) []byte {
	n := len(b)
	b = append(b, zeros[:blockLen]...)
	h := b[n:]
	copy(h[0:nameLen], f.name)
	octal(h[100:107], f.mode)
	octal(h[108:115], within(f.uid, maxOctal7))
	octal(h[116:123], within(f.gid, maxOctal7))
	octal(h[124:135], within(f.size, maxOctal11))
	octal(h[136:147], within(f.mtime, maxOctal11))
	h[156] = f.kind
	copy(h[157:257], f.link)
	copy(h[257:265], "ustar\x0000")
	if f.kind == Char || f.kind == Block {
		octal(h[329:336], within(f.major, maxOctal7))
		octal(h[337:344], within(f.minor, maxOctal7))
	}
	copy(h[148:156], "        ")
	sum := int64(0)
	for _, c := range h {
		sum += int64(c)
	}
	octal(h[148:154], sum) // six digits, NUL, and the space that is there
	h[154] = 0
	return b
}

func within(v, limit int64) int64 {
	if v < 0 || v > limit {
		return 0
	}
	return v
}

func octal(b []byte, v int64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = '0' + byte(v&7)
		v >>= 3
	}
}
