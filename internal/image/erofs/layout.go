package erofs

import (
	"fmt"
	"math/bits"
	"strings"
)

// layout decides where every inode goes. It holds one pointer per inode beside the tree.
type layout struct {
	devices int
	order   []*Inode // as placed
	pos     int64    // next free byte of the inode area
	blocks  uint32   // blocks of directory and link data, placed behind the inodes
	base    uint32   // first of them
}

// maxChunks bounds one file's index. Data never makes files that come near it.
const maxChunks = 1 << 24

// plan places the tree below root, breadth first, so that a directory's children are neighbours.
func plan(root *Inode, devices int) (*layout, error) {
	l := &layout{devices: devices, pos: BlockSize}
	if !root.IsDir() || root.dir == nil {
		return nil, fmt.Errorf("the root is not a directory")
	}
	root.dir.parent = root
	if err := l.place(root); err != nil {
		return nil, err
	}
	root.nlink = 2
	for i := 0; i < len(l.order); i++ {
		if l.order[i].IsDir() {
			if err := l.placeChildren(l.order[i]); err != nil {
				return nil, err
			}
		}
	}
	l.pos = alignUp(l.pos, BlockSize)
	if l.pos>>blockBits+int64(l.blocks) > nullBlock-1 {
		return nil, fmt.Errorf("metadata of more than 16 TiB")
	}
	l.base = uint32(l.pos >> blockBits)
	return l, nil
}

func (l *layout) placeChildren(dir *Inode) error {
	for i, e := range dir.dir.entries {
		if err := checkName(e.Name); err != nil {
			return err
		}
		if i > 0 && dir.dir.entries[i-1].Name == e.Name {
			return fmt.Errorf("name %q occurs twice in a directory", e.Name)
		}
		n := e.Inode
		if n.IsDir() {
			if n.nid != 0 || n.dir == nil {
				return fmt.Errorf("directory %q has two names, or was not made by NewDir", e.Name)
			}
			n.dir.parent = dir
			n.nlink = 1
			dir.nlink++
		}
		n.nlink++
		if n.nid == 0 {
			if err := l.place(n); err != nil {
				return fmt.Errorf("%q: %w", e.Name, err)
			}
		}
	}
	return nil
}

func checkName(name string) error {
	switch {
	case name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("%q cannot be the name of a file", name)
	case len(name) > MaxName:
		return fmt.Errorf("name of %d bytes, at most %d fit: %.40q…", len(name), MaxName, name)
	}
	return nil
}

// place gives an inode its number.
func (l *layout) place(n *Inode) error {
	sortXattrs(n.Xattrs)
	xsize, err := xattrSize(n.Xattrs)
	if err != nil {
		return err
	}
	if n.Nsec >= 1e9 {
		return fmt.Errorf("modification time with %d nanoseconds", n.Nsec)
	}
	head := inodeSize + xsize
	l.pos = alignUp(l.pos, nidSize)
	if l.pos%BlockSize > BlockSize-inodeSize { // an inode lies in one block
		l.pos = alignUp(l.pos, BlockSize)
	}
	switch n.Type() {
	case TypeDir:
		n.dir.sort()
		n.dir.shape()
		whole := len(n.dir.starts)
		if l.inline(head, n.dir.tail) {
			head += n.dir.tail
			whole--
		}
		n.block = l.blocks
		l.blocks += uint32(whole)
	case TypeSymlink:
		if n.Target == "" || len(n.Target) > MaxTarget || strings.IndexByte(n.Target, 0) >= 0 {
			return fmt.Errorf("symbolic link with a target of %d bytes", len(n.Target))
		}
		if l.inline(head, len(n.Target)) {
			head += len(n.Target)
		} else {
			n.block = l.blocks
			l.blocks++
		}
	case TypeRegular:
		if err := checkExtents(n, l.devices); err != nil {
			return err
		}
		if n.Size > 0 {
			chunks := chunkCount(n.Size, chunkBits(n))
			if chunks > maxChunks {
				return fmt.Errorf("a file in %d pieces, at most %d fit", chunks, maxChunks)
			}
			head = alignUp(head, indexSize) + int(chunks)*indexSize
		}
	case TypeChar, TypeBlock, TypeFIFO, TypeSocket:
	default:
		return fmt.Errorf("mode %#o has no file type", n.Mode)
	}
	n.nid = uint64(l.pos / nidSize)
	l.order = append(l.order, n)
	l.pos += int64(head)
	return nil
}

// inline decides whether a tail stays behind its inode, and moves on to the next block if only then all of it is in one.
func (l *layout) inline(head, tail int) bool {
	if !fitsInline(head, tail) {
		return false
	}
	if int(l.pos%BlockSize)+head+tail > BlockSize {
		l.pos = alignUp(l.pos, BlockSize)
	}
	return true
}

func fitsInline(head, tail int) bool { return head+tail <= BlockSize }

// shape cuts a sorted directory into blocks.
func (d *directory) shape() {
	d.starts, d.tail = append(d.starts[:0], 0), 0
	i := int32(0)
	for e := range d.listing(nil) {
		need := direntSize + len(e.Name)
		if d.tail+need > BlockSize {
			d.starts = append(d.starts, i)
			d.tail = 0
		}
		d.tail += need
		i++
	}
}

// size is the directory's i_size.
func (d *directory) size() int64 {
	return int64(len(d.starts)-1)*BlockSize + int64(d.tail)
}

func checkExtents(n *Inode, devices int) error {
	if n.Size < 0 {
		return fmt.Errorf("negative size %d", n.Size)
	}
	var end int64
	for i, e := range n.Extents {
		blocks := (e.Len + BlockSize - 1) / BlockSize
		switch {
		case e.Off%BlockSize != 0 || e.Len <= 0 || e.Off < end || e.Len > n.Size-e.Off:
			return fmt.Errorf("extent %d [%d, +%d) is not in order within %d bytes", i, e.Off, e.Len, n.Size)
		case e.Len%BlockSize != 0 && e.Off+e.Len != n.Size:
			return fmt.Errorf("extent %d ends within a block", i)
		case e.Device < 1 || int(e.Device) > devices:
			return fmt.Errorf("extent %d is on device %d of %d", i, e.Device, devices)
		case int64(e.Block)+blocks > nullBlock:
			return fmt.Errorf("extent %d is beyond 16 TiB of its blob", i)
		case i > 0 && misread(n.Extents[i-1], e):
			return fmt.Errorf("extent %d begins in its blob at the block where the one before ends in another", i)
		}
		end = e.Off + e.Len
	}
	return nil
}

// misread reports whether the kernel may read b wrong after a where blobs are loop devices: seeing sectors follow each other, it
// asks the device of a for both (iomap's read-ahead, at least up to Linux 6.18).
func misread(a, b Extent) bool {
	return a.Device != b.Device && int64(a.Block)+(a.Len+BlockSize-1)>>blockBits == int64(b.Block)
}

// chunkBits is the largest chunk size, as a shift of blocks, at which no chunk spans two runs of blocks.
func chunkBits(n *Inode) uint {
	blocks := uint64(n.Size+BlockSize-1) >> blockBits
	shift := uint(bits.Len64(blocks - 1)) // one chunk holds everything
	cut := func(off int64) {
		if b := uint64(off+BlockSize-1) >> blockBits; b > 0 && b < blocks {
			shift = min(shift, uint(bits.TrailingZeros64(b)))
		}
	}
	for i, e := range n.Extents {
		if i == 0 || !contiguous(n.Extents[i-1], e) {
			if i > 0 {
				cut(n.Extents[i-1].Off + n.Extents[i-1].Len)
			}
			cut(e.Off)
		}
	}
	if k := len(n.Extents); k > 0 {
		cut(n.Extents[k-1].Off + n.Extents[k-1].Len)
	}
	return min(shift, chunkBitsMask)
}

func contiguous(a, b Extent) bool {
	return a.Off+a.Len == b.Off && a.Device == b.Device && int64(a.Block)+a.Len>>blockBits == int64(b.Block)
}

func chunkCount(size int64, shift uint) int64 {
	chunk := int64(BlockSize) << shift
	return (size-1)/chunk + 1
}
