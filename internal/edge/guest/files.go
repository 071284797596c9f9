package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

// A FileRead names what to read with whose rights ("" = root).
type FileRead struct {
	Path, User     string
	Offset, Length int64 // Length 0 = to the end
}

// A FileInfo describes a file that is read.
type FileInfo struct {
	Size     int64
	Mode     uint32 // permission bits
	MTime    time.Time
	UID, GID uint32
	Length   int64 // that will be read
}

// A FileWrite names what to write with whose rights; a new file belongs to the user.
type FileWrite struct {
	Path, User             string
	Mode                   uint32 // 0 = 0644, or the existing file's
	MakeParents, Exclusive bool
	Size                   int64  // -1 = unknown
	SHA256                 []byte // of the content, if known
	// Not as a whole: what has arrived is in the file, whatever happens after it. InPlace writes at Offset, and with Truncate
	// the file ends there, too.
	Append, InPlace, Truncate bool
	Offset                    int64
}

// A fileTransfer is what reading and writing have in common: one stream, one answer.
type fileTransfer struct {
	link   *link
	stream uint32

	mu      sync.Mutex
	waiters chan struct{}
	err     error
	info    *aetherv1.FileInfo
	done    *aetherv1.WriteDone

	// Reading: what arrived and was not read. Writing: what was not yet sent.
	buf   []byte
	start uint64 // offset of buf[0]
	acked uint64
	ended bool
	src   *wire.Source // only for writing
	sent  bool         // the end was sent
	ahead uint64       // how far aether lets us go beyond acked
}

// request opens a stream for a transfer and asks for it.
func (c *Client) request(ctx context.Context, t wire.Type, m proto.Message) (*fileTransfer, error) {
	l, err := c.current(ctx)
	if err != nil {
		return nil, err
	}
	c.changed(true)
	f := &fileTransfer{link: l, ahead: wire.Window}
	if err := f.open(t == wire.MsgWriteFile); err != nil {
		return nil, errBroken
	}
	if err := l.ask(t, f.stream, m); err != nil {
		l.forget(f.stream)
		return nil, err
	}
	l.conn.Flush()
	return f, nil
}

// open holds the lock, since frames on the stream may come before it is used: its number can be guessed.
func (f *fileTransfer) open(write bool) (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stream, err = f.link.open(f); err == nil && write {
		f.src = &wire.Source{Stream: f.stream, Channel: wire.Stdin, Fill: f.fill}
	}
	return err
}

func (f *fileTransfer) message(t wire.Type, payload []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case t == wire.MsgError:
		m := new(aetherv1.Error)
		if err := decode(payload, m); err != nil {
			return err
		}
		f.fail(fromAether(m, "file_not_found"))
	case t == wire.MsgFileInfo && f.src == nil && f.info == nil:
		m := new(aetherv1.FileInfo)
		if err := decode(payload, m); err != nil {
			return err
		}
		if m.Size > math.MaxInt64 || m.Length > m.Size { // a file of holes can be as large as the kernel allows
			return violation("a file of impossible size")
		}
		f.info = m
		f.notify()
	case t == wire.MsgOpened && f.src != nil && f.done == nil:
		m := new(aetherv1.Opened)
		if err := decode(payload, m); err != nil {
			return err
		}
		f.ahead = max(f.ahead, min(uint64(m.Window), wire.WideWindow))
		if len(f.buf) > 0 {
			f.link.conn.Ready(f.src)
		}
	case t == wire.MsgWriteDone && f.src != nil && f.done == nil:
		m := new(aetherv1.WriteDone)
		if err := decode(payload, m); err != nil {
			return err
		}
		f.done = m
		f.notify()
	default:
		return violation("a message that does not fit a file transfer")
	}
	return nil
}

func (f *fileTransfer) data(channel uint8, offset uint64, b []byte, flags wire.Flags) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := f.start + uint64(len(f.buf))
	switch {
	case f.err != nil:
		return nil
	case f.src != nil || f.info == nil || f.ended || channel != wire.Stdin || offset != next:
		return violation("content that does not continue")
	case next+uint64(len(b)) > f.acked+wire.Window || next+uint64(len(b)) > f.info.Length:
		return violation("content beyond its credit or length")
	}
	f.buf = append(f.buf, b...)
	f.ended = flags&wire.End != 0
	f.notify()
	return nil
}

func (f *fileTransfer) ack(_ uint8, offset uint64, _ bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.src == nil || offset > f.start {
		return violation("credit for content that was not sent")
	}
	f.acked = max(f.acked, offset)
	if len(f.buf) > 0 {
		f.link.conn.Ready(f.src) // whoever reads frames flushes after each batch
	}
	f.notify()
	return nil
}

func (f *fileTransfer) lost(*link) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail(errBroken)
}

func (f *fileTransfer) fail(err error) {
	if f.err == nil {
		f.err = err
	}
	f.notify()
}

func (f *fileTransfer) notify() {
	if f.waiters != nil {
		close(f.waiters)
		f.waiters = nil
	}
}

// wait waits for a change; it unlocks f.mu meanwhile. Without one in time, or if ctx ends, the transfer has failed.
func (f *fileTransfer) wait(ctx context.Context, timeout time.Duration) {
	if f.waiters == nil {
		f.waiters = make(chan struct{})
	}
	changed := f.waiters
	f.mu.Unlock()
	defer f.mu.Lock()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-changed:
	case <-ctx.Done():
		f.abort(context.Cause(ctx))
	case <-timer.C:
		f.abort(unresponsive("go on with the file"))
	}
}

// abort tells aether that nothing more is wanted.
func (f *fileTransfer) abort(err error) {
	f.mu.Lock()
	over := f.err != nil || f.done != nil || (f.src == nil && f.ended)
	f.fail(err)
	f.mu.Unlock()
	if !over {
		_ = f.link.conn.Post(wire.MsgCancel, f.stream, nil) // the connection's error
		f.link.conn.Flush()
	}
	f.link.forget(f.stream)
}

// ReadFile opens a regular file inside and streams it. The reader must be closed; it ends after FileInfo.Length bytes and
// fails if the file became shorter meanwhile.
func (c *Client) ReadFile(ctx context.Context, r FileRead) (FileInfo, io.ReadCloser, error) {
	if r.Offset < 0 || r.Length < 0 {
		return FileInfo{}, nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_request", "offset and length must not be negative")
	}
	f, err := c.request(ctx, wire.MsgReadFile, &aetherv1.ReadFile{Path: []byte(r.Path), User: r.User, Offset: uint64(r.Offset), Length: uint64(r.Length)})
	if err != nil {
		return FileInfo{}, nil, err
	}
	f.mu.Lock()
	for f.info == nil && f.err == nil {
		f.wait(ctx, requestTimeout)
	}
	info, err := f.info, f.err
	f.mu.Unlock()
	if err != nil {
		f.link.forget(f.stream)
		return FileInfo{}, nil, err
	}
	if info.Length > max(0, info.Size-min(info.Size, uint64(r.Offset))) || (r.Length > 0 && info.Length > uint64(r.Length)) {
		err := violation("more of a file than was asked for")
		f.abort(err)
		return FileInfo{}, nil, err
	}
	return FileInfo{
		Size: int64(info.Size), Mode: info.Mode & 0o7777, MTime: time.Unix(0, info.MtimeNs), UID: info.Uid, GID: info.Gid, Length: int64(info.Length),
	}, &fileReader{ctx: ctx, f: f}, nil
}

type fileReader struct {
	ctx context.Context // of the whole read, which is one request
	f   *fileTransfer
}

func (r *fileReader) Read(p []byte) (int, error) {
	f := r.f
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.buf) == 0 && !f.ended && f.err == nil {
		f.wait(r.ctx, stallTimeout)
	}
	switch {
	case len(f.buf) > 0:
	case f.err != nil:
		return 0, f.err
	case f.start < f.info.Length:
		return 0, sandbox.Errorf(sandbox.DataLoss, "file_changed", "the file became shorter while it was read").WithCause(io.ErrUnexpectedEOF)
	default:
		return 0, io.EOF
	}
	n := copy(p, f.buf)
	f.buf = append(f.buf[:0], f.buf[n:]...)
	f.start += uint64(n)
	if !f.ended && f.start-f.acked >= wire.Window/4 {
		f.acked = f.start
		_ = f.link.conn.PostAck(f.stream, wire.Stdin, f.start, false) // the connection's error comes by lost
		f.link.conn.Flush()
	}
	return n, nil
}

func (r *fileReader) Close() error {
	r.f.abort(errors.ErrUnsupported)
	return nil
}

// WriteFile makes or replaces a regular file with r's content, at once and as a whole: until it is complete, and if
// anything goes wrong, the old file stays. With Append or InPlace it writes to the file itself.
func (c *Client) WriteFile(ctx context.Context, w FileWrite, r io.Reader) (size int64, sum []byte, err error) {
	f, err := c.request(ctx, wire.MsgWriteFile, &aetherv1.WriteFile{
		Path: []byte(w.Path), Mode: w.Mode, User: w.User, MakeParents: w.MakeParents, Size: w.Size, Exclusive: w.Exclusive,
		Append: w.Append, InPlace: w.InPlace, Offset: uint64(w.Offset), Truncate: w.Truncate,
	})
	if err != nil {
		return 0, nil, err
	}
	defer f.link.forget(f.stream)
	block := contentBlocks.Get().(*[]byte)
	defer contentBlocks.Put(block)
	h := sha256.New()
	whole := !w.Append && !w.InPlace
	for have := 0; ; {
		n, rerr := r.Read((*block)[have:])
		_, _ = h.Write((*block)[have : have+n]) // a hash never fails
		have += n
		next := have
		if whole && rerr == nil {
			next -= have % wire.MaxData // full frames, which pass aether without a copy: nobody sees the file before its end
		}
		if err := f.push(ctx, (*block)[:next]); err != nil {
			return 0, nil, err
		}
		have = copy(*block, (*block)[next:have])
		if errors.Is(rerr, io.EOF) {
			break
		}
		if rerr != nil {
			f.abort(rerr)
			return 0, nil, sandbox.Errorf(sandbox.Canceled, "upload_interrupted", "reading the content failed; %s", left(w)).WithCause(rerr)
		}
	}
	sum = h.Sum(nil)
	if len(w.SHA256) > 0 && !bytes.Equal(sum, w.SHA256) {
		err := sandbox.Errorf(sandbox.InvalidArgument, "content_mismatch", "the content's SHA-256 differs from the announced one")
		f.abort(err)
		return 0, nil, err
	}
	size, err = f.finish(ctx)
	return size, sum, err
}

// contentBlocks are what content is read by: few steps cost less than many.
var contentBlocks = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// left says what a write that was interrupted has left.
func left(w FileWrite) string {
	if w.Append || w.InPlace {
		return "what had arrived is in the file"
	}
	return "nothing was written"
}

// push waits until b has been sent.
func (f *fileTransfer) push(ctx context.Context, b []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.buf = b
	for len(f.buf) > 0 && f.err == nil {
		f.send()
		if len(f.buf) > 0 && f.err == nil {
			f.wait(ctx, stallTimeout)
		}
	}
	return f.err
}

func (f *fileTransfer) send() {
	f.mu.Unlock()
	defer f.mu.Lock()
	f.link.conn.Ready(f.src)
	f.link.conn.Flush()
}

func (f *fileTransfer) finish(ctx context.Context) (int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	f.send()
	for f.done == nil && f.err == nil {
		f.wait(ctx, stallTimeout)
	}
	if f.err != nil {
		return 0, f.err
	}
	if f.done.Size != f.start {
		return 0, violation("another file than the one that was sent")
	}
	return int64(f.done.Size), nil
}

// fill gives content to the connection, within aether's credit.
func (f *fileTransfer) fill(b []byte, limit int) ([]byte, uint64, wire.Flags, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return b, 0, 0, false
	}
	offset := f.start
	n := min(uint64(len(f.buf)), uint64(limit), f.acked+f.ahead-f.start)
	b = append(b, f.buf[:n]...)
	f.buf = f.buf[n:]
	f.start += n
	var flags wire.Flags
	if f.ended && len(f.buf) == 0 && !f.sent {
		f.sent = true
		flags = wire.End
	}
	if len(f.buf) == 0 {
		f.notify()
	}
	return b, offset, flags, len(f.buf) > 0 && f.acked+f.ahead > f.start
}
