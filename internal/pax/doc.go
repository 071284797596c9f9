// Package pax writes and reads tar archives as a stream: what a directory tree in a sandbox is sent as, in both directions.
// aether links it, which is why it is not archive/tar: that one links os/user and more, cannot write holes, and makes an
// object of every record.
//
// Written is ustar with POSIX extended headers where something does not fit (long names, nanoseconds, large numbers,
// attributes), and holes in GNU's form 1.0; GNU tar, bsdtar, Python and Go read it. Read is that, and what GNU tar writes in
// its other formats: long names, binary numbers, old and new forms of holes.
//
// What surprises:
//
//   - Content is what is stored: of a file with holes only its data, in the order of Header.Data. Nothing is ever expanded.
//   - An archive that ends without its end marker is truncated, which other readers let pass.
//   - Memory is bounded whatever is read: MaxExtended bytes of extended headers, MaxSegments runs of data. Where that is too
//     much, because many archives are read at once, Reader.Hold decides.
//   - Names are bytes. Nothing is made of them: who unpacks decides what "..", "/" and the like mean.
package pax

import "errors"

const (
	blockLen = 512

	// MaxExtended is how long the extended headers of one entry may be together, in bytes.
	MaxExtended = 1 << 20
	// MaxSegments is how many runs of data a file with holes may have.
	MaxSegments = 1 << 16
	// MaxSize is how large a file may be: what the kernel's largest file systems of today take. Sparse files of exabytes cost
	// nothing to announce.
	MaxSize = 1 << 44
)

// Types of entries.
const (
	File    = '0'
	Link    = '1' // another name of an earlier entry
	Symlink = '2'
	Char    = '3'
	Block   = '4'
	Dir     = '5'
	FIFO    = '6'
)

// A Segment is a run of a file that is no hole.
type Segment struct{ Off, Len int64 }

// An Xattr is an extended attribute, with its whole name.
type Xattr struct{ Name, Value string }

// A Header describes one entry.
type Header struct {
	Name, Link string // Link is the earlier entry's name, or the symbolic link's target
	Type       byte
	Mode       uint32 // permission bits with set-user-id and the like
	UID, GID   uint32
	Size       int64 // of a File, holes included
	Sec        int64 // of the last change, since 1970
	Nsec       uint32
	Xattrs     []Xattr
	Data       []Segment // the data of a File with holes; nil: all of it

	Major, Minor uint32 // of a Char or Block: written, and not read
}

// Stored is how many bytes of content follow the header.
func (h *Header) Stored() int64 {
	if h.Type != File {
		return 0
	}
	if h.Data == nil {
		return h.Size
	}
	n := int64(0)
	for _, s := range h.Data {
		n += s.Len
	}
	return n
}

// Errors of reading.
var (
	// ErrFormat is wrapped by every error about bytes that are no archive, or one that this package does not read.
	ErrFormat = errors.New("not a tar archive that can be read")
	// ErrTruncated is an archive that ends before its end marker.
	ErrTruncated = errors.New("the archive is truncated: it ends without its end marker")
)

func padding(n int64) int { return int(-n & (blockLen - 1)) }
