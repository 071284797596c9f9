package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/internal/wire"
	"dsec/sandbox"
)

// endedCommand has written those bytes to stdout; its spool is a small one.
func endedCommand(t *testing.T, out []byte) *Command {
	c := &Client{spool: smallSpool(t, 1<<30)}
	m := newCommand(c, "x")
	for len(out) > 0 {
		n := min(len(out), wire.MaxData)
		if err := m.out[0].write(out[:n]); err != nil {
			t.Fatal(err)
		}
		out = out[n:]
	}
	m.mu.Lock()
	m.finish()
	m.mu.Unlock()
	return m
}

func number(n int64) *int64 { return &n }

func TestTail(t *testing.T) {
	long := bytes.Repeat([]byte("0123456\n"), 20_000)  // over one block, and in files
	huge := bytes.Repeat([]byte("0123456\n"), 3<<20/8) // with a gap from 1 MiB to 2 MiB
	for _, c := range []struct {
		name   string
		out    []byte
		q      OutputQuery
		at     int64
		reason string
	}{
		{name: "nothing", q: OutputQuery{TailLines: number(3)}},
		{name: "no line", out: []byte("a\nb\n"), q: OutputQuery{TailLines: number(0)}, at: 4},
		{name: "one line", out: []byte("a\nb\n"), q: OutputQuery{TailLines: number(1)}, at: 2},
		{name: "an unfinished one", out: []byte("a\nb"), q: OutputQuery{TailLines: number(1)}, at: 2},
		{name: "empty lines", out: []byte("a\n\n\n"), q: OutputQuery{TailLines: number(2)}, at: 2},
		{name: "only empty lines", out: []byte("\n\n\n"), q: OutputQuery{TailLines: number(2)}, at: 1},
		{name: "all lines", out: []byte("a\nb\n"), q: OutputQuery{TailLines: number(2)}},
		{name: "more lines than there are", out: []byte("a\nb\n"), q: OutputQuery{TailLines: number(1 << 62)}},
		{name: "bytes", out: []byte("abcdef"), q: OutputQuery{Tail: number(2)}, at: 4},
		{name: "no byte", out: []byte("abcdef"), q: OutputQuery{Tail: number(0)}, at: 6},
		{name: "more bytes than there are", out: []byte("abcdef"), q: OutputQuery{Tail: number(1 << 62)}},
		{name: "an offset behind", out: []byte("abcdef"), q: OutputQuery{Tail: number(4), Offset: 5}, at: 5},
		{name: "an offset before", out: []byte("abcdef"), q: OutputQuery{Tail: number(4), Offset: 1}, at: 2},
		{name: "long", out: long, q: OutputQuery{TailLines: number(15_000)}, at: 40_000},
		{name: "one long line", out: bytes.Repeat([]byte("x"), 300_000), q: OutputQuery{TailLines: number(1)}},
		{name: "lines up to a gap", out: huge, q: OutputQuery{TailLines: number(1 << 40)}, at: 2 << 20},
		{name: "bytes up to a gap", out: huge, q: OutputQuery{Tail: number(3<<19 + 1<<18)}, at: 2 << 20},
		{name: "bytes before a gap", out: huge, q: OutputQuery{Tail: number(5 << 19)}, at: 1 << 19},
		{name: "lines over the seam of head and tail", out: huge[:3<<19], q: OutputQuery{TailLines: number(1 << 17)}, at: 1 << 19},
		{name: "in a gap", out: huge, q: OutputQuery{Offset: 3 << 19}, reason: "output_dropped"},
		{name: "behind the end", out: []byte("abc"), q: OutputQuery{Offset: 4, Follow: true}, reason: "offset_out_of_range"},
		{name: "negative", out: []byte("abc"), q: OutputQuery{Tail: number(-1)}, reason: "invalid_request"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := endedCommand(t, c.out)
			r, err := m.Output(1, c.q)
			if sandbox.ReasonOf(err) != c.reason {
				t.Fatalf("%v", err)
			}
			if err != nil {
				return
			}
			defer r.Close()
			if r.Offset() != c.at || !r.Final() {
				t.Errorf("begins at %d, final %v", r.Offset(), r.Final())
			}
			if got, err := io.ReadAll(r); sandbox.ReasonOf(err) != "output_dropped" && (err != nil || !bytes.Equal(got, c.out[c.at:])) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
}

func TestMarks(t *testing.T) {
	var k marks
	if at := k.since(5, 0); at != 0 {
		t.Errorf("nothing: %d", at)
	}
	// A byte every 100 ms, for an hour; then an hour of silence, and one more.
	const hour = 3_600_000
	size := int64(0)
	for now := int64(0); now < hour; now += 100 {
		k.add(size, now)
		size++
	}
	k.add(size, 2*hour)
	size++
	if len(k.list) > maxMarks {
		t.Errorf("%d marks", len(k.list))
	}
	for now := int64(0); now < hour; now += 777 {
		exact := (now + 99) / 100
		if at := k.since(now, size); at > exact || exact-at > hour/64/100 {
			t.Errorf("at %d ms: %d, wanted %d or a little before", now, at, exact)
		}
	}
	if at := k.since(hour+1, size); at != size-1 {
		t.Errorf("in the silence: %d of %d", at, size)
	}
	if at := k.since(2*hour+1, size); at != size {
		t.Errorf("after the end: %d of %d", at, size)
	}
	k.add(size, 0) // the clock was set back
	if at := k.since(2*hour, size+1); at > size-1 {
		t.Errorf("after the clock was set back: %d", at)
	}
}

// running is a command that writes what the test says.
func running(t *testing.T) (m *Command, write func(...byte)) {
	m = newCommand(&Client{spool: smallSpool(t, 1<<30)}, "x")
	return m, func(b ...byte) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if err := m.out[0].write(b); err != nil {
			t.Error(err)
		}
		m.notify()
	}
}

func TestQuietFollowerIsAskedAgain(t *testing.T) {
	m, write := running(t)
	write('a')
	var got []byte
	for i := range 3 {
		r, err := m.Output(1, OutputQuery{Offset: int64(len(got)), Follow: true, Quiet: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil || r.Final() {
			t.Fatalf("%v, final %v", err, r.Final())
		}
		r.Close()
		got = append(got, b...)
		write(byte('b' + i))
	}
	m.mu.Lock()
	m.finish()
	m.mu.Unlock()
	r, err := m.Output(1, OutputQuery{Offset: int64(len(got)), Follow: true, Quiet: time.Millisecond})
	if err != nil || !r.Final() {
		t.Fatalf("%v: the end was not told", err)
	}
	b, err := io.ReadAll(r)
	if got = append(got, b...); err != nil || string(got) != "abcd" || !r.Final() {
		t.Errorf("%q, %v", got, err)
	}
}

// TestCutFollowerComesBack: a follower whose connection is cut finds what it had not had, although the command could have pushed
// it out; once it stays away, the command goes on.
func TestCutFollowerComesBack(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	c.spool.headCap, c.spool.tailCap, c.spool.holdTime = 512<<10, 1<<20, time.Hour
	const size = 40 << 20
	m, err := c.Start(testContext(t), newID(), shell(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo end", size)))
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 300_000)
	lost := int64(100_000) // on the way, each time
	at := int64(0)
	for at < size+4 {
		r, err := m.Output(1, OutputQuery{Offset: at, Follow: true})
		if err != nil {
			t.Fatalf("at %d: %v", at, err)
		}
		n := 0
		for range 12 {
			k, err := r.Read(buf)
			if n += k; errors.Is(err, io.EOF) {
				lost = 0
				break
			} else if err != nil {
				t.Fatalf("at %d: %v", at, err)
			}
		}
		r.Close()
		at += max(int64(n)-lost, 0)
	}
	if err := m.Wait(testContext(t)); err != nil || m.Result().Stdout.Size != size+4 {
		t.Errorf("%+v, %v", m.Result(), err)
	}
}

func TestFollowerThatStaysAway(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	c.spool.headCap, c.spool.tailCap, c.spool.holdTime = 512<<10, 512<<10, 50*time.Millisecond
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), shell("head -c 20000000 /dev/zero"))
	if err != nil {
		t.Fatal(err)
	}
	r := follow(t, m, 1)
	if _, err := r.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if err := m.Wait(ctx); err != nil {
		t.Errorf("held back for ever: %v", err)
	}
}

// TestTwoReaders: one reads slowly and one fast, and one leaves in the middle; each gets every byte.
func TestTwoReaders(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	c.spool.headCap, c.spool.tailCap = 512<<10, 1<<20
	cmd := shell("read go; exec seq 500000")
	cmd.StdinFollows = true
	m, err := c.Start(testContext(t), newID(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	for i := 1; i <= 500_000; i++ {
		fmt.Fprintln(&want, i)
	}
	done := make(chan []byte, 2)
	for _, piece := range []int{333, 1 << 20} {
		r := follow(t, m, 1)
		go func() {
			defer r.Close()
			b, err := io.ReadAll(&small{r, piece})
			if err != nil {
				t.Error(err)
			}
			done <- b
		}()
	}
	cut := follow(t, m, 1)
	if _, err := m.WriteStdin(testContext(t), 0, strings.NewReader("go\n"), true); err != nil {
		t.Fatal(err)
	}
	if _, err := cut.Read(make([]byte, 100)); err != nil {
		t.Error(err)
	}
	cut.Close()
	for range 2 {
		if got := <-done; !bytes.Equal(got, want.Bytes()) {
			t.Errorf("%d bytes of %d, or others", len(got), want.Len())
		}
	}
}

// small reads at most n bytes at a time.
type small struct {
	r io.Reader
	n int
}

func (s *small) Read(p []byte) (int, error) { return s.r.Read(p[:min(len(p), s.n)]) }

// TestEndedSandboxIsFoundByTheNextEdge: its commands with results and output, small and large, to the byte.
func TestEndedSandboxIsFoundByTheNextEdge(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	c.spool.headCap, c.spool.tailCap = 1<<20, 1<<20
	cases := map[string]sandbox.Command{
		"small": shell("printf 'a\\r\\n\\n\\377b'; echo err >&2; exit 3"),
		"large": shell("seq 100000"),
		"huge":  shell("seq 1000000"),
		"runs":  shell("echo begun; sleep 1000"),
	}
	want := map[string][3]string{}
	for id, cmd := range cases {
		m, err := c.Start(testContext(t), id, cmd)
		if err != nil {
			t.Fatal(err)
		}
		if id == "runs" {
			r := follow(t, m, 1)
			_, err = r.Read(make([]byte, 100))
			r.Close()
			if kerr := m.Kill(testContext(t), 0); kerr != nil {
				t.Fatal(kerr)
			}
		}
		if err = errors.Join(err, m.Wait(testContext(t))); err != nil {
			t.Fatal(err)
		}
	}
	c.Close()
	c.Archive()
	for id := range cases {
		m, _ := c.Command(id)
		want[id] = keptOf(t, m)
	}
	o := w.options()
	again, err := Ended(o)
	if err != nil {
		t.Fatal(err)
	}
	again.spool.tailCap = 1 << 20
	if n := len(again.Commands()); n != len(cases) {
		t.Errorf("%d commands", n)
	}
	for id := range cases {
		m, ok := again.Command(id)
		if !ok {
			t.Errorf("%s is not known", id)
			continue
		}
		if got := keptOf(t, m); got != want[id] {
			t.Errorf("%s: %.200q, wanted %.200q", id, got, want[id])
		}
	}
	again.Forget()
	if entries, err := os.ReadDir(o.OutputDir); err != nil || len(entries) != 0 { // the directory is somebody else's to remove
		t.Errorf("%v, %v", entries, err)
	}
}

// keptOf is all that is known of a command.
func keptOf(t *testing.T, m *Command) (all [3]string) {
	t.Helper()
	r := m.Result()
	r.StartedAt, r.EndedAt = r.StartedAt.Round(0).UTC(), r.EndedAt.Round(0).UTC()
	all[2] = fmt.Sprintf("%+v", r)
	for i, size := range []StreamSize{r.Stdout, r.Stderr} {
		for _, q := range []OutputQuery{{}, {Offset: size.Size - size.Tail}} {
			o, err := m.Output(i+1, q)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(o)
			if err != nil && sandbox.ReasonOf(err) != "output_dropped" {
				t.Fatal(err)
			}
			all[i] += string(b)
			o.Close()
		}
	}
	return all
}

func FuzzEnded(f *testing.F) {
	f.Add([]byte(`[{"ID":"a","Streams":[{"Size":3,"Memory":"YWJj"},{"Size":9,"InFile":true,"Frozen":true,"HeadEnd":3,"RingAt":5,"Tail":5,"Charged":1}]}]`))
	f.Add([]byte(`[{"ID":"a","Streams":[{"Size":-3},{"Size":9,"InFile":true,"HeadEnd":-3}]}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, endedName), b, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Ended(Options{OutputDir: dir})
		if err != nil {
			return
		}
		for _, m := range c.Commands() {
			for _, lines := range []*int64{nil, number(3)} {
				if r, err := m.Output(1, OutputQuery{TailLines: lines}); err == nil {
					_, _ = io.Copy(io.Discard, io.LimitReader(r, 1<<20))
					r.Close()
				}
			}
		}
		c.Forget()
	})
}
