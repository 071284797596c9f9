package erofs

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
)

// Grains: the unit in which Data looks for holes. A run of zeros in an ordinary file only becomes a hole when a whole
// aligned defaultGrain is zero, since each hole shortens chunks and splits reads. Of a file known to be sparse each block
// counts, up to maxGrains per file, which bounds the index of a file of any size.
const (
	defaultGrain = 64 << 10
	maxGrains    = 1 << 16
)

const pieceSize = 1 << 20

// Data writes contents into one blob as they arrive. It is not safe for concurrent use.
type Data struct {
	w      io.Writer
	device uint16
	block  uint32 // next free block
	buf    []byte
}

// NewData writes to w, which is the device-th blob (from 1) of the layer's device table.
func NewData(w io.Writer, device int) *Data {
	return &Data{w: w, device: uint16(device), buf: make([]byte, pieceSize)}
}

// Blocks is what was written so far, in blocks.
func (d *Data) Blocks() uint32 { return d.block }

// Append copies size bytes of r and gives their extents. Zeros become holes; sparse says that the file is known to have
// some, so that small ones are kept as well. It fails with io.ErrUnexpectedEOF if r ends early.
func (d *Data) Append(r io.Reader, size int64, sparse bool) ([]Extent, error) {
	grain := grainFor(size, sparse)
	var extents []Extent
	for off := int64(0); off < size; {
		n := min(grain, size-off)
		block := d.block
		full, err := d.appendGrain(r, n)
		if err != nil {
			return nil, err
		}
		if full {
			extents = addExtent(extents, Extent{Off: off, Len: n, Block: block, Device: d.device})
		}
		off += n
	}
	return extents, nil
}

func grainFor(size int64, sparse bool) int64 {
	grain := int64(defaultGrain)
	if sparse {
		grain = BlockSize
	}
	if need := (size + maxGrains - 1) / maxGrains; need > grain {
		grain = 1 << bits.Len64(uint64(need-1))
	}
	return grain
}

// appendGrain copies n bytes and pads them to whole blocks, or writes nothing if all are zero.
func (d *Data) appendGrain(r io.Reader, n int64) (full bool, err error) {
	var skipped int64 // zeros that were not written yet
	for left := n; left > 0; {
		p := d.buf[:min(left, pieceSize)]
		if _, err := io.ReadFull(r, p); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return false, err
		}
		left -= int64(len(p))
		if !full && isZero(p) {
			skipped += int64(len(p))
			continue
		}
		full = true
		for ; skipped > 0; skipped -= min(skipped, pieceSize) {
			if err := d.write(zeroPiece[:min(skipped, pieceSize)]); err != nil {
				return false, err
			}
		}
		if err := d.write(p); err != nil {
			return false, err
		}
	}
	if !full {
		return false, nil
	}
	blocks := (n + BlockSize - 1) / BlockSize
	if pad := blocks*BlockSize - n; pad > 0 {
		if err := d.write(zeros[:pad]); err != nil {
			return false, err
		}
	}
	if blocks > nullBlock-1-int64(d.block) {
		return false, fmt.Errorf("more than 16 TiB in one blob")
	}
	d.block += uint32(blocks)
	return true, nil
}

// A WriteError wraps what the blob's writer said, to tell it from a fault of the source.
type WriteError struct{ Err error }

func (e *WriteError) Error() string { return "write contents: " + e.Err.Error() }
func (e *WriteError) Unwrap() error { return e.Err }

func (d *Data) write(p []byte) error {
	if _, err := d.w.Write(p); err != nil {
		return &WriteError{err}
	}
	return nil
}

func addExtent(list []Extent, e Extent) []Extent {
	if k := len(list); k > 0 && list[k-1].Len%BlockSize == 0 && contiguous(list[k-1], e) {
		list[k-1].Len += e.Len
		return list
	}
	return append(list, e)
}

var zeroPiece [pieceSize]byte

// isZero looks at eight bytes at a time; data that is no hole shows it in the first few.
func isZero(p []byte) bool {
	for len(p) >= 32 {
		if le.Uint64(p)|le.Uint64(p[8:])|le.Uint64(p[16:])|le.Uint64(p[24:]) != 0 {
			return false
		}
		p = p[32:]
	}
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}
