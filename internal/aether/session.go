package aether

import (
	"crypto/subtle"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

// Version of the protocol that this aether speaks.
const Version = 1

const (
	helloTimeout = 10 * time.Second
	maxHello     = 4 << 10 // bytes of a message before the key was checked
	maxMessage   = 3 << 20 // of a Start with all the arguments that a kernel takes
	maxTransfers = 64
	writeTimeout = 60 * time.Second

	// Byte streams beyond so many at once have smaller windows: what waits in all of them must fit into this process's memory.
	fullWindows  = 16
	scarceWindow = 64 << 10
	// So many writes of files at once have wider ones.
	wideWindows = 4
)

var errAuth = errors.New("authentication failed")

// A session is one connection of an edge.
type session struct {
	srv   *Server
	conn  *wire.Conn
	files *receiver // nil if no descriptors can come

	authenticated bool // reader only

	mu        sync.Mutex
	commands  map[uint32]*command
	transfers map[uint32]transfer
	dials     int            // of these, connections to ports
	wide      int            // and writes of files with wide windows
	wg        sync.WaitGroup // transfers
}

// A transfer is a request that takes time: a file on its way in or out, a byte stream, or a call. Its methods but run are
// called by the connection's reader; an error is a violation.
type transfer interface {
	Data(channel uint8, offset uint64, b []byte, flags wire.Flags) error
	Ack(channel uint8, offset uint64, broken bool) error
	cancel()
	run() *failure // nil once the answer was sent
}

func (s *session) flush() {
	if s != nil {
		s.conn.Flush()
	}
}

func (s *session) post(t wire.Type, stream uint32, m proto.Message) {
	b, err := proto.Marshal(m)
	if err != nil {
		s.conn.Fail(err)
		return
	}
	_ = s.conn.Post(t, stream, b) // fails only with the connection; the next one gets it again
}

func (s *session) postError(stream uint32, f *failure) { s.post(wire.MsgError, stream, f.proto()) }

// run serves the connection until it ends.
func (s *session) run() error {
	if err := s.conn.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return err
	}
	err := s.conn.Serve(s)
	if s.files != nil {
		s.files.drop()
	}
	s.mu.Lock()
	commands, transfers := s.commands, s.transfers
	s.commands, s.transfers = nil, nil
	s.mu.Unlock()
	for _, c := range commands {
		c.detachFrom(s)
	}
	for _, t := range transfers {
		t.cancel()
	}
	s.wg.Wait()
	return err
}

// Message handles one message of the edge.
func (s *session) Message(t wire.Type, stream uint32, payload []byte) error {
	if !s.authenticated {
		if t != wire.MsgHello {
			return errAuth
		}
		return s.hello(stream, payload)
	}
	switch t {
	case wire.MsgStart:
		req := new(aetherv1.Start)
		if err := unmarshal(payload, req); err != nil {
			return err
		}
		s.start(stream, req)
	case wire.MsgKill:
		req := new(aetherv1.Kill)
		if err := unmarshal(payload, req); err != nil {
			return err
		}
		if c := s.command(stream); c != nil && req.Signal >= 0 && req.Signal <= maxSignal {
			c.kill(unix.Signal(req.Signal))
		}
	case wire.MsgRelease:
		if c := s.command(stream); c != nil {
			s.srv.release(c)
			s.forget(stream)
		}
	case wire.MsgReadFile:
		req := new(aetherv1.ReadFile)
		if err := unmarshal(payload, req); err != nil {
			return err
		}
		s.transfer(stream, newReadTransfer(s, stream, req))
	case wire.MsgWriteFile:
		req := new(aetherv1.WriteFile)
		if err := unmarshal(payload, req); err != nil {
			return err
		}
		s.transfer(stream, newWriteTransfer(s, stream, req))
	case wire.MsgCall:
		req := new(aetherv1.Call)
		if err := unmarshal(payload, req); err != nil {
			return err
		}
		s.transfer(stream, newCall(s, stream, req))
	case wire.MsgOpen:
		req := new(aetherv1.Open)
		if err := unmarshal(payload, req); err != nil {
			return err
		}
		s.transfer(stream, newByteStream(s, stream, req))
	case wire.MsgCancel:
		if t := s.transferOf(stream); t != nil {
			t.cancel()
		}
	default:
		return wire.ErrProtocol
	}
	return nil
}

func unmarshal(b []byte, m proto.Message) error {
	if err := proto.Unmarshal(b, m); err != nil {
		return errors.Join(wire.ErrProtocol, err)
	}
	return nil
}

// hello checks the key before anything else is looked at.
func (s *session) hello(stream uint32, payload []byte) error {
	req := new(aetherv1.Hello)
	if err := unmarshal(payload, req); err != nil {
		return err
	}
	if subtle.ConstantTimeCompare(req.Key, s.srv.key) != 1 {
		return errAuth
	}
	if req.MinVersion > Version || req.MaxVersion < Version {
		s.postError(stream, failf(aetherv1.Code_CODE_INVALID, "this aether speaks version %d of the protocol", Version))
		s.flush()
		return errors.New("no common version")
	}
	if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	if req.Grounds != nil {
		return s.handOver(stream, req.Grounds)
	}
	if s.files != nil {
		s.files.plain = true
	}
	s.authenticated = true
	s.conn.SetMaxMessage(maxMessage)
	s.srv.replace(s)
	s.post(wire.MsgHello, stream, &aetherv1.Hello{Version: Version, MinVersion: Version, MaxVersion: Version, Commands: s.srv.statuses()})
	return nil
}

// handOver ends the connection, after its answer.
func (s *session) handOver(stream uint32, m *aetherv1.Grounds) error {
	if err := s.srv.takeGrounds(s.files, m); err != nil {
		s.postError(stream, asFailure("take over", err))
	} else {
		s.post(wire.MsgHello, stream, &aetherv1.Hello{Version: Version, GroundsTaken: true})
	}
	s.flush()
	return errHandedOver
}

func (s *session) start(stream uint32, req *aetherv1.Start) {
	if f := checkStart(req); f != nil {
		s.postError(stream, f)
		return
	}
	if s.busy(stream) {
		s.conn.Fail(wire.ErrProtocol)
		return
	}
	c, isNew, f := s.srv.command(s, stream, req)
	if f != nil {
		s.postError(stream, f)
		return
	}
	s.mu.Lock()
	if s.commands != nil {
		s.commands[stream] = c
	}
	s.mu.Unlock()
	if isNew && req.Session != "" {
		s.srv.runInSession(c, req)
		return
	}
	if isNew {
		s.srv.spawn(job{c: c, req: req})
		return
	}
	if f := c.attach(s, stream, [2]uint64{req.StdoutOffset, req.StderrOffset}); f != nil {
		s.forget(stream)
		s.postError(stream, f)
	}
}

func (s *session) busy(stream uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.commands[stream] != nil || s.transfers[stream] != nil
}

func (s *session) command(stream uint32) *command {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.commands[stream]
}

func (s *session) transferOf(stream uint32) transfer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.transfers[stream]
}

// ended reports whether the connection is over.
func (s *session) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.transfers == nil
}

// forget drops what is on a stream.
func (s *session) forget(stream uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.commands, stream)
	delete(s.transfers, stream)
}

// transfer runs t in a goroutine of its own.
func (s *session) transfer(stream uint32, t transfer) {
	s.mu.Lock()
	full, most := len(s.transfers)-s.dials >= maxTransfers, maxTransfers
	b, _ := t.(*byteStream)
	dial := b != nil && b.req.GetDial() != nil
	wide := false
	if dial {
		full, most = s.dials >= maxDials, maxDials
	}
	taken := s.commands[stream] != nil || s.transfers[stream] != nil
	if !full && !taken && s.transfers != nil {
		s.transfers[stream] = t
		if dial {
			s.dials++
			b.limit(dialWindow(s.dials))
		} else if n := len(s.transfers) - s.dials; b != nil && n > fullWindows {
			b.limit(scarceWindow)
		}
		if w, ok := t.(*writeTransfer); ok && w.whole() && s.wide < wideWindows {
			s.wide++
			wide = true
			w.widen()
		}
	}
	s.mu.Unlock()
	switch {
	case taken:
		s.conn.Fail(wire.ErrProtocol)
		return
	case full:
		s.postError(stream, failf(aetherv1.Code_CODE_RESOURCES, "%d requests are running; try again when some are done", most))
		return
	}
	s.wg.Go(func() {
		if f := t.run(); f != nil {
			s.postError(stream, f)
		}
		s.forget(stream)
		s.mu.Lock()
		if dial {
			s.dials--
		}
		if wide {
			s.wide--
		}
		s.mu.Unlock()
		s.flush()
	})
}

// Data handles input of commands and content of files.
func (s *session) Data(stream uint32, channel uint8, offset uint64, b []byte, flags wire.Flags) error {
	if !s.authenticated {
		return errAuth
	}
	ok := true
	if c := s.command(stream); c != nil {
		c.mu.Lock()
		if in := c.inputOf(channel); in != nil {
			ok = in.data(offset, b, flags&wire.End != 0)
		} else {
			_ = s.conn.PostAck(stream, channel, 0, true) // nobody reads it; fails only with the connection
		}
		c.mu.Unlock()
	} else if t := s.transferOf(stream); t != nil {
		return t.Data(channel, offset, b, flags)
	}
	if !ok {
		return wire.ErrProtocol
	}
	return nil
}

// Place finds room for content and bytes of streams. See wire.Placer.
func (s *session) Place(stream uint32, n int) []byte {
	if t, ok := s.transferOf(stream).(interface{ Place(int) []byte }); ok && s.authenticated {
		return t.Place(n)
	}
	return nil
}

// Ack handles credit for output of commands and content of files.
func (s *session) Ack(stream uint32, channel uint8, offset uint64, broken bool) error {
	if !s.authenticated {
		return errAuth
	}
	ok := true
	if c := s.command(stream); c != nil {
		if channel == wire.Stdout || channel == wire.Stderr {
			c.mu.Lock()
			ok = c.out[channel-wire.Stdout].ack(offset)
			c.mu.Unlock()
		}
	} else if t := s.transferOf(stream); t != nil {
		return t.Ack(channel, offset, broken)
	}
	if !ok {
		return wire.ErrProtocol
	}
	return nil
}
