package guest

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

const (
	version      = 1
	writeTimeout = 60 * time.Second
	maxKnown     = 8192 // commands in a Hello
)

// A stream is what one request of ours waits on. Its methods are called by the connection's reader only; an error is a
// violation.
type stream interface {
	message(t wire.Type, payload []byte) error
	data(channel uint8, offset uint64, b []byte, flags wire.Flags) error
	ack(channel uint8, offset uint64, broken bool) error
	lost(l *link) // the connection ended
}

// A link is one connection to aether.
type link struct {
	c      *Client
	conn   *wire.Conn
	served sync.WaitGroup
	greet  chan helloAnswer

	greeted bool // reader only

	mu      sync.Mutex
	streams map[uint32]stream
	last    uint32
}

type helloAnswer struct {
	commands []*aetherv1.CommandStatus
	grounds  bool // were taken
	err      error
}

func newLink(c *Client, nc net.Conn) *link {
	l := &link{c: c, conn: wire.NewConn(nc, wire.Options{Timeout: writeTimeout, Contain: true}), greet: make(chan helloAnswer, 1), streams: make(map[uint32]stream)}
	return l
}

// hello starts reading and waits for aether's greeting.
func (l *link) hello(ctx context.Context) ([]*aetherv1.CommandStatus, error) {
	return l.sendHello(ctx, nil)
}

func (l *link) sendHello(ctx context.Context, grounds *aetherv1.Grounds) ([]*aetherv1.CommandStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	l.served.Go(func() { _ = l.conn.Serve(l) }) // its error is conn.Err
	m := &aetherv1.Hello{MinVersion: version, MaxVersion: version, Key: l.c.o.Key, Grounds: grounds}
	if err := l.post(wire.MsgHello, 0, m); err != nil {
		return nil, err
	}
	l.conn.Flush()
	select {
	case a := <-l.greet:
		if a.err == nil && grounds != nil && !a.grounds {
			a.err = errOldGuest
		}
		return a.commands, a.err
	case <-l.conn.Done():
		return nil, errors.Join(errKey, l.conn.Err())
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *link) close() {
	_ = l.conn.Close() // never fails
	l.served.Wait()
}

// lostAll tells every request that its connection is gone.
func (l *link) lostAll() {
	l.mu.Lock()
	streams := l.streams
	l.streams = nil
	l.mu.Unlock()
	for _, s := range streams {
		s.lost(l)
	}
}

// open gives s a stream id. It fails once the connection is lost.
func (l *link) open(s stream) (uint32, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams == nil {
		return 0, wire.ErrClosed
	}
	l.last++
	l.streams[l.last] = s
	return l.last, nil
}

func (l *link) forget(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.streams, id)
}

func (l *link) find(id uint32) stream {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.streams[id]
}

func (l *link) issued(id uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return id != 0 && id <= l.last
}

func (l *link) post(t wire.Type, id uint32, m proto.Message) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_request", "the request cannot be encoded: it must be valid UTF-8").WithCause(err)
	}
	return l.conn.Post(t, id, b)
}

// ask posts a request that ends with its connection: one that is gone already, and was not noticed yet, is no fault of ours.
func (l *link) ask(t wire.Type, id uint32, m proto.Message) error {
	err := l.post(t, id, m)
	if connectionsOwn(err) {
		return errBroken
	}
	return err
}

// connectionsOwn reports whether post failed for the connection's sake, not the message's.
func connectionsOwn(err error) bool {
	var told *sandbox.Error
	return err != nil && !errors.As(err, &told)
}

// releaseByID attaches to a finished command whose result is here already, only to release it.
func (l *link) releaseByID(commandID string) {
	id, err := l.open(nil)
	if err != nil {
		return
	}
	// Errors below are the connection's, which ends everything anyway.
	_ = l.post(wire.MsgStart, id, &aetherv1.Start{CommandId: commandID, AttachOnly: true})
	_ = l.conn.Post(wire.MsgRelease, id, nil)
	l.forget(id)
}

// Message takes one message of aether.
func (l *link) Message(t wire.Type, id uint32, payload []byte) error {
	if !l.greeted {
		return l.greeting(t, payload)
	}
	s := l.find(id)
	if s == nil {
		return l.stray(id)
	}
	return s.message(t, payload)
}

func (l *link) greeting(t wire.Type, payload []byte) error {
	if t == wire.MsgError {
		l.greet <- helloAnswer{err: errVersion}
		l.greeted = true
		return nil
	}
	m := new(aetherv1.Hello)
	if t != wire.MsgHello {
		return violation("no greeting")
	}
	if err := decode(payload, m); err != nil {
		return err
	}
	if m.Version != version || len(m.Commands) > maxKnown {
		return violation("greeting with a version or length that was not offered")
	}
	seen := make(map[string]bool, len(m.Commands))
	for _, k := range m.Commands {
		if k.Session != "" && !sandbox.ValidSessionName(k.Session) {
			return violation("greeting with an invalid name of a session")
		}
		if !sandbox.ValidCommandID(k.CommandId) || seen[k.CommandId] { // twice, it would count as running for ever
			return violation("greeting with an invalid command id")
		}
		if k.Tag != "" && !sandbox.ValidTag(k.Tag) {
			return violation("greeting with an invalid tag")
		}
		seen[k.CommandId] = true
	}
	l.greeted = true
	l.greet <- helloAnswer{commands: m.Commands, grounds: m.GroundsTaken}
	return nil
}

func decode(b []byte, m proto.Message) error {
	if err := proto.Unmarshal(b, m); err != nil {
		return violation("a message that does not parse")
	}
	return nil
}

// stray is something on a stream that ended: late, or never opened.
func (l *link) stray(id uint32) error {
	if !l.issued(id) {
		return violation("a stream that was never opened")
	}
	return nil
}

// Data takes output and content of files.
func (l *link) Data(id uint32, channel uint8, offset uint64, b []byte, flags wire.Flags) error {
	s := l.find(id)
	if s == nil {
		return l.stray(id)
	}
	return s.data(channel, offset, b, flags)
}

// Ack takes credit for input and content of files.
func (l *link) Ack(id uint32, channel uint8, offset uint64, broken bool) error {
	s := l.find(id)
	if s == nil {
		return l.stray(id)
	}
	return s.ack(channel, offset, broken)
}
