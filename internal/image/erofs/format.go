package erofs

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// Bounds of the form.
const (
	BlockSize  = 4096
	MaxDevices = 16
	MaxName    = 255
	MaxTarget  = 4095
	// MaxXattrValue is what an entry's 16-bit size can say: one byte less than the kernel allows elsewhere.
	MaxXattrValue = 1<<16 - 1
)

// File types and permission bits of Inode.Mode, as in stat(2).
const (
	TypeMask    = 0o170000
	TypeSocket  = 0o140000
	TypeSymlink = 0o120000
	TypeRegular = 0o100000
	TypeBlock   = 0o060000
	TypeDir     = 0o040000
	TypeChar    = 0o020000
	TypeFIFO    = 0o010000
	PermMask    = 0o007777
)

const (
	blockBits = 12

	superOffset = 1024
	superSize   = 128
	superMagic  = 0xE0F5E1E2

	slotSize    = 128
	slotOffset  = superOffset + superSize
	slotTagSize = 64

	inodeSize = 64
	nidSize   = 32 // unit of inode numbers

	compatChecksum = 1 << 0
	compatMtime    = 1 << 1

	incompatChunked = 1 << 2
	incompatDevices = 1 << 3

	layoutPlain  = 0
	layoutInline = 2
	layoutChunks = 4

	formatExtended = 1
	layoutShift    = 1

	chunkBitsMask = 0x1f
	chunkIndexes  = 0x20
	indexSize     = 8
	nullBlock     = 0xffffffff

	direntSize = 12

	xattrHeaderSize = 12
	xattrEntrySize  = 4
)

// ErrFormat is in every error that means: these bytes are not an image of our form.
var ErrFormat = errors.New("malformed EROFS image")

var (
	le         = binary.LittleEndian
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// super is the superblock with the fields that we use.
type super struct {
	compat, incompat uint32
	checksum         uint32
	rootNID          uint16
	inodes           uint64
	blocks           uint32
	uuid             [16]byte
	devices          uint16
	slotOff          uint16 // in units of slotSize
}

// encode writes s into block 0; the device table must be there already, since the checksum covers it.
func (s *super) encode(block []byte) {
	b := block[superOffset:]
	le.PutUint32(b[0:], superMagic)
	le.PutUint32(b[8:], s.compat)
	b[12] = blockBits
	le.PutUint16(b[14:], s.rootNID)
	le.PutUint64(b[16:], s.inodes)
	le.PutUint32(b[36:], s.blocks)
	copy(b[48:64], s.uuid[:])
	le.PutUint32(b[80:], s.incompat)
	le.PutUint16(b[86:], s.devices)
	le.PutUint16(b[88:], s.slotOff)
	le.PutUint32(b[4:], superChecksum(block))
}

// superChecksum is CRC-32C over the rest of block 0 with the field itself as zero, without the final inversion.
func superChecksum(block []byte) uint32 {
	var zero [4]byte
	b := block[superOffset:BlockSize]
	c := crc32.Update(0, castagnoli, b[:4])
	c = crc32.Update(c, castagnoli, zero[:])
	return ^crc32.Update(c, castagnoli, b[8:])
}

// rawInode is the extended on-disk inode.
type rawInode struct {
	layout     uint16
	xattrCount uint16
	mode       uint16
	size       uint64
	union      uint32 // block address, device number or chunk format
	ino        uint32
	uid, gid   uint32
	mtime      int64
	nsec       uint32
	nlink      uint32
}

func (r *rawInode) encode(b []byte) {
	clear(b[:inodeSize])
	le.PutUint16(b[0:], formatExtended|r.layout<<layoutShift)
	le.PutUint16(b[2:], r.xattrCount)
	le.PutUint16(b[4:], r.mode)
	le.PutUint64(b[8:], r.size)
	le.PutUint32(b[16:], r.union)
	le.PutUint32(b[20:], r.ino)
	le.PutUint32(b[24:], r.uid)
	le.PutUint32(b[28:], r.gid)
	le.PutUint64(b[32:], uint64(r.mtime))
	le.PutUint32(b[40:], r.nsec)
	le.PutUint32(b[44:], r.nlink)
}

func (r *rawInode) decode(b []byte) bool {
	format := le.Uint16(b[0:])
	if format&1 != formatExtended || format>>4 != 0 {
		return false
	}
	*r = rawInode{
		layout:     format >> layoutShift & 7,
		xattrCount: le.Uint16(b[2:]),
		mode:       le.Uint16(b[4:]),
		size:       le.Uint64(b[8:]),
		union:      le.Uint32(b[16:]),
		ino:        le.Uint32(b[20:]),
		uid:        le.Uint32(b[24:]),
		gid:        le.Uint32(b[28:]),
		mtime:      int64(le.Uint64(b[32:])),
		nsec:       le.Uint32(b[40:]),
		nlink:      le.Uint32(b[44:]),
	}
	return true
}

// direntType is the type byte of a directory entry.
func direntType(mode uint16) byte {
	switch mode & TypeMask {
	case TypeRegular:
		return 1
	case TypeDir:
		return 2
	case TypeChar:
		return 3
	case TypeBlock:
		return 4
	case TypeFIFO:
		return 5
	case TypeSocket:
		return 6
	case TypeSymlink:
		return 7
	}
	return 0
}

// Rdev is a device number as the form stores it.
func Rdev(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | minor&^0xff<<12
}

func alignUp[T int | int64 | uint64](n, to T) T { return (n + to - 1) / to * to }
