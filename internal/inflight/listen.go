package inflight

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

const (
	// lingering is how long a refused connection stays open for its peer to read why, and maxLingering how many do.
	lingering    = 250 * time.Millisecond
	maxLingering = 32
	// noDescriptors is the pause after which a connection is looked for again when there is no descriptor for it.
	noDescriptors = 50 * time.Millisecond
)

// A Listener refuses connections beyond a number, and those for which the process has no descriptor, in words: the answer to
// any request is the error that says so. A peer is not left to wait for a process that has run out of something. It keeps one
// descriptor in reserve for that.
type Listener struct {
	net.Listener
	most    int64
	crowded []byte // the answer where there are too many connections
	short   []byte // and where there is no descriptor

	open     atomic.Int64 // connections that were accepted and have neither ended nor been taken over
	refusals chan struct{}

	mu     sync.Mutex
	spare  *os.File
	closed bool
}

// Listen wraps l. Its server must have Note as its ConnState. most is how many connections may be open that no stream has taken
// over; 0 = any number.
func Listen(l net.Listener, most int) *Listener {
	g := &Listener{Listener: l, most: int64(most), refusals: make(chan struct{}, maxLingering)}
	g.crowded = refusal(refuse("connections", g.most, "the platform has no room for another connection"))
	g.short = refusal(sandbox.Errorf(sandbox.ResourceExhausted, Reason, "the platform has no descriptor left for another connection; try again in a moment").WithFact("what", "descriptors"))
	g.reserve()
	return g
}

// Note is an http.Server's ConnState.
func (l *Listener) Note(_ net.Conn, s http.ConnState) {
	switch s {
	case http.StateNew:
		l.open.Add(1)
	case http.StateClosed, http.StateHijacked:
		l.open.Add(-1)
	}
}

// Accept gives the next connection for which there is room.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		switch {
		case err == nil && (l.most == 0 || l.open.Load() < l.most):
			return c, nil
		case err == nil:
			l.refuse(c)
		case OutOfDescriptors(err):
			l.refuseWithSpare()
		default:
			return nil, err
		}
	}
}

// Close ends listening.
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.spare != nil {
		_ = l.spare.Close() // of a null device
		l.spare = nil
	}
	return l.Listener.Close()
}

// OutOfDescriptors reports whether err says that the process or the machine has no descriptor left.
func OutOfDescriptors(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

func (l *Listener) reserve() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.spare == nil && !l.closed {
		l.spare, _ = os.Open(os.DevNull) // tried again when it is needed
	}
}

// refuse answers at once. Few of the refused are waited for: a connection that is closed with something unread is reset, and
// its peer may not see the answer.
func (l *Listener) refuse(c net.Conn) {
	select {
	case l.refusals <- struct{}{}:
		go func() {
			l.tell(c, l.crowded)
			<-l.refusals
		}()
	default:
		_ = c.SetWriteDeadline(time.Now()) // what does not fit at once is lost
		_, _ = c.Write(l.crowded)
		_ = c.Close()
	}
}

// tell answers and reads until the peer has closed.
func (l *Listener) tell(c net.Conn, answer []byte) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(lingering))
	if _, err := c.Write(answer); err != nil {
		return
	}
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		_ = h.CloseWrite()
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20)) // what it sent before it read
}

// refuseWithSpare answers one connection through the descriptor in reserve. Where even that fails it waits: whoever accepts in a
// loop must not spin.
func (l *Listener) refuseWithSpare() {
	l.mu.Lock()
	had := l.spare != nil
	if had {
		_ = l.spare.Close() // of a null device
		l.spare = nil
	}
	l.mu.Unlock()
	if had {
		if d, ok := l.Listener.(interface{ SetDeadline(time.Time) error }); ok {
			_ = d.SetDeadline(time.Now().Add(noDescriptors)) // the one that waited may be gone
			defer d.SetDeadline(time.Time{})
		}
		if c, err := l.Listener.Accept(); err == nil {
			l.tell(c, l.short)
			l.reserve()
			return
		}
	}
	l.reserve()
	time.Sleep(noDescriptors)
}

// refusal is an answer to any request, as of HTTP/1.1.
func refusal(e *sandbox.Error) []byte {
	info := grpcerr.Info(e)
	debug, err := protojson.Marshal(info)
	value, verr := proto.Marshal(info)
	if err := errors.Join(err, verr); err != nil {
		panic(err) // words of ours always encode
	}
	body, err := json.Marshal(map[string]any{
		"code": e.Class.String(), "message": e.Message,
		"details": []any{map[string]any{"type": string(info.ProtoReflect().Descriptor().FullName()), "value": base64.RawStdEncoding.EncodeToString(value), "debug": json.RawMessage(debug)}},
	})
	if err != nil {
		panic(err) // likewise
	}
	return fmt.Appendf(nil, "HTTP/1.1 %d Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: %d\r\nDsec-Error: %s\r\nRetry-After: %s\r\nConnection: close\r\n\r\n%s",
		grpcerr.HTTPStatus(e.Class), len(body), e.Reason, RetryAfter, body)
}

// ForDescriptors shares the descriptors that a server may have: connections of peers, and streams of all projects, each of which
// may take two for what is behind it. A quarter, or 512, is for everything else.
func ForDescriptors(most int64) (connections, allStreams int) {
	rest := most - min(512, most/4)
	return int(min(rest/2, 1<<20)), int(min(rest/4, 1<<20))
}
