package wire

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// A Handler takes what arrives, called from Serve's goroutine only. Byte slices are valid during the call. An error
// ends the connection.
type Handler interface {
	Message(t Type, stream uint32, payload []byte) error
	Data(stream uint32, channel uint8, offset uint64, b []byte, flags Flags) error
	Ack(stream uint32, channel uint8, offset uint64, broken bool) error
}

// A Placer is a Handler that has room of its own for data. Place is asked before the n bytes of a data frame are read, and they
// are read into what it returns, which is what Data gets then; nil is no room. Data may never be called: the connection may end.
type Placer interface {
	Place(stream uint32, n int) []byte
}

const readBuffer = 8 << 10

// reader cuts a byte stream into frames. It holds at most one partial message.
type reader struct {
	br         *bufio.Reader
	maxMessage int
	scratch    []byte // payloads that do not fit br

	partial       []byte // fragments of an unfinished message
	inMessage     bool
	partialType   Type
	partialStream uint32
}

func newReader(r io.Reader, maxMessage int) *reader {
	return &reader{br: bufio.NewReaderSize(r, readBuffer), maxMessage: maxMessage}
}

// idle reports whether the next read would ask the kernel.
func (r *reader) idle() bool { return r.br.Buffered() < HeaderLen }

// next reads one frame and gives it to h. io.EOF is returned only between frames.
func (r *reader) next(h Handler) error {
	head, err := r.br.Peek(HeaderLen)
	if err != nil {
		if err == io.EOF && len(head) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	hd, err := ParseHeader(head)
	if err != nil {
		return err
	}
	if err := r.checkOrder(hd); err != nil {
		return err
	}
	_, _ = r.br.Discard(HeaderLen) // cannot fail: it was peeked
	if hd.Type == typeData && hd.Length > readBuffer {
		if placed, err := r.place(h, hd); placed {
			return err
		}
	}
	payload, inBuffer, err := r.payload(int(hd.Length))
	if err != nil {
		return fmt.Errorf("read payload: %w", err)
	}
	if err := r.deliver(h, hd, payload); err != nil {
		return err
	}
	if inBuffer {
		_, _ = r.br.Discard(int(hd.Length))
	}
	return nil
}

// checkOrder refuses, before any byte of it is read, a frame that interrupts a message or makes it too long.
func (r *reader) checkOrder(hd Header) error {
	if hd.Type < MsgHello {
		if r.inMessage {
			return violation("data inside a message")
		}
		return nil
	}
	if r.inMessage && (hd.Type != r.partialType || hd.Stream != r.partialStream) {
		return violation("message inside another")
	}
	if len(r.partial)+int(hd.Length) > r.maxMessage {
		return violation("message over %d bytes", r.maxMessage)
	}
	return nil
}

// place reads a data frame into its receiver's own room, if that has any.
func (r *reader) place(h Handler, hd Header) (bool, error) {
	p, ok := h.(Placer)
	if !ok {
		return false, nil
	}
	n := int(hd.Length) - offsetLen
	room := p.Place(hd.Stream, n)
	if room == nil {
		return false, nil
	}
	var at [offsetLen]byte
	_, err := io.ReadFull(r.br, at[:])
	if err == nil {
		_, err = io.ReadFull(r.br, room[:n])
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return true, fmt.Errorf("read payload: %w", err)
	}
	return true, h.Data(hd.Stream, hd.Flags&flagChannel, binary.BigEndian.Uint64(at[:]), room[:n], Flags(hd.Flags)&(End|Push))
}

// payload returns n bytes, from bufio's own buffer if they fit.
func (r *reader) payload(n int) (b []byte, inBuffer bool, err error) {
	if n <= readBuffer {
		b, err = r.br.Peek(n)
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return b, true, err
	}
	if cap(r.scratch) < n {
		r.scratch = make([]byte, max(n, offsetLen+MaxData))
	}
	b = r.scratch[:n]
	if _, err = io.ReadFull(r.br, b); err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return b, false, err
}

func (r *reader) deliver(h Handler, hd Header, payload []byte) error {
	channel, flags := hd.Flags&flagChannel, Flags(hd.Flags)&(End|Push)
	switch hd.Type {
	case typeData:
		return h.Data(hd.Stream, channel, binary.BigEndian.Uint64(payload), payload[offsetLen:], flags)
	case typeAck:
		return h.Ack(hd.Stream, channel, binary.BigEndian.Uint64(payload), flags&End != 0)
	}
	more := hd.Flags&flagMore != 0
	if !more && !r.inMessage {
		return h.Message(hd.Type, hd.Stream, payload)
	}
	r.partial = append(r.partial, payload...)
	r.inMessage, r.partialType, r.partialStream = more, hd.Type, hd.Stream
	if more {
		return nil
	}
	message := r.partial
	r.partial, r.scratch = nil, nil // a rare large message must not stay in memory
	return h.Message(hd.Type, hd.Stream, message)
}
