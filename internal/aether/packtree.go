package aether

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/pax"
	"dsec/internal/wire"
)

const (
	// maxDepth is how deep a tree in an archive may be: each level costs a descriptor.
	maxDepth = 512
	// maxLinkNames is how many bytes the names of files with several of them may take while they are remembered.
	maxLinkNames = 4 << 20
	linkEach     = 128     // that each takes besides
	dentsBuffer  = 8 << 10 // what is left of it is kept at each level
)

// readArchive sends a tree as an archive.
func (b *byteStream) readArchive(r *aetherv1.ReadArchive) (*aetherv1.Done, error) {
	acc, err := b.s.srv.accts.lookup(r.User)
	if err != nil {
		return nil, err
	}
	if _, err := checkPath(string(r.Path)); err != nil {
		return nil, err
	}
	var done *aetherv1.Done
	err = asUser(acc, func() (err error) {
		done, err = packTree(b.ctx, r, b, b.accept, &b.s.srv.names)
		return err
	})
	if errors.Is(err, wire.ErrBroken) { // the edge reads no more
		err = errCanceled
	}
	return done, err
}

// A packer writes one archive. It holds no more than a block of content, the rest of a directory's list at each level, and
// maxLinkNames.
type packer struct {
	ctx    context.Context
	w      *pax.Writer
	dents  []byte
	attrs  []byte
	levels []level
	prefix []byte // the path of the innermost level, with a slash behind it
	held   share
	links  map[fileID]*linked
	names  int // bytes of names in links
	done   aetherv1.Done
	more   int // problems beyond the first
}

// A level is a directory that is being read.
type level struct {
	fd     int
	prefix int    // how much of packer.prefix is its path: the paths of deep levels are long
	rest   []byte // entries that were read and not yet looked at
}

type fileID struct{ dev, ino uint64 }

// linked is a file with several names, as long as some of them have not come.
type linked struct {
	name string
	left uint64
}

// packTree writes the archive of what r names to w; opened is called when it is known to be there.
func packTree(ctx context.Context, r *aetherv1.ReadArchive, w io.Writer, opened func(), of *names) (*aetherv1.Done, error) {
	p := &packer{ctx: ctx, held: share{of: of}, w: pax.NewWriter(w), dents: make([]byte, dentsBuffer), links: make(map[fileID]*linked)}
	defer func() {
		for _, l := range p.levels {
			unix.Close(l.fd)
		}
		p.held.end()
	}()
	if err := p.start(r, opened); err != nil {
		return nil, err
	}
	for len(p.levels) > 0 {
		if err := p.next(); err != nil {
			return nil, err
		}
	}
	if err := p.w.Close(); err != nil {
		return nil, err
	}
	p.done.Bytes = uint64(p.w.Sent())
	if p.more > 0 {
		p.done.Problem.Message += "; " + plural(p.more, "other entry is", "other entries are") + " not right either"
	}
	return &p.done, nil
}

// start opens what is to be packed. A symbolic link is packed as one, unless its directory's content is asked for.
func (p *packer) start(r *aetherv1.ReadArchive, opened func()) error {
	name := clip(string(r.Path), 256)
	full, err := checkPath(string(r.Path))
	if err != nil {
		return err
	}
	full = path.Clean(full)
	if len(r.Names) > 0 {
		for _, n := range r.Names {
			if !p.held.take(len(n) + nameCost) {
				return errNames
			}
		}
		opened()
		return p.named(full, r.Names)
	}
	if r.Content || full == "/" {
		fd, err := openat2(full, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return asFailure("archive "+name, err)
		}
		p.levels = append(p.levels, level{fd: fd})
		if err := checkStored(fd); err != nil {
			return err
		}
		opened()
		return nil
	}
	if r.Follow {
		if target, err := whereTo(full); err != nil {
			return asFailure("archive "+name, err)
		} else if target != "" {
			return p.followed(target, path.Base(full), opened)
		}
	}
	parent, err := openRef(path.Dir(full), unix.O_DIRECTORY)
	if err != nil {
		return asFailure("archive "+name, err)
	}
	defer unix.Close(parent)
	if err := checkStored(parent); err != nil {
		return err
	}
	if err := p.checkTop(parent, path.Base(full)); err != nil {
		return asFailure("archive "+name, err)
	}
	opened()
	return p.entry(parent, "", path.Base(full))
}

// whereTo is the path of what a link leads to, "" if p is none.
func whereTo(p string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(p, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", err
	}
	fd, err := openRef(p, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	return os.Readlink(refPath(fd))
}

// followed packs what a link leads to, under the link's name. It is no link by the time that it was looked at.
func (p *packer) followed(target, name string, opened func()) error {
	parent, err := openRef(path.Dir(target), unix.O_DIRECTORY)
	if err != nil {
		return asFailure("archive "+quoted(name), err)
	}
	defer unix.Close(parent)
	if err := checkStored(parent); err != nil {
		return err
	}
	base := path.Base(target)
	if err := p.checkTop(parent, base); err != nil {
		return asFailure("archive "+quoted(name), err)
	}
	opened()
	fd, err := openFile(parent, base)
	if err != nil {
		return asFailure("archive "+quoted(name), err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return p.regular(fd, name)
	}
	unix.Close(fd)
	return p.directory(parent, name, base, st.Dev)
}

// checkTop refuses what would be an empty archive.
func (p *packer) checkTop(parent int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(parent, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFSOCK, unix.S_IFCHR, unix.S_IFBLK:
		return failf(aetherv1.Code_CODE_INVALID, "it is a device or a socket, which no archive can hold")
	case unix.S_IFLNK:
		return nil
	}
	fd, err := refAt(parent, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := checkStored(fd); err != nil {
		return err
	}
	may := uint32(unix.R_OK)
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		may |= unix.X_OK
	}
	return unix.Faccessat2(fd, "", may, unix.AT_EACCESS|unix.AT_EMPTY_PATH)
}

// next packs entries of the deepest open directory, until it has none or one of them is a directory.
func (p *packer) next() error {
	if p.ctx.Err() != nil {
		return errCanceled
	}
	at := len(p.levels) - 1
	top := &p.levels[at]
	list := top.rest
	prefix := string(p.prefix[:top.prefix])
	if len(list) == 0 {
		n, err := readDents(top.fd, p.dents)
		if n == 0 || err != nil {
			unix.Close(top.fd)
			p.levels = p.levels[:at]
			if err != nil {
				p.problem(prefix, err)
			}
			return nil
		}
		list = p.dents[:n]
	}
	p.held.give(len(top.rest))
	for len(list) > 0 {
		var name string
		name, list = nextDent(list)
		if name == "." || name == ".." || name == "" {
			continue
		}
		if err := p.entry(top.fd, prefix, name); err != nil {
			return err
		}
		if len(p.levels) > at+1 { // it went down
			if p.levels[at].rest = nil; !p.held.take(len(list)) {
				return errNames
			}
			p.levels[at].rest = bytes.Clone(list)
			return nil
		}
	}
	p.levels[at].rest = nil
	return nil
}

// nextDent takes one entry off a list that the kernel gave: its length is 16 bytes into it, its name 19.
func nextDent(b []byte) (name string, rest []byte) {
	n := int(binary.NativeEndian.Uint16(b[16:]))
	field, _, _ := bytes.Cut(b[19:n], []byte{0})
	return string(field), b[n:]
}

// problem notes that an entry is not as it should be. The archive goes on; the first is told at the end.
func (p *packer) problem(name string, err error) {
	if p.done.Problem != nil {
		p.more++
		return
	}
	f := *asFailure("", err) // a copy: some are variables
	if f.errno != 0 {
		f.message = f.errno.Error()
	}
	f.message = "archive entry " + quoted(name) + ": " + f.message
	p.done.Problem = f.proto()
}

// entry packs one file. What vanishes meanwhile is as if it had never been there.
func (p *packer) entry(dir int, prefix, base string) error {
	if p.ctx.Err() != nil {
		return errCanceled
	}
	var st unix.Stat_t
	name := prefix + base
	if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if !errors.Is(err, unix.ENOENT) {
			p.problem(name, err)
		}
		return nil
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return p.file(dir, name, base)
	case unix.S_IFDIR:
		return p.directory(dir, name, base, st.Dev)
	case unix.S_IFLNK:
		target, err := readLink(dir, base)
		if err != nil {
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // it was replaced
				p.problem(name, err)
			}
			return nil
		}
		return p.single(&st, name, pax.Symlink, target)
	case unix.S_IFIFO:
		return p.single(&st, name, pax.FIFO, "")
	}
	p.done.Skipped++
	return nil
}

// single packs what has no content.
func (p *packer) single(st *unix.Stat_t, name string, kind byte, target string) error {
	if first := p.earlier(st, name); first != "" {
		return p.header(headerOf(st, name, pax.Link, first))
	}
	return p.header(headerOf(st, name, kind, target))
}

func headerOf(st *unix.Stat_t, name string, kind byte, link string) *pax.Header {
	return &pax.Header{Name: name, Link: link, Type: kind, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec)}
}

func (p *packer) header(h *pax.Header) error {
	p.done.Entries++
	return p.w.Header(h)
}

// earlier returns the first name of a file that has several.
func (p *packer) earlier(st *unix.Stat_t, name string) string {
	if st.Nlink < 2 {
		return ""
	}
	id := fileID{st.Dev, st.Ino}
	l := p.links[id]
	if l == nil {
		if p.names+len(name)+linkEach > maxLinkNames || !p.held.take(len(name)+linkEach) {
			p.done.SplitLinks++
			return ""
		}
		p.names += len(name) + linkEach
		p.links[id] = &linked{name, st.Nlink - 1}
		return ""
	}
	if l.left--; l.left == 0 {
		delete(p.links, id)
		p.names -= len(l.name) + linkEach
		p.held.give(len(l.name) + linkEach)
	}
	return l.name
}

// directory packs a directory and goes down into it.
func (p *packer) directory(dir int, name, base string, dev uint64) error {
	fd, err := openDirAt(dir, base)
	if err != nil {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) { // it was replaced
			p.problem(name, err)
		}
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		p.problem(name, err)
		return nil
	}
	h := headerOf(&st, name+"/", pax.Dir, "")
	h.Xattrs = p.xattrs(fd, name)
	if err := p.header(h); err != nil {
		unix.Close(fd)
		return err
	}
	if checkStored(fd) != nil {
		p.done.Skipped++
		unix.Close(fd)
		return nil
	}
	if len(p.levels) >= maxDepth {
		unix.Close(fd)
		p.problem(name, failf(aetherv1.Code_CODE_INVALID, "directories are more than %d deep below it", maxDepth))
		return nil
	}
	p.prefix = append(append(p.prefix[:0], name...), '/')
	p.levels = append(p.levels, level{fd: fd, prefix: len(p.prefix)})
	return nil
}

// readLink reads a link in a directory or, with an empty name, the one that dir refers to.
func readLink(dir int, base string) (string, error) {
	b := make([]byte, maxPath)
	n, err := unix.Readlinkat(dir, base, b)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// Attributes that belong to what is packed. Others are of the host, or made up.
func keptXattr(name string) bool {
	return strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "trusted.") || name == "security.capability" ||
		name == "system.posix_acl_access" || name == "system.posix_acl_default"
}

// xattrs reads the extended attributes of what fd refers to.
func (p *packer) xattrs(fd int, name string) (list []pax.Xattr) {
	if p.attrs == nil {
		p.attrs = make([]byte, 64<<10) // the kernel's limit of a list, and of a value
	}
	n, err := unix.Flistxattr(fd, p.attrs)
	if err != nil || n == 0 {
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			p.problem(name, err)
		}
		return nil
	}
	total := 0
	for attr := range strings.SplitSeq(string(p.attrs[:n]), "\x00") {
		if !keptXattr(attr) {
			continue
		}
		n, err := unix.Fgetxattr(fd, attr, p.attrs)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if total += n + len(attr) + 64; total > pax.MaxExtended/2 && err == nil {
			err = failf(aetherv1.Code_CODE_INVALID, "it has more extended attributes than an archive can hold")
		}
		if err == nil && strings.Contains(attr, "=") {
			err = failf(aetherv1.Code_CODE_INVALID, "the name of its extended attribute %s holds \"=\", which no archive can hold", quoted(attr))
		}
		if err != nil {
			p.problem(name, err)
			continue
		}
		list = append(list, pax.Xattr{Name: attr, Value: string(p.attrs[:n])})
	}
	return list
}
