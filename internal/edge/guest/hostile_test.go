package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

// A fakeAether greets honestly, and then does with every message what its script says.
type fakeAether struct {
	t      testing.TB
	conn   *wire.Conn
	script func(f *fakeAether, t wire.Type, stream uint32, payload []byte)
	known  []*aetherv1.CommandStatus
	data   func(f *fakeAether, stream uint32, offset uint64, b []byte) // may be nil
	panics bool                                                        // the edge is to panic, and to bear it
}

func (f *fakeAether) Message(t wire.Type, stream uint32, payload []byte) error {
	if t == wire.MsgHello {
		f.post(wire.MsgHello, 0, &aetherv1.Hello{Version: version, Commands: f.known})
		return nil
	}
	f.script(f, t, stream, payload)
	return nil
}
func (f *fakeAether) Data(stream uint32, _ uint8, offset uint64, b []byte, _ wire.Flags) error {
	if f.data != nil {
		f.data(f, stream, offset, b)
	}
	return nil
}
func (f *fakeAether) Ack(uint32, uint8, uint64, bool) error { return nil }

func (f *fakeAether) post(t wire.Type, stream uint32, m proto.Message) {
	b, err := proto.Marshal(m)
	if err != nil {
		f.t.Error(err)
	}
	_ = f.conn.Post(t, stream, b) // the edge may have hung up
}

func (f *fakeAether) output(stream uint32, channel uint8, offset uint64, b string) {
	f.conn.Ready(&wire.Source{Stream: stream, Channel: channel, Fill: func(dst []byte, _ int) ([]byte, uint64, wire.Flags, bool) {
		return append(dst, b...), offset, 0, false
	}})
	f.conn.Flush()
}

// hostile connects a Client to a scripted aether.
func hostile(t testing.TB, known []*aetherv1.CommandStatus, script func(f *fakeAether, t wire.Type, stream uint32, payload []byte)) (*Client, error) {
	return hostileWith(t, fakeAether{known: known, script: script})
}

func hostileWith(t testing.TB, like fakeAether) (*Client, error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	dial := func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		mu.Lock()
		conns = append(conns, b)
		mu.Unlock()
		f := &fakeAether{t: t, conn: wire.NewConn(b, wire.Options{MaxMessage: 1 << 22}), script: like.script, known: like.known, data: like.data}
		wg.Go(func() { _ = f.conn.Serve(f) })
		return a, nil
	}
	t.Cleanup(func() {
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	var logs bytes.Buffer
	c, err := Connect(testContext(t), Options{ID: "hostile", Key: make([]byte, 32), Dial: dial, OutputDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&logs, nil))})
	if err == nil {
		t.Cleanup(func() {
			c.Close()
			if strings.Contains(logs.String(), "panicked") != like.panics {
				t.Errorf("a panic: %v; want %v\n%s", !like.panics, like.panics, logs.String())
			}
		})
	}
	return c, err
}

func TestViolationsEndTheClient(t *testing.T) {
	type script = func(f *fakeAether, stream uint32)
	started := func(f *fakeAether, stream uint32) { f.post(wire.MsgStarted, stream, &aetherv1.Started{Pid: 2}) }
	exit := func(e *aetherv1.Exit) script {
		return func(f *fakeAether, stream uint32) { f.post(wire.MsgExit, stream, e) }
	}
	for name, s := range map[string]script{
		"exit code":             exit(&aetherv1.Exit{ExitCode: 256}),
		"negative exit code":    exit(&aetherv1.Exit{ExitCode: -1}),
		"signal":                exit(&aetherv1.Exit{ExitCode: 128 + 65, Signal: 65}),
		"signal without code":   exit(&aetherv1.Exit{Signal: 9}),
		"size without output":   exit(&aetherv1.Exit{StdoutSize: 5}),
		"impossible size":       exit(&aetherv1.Exit{StderrSize: 1 << 63}),
		"unknown stream":        func(f *fakeAether, s uint32) { f.post(wire.MsgStarted, s+1, &aetherv1.Started{}) },
		"stream 0":              func(f *fakeAether, s uint32) { f.post(wire.MsgExit, 0, &aetherv1.Exit{}) },
		"wrong message":         func(f *fakeAether, s uint32) { f.post(wire.MsgWriteDone, s, &aetherv1.WriteDone{}) },
		"request to the edge":   func(f *fakeAether, s uint32) { f.post(wire.MsgStart, s, &aetherv1.Start{}) },
		"garbage":               func(f *fakeAether, s uint32) { _ = f.conn.Post(wire.MsgExit, s, []byte{0xff, 0xff}) },
		"started twice":         func(f *fakeAether, s uint32) { started(f, s); started(f, s) },
		"started in the middle": func(f *fakeAether, s uint32) { f.post(wire.MsgStarted, s, &aetherv1.Started{StdoutOffset: 7}) },
		"output with a gap":     func(f *fakeAether, s uint32) { f.output(s, wire.Stdout, 1, "x") },
		"output again":          func(f *fakeAether, s uint32) { f.output(s, wire.Stdout, 0, "x"); f.output(s, wire.Stdout, 0, "x") },
		"output on stdin":       func(f *fakeAether, s uint32) { f.output(s, wire.Stdin, 0, "x") },
		"output of no stream":   func(f *fakeAether, s uint32) { f.output(s+9, wire.Stdout, 0, "x") },
		"ack of no input":       func(f *fakeAether, s uint32) { _ = f.conn.PostAck(s, wire.Stdin, 1, false) },
		"ack beyond input":      func(f *fakeAether, s uint32) { _ = f.conn.PostAck(s, wire.Stdin, 101, false) },
		"ack after the input broke": func(f *fakeAether, s uint32) {
			_ = f.conn.PostAck(s, wire.Stdin, 50, true)
			_ = f.conn.PostAck(s, wire.Stdin, 80, true)
		},
		"ack on stdout": func(f *fakeAether, s uint32) { _ = f.conn.PostAck(s, wire.Stdout, 0, false) },
		"error after the end": func(f *fakeAether, s uint32) {
			exit(&aetherv1.Exit{})(f, s)
			f.post(wire.MsgError, s, &aetherv1.Error{})
		},
		"two ends":         func(f *fakeAether, s uint32) { exit(&aetherv1.Exit{})(f, s); exit(&aetherv1.Exit{})(f, s) },
		"message too long": func(f *fakeAether, s uint32) { _ = f.conn.Post(wire.MsgError, s, make([]byte, 2<<20)) },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := hostile(t, nil, func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
				if ty == wire.MsgStart {
					s(f, stream)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			cmd := sandbox.Command{Argv: []string{"x"}}
			if strings.Contains(name, "input") && name != "ack of no input" {
				cmd.Stdin = make([]byte, 100) // sent with Start, in one batch
			}
			_, _ = c.Start(testContext(t), "x", cmd)
			select {
			case <-c.Done():
			case <-testContext(t).Done():
				t.Fatal("the client goes on")
			}
			if r := sandbox.ReasonOf(c.Err()); r != "guest_protocol" {
				t.Errorf("%v", c.Err())
			}
		})
	}
}

func TestOutputBeyondCredit(t *testing.T) {
	followed := make(chan struct{})
	c, err := hostile(t, nil, func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
		if ty != wire.MsgStart {
			return
		}
		f.post(wire.MsgStarted, stream, &aetherv1.Started{Pid: 2})
		sent := uint64(0)
		source := &wire.Source{Stream: stream, Channel: wire.Stdout, Fill: func(b []byte, n int) ([]byte, uint64, wire.Flags, bool) {
			sent += uint64(n)
			return append(b, make([]byte, n)...), sent - uint64(n), 0, true // whatever was acknowledged
		}}
		go func() {
			<-followed // before that there is credit for everything
			f.conn.Ready(source)
			f.conn.Flush()
		}()
	})
	if err != nil {
		t.Fatal(err)
	}
	c.spool.headCap, c.spool.tailCap = 1<<20, 1<<20
	m, err := c.Start(testContext(t), "x", sandbox.Command{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	r := follow(t, m, 1) // never read: no credit after the caps
	defer r.Close()
	close(followed)
	<-c.Done()
	if size := m.Result().Stdout.Size; size > 3<<20 {
		t.Errorf("%d bytes were taken", size)
	}
}

func TestBadGreetings(t *testing.T) {
	for name, known := range map[string][]*aetherv1.CommandStatus{
		"a path":   {{CommandId: "../../etc/passwd"}},
		"empty":    {{}},
		"twice":    {{CommandId: "a"}, {CommandId: "b"}, {CommandId: "a"}},
		"too many": make([]*aetherv1.CommandStatus, maxKnown+1),
	} {
		for i := range known {
			if known[i] == nil {
				known[i] = &aetherv1.CommandStatus{CommandId: "a"}
			}
		}
		_, err := hostile(t, known, nil)
		if sandbox.ReasonOf(err) != "guest_protocol" || !errors.Is(err, wire.ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Bytes that are no frames, instead of a greeting: an answer within the caller's time, and nothing kept of them.
func TestWhatIsNoGreeting(t *testing.T) {
	huge := []byte{0xff, 0xff, 0xff, 0x7f, 16, 0, 0, 0, 0, 0, 0, 0} // announces 2 GiB
	for name, bytes := range map[string][]byte{
		"nothing": nil, "half a header": make([]byte, wire.HeaderLen/2), "zeros": make([]byte, 4096),
		"http": []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "huge frame": huge,
	} {
		for _, hangUp := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, hanging up %v", name, hangUp), func(t *testing.T) {
				var wg sync.WaitGroup
				dial := func(context.Context) (net.Conn, error) {
					a, b := net.Pipe()
					wg.Go(func() {
						_, _ = b.Write(bytes) // the edge may hang up first
						if !hangUp {
							_, _ = io.Copy(io.Discard, b) // until the edge does
						}
						b.Close()
					})
					return a, nil
				}
				ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				defer cancel()
				_, err := Connect(ctx, Options{ID: "hostile", Key: make([]byte, 32), Dial: dial, OutputDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
				if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, wire.ErrProtocol) {
					t.Error(err)
				}
				wg.Wait() // every connection was closed
			})
		}
	}
}

func TestSilentAether(t *testing.T) {
	c, err := hostile(t, nil, func(*fakeAether, wire.Type, uint32, []byte) {})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	for name, f := range map[string]func() error{
		"start": func() error { _, err := c.Start(ctx, "x", sandbox.Command{Argv: []string{"x"}}); return err },
		"read":  func() error { _, _, err := c.ReadFile(ctx, FileRead{Path: "/x"}); return err },
		"write": func() error {
			_, _, err := c.WriteFile(ctx, FileWrite{Path: "/x", Size: -1}, strings.NewReader("x"))
			return err
		},
	} {
		if err := f(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMessagesAreMadeReadable(t *testing.T) {
	c, err := hostile(t, nil, func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
		if ty == wire.MsgStart {
			f.post(wire.MsgError, stream, &aetherv1.Error{Code: 9999, Message: strings.Repeat("é", 100_000)})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Start(testContext(t), "x", sandbox.Command{Argv: []string{"x"}})
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Internal || len(e.Message) > maxErrorText+4 {
		t.Errorf("%.100v", err)
	}
}

// A mistake of ours that one hostile aether finds ends its own sandbox, not the edge with all the others.
func TestPanicEndsTheClient(t *testing.T) {
	c, err := hostileWith(t, fakeAether{panics: true, script: func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
		f.post(wire.MsgExit, stream, &aetherv1.Exit{})
	}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := c.current(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	id, err := l.open(panicking{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.post(wire.MsgStart, id, &aetherv1.Start{}); err != nil {
		t.Fatal(err)
	}
	l.conn.Flush()
	<-c.Done()
	if r := sandbox.ReasonOf(c.Err()); r != "guest_protocol" {
		t.Errorf("%v", c.Err())
	}
}

type panicking struct{}

func (panicking) message(wire.Type, []byte) error              { panic("a mistake") }
func (panicking) data(uint8, uint64, []byte, wire.Flags) error { panic("a mistake") }
func (panicking) ack(uint8, uint64, bool) error                { panic("a mistake") }
func (panicking) lost(*link)                                   {}

// An aether that greets and hangs up, for ever, gets few attempts, slower and slower.
func TestHangingUpAfterTheGreeting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hello, err := proto.Marshal(&aetherv1.Hello{Version: version})
		if err != nil {
			t.Fatal(err)
		}
		greeting := append(wire.Header{Type: wire.MsgHello, Length: uint32(len(hello))}.Append(nil), hello...)
		var logs bytes.Buffer
		dials := 0
		dial := func(context.Context) (net.Conn, error) {
			dials++
			a, b := net.Pipe()
			go func() {
				_, _ = b.Read(make([]byte, 4096)) // the edge may have hung up
				_, _ = b.Write(greeting)
				b.Close()
			}()
			return a, nil
		}
		began := time.Now()
		c, err := Connect(t.Context(), Options{ID: "hostile", Key: make([]byte, 32), Dial: dial, OutputDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&logs, nil))})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		select {
		case <-c.Done():
		case <-time.After(time.Hour):
			t.Fatalf("after an hour and %d connections it is still spoken to", dials)
		}
		if took := time.Since(began); dials > 2*maxShort || took < time.Second {
			t.Errorf("%d connections in %v", dials, took)
		}
		if r := sandbox.ReasonOf(c.Err()); r != "guest_protocol" {
			t.Errorf("%v", c.Err())
		}
		if n := strings.Count(logs.String(), "\n"); n > 2 {
			t.Errorf("%d lines of log:\n%s", n, logs.String())
		}
	})
}

// Input for a command that an earlier edge started waits until aether has said how much of it arrived there.
func TestStdinOfAnAdoptedCommand(t *testing.T) {
	var got []byte
	goOn := make(chan struct{})
	c, err := hostileWith(t, fakeAether{
		known: []*aetherv1.CommandStatus{{CommandId: "x"}},
		script: func(f *fakeAether, ty wire.Type, stream uint32, _ []byte) {
			if ty == wire.MsgStart {
				go func() {
					<-goOn
					_ = f.conn.PostAck(stream, wire.Stdin, 7, false)
					f.post(wire.MsgStarted, stream, &aetherv1.Started{StdinOffset: 10})
					f.conn.Flush()
				}()
			}
		},
		data: func(f *fakeAether, stream uint32, offset uint64, b []byte) {
			got = fmt.Appendf(got, "%d:%s ", offset, b)
			_ = f.conn.PostAck(stream, wire.Stdin, offset+uint64(len(b)), false)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	m, ok := c.Command("x")
	if !ok {
		t.Fatal("the command is not known")
	}
	ctx := testContext(t)
	waiting := make(chan struct{})
	result := make(chan error, 1)
	go func() {
		close(waiting)
		n, err := m.WriteStdin(ctx, 0, strings.NewReader("0123456789abc"), false)
		if n != 13 {
			err = errors.Join(err, fmt.Errorf("%d bytes are said to have arrived", n))
		}
		result <- err
	}()
	<-waiting
	time.Sleep(10 * time.Millisecond) // longer does no harm, shorter lets the mistake pass
	close(goOn)
	if err := <-result; err != nil {
		t.Error(err)
	}
	if string(got) != "10:abc " {
		t.Errorf("aether got %q", got)
	}
}

// FuzzHostileAether feeds arbitrary bytes, after an honest greeting, to a Client with a running command.
func FuzzHostileAether(f *testing.F) {
	frame := func(t wire.Type, flags uint8, stream uint32, payload string) string {
		return string(wire.Header{Type: t, Flags: flags, Stream: stream, Length: uint32(len(payload))}.Append(nil)) + payload
	}
	started, _ := proto.Marshal(&aetherv1.Started{Pid: 1})
	exit, _ := proto.Marshal(&aetherv1.Exit{ExitCode: 3, StdoutSize: 2})
	f.Add([]byte(frame(wire.MsgStarted, 0, 1, string(started)) + frame(1, wire.Stdout, 1, "\x00\x00\x00\x00\x00\x00\x00\x00hi") + frame(wire.MsgExit, 0, 1, string(exit))))
	f.Add([]byte(frame(1, wire.Stderr|uint8(wire.Push), 1, "\x00\x00\x00\x00\x00\x00\x00\x00hi")))
	f.Add([]byte(frame(2, 0x80, 1, "\x00\x00\x00\x00\x00\x00\x00\x00")))
	f.Add([]byte(frame(2, 0x80, 1, "\x00\x00\x00\x00\x00\x00\x00\x02") + frame(2, 0x80, 1, "\x00\x00\x00\x00\x00\x00\x00\x04")))
	f.Fuzz(func(t *testing.T, in []byte) {
		c := &Client{o: Options{Log: slog.New(slog.DiscardHandler)}, spool: newSpool(t.TempDir()), done: make(chan struct{}), linked: make(chan struct{}), commands: make(map[string]*Command)}
		ours, theirs := net.Pipe()
		l := newLink(c, ours)
		l.greeted = true
		c.link = l
		m := newCommand(c, "x")
		m.prepare(sandbox.Command{Argv: []string{"x"}, Stdin: []byte("input")})
		c.commands["x"] = m
		c.running++
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = io.Copy(io.Discard, theirs) })
		m.resume(l)
		l.conn.Flush()
		wg.Go(func() { _ = l.conn.Serve(l) })
		_, _ = theirs.Write(in) // ends early where the client hangs up
		theirs.Close()
		wg.Wait()
		l.lostAll()
		if err := l.conn.Err(); strings.Contains(err.Error(), "panicked") {
			t.Error(err)
		}
		r := m.Result()
		if r.ExitCode < 0 || r.ExitCode > 255 || r.Stdout.Size < 0 || r.Stdout.Size > int64(len(in)) || r.Stdout.Head > r.Stdout.Size {
			t.Errorf("%+v", r)
		}
		if head := m.Head(1, 1<<20); int64(len(head)) != r.Stdout.Head {
			t.Errorf("%d bytes of output, result says %d", len(head), r.Stdout.Head)
		}
	})
}
