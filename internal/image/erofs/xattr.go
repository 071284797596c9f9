package erofs

import (
	"fmt"
	"strings"
)

// xattrPrefixes are the name indexes of the form. An ACL's whole name is its prefix.
var xattrPrefixes = []struct {
	index  byte
	prefix string
}{
	{1, "user."},
	{2, "system.posix_acl_access"},
	{3, "system.posix_acl_default"},
	{4, "trusted."},
	{6, "security."},
}

// splitXattr gives the index of a name's prefix and the rest of the name.
func splitXattr(name string) (index byte, suffix string, ok bool) {
	for _, p := range xattrPrefixes {
		suffix, found := strings.CutPrefix(name, p.prefix)
		if !found || len(suffix) > 255 || strings.IndexByte(suffix, 0) >= 0 {
			continue
		}
		if whole := !strings.HasSuffix(p.prefix, "."); whole != (suffix == "") {
			continue
		}
		return p.index, suffix, true
	}
	return 0, "", false
}

// ValidXattr reports whether the form can hold an attribute.
func ValidXattr(x Xattr) bool {
	_, _, ok := splitXattr(x.Name)
	return ok && len(x.Name) <= MaxName && len(x.Value) <= MaxXattrValue
}

func joinXattr(index byte, suffix string) (string, bool) {
	for _, p := range xattrPrefixes {
		if p.index == index {
			name := p.prefix + suffix
			_, _, ok := splitXattr(name)
			return name, ok
		}
	}
	return "", false
}

func xattrEntryLen(suffix, value string) int {
	return alignUp(xattrEntrySize+len(suffix)+len(value), 4)
}

// xattrSize checks attributes that are sorted, and gives their bytes behind the inode.
func xattrSize(xs []Xattr) (int, error) {
	if len(xs) == 0 {
		return 0, nil
	}
	n := xattrHeaderSize
	for i, x := range xs {
		_, suffix, ok := splitXattr(x.Name)
		switch {
		case !ok:
			return 0, fmt.Errorf("extended attribute %q has no form in EROFS", x.Name)
		case len(x.Value) > MaxXattrValue:
			return 0, fmt.Errorf("extended attribute %q has %d bytes, at most %d fit", x.Name, len(x.Value), MaxXattrValue)
		case i > 0 && xs[i-1].Name == x.Name:
			return 0, fmt.Errorf("extended attribute %q occurs twice", x.Name)
		}
		n += xattrEntryLen(suffix, x.Value)
	}
	if n > MaxXattrs {
		return 0, fmt.Errorf("extended attributes of %d bytes, at most %d fit", n, MaxXattrs)
	}
	return n, nil
}

// MaxXattrs bounds an inode's encoded attributes: its count of 4-byte units has 16 bits.
const MaxXattrs = xattrHeaderSize + (1<<16-2)*4

// xattrCount is the on-disk size field for size bytes.
func xattrCount(size int) uint16 {
	if size == 0 {
		return 0
	}
	return uint16((size-xattrHeaderSize)/4 + 1)
}

func appendXattrs(b []byte, xs []Xattr) []byte {
	if len(xs) == 0 {
		return b
	}
	b = append(b, make([]byte, xattrHeaderSize)...)
	for _, x := range xs {
		index, suffix, _ := splitXattr(x.Name)
		b = append(b, byte(len(suffix)), index)
		b = le.AppendUint16(b, uint16(len(x.Value)))
		b = append(b, suffix...)
		b = append(b, x.Value...)
		for pad := xattrEntryLen(suffix, x.Value) - xattrEntrySize - len(suffix) - len(x.Value); pad > 0; pad-- {
			b = append(b, 0)
		}
	}
	return b
}

// parseXattrs decodes what follows an inode.
func parseXattrs(b []byte) ([]Xattr, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if len(b) < xattrHeaderSize || b[4] != 0 {
		return nil, fmt.Errorf("%w: extended attributes are shared or too short", ErrFormat)
	}
	var xs []Xattr
	for b = b[xattrHeaderSize:]; len(b) > 0; {
		if len(b) < xattrEntrySize {
			return nil, fmt.Errorf("%w: extended attribute is cut", ErrFormat)
		}
		nameLen, valueLen := int(b[0]), int(le.Uint16(b[2:]))
		end := xattrEntrySize + nameLen + valueLen
		if alignUp(end, 4) > len(b) {
			return nil, fmt.Errorf("%w: extended attribute is cut", ErrFormat)
		}
		name, ok := joinXattr(b[1], string(b[xattrEntrySize:xattrEntrySize+nameLen]))
		if !ok {
			return nil, fmt.Errorf("%w: extended attribute has a bad name", ErrFormat)
		}
		xs = append(xs, Xattr{Name: name, Value: string(b[xattrEntrySize+nameLen : end])})
		b = b[alignUp(end, 4):]
	}
	return xs, nil
}
