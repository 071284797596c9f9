package erofs

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
)

// A Device is a row of the device table: a blob, in the order of Extent.Device.
type Device struct {
	Digest string // 64 hex digits of the blob's SHA-256
	Blocks uint32
}

// Write emits the metadata image of the tree below root: equal trees give equal bytes. It writes in order and never
// seeks. The tree may not change after it; a second Write of the same tree is refused.
func Write(w io.Writer, root *Inode, devices []Device) error {
	if root.nid != 0 {
		return errors.New("this tree was written before")
	}
	if len(devices) > MaxDevices {
		return fmt.Errorf("%d blobs, at most %d fit", len(devices), MaxDevices)
	}
	for _, d := range devices {
		if len(d.Digest) != slotTagSize {
			return fmt.Errorf("%q is not the hex form of a SHA-256", d.Digest)
		}
	}
	l, err := plan(root, len(devices))
	if err != nil {
		return err
	}
	head := l.header(devices)
	sum := sha256.New()
	sum.Write(head)
	if err := l.emit(sum); err != nil {
		return err
	}
	s := l.super(devices)
	copy(s.uuid[:], sum.Sum(nil))
	s.encode(head)
	if _, err := w.Write(head); err != nil {
		return fmt.Errorf("write superblock: %w", err)
	}
	if err := l.emit(w); err != nil {
		return fmt.Errorf("write metadata: %w", err)
	}
	return nil
}

// header is block 0 without the superblock.
func (l *layout) header(devices []Device) []byte {
	b := make([]byte, BlockSize)
	for i, d := range devices {
		slot := b[slotOffset+i*slotSize:]
		copy(slot[:slotTagSize], d.Digest)
		le.PutUint32(slot[slotTagSize:], d.Blocks)
	}
	return b
}

func (l *layout) super(devices []Device) *super {
	s := &super{
		compat:   compatChecksum | compatMtime,
		incompat: incompatChunked,
		rootNID:  uint16(l.order[0].nid),
		inodes:   uint64(len(l.order)),
		blocks:   l.base + l.blocks,
	}
	if len(devices) > 0 {
		s.incompat |= incompatDevices
		s.devices = uint16(len(devices))
		s.slotOff = slotOffset / slotSize
	}
	return s
}

// emitter writes in order and knows where it is.
type emitter struct {
	w    *bufio.Writer
	pos  int64
	buf  []byte
	list []Dirent
}

func (e *emitter) write(b []byte) error {
	n, err := e.w.Write(b)
	e.pos += int64(n)
	return err
}

var zeros [BlockSize]byte

func (e *emitter) padTo(pos int64) error {
	if pos < e.pos {
		return fmt.Errorf("layout overlaps at %d", pos)
	}
	for e.pos < pos {
		if err := e.write(zeros[:min(BlockSize, pos-e.pos)]); err != nil {
			return err
		}
	}
	return nil
}

// emit writes everything behind block 0.
func (l *layout) emit(w io.Writer) error {
	e := &emitter{w: bufio.NewWriterSize(w, 256<<10), pos: BlockSize}
	for i, n := range l.order {
		if err := e.padTo(int64(n.nid) * nidSize); err != nil {
			return err
		}
		if err := l.emitInode(e, n, uint32(i+1)); err != nil {
			return err
		}
	}
	if err := e.padTo(int64(l.base) * BlockSize); err != nil {
		return err
	}
	for _, n := range l.order {
		if err := l.emitBlocks(e, n); err != nil {
			return err
		}
	}
	return e.w.Flush()
}

// emitInode writes an inode and what lies behind it. The ino field only serves 32-bit stat(2).
func (l *layout) emitInode(e *emitter, n *Inode, ino uint32) error {
	xsize, err := xattrSize(n.Xattrs)
	if err != nil {
		return err
	}
	raw := rawInode{
		xattrCount: xattrCount(xsize), mode: n.Mode, ino: ino, uid: n.UID, gid: n.GID,
		mtime: n.Mtime, nsec: n.Nsec, nlink: n.nlink,
	}
	e.buf = appendXattrs(e.buf[:0], n.Xattrs)
	switch head := inodeSize + xsize; n.Type() {
	case TypeDir:
		raw.size = uint64(n.dir.size())
		raw.union = l.base + n.block
		if fitsInline(head, n.dir.tail) {
			raw.layout = layoutInline
			e.buf = appendDirents(e.buf, e.listing(n)[n.dir.starts[len(n.dir.starts)-1]:])
		}
	case TypeSymlink:
		raw.size = uint64(len(n.Target))
		raw.union = l.base + n.block
		if fitsInline(head, len(n.Target)) {
			raw.layout, raw.union = layoutInline, 0
			e.buf = append(e.buf, n.Target...)
		}
	case TypeRegular:
		raw.size = uint64(n.Size)
		if n.Size > 0 {
			shift := chunkBits(n)
			raw.layout, raw.union = layoutChunks, chunkIndexes|uint32(shift)
			e.buf = append(e.buf, zeros[:alignUp(head, indexSize)-head]...)
			e.buf = appendIndexes(e.buf, n, shift)
		}
	case TypeChar, TypeBlock:
		raw.union = n.Rdev
	}
	var b [inodeSize]byte
	raw.encode(b[:])
	if err := e.write(b[:]); err != nil {
		return err
	}
	return e.write(e.buf)
}

// appendIndexes maps each chunk to its blob, or to a hole.
func appendIndexes(b []byte, n *Inode, shift uint) []byte {
	rest := n.Extents
	chunk := int64(BlockSize) << shift
	for off := int64(0); off < n.Size; off += chunk {
		for len(rest) > 0 && rest[0].Off+rest[0].Len <= off {
			rest = rest[1:]
		}
		device, block := uint16(0), uint32(nullBlock)
		if len(rest) > 0 && rest[0].Off <= off {
			device = rest[0].Device
			block = rest[0].Block + uint32((off-rest[0].Off)>>blockBits)
		}
		b = append(b, 0, 0)
		b = le.AppendUint16(b, device)
		b = le.AppendUint32(b, block)
		if off > n.Size-chunk { // the next offset may not be representable
			break
		}
	}
	return b
}

// emitBlocks writes the blocks that an inode has behind the inode area.
func (l *layout) emitBlocks(e *emitter, n *Inode) error {
	if !n.IsDir() && n.Type() != TypeSymlink {
		return nil
	}
	xsize, err := xattrSize(n.Xattrs)
	if err != nil {
		return err
	}
	head := inodeSize + xsize
	if n.Type() == TypeSymlink {
		if fitsInline(head, len(n.Target)) {
			return nil
		}
		return e.writeBlock(append(e.buf[:0], n.Target...))
	}
	starts, list := n.dir.starts, []Dirent(nil)
	for i := range starts {
		last := i == len(starts)-1
		if last && fitsInline(head, n.dir.tail) {
			break
		}
		if list == nil {
			list = e.listing(n)
		}
		end := int32(len(list))
		if !last {
			end = starts[i+1]
		}
		if err := e.writeBlock(appendDirents(e.buf[:0], list[starts[i]:end])); err != nil {
			return err
		}
	}
	return nil
}

// listing is n's directory with the dots; valid until the next call.
func (e *emitter) listing(n *Inode) []Dirent {
	e.list = slices.AppendSeq(e.list[:0], n.dir.listing(n))
	return e.list
}

func (e *emitter) writeBlock(b []byte) error {
	e.buf = b
	end := e.pos + BlockSize
	if err := e.write(b); err != nil {
		return err
	}
	return e.padTo(end)
}

// appendDirents encodes a block of a directory: entries, then names.
func appendDirents(b []byte, block []Dirent) []byte {
	off := len(block) * direntSize
	for _, e := range block {
		b = le.AppendUint64(b, e.Inode.nid)
		b = le.AppendUint16(b, uint16(off))
		b = append(b, direntType(e.Inode.Mode), 0)
		off += len(e.Name)
	}
	for _, e := range block {
		b = append(b, e.Name...)
	}
	return b
}
