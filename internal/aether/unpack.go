package aether

import (
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/pax"
)

// writeArchive unpacks an archive below a directory.
func (b *byteStream) writeArchive(r *aetherv1.WriteArchive) (*aetherv1.Done, error) {
	acc, err := b.s.srv.accts.lookup(r.User)
	if err != nil {
		return nil, err
	}
	var done *aetherv1.Done
	err = asUser(acc, func() error {
		u, err := newUnpacker(r, acc, b.s.srv.pool != nil, &b.s.srv.names)
		if err != nil {
			return err
		}
		defer u.close()
		b.accept()
		done, err = u.run(b)
		return err
	})
	return done, err
}

// An unpacker makes the entries of one archive. Every name is looked up one part at a time from the directory's own
// descriptor, entering no other mount and following no link of the archive's own, so that neither the archive nor what the
// sandbox does meanwhile leads out. Links to directories that were there are followed, see follow. It holds a block of content, and a descriptor for each level of the directory that it is in.
type unpacker struct {
	keepOwners, noReplace, now bool

	attrs int       // bytes of extended attributes of dirs that are still to be set
	dirs  []openDir // the directory itself, and those down to where the last entry was
	buf   []byte
	done  aetherv1.Done

	links  map[fileID]struct{} // that were made
	forgot bool                // some, or all
	held   share               // for links and headers
}

// An openDir is a directory on the way to the last entry. Its attributes are set when the way leads elsewhere: what is
// made in it changes its time, and may need other permissions than it gets.
type openDir struct {
	name  string
	fd    int
	attrs *pax.Header // nil if the archive says nothing of it
	real  []string    // the way to it from the first one, if name is a link; else nil
}

func newUnpacker(r *aetherv1.WriteArchive, acc account, charged bool, of *names) (*unpacker, error) {
	name := clip(string(r.Path), 256)
	p, err := checkPath(string(r.Path))
	if err != nil {
		return nil, err
	}
	if r.KeepOwners && acc.uid != 0 {
		return nil, failf(aetherv1.Code_CODE_PERMISSION, "only root can give files away: keep_owners needs the user root")
	}
	if r.MakeParents {
		if err := makeParents(path.Clean(p)); err != nil {
			return nil, asFailure("make "+name, err)
		}
	}
	fd, err := openRef(p, unix.O_DIRECTORY)
	if err != nil {
		return nil, asFailure("unpack into "+name, err)
	}
	if charged {
		if err := checkDiskFD(fd); err != nil {
			unix.Close(fd)
			return nil, asFailure("unpack into "+name, err)
		}
	}
	if err := unix.Faccessat2(fd, "", unix.W_OK|unix.X_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH); err != nil {
		unix.Close(fd)
		return nil, asFailure("unpack into "+name, err)
	}
	return &unpacker{
		keepOwners: r.KeepOwners, noReplace: r.NoReplaceTypes, now: r.Now,
		dirs: []openDir{{fd: fd}}, buf: make([]byte, block), held: share{of: of},
	}, nil
}

func (u *unpacker) close() {
	for _, d := range u.dirs {
		unix.Close(d.fd)
	}
	u.held.end()
}

// run unpacks all. An error says what had been unpacked by then, which stays.
func (u *unpacker) run(src io.Reader) (*aetherv1.Done, error) {
	r := pax.NewReader(src)
	r.Hold = u.hold
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, u.stopped(err, "")
		}
		if err := u.entry(h, r); err != nil {
			return nil, u.stopped(err, h.Name)
		}
	}
	if err := u.leave(1); err != nil {
		return nil, u.stopped(err, "")
	}
	if err := r.Drain(); err != nil {
		return nil, u.stopped(err, "")
	}
	u.done.Bytes = uint64(r.Offset())
	return &u.done, nil
}

// hold counts what extended headers take: an entry may bring a MiB of them, and many archives may be unpacked at once.
func (u *unpacker) hold(n int) error {
	if n < 0 {
		u.held.give(-n)
	} else if !u.held.take(n) {
		return errHeaders
	}
	return nil
}

var errHeaders = failf(aetherv1.Code_CODE_RESOURCES,
	"archives that are unpacked in this sandbox at the same time have too many long names and attributes; try again when some are done")

// stopped makes the answer of what ended the unpacking, at an entry if name is given.
func (u *unpacker) stopped(err error, name string) error {
	if errors.Is(err, errCanceled) {
		return err
	}
	var f *failure
	switch {
	case errors.Is(err, pax.ErrFormat), errors.Is(err, pax.ErrTruncated):
		reason, _, _ := strings.Cut(err.Error(), "\n")
		f = failf(aetherv1.Code_CODE_BAD_ARCHIVE, "%s", reason)
	default:
		kept := *asFailure("", err) // a copy: some are variables
		f = &kept
		if f.errno != 0 {
			f.message = f.errno.Error()
		}
	}
	if name != "" {
		f.message = "archive entry " + quoted(name) + ": " + f.message
	}
	f.message += "; " + plural(int(u.done.Entries), "entry was", "entries were") + " unpacked before"
	return f
}

// entry makes one entry.
func (u *unpacker) entry(h *pax.Header, r *pax.Reader) error {
	parts, err := split(h.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 { // "./": the directory itself is the caller's, and keeps its attributes
		return nil
	}
	if h.Type == pax.Dir {
		err = u.enter(parts, h)
	} else {
		base := parts[len(parts)-1]
		if err := u.enter(parts[:len(parts)-1], nil); err != nil {
			return err
		}
		switch h.Type {
		case pax.File:
			err = u.file(base, h, r)
		case pax.Link:
			err = u.link(base, h)
		case pax.Symlink:
			err = u.symlink(base, h)
		case pax.FIFO:
			err = u.fifo(base, h)
		default: // devices, which nobody can make here
			u.done.Skipped++
			return nil
		}
	}
	if err == nil {
		u.done.Entries++
	}
	return err
}

func unsafef(format string, args ...any) *failure {
	return failf(aetherv1.Code_CODE_UNSAFE_ENTRY, format, args...)
}

// split cuts a name into its parts.
func split(name string) ([]string, error) {
	switch {
	case name == "" || len(name) > maxPath:
		return nil, failf(aetherv1.Code_CODE_BAD_ARCHIVE, "a name has 1 to %d bytes", maxPath)
	case name[0] == '/':
		return nil, unsafef("its name is absolute; names are relative to the directory that is unpacked into")
	case strings.IndexByte(name, 0) >= 0:
		return nil, failf(aetherv1.Code_CODE_BAD_ARCHIVE, "its name holds a NUL byte")
	}
	parts := strings.Split(name, "/")
	kept := parts[:0]
	for _, p := range parts {
		switch p {
		case "", ".":
		case "..":
			return nil, unsafef("its name leads upwards by \"..\"")
		default:
			kept = append(kept, p)
		}
	}
	if len(kept) > maxDepth {
		return nil, failf(aetherv1.Code_CODE_INVALID, "it is more than %d directories deep", maxDepth)
	}
	return kept, nil
}

// enter goes to a directory, making what is missing. attrs are those of the last part, nil if it is only on the way.
func (u *unpacker) enter(parts []string, attrs *pax.Header) error {
	same := 0
	for same < len(parts) && same+1 < len(u.dirs) && u.dirs[same+1].name == parts[same] {
		same++
	}
	if err := u.leave(same + 1); err != nil {
		return err
	}
	for i := same; i < len(parts); i++ {
		d, err := u.directory(parts[i], attrs != nil && i == len(parts)-1)
		if err != nil {
			return err
		}
		u.dirs = append(u.dirs, d)
	}
	if d := &u.dirs[len(u.dirs)-1]; attrs != nil && d.real == nil { // what a link leads to keeps its own
		more := sizeOf(attrs) - sizeOf(d.attrs)
		if u.attrs += more; u.attrs > maxHeldAttrs {
			return failf(aetherv1.Code_CODE_INVALID, "the directories that it is in have more than %d bytes of extended attributes", maxHeldAttrs)
		}
		if err := u.hold(more); err != nil {
			u.attrs -= more
			return err
		}
		d.attrs = attrs
	}
	return nil
}

// maxHeldAttrs bounds the extended attributes that wait until their directories are left: one entry may bring a MiB of them.
const maxHeldAttrs = 2 << 20

// sizeOf is what a directory's header costs while it waits.
func sizeOf(h *pax.Header) int {
	if h == nil {
		return 0
	}
	n := len(h.Name) + len(h.Link)
	for _, x := range h.Xattrs {
		n += len(x.Name) + len(x.Value) + attrCost
	}
	return n
}

const attrCost = 48 // of each besides

// leave closes directories until n are left, and gives them their attributes.
func (u *unpacker) leave(n int) error {
	for len(u.dirs) > n {
		last := len(u.dirs) - 1
		d := u.dirs[last]
		u.dirs = u.dirs[:last]
		u.attrs -= sizeOf(d.attrs)
		u.held.give(sizeOf(d.attrs))
		err := u.finish(d)
		unix.Close(d.fd)
		if err != nil {
			return err
		}
	}
	return nil
}

// finish sets a directory's attributes.
func (u *unpacker) finish(d openDir) error {
	h := d.attrs
	if h == nil {
		return nil
	}
	p := refPath(d.fd)
	if u.keepOwners {
		if err := unix.Fchownat(unix.AT_FDCWD, p, int(h.UID), int(h.GID), 0); err != nil {
			return err
		}
	}
	if err := unix.Fchmodat(unix.AT_FDCWD, p, h.Mode, 0); err != nil {
		return err
	}
	if err := setXattrs(h, func(name string, value []byte) error { return unix.Setxattr(p, name, value, 0) }); err != nil {
		return err
	}
	if u.now {
		return nil
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, p, times(h), 0)
}

// openStep follows one part of a name.
func openStep(dir int, name string) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) { // a rename somewhere
			return fd, err
		}
	}
}

// directory opens or makes a directory in the last one. entry says that the archive has it, so that it may replace something
// else, but for a link to a directory: that is as good as one, and systems depend on theirs.
func (u *unpacker) directory(name string, entry bool) (openDir, error) {
	dir, mode := u.dir(), uint32(0o755)
	if entry {
		mode = 0o700 // until it gets its own
	}
	fd, err := openStep(dir, name)
	for range 2 {
		switch {
		case err == nil:
			return openDir{name: name, fd: fd}, nil
		case errors.Is(err, unix.EXDEV):
			return openDir{}, unsafef("it leads into another file system, which is mounted at %s", quoted(name))
		case errors.Is(err, unix.ENOENT):
			err = unix.Mkdirat(dir, name, mode)
		case !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP):
			return openDir{}, err
		default:
			d, ferr := u.followed(name)
			if ferr == nil {
				return d, nil
			}
			if err = u.unfollowed(name, entry, ferr); err == nil {
				err = unix.Mkdirat(dir, name, mode)
			}
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return openDir{}, err
		}
		fd, err = openStep(dir, name)
	}
	return openDir{name: name, fd: fd}, err
}

// unfollowed removes what is in the way of an entry that is a directory, or says why it stays.
func (u *unpacker) unfollowed(name string, entry bool, err error) error {
	switch {
	case errors.Is(err, unix.EXDEV):
		return unsafef("%s leads into another file system", quoted(name))
	case err != errMade && !leadsNowhere(err):
		return err
	case !entry && err == errMade:
		return err
	case !entry:
		return unsafef("%s on its way is no directory, nor a link to one within the directory that is unpacked into", quoted(name))
	case u.noReplace:
		return failf(aetherv1.Code_CODE_NOT_DIRECTORY, "a directory would replace what is no directory")
	}
	return unix.Unlinkat(u.dir(), name, 0)
}

func times(h *pax.Header) []unix.Timespec {
	t := unix.Timespec{Sec: h.Sec, Nsec: int64(h.Nsec)}
	return []unix.Timespec{t, t}
}

// setXattrs sets the extended attributes of an entry. Labels of a host mean nothing here.
func setXattrs(h *pax.Header, set func(name string, value []byte) error) error {
	for _, x := range h.Xattrs {
		if !keptXattr(x.Name) {
			continue
		}
		if err := set(x.Name, []byte(x.Value)); err != nil {
			f := asFailure("", err)
			return &failure{f.code, "its extended attribute " + quoted(x.Name) + ": " + os.NewSyscallError("setxattr", err).Error(), f.errno}
		}
	}
	return nil
}
