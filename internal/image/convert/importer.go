package convert

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"strings"

	"dsec/internal/image"
	"dsec/internal/image/erofs"
	"dsec/sandbox"
)

// importer builds a tree from the entries of an archive.
type importer struct {
	o        Options
	in       *input
	root     *erofs.Inode
	data     *erofs.Data
	manifest image.Manifest

	entries  int64 // headers and implied parents so far; at the end, names of the tree
	bytes    int64 // of files so far
	memory   int64 // estimate of what the tree takes
	reported int64 // bytes at the last Progress
}

// nodeMemory is what an inode and its name take beside their strings, with the slack of growing slices and maps.
const nodeMemory = 320

func refuse(path, format string, args ...any) error {
	msg := fmt.Sprintf(format, args...)
	path = strings.ToValidUTF8(path[:min(len(path), 200)], "\uFFFD")
	return sandbox.Errorf(sandbox.InvalidArgument, "bad_entry", "archive entry %q: %s", path, msg).WithFact("path", path)
}

// readArchive reads every entry and then the rest of the input.
func (im *importer) readArchive() error {
	im.in.limit = headerAllowance + im.o.MaxEntries*perEntryAllowance
	tr := tar.NewReader(im.in)
	for {
		before := im.in.count
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return im.readEnd(before)
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // paths are checked here
			return err
		}
		if err := im.charge(int64(len(hdr.Name)+len(hdr.Linkname)), hdr.Size); err != nil {
			return err
		}
		if err := im.entry(hdr, tr); err != nil {
			return err
		}
		if im.entries%1024 == 0 || im.bytes-im.reported >= 16<<20 {
			im.reported = im.bytes
			im.o.Progress(im.entries, im.bytes)
		}
	}
}

// readEnd checks that the archive ended by its marker: since the position before, at least one whole block of zeros.
func (im *importer) readEnd(before int64) error {
	padded := (before + tarBlock - 1) / tarBlock * tarBlock
	if im.in.count < padded+tarBlock || im.in.last != [tarBlock]byte{} {
		return io.ErrUnexpectedEOF
	}
	return im.in.drain()
}

// charge counts one more name against the limits, before anything is done for it.
func (im *importer) charge(text, size int64) error {
	im.entries++
	im.memory += nodeMemory + text
	switch {
	case im.entries > im.o.MaxEntries:
		return sandbox.Errorf(sandbox.InvalidArgument, "too_many_entries", "the archive has more than %d entries", im.o.MaxEntries)
	case size > im.o.MaxBytes-im.bytes:
		return sandbox.Errorf(sandbox.InvalidArgument, "too_many_bytes", "the files of the archive have more than %d bytes", im.o.MaxBytes)
	case im.memory > im.o.MaxMemory:
		return sandbox.Errorf(sandbox.InvalidArgument, "archive_too_large", "names and attributes of the archive need more than %d bytes of memory", im.o.MaxMemory)
	}
	im.bytes += size
	im.in.limit += size
	return nil
}

// classify says in the user's terms what ended an import.
func (im *importer) classify(err error) error {
	var known *sandbox.Error
	var write *erofs.WriteError
	switch {
	case im.in.source.ctx.Err() != nil:
		return im.in.source.ctx.Err()
	case im.in.source.err != nil:
		if errors.As(im.in.source.err, &known) {
			return known
		}
		return sandbox.Errorf(sandbox.Canceled, "upload_cut", "the archive's source failed before its end; send it again").WithCause(im.in.source.err)
	case errors.As(err, &write):
		return write.Err
	case errors.As(err, &known):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return sandbox.Errorf(sandbox.InvalidArgument, "bad_archive", "the archive ends early: it was cut, or is no tar archive").WithCause(err)
	case im.in.gzip:
		return sandbox.Errorf(sandbox.InvalidArgument, "bad_archive", "this is no undamaged gzip of a tar archive").WithCause(err)
	}
	return sandbox.Errorf(sandbox.InvalidArgument, "bad_archive", "this is no undamaged tar archive, plain or gzip").WithCause(err)
}

// entry puts one header's file into the tree.
func (im *importer) entry(hdr *tar.Header, content io.Reader) error {
	switch hdr.Typeflag {
	case tar.TypeXGlobalHeader, 'V': // comments: git's commit, a volume's name
		return nil
	}
	parts, err := splitPath(hdr.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return im.rootEntry(hdr)
	}
	dir, err := im.parent(hdr.Name, parts)
	if err != nil {
		return err
	}
	name := strings.Clone(parts[len(parts)-1]) // not a part of the whole path's memory
	if im.o.Whiteouts && strings.HasPrefix(name, whiteoutPrefix) {
		return im.whiteout(hdr, dir, strings.TrimPrefix(name, whiteoutPrefix))
	}
	n, err := im.inode(hdr, content)
	if err != nil || n == nil {
		return err
	}
	im.put(dir, name, n)
	return nil
}

// rootEntry sets the attributes of the root.
func (im *importer) rootEntry(hdr *tar.Header) error {
	if hdr.Typeflag != tar.TypeDir {
		return refuse(hdr.Name, "the root can only be a directory")
	}
	n := erofs.NewDir(0)
	if err := im.attributes(n, hdr); err != nil {
		return err
	}
	adopt(im.root, n)
	return nil
}

// adopt gives a directory the attributes of a later entry for it. Its contents stay, and so does opacity.
func adopt(old, n *erofs.Inode) {
	if isOpaque(old) {
		setOpaque(n)
	}
	old.Mode, old.UID, old.GID, old.Mtime, old.Nsec, old.Xattrs = n.Mode, n.UID, n.GID, n.Mtime, n.Nsec, n.Xattrs
}

// put names n in dir. An earlier file of that name goes, an earlier directory only for something else.
func (im *importer) put(dir *erofs.Inode, name string, n *erofs.Inode) {
	old := dir.Lookup(name)
	if old != nil && n.IsDir() {
		if old.IsDir() {
			adopt(old, n)
			return
		}
		if im.o.Whiteouts && isWhiteout(old) { // the whiteout hid what the new directory must not merge with
			setOpaque(n)
		}
	}
	dir.Set(name, n)
}

// splitPath cuts a name into parts. No part is empty, "." or ".."; none is longer than a file system allows.
func splitPath(name string) ([]string, error) {
	if len(name) > erofs.MaxPath {
		return nil, refuse(name, "its path has %d bytes, at most %d are allowed", len(name), erofs.MaxPath)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, refuse(name, "its name holds a NUL byte")
	}
	parts := make([]string, 0, 16)
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, refuse(name, "its path holds \"..\"")
		case len(part) > erofs.MaxName:
			return nil, refuse(name, "a name has %d bytes, at most %d are allowed", len(part), erofs.MaxName)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// parent finds the directory of an entry and makes the ones that are missing.
func (im *importer) parent(path string, parts []string) (*erofs.Inode, error) {
	dir := im.root
	for _, part := range parts[:len(parts)-1] {
		next := dir.Lookup(part)
		switch {
		case next == nil, im.o.Whiteouts && isWhiteout(next):
			if err := im.charge(int64(len(part)), 0); err != nil {
				return nil, err
			}
			next = erofs.NewDir(0o755)
			im.put(dir, strings.Clone(part), next)
		case next.Type() == erofs.TypeSymlink:
			return nil, refuse(path, "%q above it is a symbolic link, which an archive may not write through", part)
		case !next.IsDir():
			return nil, refuse(path, "%q above it is no directory", part)
		}
		dir = next
	}
	return dir, nil
}

// inode makes what a header describes; nil if it is dropped.
func (im *importer) inode(hdr *tar.Header, content io.Reader) (*erofs.Inode, error) {
	var n *erofs.Inode
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		n = &erofs.Inode{Mode: erofs.TypeRegular, Size: hdr.Size}
	case tar.TypeDir:
		n = erofs.NewDir(0)
	case tar.TypeSymlink:
		if hdr.Linkname == "" || len(hdr.Linkname) > erofs.MaxTarget || strings.IndexByte(hdr.Linkname, 0) >= 0 {
			return nil, refuse(hdr.Name, "a symbolic link needs a target of 1 to %d bytes", erofs.MaxTarget)
		}
		n = &erofs.Inode{Mode: erofs.TypeSymlink, Target: hdr.Linkname}
	case tar.TypeLink:
		return im.linked(hdr)
	case tar.TypeFifo:
		n = &erofs.Inode{Mode: erofs.TypeFIFO}
	case tar.TypeChar:
		if hdr.Devmajor == 0 && hdr.Devminor == 0 {
			n = whiteoutInode()
			break
		}
		im.drop("%s: character device %d:%d", hdr.Name, hdr.Devmajor, hdr.Devminor)
		return nil, nil
	case tar.TypeBlock:
		im.drop("%s: block device %d:%d", hdr.Name, hdr.Devmajor, hdr.Devminor)
		return nil, nil
	case 'M':
		return nil, refuse(hdr.Name, "it continues a file of another volume; multi-volume archives are not supported")
	default:
		im.drop("%s: entry of unknown type %q", hdr.Name, hdr.Typeflag)
		return nil, nil
	}
	if err := im.attributes(n, hdr); err != nil {
		return nil, err
	}
	if n.Type() == erofs.TypeRegular && n.Size > 0 {
		var err error
		if n.Extents, err = im.data.Append(content, n.Size, isSparse(hdr)); err != nil {
			return nil, err
		}
		im.memory += 24 * int64(cap(n.Extents))
	}
	return n, nil
}

// linked finds the target of a hard link.
func (im *importer) linked(hdr *tar.Header) (*erofs.Inode, error) {
	parts, err := splitPath(hdr.Linkname)
	if err != nil {
		return nil, err
	}
	n := im.root
	for _, part := range parts {
		if !n.IsDir() {
			return nil, refuse(hdr.Name, "it is a hard link to %.100q, which leads through something that is no directory", hdr.Linkname)
		}
		if n = n.Lookup(part); n == nil {
			return nil, refuse(hdr.Name, "it is a hard link to %.100q, which is not in the archive before it", hdr.Linkname)
		}
	}
	if n.IsDir() {
		return nil, refuse(hdr.Name, "it is a hard link to the directory %.100q", hdr.Linkname)
	}
	return n, nil
}

// isSparse reports whether the archive stored holes, in one of GNU's forms.
func isSparse(hdr *tar.Header) bool {
	if hdr.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func (im *importer) drop(format string, args ...any) { im.manifest.Drop(fmt.Sprintf(format, args...)) }

// count fills in the manifest's numbers from the finished tree.
func (im *importer) count() {
	seen := map[*erofs.Inode]bool{} // files with several names
	dirs := []*erofs.Inode{im.root}
	im.entries = 0
	for len(dirs) > 0 {
		dir := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		for _, n := range dir.Children() {
			im.entries++
			switch {
			case n.IsDir():
				dirs = append(dirs, n)
			case n.Size > 0 && !seen[n]:
				seen[n] = true
				im.manifest.FileBytes += n.Size
			}
		}
	}
	im.manifest.Entries = im.entries
}
