package wire

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
)

type event struct {
	kind    string
	t       Type
	stream  uint32
	channel uint8
	offset  uint64
	flags   Flags
	payload string
}

// recorder keeps what arrives; hook may act on it.
type recorder struct {
	mu     sync.Mutex
	events []event
	hook   func(event) error
}

func (r *recorder) add(e event) error {
	r.mu.Lock()
	r.events = append(r.events, e)
	r.mu.Unlock()
	if r.hook != nil {
		return r.hook(e)
	}
	return nil
}

func (r *recorder) Message(t Type, stream uint32, p []byte) error {
	return r.add(event{kind: "message", t: t, stream: stream, payload: string(p)})
}

func (r *recorder) Data(stream uint32, channel uint8, offset uint64, b []byte, flags Flags) error {
	return r.add(event{kind: "data", stream: stream, channel: channel, offset: offset, flags: flags, payload: string(b)})
}

func (r *recorder) Ack(stream uint32, channel uint8, offset uint64, broken bool) error {
	e := event{kind: "ack", stream: stream, channel: channel, offset: offset}
	if broken {
		e.flags = End
	}
	return r.add(e)
}

func socketPair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	dir, err := os.MkdirTemp("", "wi")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

// pair connects a sender with a serving receiver; done gives the receiver's end.
func pair(t *testing.T, a, b net.Conn, o Options, h Handler) (sender *Conn, done <-chan error) {
	t.Helper()
	sender = NewConn(a, Options{})
	receiver := NewConn(b, o)
	end := make(chan error, 1)
	go func() { end <- receiver.Serve(h) }()
	go func() { _ = sender.Serve(&recorder{}) }()
	t.Cleanup(func() { sender.Close(); receiver.Close() })
	return sender, end
}

func transports(t *testing.T, f func(t *testing.T, a, b net.Conn)) {
	t.Run("unix", func(t *testing.T) { a, b := socketPair(t); f(t, a, b) })
	t.Run("pipe", func(t *testing.T) { a, b := net.Pipe(); f(t, a, b) })
}

func TestFramesArriveInOrder(t *testing.T) {
	transports(t, func(t *testing.T, a, b net.Conn) {
		long := bytes.Repeat([]byte("0123456789"), 250_000) // over two frames of a message
		got := make(chan event, 16)
		r := &recorder{hook: func(e event) error { got <- e; return nil }}
		s, _ := pair(t, a, b, Options{MaxMessage: 3 << 20}, r)
		if err := s.Post(MsgHello, 0, nil); err != nil {
			t.Fatal(err)
		}
		if err := s.Send(context.Background(), MsgStart, 7, long); err != nil {
			t.Fatal(err)
		}
		if err := s.PostAck(7, Script, 1<<40, true); err != nil {
			t.Fatal(err)
		}
		s.Flush()
		for i, want := range []event{
			{kind: "message", t: MsgHello},
			{kind: "message", t: MsgStart, stream: 7, payload: string(long)},
			{kind: "ack", stream: 7, channel: Script, offset: 1 << 40, flags: End},
		} {
			if e := <-got; e != want {
				t.Errorf("frame %d: %.80v", i, e)
			}
		}
	})
}

// source sends n bytes and notes how much was asked of it.
type source struct {
	Source
	left, sent int
}

func newSource(stream uint32, n int) *source {
	s := &source{left: n}
	s.Stream = stream
	s.Fill = func(b []byte, limit int) ([]byte, uint64, Flags, bool) {
		n := min(limit, s.left)
		offset := uint64(s.sent)
		s.left -= n
		s.sent += n
		var flags Flags
		if s.left == 0 {
			flags = End
		}
		return append(b, make([]byte, n)...), offset, flags, s.left > 0
	}
	return s
}

func TestControlOvertakesDataAndStreamsTakeTurns(t *testing.T) {
	a, b := socketPair(t)
	reading := make(chan struct{})
	finished := make(chan struct{})
	ends := 0
	r := &recorder{}
	r.hook = func(e event) error {
		<-reading
		if e.flags&End != 0 {
			if ends++; ends == 2 {
				close(finished)
			}
		}
		return nil
	}
	s, _ := pair(t, a, b, Options{}, r)
	s.Ready(&newSource(1, 4<<20).Source)
	s.Ready(&newSource(2, 4<<20).Source)
	s.Flush() // nobody reads: the rest waits in a goroutine
	if err := s.Post(MsgKill, 9, []byte("now")); err != nil {
		t.Fatal(err)
	}
	s.Flush()
	close(reading)
	<-finished
	var before, turns int
	var last uint32
	killed := false
	for _, e := range r.events {
		switch {
		case e.kind == "message":
			killed = true
		case !killed:
			before += len(e.payload)
		}
		if e.kind == "data" && e.stream != last {
			turns++
			last = e.stream
		}
	}
	if !killed || before > 1<<20 { // what the kernel's buffers and one batch hold
		t.Errorf("the message came after %d bytes of data", before)
	}
	if turns < 100 {
		t.Errorf("streams changed %d times over 128 frames", turns)
	}
}

func TestPeerThatDoesNotRead(t *testing.T) {
	a, b := socketPair(t)
	defer b.Close()
	c := NewConn(a, Options{})
	payload := make([]byte, 64<<10)
	var err error
	n := 0
	for ; err == nil && n < 1000; n++ {
		err = c.Post(MsgError, 1, payload)
		c.Flush()
	}
	if !errors.Is(err, ErrSlow) {
		t.Fatalf("after %d messages of 64 KiB: %v", n, err)
	}
	if n*len(payload) > 2*MaxQueued {
		t.Errorf("%d bytes were queued", n*len(payload))
	}
	if err := c.Serve(&recorder{}); !errors.Is(err, ErrSlow) {
		t.Errorf("Serve: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Send(ctx, MsgKill, 1, nil); !errors.Is(err, ErrSlow) {
		t.Errorf("Send: %v", err)
	}
}

func TestWriteTimeout(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	c := NewConn(a, Options{Timeout: time.Millisecond})
	if err := c.Post(MsgKill, 1, nil); err != nil {
		t.Fatal(err)
	}
	c.Flush()
	<-c.Done()
	if err := c.Err(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestSendWaitsForRoom(t *testing.T) {
	a, b := net.Pipe()
	c := NewConn(a, Options{})
	big := make([]byte, MaxQueued/2)
	if err := c.Post(MsgStart, 1, big); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Send(ctx, MsgKill, 1, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("with a full queue: %v", err)
	}
	go io.Copy(io.Discard, b)
	c.Flush()
	if err := c.Send(context.Background(), MsgKill, 1, nil); err != nil {
		t.Errorf("with a reader: %v", err)
	}
	c.Close()
	b.Close()
}

func TestViolations(t *testing.T) {
	message := func(ty Type, flags uint8, stream uint32, n int) []byte {
		return append(Header{Type: ty, Flags: flags, Stream: stream, Length: uint32(n)}.Append(nil), make([]byte, n)...)
	}
	for name, in := range map[string][]byte{
		"unknown type":         message(99, 0, 1, 0),
		"type 0":               message(0, 0, 1, 0),
		"reserved":             {byte(MsgKill), 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0},
		"message flags":        message(MsgKill, 4, 1, 0),
		"long frame":           Header{Type: MsgKill, Stream: 1, Length: MaxControl + 1}.Append(nil),
		"long message":         append(message(MsgStart, flagMore, 1, MaxControl), message(MsgStart, 0, 1, 1)...),
		"empty fragment":       message(MsgStart, flagMore, 1, 0),
		"message in a message": append(message(MsgStart, flagMore, 1, 10), message(MsgStart, 0, 2, 10)...),
		"data in a message":    append(message(MsgStart, flagMore, 1, 10), message(typeData, 0, 1, 8)...),
		"short data":           message(typeData, 0, 1, 7),
		"long data":            Header{Type: typeData, Stream: 1, Length: offsetLen + MaxData + 1}.Append(nil),
		"long ack":             message(typeAck, 0, 1, 9),
		"ack flags":            message(typeAck, uint8(Push), 1, 8),
	} {
		r := newReader(bytes.NewReader(in), MaxControl)
		var err error
		for err == nil {
			err = r.next(&recorder{})
		}
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n := 1; n < HeaderLen+8; n++ {
		r := newReader(bytes.NewReader(message(typeData, 0, 1, 8)[:n]), MaxControl)
		if err := r.next(&recorder{}); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut after %d bytes: %v", n, err)
		}
	}
}

// trickle gives a stream in pieces of random sizes.
type trickle struct {
	b   []byte
	rnd *rand.Rand
}

func (t *trickle) Read(p []byte) (int, error) {
	if len(t.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), 1+t.rnd.IntN(40_000))], t.b)
	t.b = t.b[n:]
	return n, nil
}

func TestAnyCutOfTheStreamIsTheSame(t *testing.T) {
	var in []byte
	var want []event
	for i := range uint32(60) {
		payload := bytes.Repeat([]byte{byte(i)}, int(i*1111)%(MaxData+1))
		in = appendData(in, i, uint8(i%4), uint64(i), 0, len(payload))
		in = append(in, payload...)
		want = append(want, event{kind: "data", stream: i, channel: uint8(i % 4), offset: uint64(i), payload: string(payload)})
		in = appendMessage(in, MsgExit, i, payload)
		want = append(want, event{kind: "message", t: MsgExit, stream: i, payload: string(payload)})
	}
	for seed := range uint64(20) {
		rec := &recorder{}
		r := newReader(&trickle{in, rand.New(rand.NewPCG(seed, 0))}, MaxControl)
		var err error
		for err == nil {
			err = r.next(rec)
		}
		if err != io.EOF || len(rec.events) != len(want) {
			t.Fatalf("seed %d: %d events, %v", seed, len(rec.events), err)
		}
		for i := range want {
			if rec.events[i] != want[i] {
				t.Fatalf("seed %d: event %d differs", seed, i)
			}
		}
	}
}

func FuzzReader(f *testing.F) {
	f.Add(appendMessage(nil, MsgStart, 1, []byte("x")))
	f.Add(append(appendData(nil, 3, Stdout, 5, End|Push, 2), "ab"...))
	f.Add(appendAck(nil, 1<<31, Script, 1<<63, true))
	for _, stream := range []uint32{4, 5} {
		f.Add(append(appendData(nil, stream, Stdin, 5, End, MaxData), make([]byte, MaxData)...))
		f.Add(append(appendData(nil, stream, Stdin, 5, End, MaxData), make([]byte, readBuffer)...))
	}
	f.Add(append(Header{Type: MsgStart, Flags: flagMore, Stream: 1, Length: 3}.Append(nil), "abc"...))
	f.Fuzz(func(t *testing.T, in []byte) {
		const maxMessage = 1 << 16
		r := newReader(bytes.NewReader(in), maxMessage)
		total := 0
		rec := &recorder{hook: func(e event) error {
			total += len(e.payload)
			if len(e.payload) > maxMessage && e.kind == "message" || len(e.payload) > MaxData && e.kind == "data" || e.channel > Script {
				t.Errorf("%s of %d bytes on channel %d", e.kind, len(e.payload), e.channel)
			}
			return nil
		}}
		var err error
		for err == nil {
			err = r.next(rec)
		}
		if total > len(in) {
			t.Errorf("%d bytes out of %d", total, len(in))
		}
		if err != io.EOF && !errors.Is(err, ErrProtocol) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%v", err)
		}
		p := &placer{}
		r = newReader(bytes.NewReader(in), maxMessage)
		var perr error
		for perr == nil {
			perr = r.next(p)
		}
		if !slices.Equal(p.events, rec.events) || perr.Error() != err.Error() {
			t.Errorf("with room of its own: %d events, %v; without: %d, %v", len(p.events), perr, len(rec.events), err)
		}
	})
}

// placer is a recorder with room of its own.
type placer struct {
	recorder
	room []byte
}

func (p *placer) Place(stream uint32, n int) []byte {
	if stream%2 == 0 {
		return nil
	}
	p.room = make([]byte, n)
	return p.room
}

func (p *placer) Data(stream uint32, channel uint8, offset uint64, b []byte, flags Flags) error {
	if p.room != nil && &p.room[0] != &b[0] {
		return errors.New("data was read to elsewhere")
	}
	p.room = nil
	return p.recorder.Data(stream, channel, offset, b, flags)
}

func FuzzHeader(f *testing.F) {
	f.Add(Header{Type: MsgStart, Stream: 1, Length: 3}.Append(nil))
	f.Fuzz(func(t *testing.T, in []byte) {
		if h, err := ParseHeader(in); err == nil && !bytes.Equal(h.Append(nil), in[:HeaderLen]) {
			t.Errorf("%v is not what was parsed", h)
		}
	})
}
