package pax

import (
	"io"
	"strconv"
	"strings"
)

type sparseKind int

const (
	notSparse sparseKind = iota
	sparse0              // in old headers, or in the extended one
	sparse10             // before the content
)

// sparseMap is where a file's data is, in any of GNU's forms.
type sparseMap struct {
	r            *Reader
	kind         sparseKind
	major, minor string
	name         string
	size         int64
	data         []Segment
	offset       int64 // of form 0.0, until its length comes
	hasOffset    bool
}

func (m *sparseMap) set(key, value string) error {
	if m.kind == notSparse {
		m.kind = sparse0
	}
	if key == "name" {
		if m.name = value; strings.IndexByte(value, 0) >= 0 {
			return malformed("a name with a NUL")
		}
		return nil
	}
	if key == "map" {
		return m.list(value)
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < 0 {
		return malformed("GNU.sparse.%.100s=%.100q", key, value)
	}
	switch key {
	case "major", "minor":
		if key == "major" {
			m.major = value
		} else {
			m.minor = value
		}
		if m.major == "1" && m.minor == "0" {
			m.kind = sparse10
		} else if m.major > "1" || m.minor > "1" {
			return malformed("holes in an unknown form %.20s.%.20s", m.major, m.minor)
		}
	case "size", "realsize":
		m.size = n
	case "offset":
		m.offset, m.hasOffset = n, true
	case "numbytes":
		if !m.hasOffset {
			return malformed("a length without its offset in the map of holes")
		}
		m.hasOffset = false
		return m.add(m.offset, n)
	}
	return nil
}

const segmentLen = 16

func (m *sparseMap) add(off, n int64) error {
	if len(m.data) >= MaxSegments {
		return malformed("a file of more than %d pieces between its holes", MaxSegments)
	}
	if len(m.data) == cap(m.data) { // it will be twice as long
		if err := m.r.take(2 * segmentLen * max(1, len(m.data))); err != nil {
			return err
		}
	}
	m.data = append(m.data, Segment{off, n})
	return nil
}

// list reads form 0.1.
func (m *sparseMap) list(value string) error {
	m.data = nil
	for value != "" {
		var pair [2]int64
		for i := range pair {
			var word string
			word, value, _ = strings.Cut(value, ",")
			n, err := strconv.ParseInt(word, 10, 64)
			if err != nil || n < 0 {
				return malformed("the map of a file's holes")
			}
			pair[i] = n
		}
		if err := m.add(pair[0], pair[1]); err != nil {
			return err
		}
	}
	return nil
}

// readMap reads form 1.0: decimal numbers at the start of the content, in whole blocks.
func (m *sparseMap) readMap(r *Reader) error {
	d := &decimals{r: r}
	count, err := d.next()
	if err != nil {
		return err
	}
	m.data = nil
	for range count {
		off, err := d.next()
		if err != nil {
			return err
		}
		n, err := d.next()
		if err != nil {
			return err
		}
		if err := m.add(off, n); err != nil {
			return err
		}
	}
	return nil
}

// decimals reads numbers, each with a newline behind it, from blocks of content.
type decimals struct {
	r     *Reader
	block [blockLen]byte
	at, n int
}

func (d *decimals) next() (int64, error) {
	n, digits := int64(0), 0
	for {
		if d.at == d.n {
			if d.r.left < blockLen {
				return 0, malformed("the map of its holes is cut")
			}
			if _, err := io.ReadFull(d.r, d.block[:]); err != nil {
				return 0, err
			}
			d.at, d.n = 0, blockLen
		}
		c := d.block[d.at]
		d.at++
		switch {
		case c == '\n' && digits > 0:
			return n, nil
		case c < '0' || c > '9' || digits == 18:
			return 0, malformed("the map of its holes holds no numbers")
		}
		n = 10*n + int64(c-'0')
		digits++
	}
}

// oldGNU reads the map of GNU's own format: four pieces in the header, 21 in each block that follows it.
func (m *sparseMap) oldGNU(r *Reader, f *rawFields) error {
	m.kind = sparse0
	size, err := parseNumber(f.block[483:495])
	if err != nil {
		return malformed("the size of a file with holes")
	}
	m.size = size
	more := f.block[482] != 0
	if err := m.pieces(f.block[386:482]); err != nil {
		return err
	}
	for more {
		var b [blockLen]byte
		if err := r.full(b[:]); err != nil {
			return err
		}
		if err := m.pieces(b[:504]); err != nil {
			return err
		}
		more = b[504] != 0
	}
	return nil
}

func (m *sparseMap) pieces(b []byte) error {
	for ; len(b) >= 24 && b[0] != 0; b = b[24:] {
		off, err := parseNumber(b[:12])
		n, err2 := parseNumber(b[12:24])
		if err != nil || err2 != nil {
			return malformed("the map of a file's holes")
		}
		if err := m.add(off, n); err != nil {
			return err
		}
	}
	return nil
}
