package erofs

import (
	"fmt"
	"io"
	"math"
)

// An Image is a metadata image that is being read. It accepts the form that Write emits and nothing else. Methods may be
// called concurrently if the reader allows it. Errors that are about the bytes wrap ErrFormat.
type Image struct {
	r       io.ReaderAt
	size    int64
	super   super
	devices []Device
}

// An Info is what an inode says of itself.
type Info struct {
	NID   uint64 // st_ino
	Mode  uint16 // type and permission bits
	Nlink uint32
	UID   uint32
	GID   uint32
	Rdev  uint32
	Size  int64
	Mtime int64
	Nsec  uint32

	layout uint16
	xsize  int
	union  uint32
}

// Type is the type part of the mode.
func (i *Info) Type() uint16 { return i.Mode & TypeMask }

// IsDir reports whether i is a directory.
func (i *Info) IsDir() bool { return i.Type() == TypeDir }

// offset is where the inode is in the image, and tail where its xattrs end.
func (i *Info) offset() int64 { return int64(i.NID) * nidSize }
func (i *Info) tail() int64   { return i.offset() + inodeSize + int64(i.xsize) }

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrFormat, fmt.Errorf(format, args...))
}

// Open checks the superblock and the device table of an image of size bytes.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	if size < 2*BlockSize || size%BlockSize != 0 || size>>blockBits > math.MaxUint32 {
		return nil, bad("%d bytes cannot be an image", size)
	}
	im := &Image{r: r, size: size}
	var block [BlockSize]byte
	if err := im.readAt(block[:], 0); err != nil {
		return nil, err
	}
	b := block[superOffset:]
	s := super{
		checksum: le.Uint32(b[4:]), compat: le.Uint32(b[8:]), rootNID: le.Uint16(b[14:]), inodes: le.Uint64(b[16:]),
		blocks: le.Uint32(b[36:]), incompat: le.Uint32(b[80:]), devices: le.Uint16(b[86:]), slotOff: le.Uint16(b[88:]),
	}
	copy(s.uuid[:], b[48:64])
	wantIncompat, wantSlot := uint32(incompatChunked), uint16(0)
	if s.devices > 0 {
		wantIncompat, wantSlot = wantIncompat|incompatDevices, slotOffset/slotSize
	}
	switch {
	case le.Uint32(b) != superMagic:
		return nil, bad("no superblock")
	case s.checksum != superChecksum(block[:]):
		return nil, bad("checksum of the superblock does not match")
	case b[12] != blockBits || b[13] != 0 || s.compat != compatChecksum|compatMtime || s.incompat != wantIncompat || s.slotOff != wantSlot:
		return nil, bad("features %#x/%#x are not those of our form", s.compat, s.incompat)
	case s.devices > MaxDevices:
		return nil, bad("%d blobs", s.devices)
	case int64(s.blocks)*BlockSize != size:
		return nil, bad("image of %d bytes says it has %d blocks", size, s.blocks)
	}
	im.super = s
	for i := range int(s.devices) {
		slot := block[slotOffset+i*slotSize:]
		im.devices = append(im.devices, Device{Digest: string(slot[:slotTagSize]), Blocks: le.Uint32(slot[slotTagSize:])})
	}
	return im, nil
}

// Devices are the blobs that the image refers to. Digests are as found: compare, do not use as paths.
func (im *Image) Devices() []Device { return im.devices }

// Inodes is the number of inodes.
func (im *Image) Inodes() uint64 { return im.super.inodes }

func (im *Image) readAt(b []byte, off int64) error {
	if off < 0 || off > im.size || int64(len(b)) > im.size-off {
		return bad("reference to %d, +%d in an image of %d bytes", off, len(b), im.size)
	}
	if n, err := im.r.ReadAt(b, off); n < len(b) {
		return fmt.Errorf("read metadata: %w", err)
	}
	return nil
}

// Root is the root directory.
func (im *Image) Root() (Info, error) {
	i, err := im.Stat(uint64(im.super.rootNID))
	if err == nil && !i.IsDir() {
		return Info{}, bad("the root is not a directory")
	}
	return i, err
}

// Stat reads an inode.
func (im *Image) Stat(nid uint64) (Info, error) {
	if nid < BlockSize/nidSize || nid > uint64(im.size-inodeSize)/nidSize || nid*nidSize%BlockSize > BlockSize-inodeSize {
		return Info{}, bad("inode number %d", nid)
	}
	var b [inodeSize]byte
	if err := im.readAt(b[:], int64(nid)*nidSize); err != nil {
		return Info{}, err
	}
	var raw rawInode
	if !raw.decode(b[:]) || raw.size > math.MaxInt64-BlockSize || raw.nsec >= 1e9 || raw.nlink == 0 {
		return Info{}, bad("inode %d", nid)
	}
	i := Info{
		NID: nid, Mode: raw.mode, Nlink: raw.nlink, UID: raw.uid, GID: raw.gid, Size: int64(raw.size),
		Mtime: raw.mtime, Nsec: raw.nsec, layout: raw.layout, union: raw.union,
	}
	if raw.xattrCount > 0 {
		i.xsize = xattrHeaderSize + (int(raw.xattrCount)-1)*4
	}
	if !im.validShape(&i) {
		return Info{}, bad("inode %d of mode %#o has layout %d and %d bytes", nid, i.Mode, i.layout, i.Size)
	}
	return i, nil
}

// validShape checks that type, layout and size go together, and sets Rdev.
func (im *Image) validShape(i *Info) bool {
	if i.layout == layoutInline && i.Size > 0 && i.tail()%BlockSize+(i.Size-1)%BlockSize+1 > BlockSize {
		return false // the tail crosses a block
	}
	switch i.Type() {
	case TypeRegular:
		if i.Size == 0 {
			return i.layout == layoutPlain
		}
		return i.layout == layoutChunks && i.union&^chunkBitsMask == chunkIndexes
	case TypeDir:
		return i.Size > 0 && i.Size <= im.size && (i.layout == layoutPlain || i.layout == layoutInline)
	case TypeSymlink:
		return i.Size > 0 && i.Size <= MaxTarget && (i.layout == layoutPlain || i.layout == layoutInline)
	case TypeChar, TypeBlock:
		i.Rdev = i.union
		return i.layout == layoutPlain && i.Size == 0
	case TypeFIFO, TypeSocket:
		return i.layout == layoutPlain && i.Size == 0
	}
	return false
}

// Xattrs reads an inode's extended attributes, sorted by name.
func (im *Image) Xattrs(i Info) ([]Xattr, error) {
	if i.xsize == 0 {
		return nil, nil
	}
	b := make([]byte, i.xsize)
	if err := im.readAt(b, i.offset()+inodeSize); err != nil {
		return nil, err
	}
	xs, err := parseXattrs(b)
	if err != nil {
		return nil, err
	}
	for k := 1; k < len(xs); k++ {
		if xs[k-1].Name >= xs[k].Name {
			return nil, bad("extended attributes of inode %d are not in order", i.NID)
		}
	}
	return xs, nil
}

// Readlink reads a symbolic link.
func (im *Image) Readlink(i Info) (string, error) {
	if i.Type() != TypeSymlink {
		return "", bad("inode %d is no symbolic link", i.NID)
	}
	b := make([]byte, i.Size)
	if err := im.readAt(b, im.lastBlock(i)); err != nil {
		return "", err
	}
	for _, c := range b {
		if c == 0 {
			return "", bad("symbolic link %d holds a NUL", i.NID)
		}
	}
	return string(b), nil
}

// lastBlock is where the last, possibly inline, block of a directory or link is.
func (im *Image) lastBlock(i Info) int64 {
	if i.layout == layoutInline {
		return i.tail()
	}
	return int64(i.union)*BlockSize + (i.Size-1)/BlockSize*BlockSize
}

// Extents yields a regular file's data in order, as long runs. It checks that each lies within its blob.
func (im *Image) Extents(i Info, yield func(Extent) error) error {
	if i.Type() != TypeRegular || i.Size == 0 {
		return nil
	}
	shift := uint(i.union & chunkBitsMask)
	chunk := int64(BlockSize) << shift
	count := chunkCount(i.Size, shift)
	pos := alignUp(i.tail(), indexSize)
	if count > (im.size-pos)/indexSize {
		return bad("chunks of inode %d are beyond the image", i.NID)
	}
	var run Extent
	var buf [512 * indexSize]byte
	for k := int64(0); k < count; k++ {
		at := k % 512 * indexSize
		if at == 0 {
			if err := im.readAt(buf[:min(512, count-k)*indexSize], pos+k*indexSize); err != nil {
				return err
			}
		}
		e := Extent{Off: k * chunk, Len: min(chunk, i.Size-k*chunk), Device: le.Uint16(buf[at+2:]), Block: le.Uint32(buf[at+4:])}
		if e.Block == nullBlock {
			continue
		}
		blocks := (e.Len + BlockSize - 1) / BlockSize
		if e.Device < 1 || int(e.Device) > len(im.devices) || int64(e.Block)+blocks > int64(im.devices[e.Device-1].Blocks) {
			return bad("chunk %d of inode %d is beyond its blob", k, i.NID)
		}
		if run.Len > 0 && contiguous(run, e) {
			run.Len += e.Len
			continue
		}
		if run.Len > 0 {
			if err := yield(run); err != nil {
				return err
			}
		}
		run = e
	}
	if run.Len > 0 {
		return yield(run)
	}
	return nil
}
