package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// smallSpool keeps 1 MiB of head, 1 MiB of tail and total bytes of disk.
func smallSpool(t *testing.T, total int64) *spool {
	s := newSpool(filepath.Join(t.TempDir(), "out"))
	s.node = newNode()
	s.headCap, s.tailCap, s.totalCap = 1<<20, 1<<20, total
	return s
}

func pattern(n int) []byte {
	b := make([]byte, n)
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(b)
	return b
}

// TestBodyKeepsHeadAndTail writes in pieces of all sizes and compares everything that can be read.
func TestBodyKeepsHeadAndTail(t *testing.T) {
	for _, total := range []int{0, 1, memoryCap, memoryCap + 1, 1 << 20, 1<<20 + 1, 2 << 20, 2<<20 + 1, 3<<20 + 12345, 9 << 20} {
		s := smallSpool(t, 1<<30)
		m := &Command{}
		b := &body{spool: s, owner: m, name: "x.1"}
		all := pattern(total)
		rnd := rand.New(rand.NewPCG(uint64(total), 0))
		for off := 0; off < total; {
			n := min(total-off, 1+rnd.IntN(100_000))
			if err := b.write(all[off : off+n]); err != nil {
				t.Fatal(err)
			}
			off += n
		}
		b.close()
		headEnd, tailFrom := b.kept()
		if kept := headEnd + int64(total) - tailFrom; kept != min(int64(total), s.headCap+s.tailCap) {
			t.Errorf("%d bytes: %d kept", total, kept)
		}
		got := make([]byte, total)
		for off := int64(0); off < int64(total); {
			n, err := b.readAt(got[off:min(int64(total), off+70_000)], off)
			if sandbox.ReasonOf(err) == "output_dropped" {
				if off != headEnd {
					t.Errorf("%d bytes: gap at %d, head ends at %d", total, off, headEnd)
				}
				copy(got[off:tailFrom], all[off:tailFrom])
				off = tailFrom
				continue
			}
			if err != nil {
				t.Fatalf("%d bytes, at %d: %v", total, off, err)
			}
			off += int64(n)
		}
		if !bytes.Equal(got, all) {
			t.Errorf("%d bytes: others were read", total)
		}
		if _, err := b.readAt(make([]byte, 1), int64(total)); err != io.EOF {
			t.Errorf("%d bytes: at the end: %v", total, err)
		}
		b.drop()
		if s.disk != 0 || s.memory != 0 {
			t.Errorf("%d bytes: after drop %d of disk and %d of memory are charged", total, s.disk, s.memory)
		}
		if left, _ := os.ReadDir(s.dir); len(left) != 0 {
			t.Errorf("%d bytes: files are left: %v", total, left)
		}
	}
}

func TestBodyGap(t *testing.T) {
	s := smallSpool(t, 1<<30)
	b := &body{spool: s, owner: &Command{}, name: "x.1"}
	if err := b.write([]byte("before")); err != nil {
		t.Fatal(err)
	}
	b.skip(1000)
	if err := b.write([]byte("after")); err != nil {
		t.Fatal(err)
	}
	if got := b.sizes(); got != (StreamSize{Size: 1005, Head: 6, Tail: 5}) {
		t.Errorf("%+v", got)
	}
	p := make([]byte, 100)
	if n, err := b.readAt(p, 0); err != nil || string(p[:n]) != "before" {
		t.Errorf("%q, %v", p[:n], err)
	}
	if n, err := b.readAt(p, 1000); err != nil || string(p[:n]) != "after" {
		t.Errorf("%q, %v", p[:n], err)
	}
	_, err := b.readAt(p, 6)
	if e := sandbox.AsError(err); e == nil || e.Reason != "output_dropped" || e.Class != sandbox.NotFound || e.Facts["next_offset"] != "1000" {
		t.Errorf("%+v", e)
	}
}

func TestSandboxCapDropsTheOldestFinished(t *testing.T) {
	s := smallSpool(t, 3<<20)
	var all []*Command
	for i := range 5 {
		m := &Command{c: &Client{spool: s}, id: fmt.Sprint(i)}
		for k := range m.out {
			m.out[k] = body{spool: s, owner: m, name: fmt.Sprintf("%d.%d", i, k)}
		}
		if err := m.out[0].write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
		m.out[0].close()
		m.done = true
		s.finished(m)
		all = append(all, m)
	}
	for i, m := range all {
		want := StreamSize{Size: 1 << 20, Head: 1 << 20}
		if i < 2 {
			want.Head = 0
		}
		if got := m.Result().Stdout; got != want {
			t.Errorf("command %d: %+v, want %+v", i, got, want)
		}
	}
	live := &body{spool: s, owner: &Command{}, name: "live.1"}
	err := live.write(make([]byte, 5<<20))
	if got := live.sizes(); got.Size != 5<<20 || got.Head+got.Tail > 3<<20 || (err != nil) != (got.Tail == 0) {
		t.Errorf("a stream over the sandbox's cap: %+v, %v", got, err)
	}
	if s.disk > s.totalCap {
		t.Errorf("%d bytes of %d", s.disk, s.totalCap)
	}
}

// finishedWith is a command of s that wrote n bytes and has ended.
func finishedWith(t *testing.T, s *spool, id string, n int) *Command {
	t.Helper()
	c := &Client{spool: s, commands: make(map[string]*Command)}
	m := newCommand(c, id)
	c.commands[id] = m
	if err := m.out[0].write(make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	m.finish()
	c.finished = append(c.finished, m)
	s.finished(m)
	return m
}

// All sandboxes together keep no more than their part of the disk: the oldest that has ended goes first, whosever it is.
func TestNodeCapDropsTheOldestFinished(t *testing.T) {
	n := newNode()
	n.diskCap = 3 << 20
	spools := make([]*spool, 5)
	all := make([]*Command, 5)
	for i := range all {
		spools[i] = smallSpool(t, 2<<20)
		spools[i].node = n
		all[i] = finishedWith(t, spools[i], "x", 1<<20)
	}
	for i, m := range all {
		want := StreamSize{Size: 1 << 20, Head: 1 << 20}
		if i < 2 {
			want.Head = 0
		}
		if got := m.Result().Stdout; got != want {
			t.Errorf("command %d: %+v, want %+v", i, got, want)
		}
	}
	live := &body{spool: smallSpool(t, 1<<30), owner: &Command{}, name: "live.1"}
	live.spool.node = n
	live.spool.headCap = 8 << 20
	for range 5 { // the stream goes on, the keeping ends
		_ = live.write(make([]byte, 1<<20))
	}
	if got := live.sizes(); got.Size != 5<<20 || got.Head != 3<<20 {
		t.Errorf("a stream over the node's cap: %+v", got)
	}
	if n.disk != 3<<20 || n.spooled.Len() != 0 {
		t.Errorf("%d bytes are charged and %d commands listed", n.disk, n.spooled.Len())
	}
	live.drop()
	if n.disk != 0 {
		t.Errorf("%d bytes are charged after all was dropped", n.disk)
	}
}

func TestNodeCapIsAPartOfTheDisk(t *testing.T) {
	s := smallSpool(t, 1<<30)
	f, err := s.create("x")
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	total, _, err := linux.DiskSpace(s.dir)
	if err != nil || s.node.diskCap != total/20 {
		t.Errorf("%d of %d, %v", s.node.diskCap, total, err)
	}
}

// Beyond the node's memory all output goes to files, in every sandbox.
func TestNodeMemoryIsBounded(t *testing.T) {
	n := newNode()
	n.memoryCap = 100_000
	for range 100 {
		s := smallSpool(t, 1<<30)
		s.node = n
		finishedWith(t, s, "x", 10_000)
	}
	if n.memory.Load() > n.memoryCap+10_000 {
		t.Errorf("%d bytes in memory", n.memory.Load())
	}
}

// A sandbox that has ended keeps little in memory, and nothing is lost of what it wrote; forgotten, it keeps nothing.
func TestArchiveAndForget(t *testing.T) {
	s := smallSpool(t, 1<<30)
	c := &Client{o: Options{Log: slog.New(slog.DiscardHandler)}, spool: s, commands: make(map[string]*Command)}
	for i := range 100 {
		m := newCommand(c, fmt.Sprint(i))
		c.commands[m.id] = m
		for k := range m.out {
			if err := m.out[k].write(fmt.Appendf(make([]byte, 3000), "%d %d", i, k)); err != nil {
				t.Fatal(err)
			}
		}
		if i == 0 {
			continue // never ended
		}
		m.finish()
		c.finished = append(c.finished, m)
		s.finished(m)
	}
	c.Archive()
	if s.memory > endedMemory || s.memory == 0 || s.node.memory.Load() != s.memory {
		t.Errorf("%d bytes in memory, %d of the node", s.memory, s.node.memory.Load())
	}
	if m := c.finished[len(c.finished)-1]; m.onDisk() {
		t.Error("the newest is in a file")
	}
	for i := range 100 {
		m := c.commands[fmt.Sprint(i)]
		for k := range m.out {
			if got := string(m.Head(k+1, 4000)[3000:]); got != fmt.Sprint(i, k) {
				t.Errorf("command %d, stream %d: %q", i, k+1, got)
			}
		}
	}
	s.node.memoryCap = 100 // scarce
	c.Archive()
	if s.memory != 0 {
		t.Errorf("%d bytes in memory though it is scarce", s.memory)
	}
	c.Forget()
	c.Archive() // comes late
	if s.disk != 0 || s.node.disk != 0 || s.node.memory.Load() != 0 || s.node.spooled.Len() != 0 {
		t.Errorf("forgotten: %d bytes in files, %d of the node, %d in memory, %d listed", s.disk, s.node.disk, s.node.memory.Load(), s.node.spooled.Len())
	}
	if left, _ := os.ReadDir(s.dir); len(left) != 0 {
		t.Errorf("files are left: %v", left)
	}
}

func TestFullDiskEndsTheKeepingOnly(t *testing.T) {
	s := newSpool("/dev/null/out") // nothing can be made there, for root neither
	b := &body{spool: s, owner: &Command{}, name: "x.1"}
	if err := b.write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := b.write(make([]byte, memoryCap)); err == nil {
		t.Error("written to nowhere")
	}
	if err := b.write(make([]byte, 10)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if b.size != 1000+memoryCap+10 {
		t.Errorf("size %d", b.size)
	}
	if _, err := b.readAt(make([]byte, 1), 0); sandbox.ReasonOf(err) != "output_dropped" {
		t.Errorf("%v", err)
	}
}

func TestEndlessOutputCostsTheCap(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	c.spool.headCap, c.spool.tailCap = 1<<20, 1<<20
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), shell("exec yes"))
	if err != nil {
		t.Fatal(err)
	}
	for m.Result().Stdout.Size < 64<<20 {
		select {
		case <-ctx.Done():
			t.Fatalf("only %d bytes came: nobody reads, and it is held back", m.Result().Stdout.Size)
		case <-time.After(time.Millisecond):
		}
	}
	if err := m.Kill(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if got := m.Result().Stdout; got.Head != 1<<20 || got.Tail != 1<<20 {
		t.Errorf("%+v", got)
	}
	entries, err := os.ReadDir(c.o.OutputDir)
	if err != nil {
		t.Fatal(err)
	}
	var disk int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		disk += info.Size()
	}
	if disk != 2<<20+ringHeader {
		t.Errorf("%d bytes in files", disk)
	}
}

func TestFollowerMissesNothing(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	c.spool.headCap, c.spool.tailCap = 512<<10, 512<<10
	ctx := testContext(t)
	const lines = 1_000_000
	m, err := c.Start(ctx, newID(), shell(fmt.Sprintf("exec seq %d", lines)))
	if err != nil {
		t.Fatal(err)
	}
	r := follow(t, m, 1)
	defer r.Close()
	var want strings.Builder
	for i := 1; i <= lines; i++ {
		fmt.Fprintln(&want, i)
	}
	var got bytes.Buffer
	buf := make([]byte, 10_000)
	for {
		n, err := r.Read(buf)
		got.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", got.Len(), err)
		}
	}
	if got.String() != want.String() {
		t.Errorf("%d bytes of %d, or others", got.Len(), want.Len())
	}
}

func TestCloseEndsARead(t *testing.T) {
	c := newWorld(t).connect()
	ctx := testContext(t)
	m, err := c.Start(ctx, newID(), shell("sleep 30"))
	if err != nil {
		t.Fatal(err)
	}
	r := follow(t, m, 1)
	result := make(chan error, 1)
	go func() { _, err := r.Read(make([]byte, 1)); result <- err }()
	r.Close()
	if err := <-result; !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v", err)
	}
	if err := m.Kill(ctx, 0); err != nil {
		t.Fatal(err)
	}
}

// TestAbsentEdge: a command without an edge blocks once its window is full, goes on when an edge comes, and loses nothing.
func TestAbsentEdge(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	ctx := testContext(t)
	gate := filepath.Join(w.dir, "gate")
	if err := exec.Command("mkfifo", gate).Run(); err != nil {
		t.Fatal(err)
	}
	for i := range 60 { // together more than aether may keep in memory
		if _, err := c.Start(ctx, fmt.Sprint("n", i), shell(fmt.Sprintf(": <%s; head -c 30000 /dev/zero; touch %s/n%d; head -c 270000 /dev/zero; echo end", gate, w.dir, i))); err != nil {
			t.Fatal(err)
		}
	}
	c.Close()
	opened, err := os.OpenFile(gate, os.O_WRONLY, 0) // all who wait to read go on
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	for { // all of them are writing
		written, err := filepath.Glob(filepath.Join(w.dir, "n*"))
		if err != nil {
			t.Fatal(err)
		}
		if len(written) == 60 {
			break
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%d commands wrote without an edge", len(written))
		case <-time.After(time.Millisecond):
		}
	}
	again := w.connect()
	if n := len(again.Commands()); n != 60 {
		t.Fatalf("%d commands", n)
	}
	for _, m := range again.Commands() {
		if err := m.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		if r := m.Result(); r.Stdout.Size != 300_004 || r.Stdout.Head != r.Stdout.Size {
			t.Errorf("%s: %+v", m.ID(), r.Stdout)
		}
	}
}
