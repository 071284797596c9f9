package erofs

import (
	"cmp"
	"iter"
	"slices"
	"strings"
)

// An Inode is a file to be written. Hard links are the same *Inode under several names. Fields may be set freely until
// Write, which checks them.
type Inode struct {
	Mode  uint16 // type and permission bits as in stat(2)
	Nsec  uint32 // nanoseconds of Mtime
	UID   uint32
	GID   uint32
	Rdev  uint32 // character and block devices, see Rdev
	Mtime int64  // seconds since 1970
	Size  int64  // regular files, bytes
	// Extents are a regular file's data, ascending and disjoint. What they leave out reads as zeros.
	Extents []Extent
	Target  string // symbolic links
	Xattrs  []Xattr

	dir   *directory
	nid   uint64 // 0 = not placed yet
	nlink uint32
	block uint32 // first of the blocks behind the inode area, relative to it
}

// An Extent is a run of a file's bytes in a blob.
type Extent struct {
	Off    int64 // in the file, a multiple of BlockSize
	Len    int64 // bytes; a multiple of BlockSize except at the end of the file
	Block  uint32
	Device uint16 // 1 = the first blob of the device table
}

// An Xattr is one extended attribute, with its full name.
type Xattr struct {
	Name  string
	Value string
}

// A Dirent is a name in a directory.
type Dirent struct {
	Name  string
	Inode *Inode
}

// directory holds children. Most directories are small, so that a map is only kept above indexFrom entries.
type directory struct {
	entries []Dirent
	index   map[string]int32
	// What layout found out.
	parent *Inode
	starts []int32 // index in listing of the first entry of each directory block; never empty
	tail   int     // bytes in the last block
}

const indexFrom = 24

// NewDir makes an empty directory.
func NewDir(perm uint16) *Inode {
	return &Inode{Mode: TypeDir | perm&PermMask, dir: &directory{}}
}

// IsDir reports whether n is a directory.
func (n *Inode) IsDir() bool { return n.Mode&TypeMask == TypeDir }

// Type is the type part of the mode.
func (n *Inode) Type() uint16 { return n.Mode & TypeMask }

// Len is the number of names in a directory.
func (n *Inode) Len() int { return len(n.dir.entries) }

// Lookup finds a name in a directory.
func (n *Inode) Lookup(name string) *Inode {
	if i := n.dir.find(name); i >= 0 {
		return n.dir.entries[i].Inode
	}
	return nil
}

// Set adds a name to a directory, or gives an existing name to child.
func (n *Inode) Set(name string, child *Inode) {
	d := n.dir
	if i := d.find(name); i >= 0 {
		d.entries[i].Inode = child
		return
	}
	d.entries = append(d.entries, Dirent{Name: name, Inode: child})
	if d.index != nil {
		d.index[name] = int32(len(d.entries) - 1)
	}
}

// Children yields the names of a directory in no particular order.
func (n *Inode) Children() iter.Seq2[string, *Inode] {
	return func(yield func(string, *Inode) bool) {
		for _, e := range n.dir.entries {
			if !yield(e.Name, e.Inode) {
				return
			}
		}
	}
}

func (d *directory) find(name string) int {
	if d.index == nil && len(d.entries) >= indexFrom {
		d.index = make(map[string]int32, 2*len(d.entries))
		for i, e := range d.entries {
			d.index[e.Name] = int32(i)
		}
	}
	if d.index != nil {
		if i, ok := d.index[name]; ok {
			return int(i)
		}
		return -1
	}
	return slices.IndexFunc(d.entries, func(e Dirent) bool { return e.Name == name })
}

// sort puts entries into the order of the kernel's search: unsigned bytes.
func (d *directory) sort() {
	d.index = nil
	slices.SortFunc(d.entries, func(a, b Dirent) int { return strings.Compare(a.Name, b.Name) })
}

// listing yields the entries of a sorted directory with "." and ".." in their places.
func (d *directory) listing(self *Inode) iter.Seq[Dirent] {
	return func(yield func(Dirent) bool) {
		dots := []Dirent{{".", self}, {"..", d.parent}}
		for _, e := range d.entries {
			for len(dots) > 0 && dots[0].Name < e.Name {
				if !yield(dots[0]) {
					return
				}
				dots = dots[1:]
			}
			if !yield(e) {
				return
			}
		}
		for _, e := range dots {
			if !yield(e) {
				return
			}
		}
	}
}

// sortXattrs orders by name, as Write needs it to be deterministic.
func sortXattrs(x []Xattr) {
	slices.SortFunc(x, func(a, b Xattr) int { return cmp.Compare(a.Name, b.Name) })
}
