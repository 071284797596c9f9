package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Sizes in bytes. They are part of the protocol.
const (
	HeaderLen  = 12
	MaxData    = 64 << 10  // payload of a data frame after its offset
	MaxControl = 1 << 20   // payload of one frame of a message
	Window     = 256 << 10 // how far a sender of data may be beyond what was acknowledged
	WideWindow = 1 << 20   // the same for content of files, where the receiver says so

	offsetLen = 8
)

// A Type says what a frame carries.
type Type uint8

// Frame types. Those from MsgHello on are messages of api/aether/v1 of the same name.
const (
	typeData Type = 1
	typeAck  Type = 2

	MsgHello     Type = 16
	MsgStart     Type = 17
	MsgStarted   Type = 18
	MsgExit      Type = 19
	MsgKill      Type = 20
	MsgRelease   Type = 21
	MsgError     Type = 22
	MsgReadFile  Type = 23
	MsgFileInfo  Type = 24
	MsgWriteFile Type = 25
	MsgWriteDone Type = 26
	MsgCancel    Type = 27 // no payload: the edge wants nothing more of this transfer
	MsgCall      Type = 28
	MsgReply     Type = 29
	MsgOpen      Type = 30
	MsgOpened    Type = 31
	MsgDone      Type = 32
	msgLast      Type = MsgDone
)

// Channels of one stream.
const (
	Stdin  = 0 // edge to aether; also the content of a file, in either direction
	Stdout = 1
	Stderr = 2
	Script = 3 // edge to aether: a script too long for an argument
)

// Flags of data and acknowledgements.
type Flags uint8

const (
	// End on data: nothing follows. On an ack: the receiver takes nothing more.
	End Flags = 0x80
	// Push on data: the sender is short of memory and cannot go on until this is acknowledged. Without it a receiver may
	// acknowledge late, up to a quarter of the window.
	Push Flags = 0x40

	flagChannel = 0x03 // data and ack: the channel
	flagMore    = 0x01 // message: continues in the next frame
)

// ErrProtocol is wrapped by every error about bytes that the peer should not have sent.
var ErrProtocol = errors.New("protocol violation")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// A Header precedes every payload: type, flags, two zero bytes, stream and payload length, big-endian.
type Header struct {
	Type   Type
	Flags  uint8
	Stream uint32
	Length uint32
}

// Append adds h's encoding to b.
func (h Header) Append(b []byte) []byte {
	b = append(b, byte(h.Type), h.Flags, 0, 0)
	b = binary.BigEndian.AppendUint32(b, h.Stream)
	return binary.BigEndian.AppendUint32(b, h.Length)
}

// ParseHeader decodes and checks the first HeaderLen bytes of b.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderLen {
		return Header{}, violation("header of %d bytes", len(b))
	}
	h := Header{Type: Type(b[0]), Flags: b[1], Stream: binary.BigEndian.Uint32(b[4:]), Length: binary.BigEndian.Uint32(b[8:])}
	if b[2] != 0 || b[3] != 0 {
		return h, violation("reserved bytes are set")
	}
	return h, h.check()
}

func (h Header) check() error {
	switch {
	case h.Type == typeData:
		if h.Length < offsetLen || h.Length > offsetLen+MaxData {
			return violation("data frame of %d bytes", h.Length)
		}
	case h.Type == typeAck:
		if h.Length != offsetLen {
			return violation("ack frame of %d bytes", h.Length)
		}
	case h.Type >= MsgHello && h.Type <= msgLast:
		if h.Length > MaxControl {
			return violation("message frame of %d bytes", h.Length)
		}
		if h.Flags&^uint8(flagMore) != 0 {
			return violation("message with flags %#x", h.Flags)
		}
		if h.Flags&flagMore != 0 && h.Length == 0 {
			return violation("empty fragment") // would make progress impossible to tell from a flood
		}
		return nil
	default:
		return violation("unknown frame type %d", h.Type)
	}
	if h.Flags&^(flagChannel|uint8(End|Push)) != 0 || (h.Type == typeAck && h.Flags&uint8(Push) != 0) {
		return violation("frame type %d with flags %#x", h.Type, h.Flags)
	}
	return nil
}

func appendData(b []byte, stream uint32, channel uint8, offset uint64, flags Flags, n int) []byte {
	h := Header{Type: typeData, Flags: channel | uint8(flags), Stream: stream, Length: uint32(offsetLen + n)}
	return binary.BigEndian.AppendUint64(h.Append(b), offset)
}

func appendAck(b []byte, stream uint32, channel uint8, offset uint64, broken bool) []byte {
	h := Header{Type: typeAck, Flags: channel, Stream: stream, Length: offsetLen}
	if broken {
		h.Flags |= uint8(End)
	}
	return binary.BigEndian.AppendUint64(h.Append(b), offset)
}

// appendMessage adds payload in as many frames as it needs.
func appendMessage(b []byte, t Type, stream uint32, payload []byte) []byte {
	for len(payload) > MaxControl {
		b = Header{Type: t, Flags: flagMore, Stream: stream, Length: MaxControl}.Append(b)
		b = append(b, payload[:MaxControl]...)
		payload = payload[MaxControl:]
	}
	b = Header{Type: t, Stream: stream, Length: uint32(len(payload))}.Append(b)
	return append(b, payload...)
}
