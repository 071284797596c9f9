package guest

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"time"

	"dsec/internal/wire"
)

// A body is what is kept of one stream of a command: its head, and its tail in a ring. Its command's lock guards it.
//
//	0 ........ headEnd        tailFrom ........ size
//	   kept          dropped        kept
type body struct {
	spool *spool
	owner *Command
	name  string // of its files, less the suffix

	size int64 // all that arrived or was lost

	mem     []byte // everything, while it is small
	inFile  bool
	headEnd int64 // kept without a gap from the start
	frozen  bool  // headEnd grows no more
	ringAt  int64 // offset that is at the ring's start, once frozen
	tail    int64 // offset from which the ring holds everything
	charged int64 // bytes of disk
	failed  bool  // no more is kept: the disk is full, or the sandbox's cap is reached
	head    *os.File
	ring    *os.File
	acked   int64
	marks   marks
}

// kept returns the ends of what can be read: [0, headEnd) and [tailFrom, size).
func (b *body) kept() (headEnd, tailFrom int64) {
	if !b.inFile {
		return int64(len(b.mem)), b.size
	}
	if !b.frozen {
		return b.headEnd, b.size
	}
	return b.headEnd, b.tailFrom()
}

func (b *body) tailFrom() int64 {
	if b.failed {
		return b.size
	}
	return max(b.tail, b.size-b.spool.tailCap)
}

// sizes are what a result says: with nothing dropped, all is head.
func (b *body) sizes() StreamSize {
	headEnd, tailFrom := b.kept()
	if headEnd >= tailFrom {
		return StreamSize{Size: b.size, Head: b.size}
	}
	return StreamSize{Size: b.size, Head: headEnd, Tail: b.size - tailFrom}
}

// write keeps p, which follows what came before. Errors of the disk end the keeping, not the command.
func (b *body) write(p []byte) error {
	b.marks.add(b.size, time.Now().UnixMilli())
	if !b.inFile && len(b.mem)+len(p) <= b.spool.memoryLimit() {
		b.mem = append(b.mem, p...)
		b.size += int64(len(p))
		b.spool.addMemory(len(p))
		return nil
	}
	err := b.toFile()
	if err == nil && !b.failed {
		err = b.store(p, b.size)
	}
	if err != nil {
		b.fail()
	}
	b.size += int64(len(p))
	return err
}

// toFile moves what is in memory to the head file.
func (b *body) toFile() error {
	if b.inFile {
		return nil
	}
	mem := b.mem
	b.mem = nil
	b.inFile = true
	b.spool.addMemory(-len(mem))
	return b.store(mem, 0)
}

// store writes p, whose first byte has the given offset, to head and ring.
func (b *body) store(p []byte, offset int64) error {
	if !b.frozen {
		n := min(int64(len(p)), b.spool.headCap-b.headEnd)
		if err := b.storeHead(p[:n]); err != nil {
			return err
		}
		p, offset = p[n:], offset+n
		if b.headEnd == b.spool.headCap {
			b.freeze(b.headEnd)
		}
	}
	wrote := false
	for len(p) > 0 {
		at := (offset - b.ringAt) % b.spool.tailCap
		n := min(int64(len(p)), b.spool.tailCap-at)
		if err := b.storeRing(p[:n], at); err != nil {
			return err
		}
		p, offset = p[n:], offset+n
		wrote = true
	}
	if wrote {
		return b.writeRingHeader(offset)
	}
	return nil
}

func (b *body) freeze(ringAt int64) {
	b.frozen, b.ringAt, b.tail = true, ringAt, ringAt
}

// The file of a ring begins with what the next edge must know to read it: headEnd, ringAt, tail and size, little-endian. It
// is written after the bytes that it speaks of, and they are acknowledged after it. Nothing is synced: it is to survive this
// process, not the machine.
const ringHeader = 4 * 8

func (b *body) writeRingHeader(size int64) error {
	var h [ringHeader]byte
	for i, v := range []int64{b.headEnd, b.ringAt, b.tail, size} {
		binary.LittleEndian.PutUint64(h[8*i:], uint64(v))
	}
	if _, err := b.ring.WriteAt(h[:], 0); err != nil {
		return fmt.Errorf("spool output: %w", err)
	}
	return nil
}

func (b *body) storeHead(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if err := b.charge(int64(len(p))); err != nil {
		return err
	}
	var err error
	if b.head == nil {
		if b.head, err = b.spool.create(b.name + ".head"); err != nil {
			return err
		}
	}
	if _, err := b.head.WriteAt(p, b.headEnd); err != nil {
		return fmt.Errorf("spool output: %w", err)
	}
	b.headEnd += int64(len(p))
	return nil
}

func (b *body) storeRing(p []byte, at int64) error {
	if over := b.headEnd + at + int64(len(p)) - b.charged; over > 0 { // the ring grows to its cap and no further
		if err := b.charge(over); err != nil {
			return err
		}
	}
	var err error
	if b.ring == nil {
		if b.ring, err = b.spool.create(b.name + ".tail"); err != nil {
			return err
		}
	}
	if _, err := b.ring.WriteAt(p, ringHeader+at); err != nil {
		return fmt.Errorf("spool output: %w", err)
	}
	return nil
}

var errCap = fmt.Errorf("the sandbox's cap of kept output is reached")

func (b *body) charge(n int64) error {
	if !b.spool.reserve(b.owner, n) {
		return errCap
	}
	b.charged += n
	return nil
}

// fail ends the keeping. What the head has stays.
func (b *body) fail() {
	if !b.frozen {
		b.freeze(b.headEnd)
	}
	b.failed = true
}

// skip notes that output up to offset is lost: it was acknowledged to an edge that is gone.
func (b *body) skip(offset int64) {
	if offset <= b.size {
		return
	}
	_ = b.toFile() // as in write: what cannot be kept is dropped
	if !b.frozen {
		b.freeze(offset)
	} else {
		b.ringAt, b.tail = offset, offset
	}
	b.size = offset
	if b.failed {
		b.tail = offset
	} else if b.ring != nil && b.writeRingHeader(offset) != nil { // or it would speak of bytes that are overwritten next
		b.fail()
	}
}

// recover finds what an earlier edge spooled.
func (b *body) recover() {
	ring := b.openRing()
	head := int64(0)
	if info, err := os.Lstat(b.spool.path(b.name + ".head")); err == nil && info.Mode().IsRegular() {
		head = min(info.Size(), b.spool.headCap)
	} else if ring == nil {
		return
	}
	b.inFile = true
	h, kept, ok := b.readRingHeader(ring, head)
	if !ok {
		h = [4]int64{head, head, head, head}
	}
	if ring != nil && (!ok || ring.Truncate(ringHeader+kept) != nil) { // longer, it would hold what was given up
		_ = ring.Close()
		_ = os.Remove(b.spool.path(b.name + ".tail")) // it stays out of account, until the sandbox's end
		h, kept, ring = [4]int64{head, head, head, head}, 0, nil
	}
	if b.charge(h[0]+kept) != nil {
		if ring != nil {
			_ = ring.Close()
		}
		b.fail()
		return
	}
	b.headEnd, b.size, b.ring = h[0], h[3], ring
	b.recoverMarks()
	if ring != nil || b.headEnd == b.spool.headCap {
		b.frozen, b.ringAt, b.tail = true, h[1], h[2]
	}
}

func (b *body) openRing() *os.File {
	name := b.spool.path(b.name + ".tail")
	if info, err := os.Lstat(name); err != nil || !info.Mode().IsRegular() {
		return nil
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return f
}

// readRingHeader reads and checks what an earlier edge wrote, and says how many bytes of the ring are in use. One piece of
// output may have been written since, over the oldest bytes: those do not count.
func (b *body) readRingHeader(ring *os.File, head int64) (h [4]int64, kept int64, ok bool) {
	var raw [ringHeader]byte
	if ring == nil {
		return h, 0, false
	}
	if _, err := ring.ReadAt(raw[:], 0); err != nil {
		return h, 0, false
	}
	for i := range h {
		h[i] = int64(binary.LittleEndian.Uint64(raw[8*i:]))
	}
	headEnd, ringAt, tail, size := h[0], h[1], h[2], h[3]
	if headEnd != head || headEnd > ringAt || ringAt > tail || tail > size || size > maxOffset {
		return h, 0, false
	}
	kept = min(size-ringAt, b.spool.tailCap)
	if info, err := ring.Stat(); err != nil || info.Size() < ringHeader+kept {
		return h, 0, false
	}
	h[2] = min(max(tail, size+wire.MaxData-b.spool.tailCap), size)
	return h, kept, true
}

// stored is up to where output would survive this process.
func (b *body) stored() int64 {
	if b.inFile {
		return b.size
	}
	return 0
}

// close closes the files for writing; reading opens them again.
func (b *body) close() {
	for _, f := range []*os.File{b.head, b.ring} {
		if f != nil {
			_ = f.Close() // nothing is synced: the spool need not outlive the machine
		}
	}
	b.head, b.ring = nil, nil
}

// drop gives up everything but the size.
func (b *body) drop() {
	b.close()
	if b.inFile {
		for _, suffix := range []string{".head", ".tail"} {
			_ = os.Remove(b.spool.path(b.name + suffix)) // missing, or removed with the directory
		}
		b.spool.free(b.charged)
		b.charged = 0
	}
	b.spool.addMemory(-len(b.mem))
	b.mem, b.inFile, b.headEnd, b.frozen, b.failed = nil, true, 0, true, true
	b.marks = marks{}
}

// readAt copies what is kept from offset on. It returns io.EOF at the end of what is there, and an output_dropped error
// in a gap.
func (b *body) readAt(p []byte, offset int64) (int, error) {
	if offset >= b.size {
		return 0, io.EOF
	}
	if !b.inFile {
		return copy(p, b.mem[offset:]), nil
	}
	headEnd, tailFrom := b.kept()
	switch {
	case offset < headEnd:
		return b.readFile(b.head, ".head", p[:min(int64(len(p)), headEnd-offset)], offset)
	case offset >= tailFrom:
		at := (offset - b.ringAt) % b.spool.tailCap
		n := min(int64(len(p)), b.size-offset, b.spool.tailCap-at)
		return b.readFile(b.ring, ".tail", p[:n], ringHeader+at)
	}
	return 0, outputDropped(offset, tailFrom)
}

func (b *body) readFile(f *os.File, suffix string, p []byte, at int64) (int, error) {
	if f == nil {
		var err error
		if f, err = os.Open(b.spool.path(b.name + suffix)); err != nil {
			return 0, fmt.Errorf("open spooled output: %w", err)
		}
		defer f.Close()
	}
	n, err := f.ReadAt(p, at)
	if n > 0 {
		return n, nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return 0, fmt.Errorf("read spooled output: %w", err)
}
