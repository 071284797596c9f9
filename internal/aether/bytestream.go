package aether

import (
	"context"
	"errors"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

// A byteStream is what an Open of the edge opened: bytes from it are read, and bytes to it written.
type byteStream struct {
	*wire.Duplex
	s      *session
	stream uint32
	req    *aetherv1.Open
	ctx    context.Context // ends with the connection, or when the edge wants no more
	stop   func()
	window uint64 // that the edge is told of; 0 = wire.Window
}

func newByteStream(s *session, stream uint32, req *aetherv1.Open) *byteStream {
	b := &byteStream{s: s, stream: stream, req: req, Duplex: wire.NewDuplex(s.conn, stream, wire.Stdin, wire.Stdout, 0)}
	if n := req.Window; n > 0 {
		b.SetCredit(min(uint64(n), wire.Window))
	}
	b.ctx, b.stop = context.WithCancel(context.Background())
	return b
}

// limit bounds what the edge may send beyond what was taken. Call it before accept.
func (b *byteStream) limit(window uint64) {
	b.window = window
	b.SetWindow(window)
}

func (b *byteStream) cancel() {
	b.stop()
	b.Fail(errCanceled)
}

// accept tells the edge that the stream is open. Errors before that are the answer instead.
func (b *byteStream) accept() {
	b.s.post(wire.MsgOpened, b.stream, &aetherv1.Opened{Window: uint32(b.window)})
	b.s.flush()
}

func (b *byteStream) run() *failure {
	defer b.cancel() // what arrives late finds a stream that takes nothing
	done, err := b.serve()
	if err == nil {
		err = b.Drain()
	}
	if err != nil {
		if errors.Is(err, errCanceled) {
			return nil
		}
		return asFailure("go on", err)
	}
	b.s.post(wire.MsgDone, b.stream, done)
	return nil
}

// serve does what is asked: it calls accept, then reads and writes.
func (b *byteStream) serve() (*aetherv1.Done, error) {
	switch r := b.req.Open.(type) {
	case *aetherv1.Open_Dial:
		return b.dial(r.Dial)
	case *aetherv1.Open_ReadArchive:
		return b.readArchive(r.ReadArchive)
	case *aetherv1.Open_WriteArchive:
		return b.writeArchive(r.WriteArchive)
	case *aetherv1.Open_ListFiles:
		return b.listFiles(r.ListFiles)
	case *aetherv1.Open_WatchFiles:
		return b.watchFiles(r.WatchFiles)
	default:
		return nil, failf(aetherv1.Code_CODE_INVALID, "this aether does not know the request")
	}
}
