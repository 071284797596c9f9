package pax

import (
	"bytes"
	"errors"
	"math"
	"strconv"
	"strings"
)

// rawFields are those of a header block.
type rawFields struct {
	name, link                  string
	kind                        byte
	mode, uid, gid, size, mtime int64
	gnu                         bool // of GNU's old format
	block                       *[blockLen]byte
}

func parseFields(b *[blockLen]byte) (*rawFields, error) {
	if !sumFits(b) {
		return nil, malformed("a header's checksum is wrong")
	}
	f := &rawFields{name: text(b[0:100]), link: text(b[157:257]), kind: b[156], block: b}
	f.gnu = string(b[257:265]) == "ustar  \x00"
	if !f.gnu && string(b[257:262]) == "ustar" {
		if prefix := text(b[345:500]); prefix != "" {
			f.name = prefix + "/" + f.name
		}
	}
	var err error
	number := func(b []byte) int64 {
		n, e := parseNumber(b)
		err = errors.Join(err, e)
		return n
	}
	f.mode, f.uid, f.gid = number(b[100:108]), number(b[108:116]), number(b[116:124])
	f.size, f.mtime = number(b[124:136]), number(b[136:148])
	if err != nil {
		return nil, malformed("a number in the header of %.200q", f.name)
	}
	if f.size < 0 {
		return nil, malformed("entry %.200q of negative size", f.name)
	}
	return f, nil
}

// sumFits accepts the sum over signed bytes as well, which some old writers made.
func sumFits(b *[blockLen]byte) bool {
	want, err := parseNumber(b[148:156])
	if err != nil {
		return false
	}
	unsigned, signed := int64(0), int64(0)
	for i, c := range b {
		if i >= 148 && i < 156 {
			c = ' '
		}
		unsigned += int64(c)
		signed += int64(int8(c))
	}
	return want == unsigned || want == signed
}

// text ends at the first NUL.
func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

var errNumber = errors.New("no number")

// parseNumber reads octal digits between spaces and NULs, or GNU's binary form.
func parseNumber(b []byte) (int64, error) {
	if b[0]&0x80 != 0 {
		return parseBinary(b)
	}
	b = bytes.Trim(b, " \x00")
	n := int64(0)
	for _, c := range b {
		if c < '0' || c > '7' || n > math.MaxInt64>>3 {
			return 0, errNumber
		}
		n = n<<3 | int64(c-'0')
	}
	return n, nil
}

func parseBinary(b []byte) (int64, error) {
	negative := b[0]&0x40 != 0
	n := int64(0)
	if negative {
		n = -1
	}
	for i, c := range b {
		if i == 0 {
			if c = b[0] & 0x3f; negative {
				c |= 0xc0
			}
		}
		if top := n >> 55; top != 0 && top != -1 {
			return 0, errNumber
		}
		n = n<<8 | int64(c)
	}
	return n, nil
}

// idOf chooses between a header's number and an extended one.
func idOf(plain int64, extended *int64) (uint32, error) {
	if extended != nil {
		plain = *extended
	}
	if plain < 0 || plain >= math.MaxUint32 {
		return 0, errors.New("an impossible owner")
	}
	return uint32(plain), nil
}

// records are those of extended headers that mean something here.
type records struct {
	any        bool
	path, link string
	hasSize    bool
	size       int64
	uid, gid   *int64
	hasTime    bool
	sec        int64
	nsec       uint32
	xattrs     []Xattr
	sparse     sparseMap
}

// parse reads "length key=value\n" again and again.
func (x *records) parse(b []byte) error {
	x.any = true
	for len(b) > 0 {
		digits, _, ok := bytes.Cut(b[:min(len(b), 21)], []byte{' '})
		n, err := strconv.ParseUint(string(digits), 10, 32)
		head := len(digits) + 1
		if !ok || err != nil || n > uint64(len(b)) || int(n) < head+2 || b[n-1] != '\n' {
			return malformed("a record of an extended header")
		}
		key, value, ok := bytes.Cut(b[head:n-1], []byte{'='})
		if !ok || len(key) == 0 {
			return malformed("a record of an extended header without a key")
		}
		if err := x.set(string(key), string(value)); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (x *records) set(key, value string) (err error) {
	number := func() int64 {
		n, e := strconv.ParseInt(value, 10, 64)
		if e != nil || n < 0 {
			err = malformed("%.100s=%.100q of an extended header", key, value)
		}
		return n
	}
	if strings.HasPrefix(key, "GNU.sparse.") {
		return x.sparse.set(key[len("GNU.sparse."):], value)
	}
	if name, ok := strings.CutPrefix(key, xattrPrefix); ok {
		if name == "" || strings.IndexByte(name, 0) >= 0 {
			return malformed("an extended attribute without a name")
		}
		x.xattrs = append(x.xattrs, Xattr{name, value})
		return nil
	}
	switch key {
	case "path", "linkpath":
		if strings.IndexByte(value, 0) >= 0 {
			return malformed("a name with a NUL")
		}
		if key == "path" {
			x.path = value
		} else {
			x.link = value
		}
	case "size":
		x.size, x.hasSize = number(), true
	case "uid":
		n := number()
		x.uid = &n
	case "gid":
		n := number()
		x.gid = &n
	case "mtime":
		x.sec, x.nsec, err = parseTime(value)
		x.hasTime = true
	}
	return err
}

// times takes over what a global header may say of all entries; the rest of what it can say makes no sense for more than one.
func (x *records) times(g *records) {
	if g.hasTime {
		x.hasTime, x.sec, x.nsec = true, g.sec, g.nsec
	}
	if g.uid != nil {
		x.uid = g.uid
	}
	if g.gid != nil {
		x.gid = g.gid
	}
}

func (x *records) defaults(g *records) {
	if !x.hasTime {
		x.hasTime, x.sec, x.nsec = g.hasTime, g.sec, g.nsec
	}
	if x.uid == nil {
		x.uid = g.uid
	}
	if x.gid == nil {
		x.gid = g.gid
	}
}

// parseTime reads a decimal number of seconds.
func parseTime(s string) (sec int64, nsec uint32, err error) {
	whole, fraction, _ := strings.Cut(s, ".")
	sec, err = strconv.ParseInt(whole, 10, 64)
	if err != nil || sec > 1<<40 || sec < -1<<40 {
		return 0, 0, malformed("mtime=%.100q of an extended header", s)
	}
	fraction = (fraction + "000000000")[:9]
	n, err := strconv.ParseUint(fraction, 10, 32)
	if err != nil {
		return 0, 0, malformed("mtime=%.100q of an extended header", s)
	}
	if whole[0] == '-' && n > 0 {
		return sec - 1, uint32(1e9 - n), nil
	}
	return sec, uint32(n), nil
}
