// Package unpack makes the files of a tar archive that came from a sandbox, below a directory of the user's.
//
// What surprises:
//
//   - The archive is hostile. Every name is looked up below the directory by os.Root: neither "..", nor a link that the
//     archive has made, nor one that was there leads out.
//   - Set-user-id and set-group-id bits are dropped, and so are extended attributes but for those of users ("user."): nothing
//     from a sandbox gets privileges here. Devices, sockets and pipes are left out and counted.
//   - Each file is made under another name and renamed when it is whole. What came before an error stays.
package unpack

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dsec/internal/linux"
	"dsec/internal/pax"
	"dsec/sandbox"
)

// Options say how.
type Options struct {
	KeepOwners bool // where we may give files away
}

// A Result counts the entries of the archive, the bytes of files that were written, and the entries that were left out.
type Result struct {
	Entries, Bytes, Skipped int64
	// Attributes that were not kept: how many, and their first names, each once.
	AttributesLost int64
	LostNames      []string
}

const maxLostNames = 4

func (r *Result) lost(name string) {
	r.AttributesLost++
	if len(r.LostNames) < maxLostNames && !slices.Contains(r.LostNames, name) {
		r.LostNames = append(r.LostNames, name)
	}
}

// Attributes sets those of an entry that are kept. That the local file system has none is no error.
func (r *Result) Attributes(f *os.File, list []pax.Xattr) {
	for _, x := range list {
		if !strings.HasPrefix(x.Name, "user.") || linux.SetXattr(f, x.Name, x.Value) != nil {
			r.lost(x.Name)
		}
	}
}

// Tree unpacks an archive into a directory that exists.
func Tree(dir string, archive io.Reader, o Options) (Result, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Result{}, err
	}
	defer root.Close()
	u := &unpacker{root: root, o: o, in: pax.NewReader(archive), buf: make([]byte, 256<<10)}
	for {
		h, err := u.in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = u.entry(h)
		}
		if err != nil {
			return u.done, err
		}
	}
	return u.done, errors.Join(u.in.Drain(), u.finish())
}

type unpacker struct {
	root *os.Root
	o    Options
	in   *pax.Reader
	buf  []byte
	dirs []directory // whose attributes are set at the end: what is made in them changes their times
	done Result
}

type directory struct {
	name string
	h    *pax.Header
}

// local makes a name of the archive one below the directory.
func local(name string) (string, error) {
	clean := filepath.Clean(strings.TrimSuffix(name, "/"))
	if name == "" || strings.ContainsRune(name, 0) || !filepath.IsLocal(clean) || slices.Contains(strings.Split(name, "/"), "..") {
		return "", sandbox.Errorf(sandbox.InvalidArgument, "unsafe_entry", "the archive from the sandbox has an entry %.200q, which would leave the directory", name)
	}
	return clean, nil
}

func (u *unpacker) entry(h *pax.Header) error {
	name, err := local(h.Name)
	if err != nil {
		return err
	}
	u.done.Entries++
	switch h.Type {
	case pax.Dir:
		err = u.directory(name, h)
	case pax.File:
		err = u.replace(name, func(tmp string) error { return u.file(tmp, h) })
	case pax.Symlink:
		err = u.replace(name, func(tmp string) error { return errors.Join(u.root.Symlink(h.Link, tmp), u.own(tmp, h)) })
	case pax.Link:
		var old string
		if old, err = local(h.Link); err == nil && !u.same(old, name) {
			err = u.replace(name, func(tmp string) error { return u.root.Link(old, tmp) })
		}
	default:
		u.done.Skipped++
	}
	return err
}

// same reports whether both are names of one file already: then a rename of one to the other does nothing, and leaves it there.
func (u *unpacker) same(a, b string) bool {
	one, err := u.root.Lstat(a)
	other, oerr := u.root.Lstat(b)
	return err == nil && oerr == nil && os.SameFile(one, other)
}

func (u *unpacker) directory(name string, h *pax.Header) error {
	err := u.root.MkdirAll(name, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return notReplaced(name)
	}
	if err != nil {
		return err
	}
	u.dirs = append(u.dirs, directory{name, h})
	return nil
}

func notReplaced(name string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "not_replaced", "%.200q is a directory on one side and none on the other; remove it first", name)
}

// replace makes something under another name, and renames it.
func (u *unpacker) replace(name string, make func(tmp string) error) error {
	if name == "." {
		return notReplaced(name)
	}
	parent := filepath.Dir(name)
	if err := u.root.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	if st, err := u.root.Lstat(name); err == nil && st.IsDir() {
		return notReplaced(name)
	}
	tmp := filepath.Join(parent, ".dsec-cp-"+strconv.FormatUint(rand.Uint64(), 36))
	err := make(tmp)
	if err == nil {
		err = u.root.Rename(tmp, name)
	}
	if err != nil {
		_ = u.root.Remove(tmp) // it may not be there
	}
	return err
}

func (u *unpacker) file(tmp string, h *pax.Header) (err error) {
	f, err := u.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	data := h.Data
	if data == nil {
		data = []pax.Segment{{Off: 0, Len: h.Size}}
	} else if err := f.Truncate(h.Size); err != nil {
		return err
	}
	for _, s := range data {
		if _, err := f.Seek(s.Off, io.SeekStart); err != nil {
			return err
		}
		n, err := io.CopyBuffer(writer{f}, io.LimitReader(u.in, s.Len), u.buf)
		u.done.Bytes += n
		if err != nil {
			return err
		}
		if n < s.Len {
			return pax.ErrTruncated
		}
	}
	u.done.Attributes(f, h.Xattrs)
	if err := u.own(tmp, h); err != nil { // before the mode: a change of owner takes bits away
		return err
	}
	if err := f.Chmod(fs.FileMode(h.Mode) & fs.ModePerm); err != nil {
		return err
	}
	at := time.Unix(h.Sec, int64(h.Nsec))
	return u.root.Chtimes(tmp, at, at)
}

// A writer hides that a file can copy by itself: the buffer is ours.
type writer struct{ io.Writer }

func (u *unpacker) own(name string, h *pax.Header) error {
	if !u.o.KeepOwners {
		return nil
	}
	return u.root.Lchown(name, int(h.UID), int(h.GID))
}

func (u *unpacker) directoryAttributes(d directory) error {
	if len(d.h.Xattrs) == 0 {
		return nil
	}
	f, err := u.root.Open(d.name)
	if err != nil {
		return err
	}
	u.done.Attributes(f, d.h.Xattrs)
	return f.Close()
}

// finish sets the attributes of directories, the innermost first.
func (u *unpacker) finish() error {
	for _, d := range slices.Backward(u.dirs) {
		if err := u.directoryAttributes(d); err != nil {
			return err
		}
		if err := u.own(d.name, d.h); err != nil {
			return err
		}
		if err := u.root.Chmod(d.name, fs.FileMode(d.h.Mode)&fs.ModePerm); err != nil {
			return fmt.Errorf("setting the mode: %w", err)
		}
		at := time.Unix(d.h.Sec, int64(d.h.Nsec))
		if err := u.root.Chtimes(d.name, at, at); err != nil {
			return fmt.Errorf("setting the time: %w", err)
		}
	}
	return nil
}
