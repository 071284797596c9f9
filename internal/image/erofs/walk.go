package erofs

import (
	"errors"
	"io/fs"
	"strings"
)

// A Name is an entry of a directory being read.
type Name struct {
	Name string
	NID  uint64
	typ  byte
}

// ReadDir yields the names of a directory in the order of their bytes, without the dots.
func (im *Image) ReadDir(dir Info, yield func(Name) error) error {
	_, err := im.readDir(dir, yield)
	return err
}

// readDir also gives the number of "..".
func (im *Image) readDir(dir Info, yield func(Name) error) (parent uint64, err error) {
	if !dir.IsDir() {
		return 0, bad("inode %d is no directory", dir.NID)
	}
	var self uint64
	last := ""
	block := make([]byte, BlockSize)
	for off := int64(0); off < dir.Size; off += BlockSize {
		b := block[:min(BlockSize, dir.Size-off)]
		at := int64(dir.union)*BlockSize + off
		if dir.Size-off <= BlockSize {
			at = im.lastBlock(dir)
		}
		if err := im.readAt(b, at); err != nil {
			return 0, err
		}
		err := parseDirBlock(b, func(n Name) error {
			if n.Name <= last {
				return bad("names of directory %d are not in order", dir.NID)
			}
			last = n.Name
			switch n.Name {
			case ".":
				self = n.NID
				return nil
			case "..":
				parent = n.NID
				return nil
			}
			return yield(n)
		})
		if err != nil {
			return 0, err
		}
	}
	if self != dir.NID || parent == 0 {
		return 0, bad("directory %d has no right dots", dir.NID)
	}
	return parent, nil
}

// parseDirBlock decodes one block of a directory.
func parseDirBlock(b []byte, yield func(Name) error) error {
	if len(b) < direntSize {
		return bad("directory block of %d bytes", len(b))
	}
	first := int(le.Uint16(b[8:]))
	if first < direntSize || first%direntSize != 0 || first > len(b) {
		return bad("directory block whose names start at %d", first)
	}
	end := 0
	for i := 0; i < first; i += direntSize {
		start := int(le.Uint16(b[i+8:]))
		if i == 0 {
			end = start
		}
		if start != end || start >= len(b) {
			return bad("directory entry whose name is at %d", start)
		}
		var name string
		if next := i + direntSize; next < first {
			end = int(le.Uint16(b[next+8:]))
			if end <= start || end > len(b) {
				return bad("directory entry whose name ends at %d", end)
			}
			name = string(b[start:end])
		} else {
			name, _, _ = strings.Cut(string(b[start:]), "\x00") // the rest of the block is padding
		}
		if err := checkName(name); err != nil && name != "." && name != ".." {
			return bad("directory entry: %w", err)
		}
		if err := yield(Name{Name: name, NID: le.Uint64(b[i:]), typ: b[i+10]}); err != nil {
			return err
		}
	}
	return nil
}

// MaxPath bounds the paths of a walk, since a hostile image can chain directories for as long as it is.
const MaxPath = 16 << 10

// walker holds what makes a walk of a hostile image end: each directory once, and no more names than the image has room
// for.
type walker struct {
	im   *Image
	fn   func(path string, i Info) error
	seen map[uint64]bool
	left int64
}

// step is a directory whose names are still to be visited.
type step struct {
	path  string
	info  Info
	names []Name
}

// Walk visits every name below the root, a directory before its contents, in the order of bytes within each. Paths start
// with "/", the root is "/". fn may return fs.SkipDir for a directory.
func (im *Image) Walk(fn func(path string, i Info) error) error {
	root, err := im.Root()
	if err != nil {
		return err
	}
	w := &walker{im: im, fn: fn, seen: map[uint64]bool{}, left: im.size / (direntSize + 1)}
	if err := fn("/", root); err != nil {
		if errors.Is(err, fs.SkipDir) {
			return nil
		}
		return err
	}
	top, err := w.enter("", root, root.NID)
	if err != nil {
		return err
	}
	stack := []*step{top}
	for len(stack) > 0 {
		s := stack[len(stack)-1]
		if len(s.names) == 0 {
			stack = stack[:len(stack)-1]
			continue
		}
		n := s.names[0]
		s.names = s.names[1:]
		next, err := w.visit(s, n)
		if err != nil {
			return err
		}
		if next != nil {
			stack = append(stack, next)
		}
	}
	return nil
}

func (w *walker) enter(path string, dir Info, parent uint64) (*step, error) {
	if w.seen[dir.NID] {
		return nil, bad("directory %d has two names", dir.NID)
	}
	w.seen[dir.NID] = true
	s := &step{path: path, info: dir}
	got, err := w.im.readDir(dir, func(n Name) error {
		if w.left--; w.left < 0 {
			return bad("more names than the image has room for")
		}
		s.names = append(s.names, n)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if got != parent {
		return nil, bad("parent of directory %d is %d, not %d", dir.NID, got, parent)
	}
	return s, nil
}

func (w *walker) visit(s *step, n Name) (*step, error) {
	i, err := w.im.Stat(n.NID)
	if err != nil {
		return nil, err
	}
	if direntType(i.Mode) != n.typ {
		return nil, bad("name of inode %d says it has type %d", n.NID, n.typ)
	}
	path := s.path + "/" + n.Name
	if len(path) > MaxPath {
		return nil, bad("a path of more than %d bytes", MaxPath)
	}
	if err := w.fn(path, i); err != nil {
		if i.IsDir() && errors.Is(err, fs.SkipDir) {
			return nil, nil
		}
		return nil, err
	}
	if !i.IsDir() {
		return nil, nil
	}
	return w.enter(path, i, s.info.NID)
}

// Verify reads everything that an image says and checks that it fits together: order of names, dots, link counts, number
// of inodes, attributes, targets, and that every chunk lies within its blob.
func (im *Image) Verify() error {
	links := map[uint64]uint32{}
	declared := map[uint64]uint32{}
	err := im.Walk(func(path string, i Info) error {
		if _, again := declared[i.NID]; !again {
			if err := im.verifyInode(i); err != nil {
				return err
			}
		}
		declared[i.NID] = i.Nlink
		links[i.NID]++
		if i.IsDir() {
			links[i.NID]++
			return im.ReadDir(i, func(n Name) error {
				if n.typ == direntType(TypeDir) {
					links[i.NID]++
				}
				return nil
			})
		}
		return nil
	})
	if err != nil {
		return err
	}
	for nid, want := range declared {
		if links[nid] != want {
			return bad("inode %d has %d links and says %d", nid, links[nid], want)
		}
	}
	if uint64(len(declared)) != im.super.inodes {
		return bad("%d inodes, the superblock says %d", len(declared), im.super.inodes)
	}
	return nil
}

func (im *Image) verifyInode(i Info) error {
	if _, err := im.Xattrs(i); err != nil {
		return err
	}
	if i.Type() == TypeSymlink {
		_, err := im.Readlink(i)
		return err
	}
	return im.Extents(i, func(Extent) error { return nil })
}
