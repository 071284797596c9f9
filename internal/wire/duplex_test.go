package wire

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
)

// ends is two ends of one Duplex over a socket.
type ends struct{ a, b *Duplex }

// feed is the Handler of a Conn with one Duplex.
type feed struct {
	d    *Duplex
	done chan struct{} // gets each message
}

func (f *feed) Message(Type, uint32, []byte) error { f.done <- struct{}{}; return nil }
func (f *feed) Data(_ uint32, ch uint8, off uint64, b []byte, fl Flags) error {
	return f.d.Data(ch, off, b, fl)
}
func (f *feed) Place(_ uint32, n int) []byte { return f.d.Place(n) }
func (f *feed) Ack(_ uint32, ch uint8, off uint64, broken bool) error {
	return f.d.Ack(ch, off, broken)
}

func newEnds(t *testing.T, window uint64) (e ends, message chan struct{}) {
	nc, md := socketPair(t)
	ca, cb := NewConn(nc, Options{}), NewConn(md, Options{})
	e.a = NewDuplex(ca, 7, Stdin, Stdout, 0)
	e.b = NewDuplex(cb, 7, Stdout, Stdin, window)
	e.a.SetCredit(e.b.window)
	message = make(chan struct{}, 1)
	var wg sync.WaitGroup
	for _, s := range []struct {
		c *Conn
		d *Duplex
	}{{ca, e.a}, {cb, e.b}} {
		wg.Go(func() {
			s.d.Fail(s.c.Serve(&feed{s.d, message}))
		})
	}
	t.Cleanup(func() { ca.Close(); cb.Close(); wg.Wait() })
	return e, message
}

func TestDuplexBothWays(t *testing.T) {
	for _, window := range []uint64{0, 1000, 64 << 10} {
		e, _ := newEnds(t, window)
		var wg sync.WaitGroup
		for i, d := range []*Duplex{e.a, e.b} {
			other := []*Duplex{e.b, e.a}[i]
			sums := make(chan [32]byte, 1)
			wg.Go(func() {
				r := rand.New(rand.NewPCG(1, uint64(i)))
				h := sha256.New()
				for range 300 {
					p := make([]byte, r.IntN(100_000))
					h.Write(p)
					if n, err := d.Write(p); n != len(p) || err != nil {
						t.Errorf("write: %d, %v", n, err)
						return
					}
				}
				if err := d.CloseWrite(); err != nil {
					t.Error(err)
				}
				sums <- [32]byte(h.Sum(nil))
			})
			wg.Go(func() {
				h := sha256.New()
				var err error
				if i == 0 {
					_, err = other.WriteTo(h)
				} else {
					_, err = io.Copy(h, struct{ io.Reader }{other})
				}
				if err != nil || [32]byte(h.Sum(nil)) != <-sums {
					t.Errorf("direction %d: %v, or other bytes", i, err)
				}
			})
		}
		wg.Wait()
	}
}

func TestGather(t *testing.T) {
	for _, window := range []uint64{1000, Window, WideWindow} {
		e, _ := newEnds(t, window)
		sent := make(chan [32]byte, 1)
		go func() {
			r := rand.New(rand.NewPCG(1, 2))
			h := sha256.New()
			for range 100 {
				p := make([]byte, []int{1, 5000, MaxData, 4 * MaxData}[r.IntN(4)])
				p[0] = byte(r.Uint32())
				h.Write(p)
				if _, err := e.a.Write(p); err != nil {
					t.Error(err)
				}
			}
			if err := e.a.CloseWrite(); err != nil {
				t.Error(err)
			}
			sent <- [32]byte(h.Sum(nil))
		}()
		h := sha256.New()
		last := false
		err := e.b.Gather(func(pieces [][]byte) error {
			size := 0
			for _, p := range pieces {
				h.Write(p)
				size += len(p)
			}
			if last {
				t.Error("something came after less than was to be waited for")
			}
			last = uint64(size) < window/4
			return nil
		})
		if err != nil || [32]byte(h.Sum(nil)) != <-sent {
			t.Errorf("window %d: %v, or other bytes", window, err)
		}
	}
}

func TestGatherEnds(t *testing.T) {
	boom := errors.New("boom")
	e, _ := newEnds(t, 0)
	if _, err := e.a.Write(make([]byte, Window)); err != nil {
		t.Fatal(err)
	}
	if err := e.b.Gather(func([][]byte) error { return boom }); !errors.Is(err, boom) {
		t.Errorf("the receiver failed, and Gather gave %v", err)
	}
	e, _ = newEnds(t, 0)
	if _, err := e.a.Write(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- e.b.Gather(func([][]byte) error { t.Error("10 bytes are not enough"); return nil })
	}()
	e.b.Fail(boom)
	if err := <-done; !errors.Is(err, boom) {
		t.Errorf("the stream failed, and Gather gave %v", err)
	}
}

func TestDuplexHalfClose(t *testing.T) {
	e, _ := newEnds(t, 0)
	if err := e.a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := e.b.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Fatalf("%d, %v", n, err)
	}
	if _, err := e.b.Write([]byte("still")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(e.a, got); err != nil || string(got) != "still" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := e.a.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("write after the end: %v", err)
	}
}

func TestDuplexBackPressure(t *testing.T) {
	e, _ := newEnds(t, 0)
	if err := e.a.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	n, err := e.a.Write(make([]byte, 10*Window))
	if n != Window || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("without a reader %d bytes went, %v", n, err)
	}
	if err := e.a.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { _, err := e.a.Write(make([]byte, Window)); done <- err }()
	if _, err := io.CopyN(io.Discard, e.b, 2*Window); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestDuplexReaderLeaves(t *testing.T) {
	e, _ := newEnds(t, 0)
	done := make(chan error, 1)
	go func() { _, err := e.a.Write(make([]byte, 10*Window)); done <- err }()
	if _, err := io.CopyN(io.Discard, e.b, 1000); err != nil {
		t.Fatal(err)
	}
	if err := e.b.CloseRead(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, ErrBroken) {
		t.Fatalf("%v", err)
	}
	if _, err := e.b.Write([]byte("and back")); err != nil {
		t.Fatal(err)
	}
	if _, err := e.b.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("read after CloseRead: %v", err)
	}
}

func TestDuplexFailEndsWaits(t *testing.T) {
	e, _ := newEnds(t, 0)
	boom := errors.New("boom")
	errs := make(chan error, 2)
	go func() { _, err := e.a.Read(make([]byte, 1)); errs <- err }()
	go func() { _, err := e.a.Write(make([]byte, 10*Window)); errs <- err }()
	e.a.Fail(boom)
	for range 2 {
		if err := <-errs; !errors.Is(err, boom) {
			t.Errorf("%v", err)
		}
	}
	if err := e.a.Drain(); !errors.Is(err, boom) {
		t.Errorf("drain: %v", err)
	}
}

func TestDuplexMessageAfterDrainComesLast(t *testing.T) {
	e, message := newEnds(t, 0)
	want := bytes.Repeat([]byte("0123456789"), 20_000)
	go func() {
		_, _ = e.a.Write(want)
		_ = e.a.Drain()
		_ = e.a.conn.Post(MsgDone, 7, nil)
		e.a.conn.Flush()
	}()
	got := make([]byte, 0, len(want))
	buf := make([]byte, 1000)
	for len(got) < len(want)-Window/8 {
		n, err := e.b.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, buf[:n]...)
	}
	<-message
	e.b.mu.Lock()
	ended := e.b.ended
	e.b.mu.Unlock()
	if !ended {
		t.Error("the message overtook the end")
	}
}

func TestDuplexRefusesForeignRules(t *testing.T) {
	nc, other := socketPair(t)
	defer other.Close()
	c := NewConn(nc, Options{})
	defer c.Close()
	full := make([]byte, MaxData)
	for name, f := range map[string]func(d *Duplex) error{
		"gap":            func(d *Duplex) error { return d.Data(Stdin, 1, []byte("x"), 0) },
		"again":          func(d *Duplex) error { _ = d.Data(Stdin, 0, []byte("x"), 0); return d.Data(Stdin, 0, []byte("x"), 0) },
		"channel":        func(d *Duplex) error { return d.Data(Stderr, 0, []byte("x"), 0) },
		"after the end":  func(d *Duplex) error { _ = d.Data(Stdin, 0, nil, End); return d.Data(Stdin, 0, nil, 0) },
		"credit":         func(d *Duplex) error { return d.Data(Stdin, 0, full, 0) },
		"ack beyond":     func(d *Duplex) error { return d.Ack(Stdout, 1, false) },
		"ack of channel": func(d *Duplex) error { return d.Ack(Stdin, 0, false) },
	} {
		if err := f(NewDuplex(c, 1, Stdin, Stdout, MaxData-1)); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Who ends reading while a piece of it is on its way takes nothing back of what it said it has had.
func TestDuplexCloseReadDuringWriteTo(t *testing.T) {
	e, _ := newEnds(t, 0)
	if _, err := e.a.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	entered, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := e.b.WriteTo(writerFunc(func(p []byte) (int, error) { close(entered); <-leave; return len(p), nil }))
		done <- err
	}()
	<-entered
	if _, err := e.a.Write(make([]byte, 100_000)); err != nil {
		t.Fatal(err)
	}
	for arrived := uint64(0); arrived < 100_001; time.Sleep(time.Millisecond) {
		e.b.mu.Lock()
		arrived = e.b.arrived
		e.b.mu.Unlock()
	}
	if err := e.b.CloseRead(); err != nil {
		t.Fatal(err)
	}
	close(leave)
	if err := <-done; !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
	e.b.mu.Lock()
	defer e.b.mu.Unlock()
	if e.b.acked != e.b.arrived {
		t.Errorf("acknowledged %d, arrived %d", e.b.acked, e.b.arrived)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// An end behind a Write that gives up is sent all the same.
func TestDuplexEndBehindAWriteThatGivesUp(t *testing.T) {
	e, _ := newEnds(t, 0)
	wrote := make(chan error, 1)
	go func() { _, err := e.a.Write(make([]byte, 2*Window)); wrote <- err }()
	for arrived := uint64(0); arrived < Window; time.Sleep(time.Millisecond) {
		e.b.mu.Lock()
		arrived = e.b.arrived
		e.b.mu.Unlock()
	}
	if err := e.a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	_ = e.a.SetWriteDeadline(time.Now())
	if err := <-wrote; err == nil {
		t.Fatal("it wrote all")
	}
	_ = e.a.SetWriteDeadline(time.Now().Add(30 * time.Second))
	if err := e.a.Drain(); err != nil {
		t.Error(err)
	}
	if n, err := io.Copy(io.Discard, e.b); n != Window || err != nil {
		t.Error(n, err)
	}
}
