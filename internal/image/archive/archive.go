//go:build linux

// Package archive packs a local directory as a tar archive, the form in which environments are sent to the server.
//
// # What surprises
//
//   - Archives are deterministic: sorted, without names of users, access times or inode numbers.
//   - Links are never followed. A file that is replaced while it is read is an error, and so is one that shrinks.
//   - Holes are kept: of a file with very many of them the larger ones.
//   - What has no form in an archive (sockets, attributes whose name holds "=") is skipped, and Options.Skipped told.
package archive

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"dsec/internal/linux"
	"dsec/internal/pax"
	"dsec/sandbox"
)

// Options say how a directory is packed.
type Options struct {
	// RootOwner makes everything belong to 0:0, which is what a user without privileges wants of an image.
	RootOwner bool
	// OneFileSystem leaves out what is mounted below the directory.
	OneFileSystem bool
	// Skipped, if set, is told of everything that was left out, with its path and the reason.
	Skipped func(path, why string)
	// Progress, if set, is called after every entry with what was packed so far.
	Progress func(entries, bytes int64)
}

// WriteTar packs the contents of dir, whose own attributes become those of the entry "./". What the user can mend is
// InvalidArgument "bad_directory" or FailedPrecondition "file_changed"; failures of w are returned as they are.
func WriteTar(ctx context.Context, w io.Writer, dir string, o Options) error {
	st, err := os.Stat(dir)
	if err != nil || !st.IsDir() {
		return sandbox.Errorf(sandbox.InvalidArgument, "bad_directory", "%s is not a directory that can be packed", dir).WithCause(err)
	}
	if o.Skipped == nil {
		o.Skipped = func(string, string) {}
	}
	if o.Progress == nil {
		o.Progress = func(int64, int64) {}
	}
	out := bufio.NewWriterSize(w, 1<<20)
	p := &packer{ctx: ctx, o: o, root: dir, w: pax.NewWriter(out), links: map[fileID]string{}, device: idOf(st).dev}
	if err := p.tree(".", st); err != nil {
		return err
	}
	if err := p.w.Close(); err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	return out.Flush()
}

type fileID struct{ dev, ino uint64 }

func idOf(st fs.FileInfo) fileID {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return fileID{uint64(s.Dev), s.Ino}
	}
	return fileID{}
}

// packer lives for one WriteTar, and so may hold its context.
type packer struct {
	ctx    context.Context
	o      Options
	root   string
	w      *pax.Writer
	links  map[fileID]string // files with several names that were packed
	device uint64

	entries, bytes int64
}

// tree packs rel and what is below it. The recursion is as deep as the directory, which is the user's own.
func (p *packer) tree(rel string, st fs.FileInfo) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if err := p.entry(rel, st); err != nil {
		return err
	}
	p.entries++
	p.o.Progress(p.entries, p.bytes)
	if !st.IsDir() || p.o.OneFileSystem && idOf(st).dev != p.device {
		return nil
	}
	list, err := os.ReadDir(p.path(rel))
	if err != nil {
		return unreadable(err)
	}
	for _, e := range list {
		st, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			p.o.Skipped(filepath.Join(rel, e.Name()), "it vanished")
			continue
		}
		if err != nil {
			return unreadable(err)
		}
		if err := p.tree(filepath.Join(rel, e.Name()), st); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) path(rel string) string { return filepath.Join(p.root, rel) }

func unreadable(err error) error {
	return sandbox.Errorf(sandbox.InvalidArgument, "bad_directory", "the directory cannot be packed: %v", err)
}

// entry packs one file.
func (p *packer) entry(rel string, st fs.FileInfo) error {
	if st.Mode().Type() == fs.ModeSocket {
		p.o.Skipped(rel, "it is a socket")
		return nil
	}
	h, err := p.header(rel, st)
	if err != nil {
		return err
	}
	if h.Type == pax.File && h.Size > 0 {
		return p.content(h, rel, st)
	}
	return p.writeHeader(h)
}

// header describes a file, or a link to an earlier name of it.
func (p *packer) header(rel string, st fs.FileInfo) (*pax.Header, error) {
	s := st.Sys().(*syscall.Stat_t)
	h := &pax.Header{Name: rel, Mode: s.Mode & 0o7777, UID: s.Uid, GID: s.Gid, Sec: s.Mtim.Sec, Nsec: uint32(s.Mtim.Nsec)}
	if p.o.RootOwner {
		h.UID, h.GID = 0, 0
	}
	if !st.IsDir() && s.Nlink > 1 {
		if first, ok := p.links[idOf(st)]; ok {
			h.Type, h.Link = pax.Link, first
			return h, nil
		}
		p.links[idOf(st)] = rel
	}
	switch s.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		h.Type, h.Size = pax.File, st.Size()
	case syscall.S_IFDIR:
		h.Type = pax.Dir
		h.Name += "/"
	case syscall.S_IFLNK:
		target, err := os.Readlink(p.path(rel))
		if err != nil {
			return nil, unreadable(err)
		}
		h.Type, h.Link = pax.Symlink, target
	case syscall.S_IFIFO:
		h.Type = pax.FIFO
	case syscall.S_IFCHR, syscall.S_IFBLK:
		h.Type = pax.Char
		if s.Mode&syscall.S_IFMT == syscall.S_IFBLK {
			h.Type = pax.Block
		}
		h.Major, h.Minor = uint32(s.Rdev>>8&0xfff|s.Rdev>>32&^0xfff), uint32(s.Rdev&0xff|s.Rdev>>12&^0xff)
	}
	return h, p.xattrs(h, rel)
}

func (p *packer) xattrs(h *pax.Header, rel string) error {
	xattrs, err := linux.Lxattrs(p.path(rel))
	if err != nil {
		return unreadable(err)
	}
	for _, name := range slices.Sorted(maps.Keys(xattrs)) {
		if strings.ContainsAny(name, "=") {
			p.o.Skipped(rel, "the name of its extended attribute "+name+" holds \"=\"")
			continue
		}
		h.Xattrs = append(h.Xattrs, pax.Xattr{Name: name, Value: xattrs[name]})
	}
	return nil
}

func (p *packer) writeHeader(h *pax.Header) error {
	if err := p.w.Header(h); err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	return nil
}

// content packs a regular file with bytes.
func (p *packer) content(h *pax.Header, rel string, st fs.FileInfo) error {
	f, err := os.OpenFile(p.path(rel), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return unreadable(err)
	}
	defer f.Close()
	if now, err := f.Stat(); err != nil || !os.SameFile(st, now) {
		return changed(rel)
	}
	p.bytes += h.Size
	if s := st.Sys().(*syscall.Stat_t); s.Blocks*512 < h.Size {
		h.Data = pax.Runs(h.Size, f.Seek)
	}
	if err := p.writeHeader(h); err != nil {
		return err
	}
	if h.Data == nil {
		return p.copy(f, rel, 0, h.Size)
	}
	for _, s := range h.Data {
		if err := p.copy(f, rel, s.Off, s.Len); err != nil {
			return err
		}
	}
	return nil
}

func changed(rel string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "file_changed", "%s changed while it was packed; try again when nothing writes to the directory", rel)
}

// copy copies length bytes of f from off.
func (p *packer) copy(f *os.File, rel string, off, length int64) error {
	for length > 0 {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		space := p.w.Space()
		n, err := f.ReadAt(space[:min(int64(len(space)), length)], off)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("pack %s: %w", rel, err)
		}
		if n == 0 {
			return changed(rel)
		}
		if err := p.w.Advance(n); err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
		off += int64(n)
		length -= int64(n)
	}
	return nil
}
