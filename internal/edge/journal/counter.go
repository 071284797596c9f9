package journal

import (
	"bufio"
	"encoding/binary"
	"hash/crc32"
	"io"
)

// A counter is a buffered writer that remembers its size and its first error.
type counter struct {
	w   *bufio.Writer
	n   int64
	err error
}

func newCounter(w io.Writer) *counter { return &counter{w: bufio.NewWriterSize(w, 256<<10)} }

func (c *counter) write(b []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(b)
		c.n += int64(len(b))
	}
}

func (c *counter) finish() (int64, error) {
	if c.err == nil {
		c.err = c.w.Flush()
	}
	return c.n, c.err
}

// frameOf frames a payload that was read and checked.
func frameOf(payload []byte) []byte {
	b := make([]byte, frameHeader, frameHeader+len(payload))
	binary.LittleEndian.PutUint32(b, uint32(len(payload)))
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(payload, castagnoli))
	return append(b, payload...)
}
