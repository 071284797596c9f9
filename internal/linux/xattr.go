package linux

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Lxattrs reads all extended attributes of path, which may be a symbolic link, that the caller is allowed to see. Where the
// file system has none it returns an empty map. Attributes that vanish meanwhile are left out.
func Lxattrs(path string) (map[string]string, error) {
	list, err := xattrBuffer(func(b []byte) (int, error) { return unix.Llistxattr(path, b) })
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "llistxattr", Path: path, Err: err}
	}
	xattrs := make(map[string]string)
	for name := range bytes.SplitSeq(list, []byte{0}) {
		if len(name) == 0 {
			continue
		}
		value, err := xattrBuffer(func(b []byte) (int, error) { return unix.Lgetxattr(path, string(name), b) })
		switch {
		case errors.Is(err, unix.ENODATA):
		case err != nil:
			return nil, &fs.PathError{Op: fmt.Sprintf("lgetxattr %q", name), Path: path, Err: err}
		default:
			xattrs[string(name)] = string(value)
		}
	}
	return xattrs, nil
}

// Lsetxattr sets one extended attribute of path, which may be a symbolic link.
func Lsetxattr(path, name, value string) error {
	if err := retryEINTR(func() error { return unix.Lsetxattr(path, name, []byte(value), 0) }); err != nil {
		return &fs.PathError{Op: fmt.Sprintf("lsetxattr %q", name), Path: path, Err: err}
	}
	return nil
}

// xattrBuffer calls f, which fills a buffer or says ERANGE, with larger and larger ones.
func xattrBuffer(f func([]byte) (int, error)) ([]byte, error) {
	for size := 256; ; size *= 4 {
		b := make([]byte, size)
		n, err := f(b)
		switch {
		case errors.Is(err, unix.EINTR):
			size /= 4
		case errors.Is(err, unix.ERANGE) && size < 1<<20:
		case err != nil:
			return nil, err
		default:
			return b[:n], nil
		}
	}
}

// SetXattr sets an extended attribute of an open file or directory.
func SetXattr(f *os.File, name, value string) error {
	if err := retryEINTR(func() error { return unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0) }); err != nil {
		return &fs.PathError{Op: fmt.Sprintf("fsetxattr %q", name), Path: f.Name(), Err: err}
	}
	return nil
}
