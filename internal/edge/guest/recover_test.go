package guest

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dsec/internal/wire"
	"dsec/sandbox"
)

// recovered is the body that the next edge finds.
func recovered(s *spool) *body {
	b := &body{spool: s, owner: &Command{}, name: "x.1"}
	b.recover()
	return b
}

// checkRecovered reads everything that is said to be kept.
func checkRecovered(t *testing.T, b *body, all []byte) {
	t.Helper()
	headEnd, tailFrom := b.kept()
	for off := int64(0); off < b.size; {
		if off == headEnd && off < tailFrom {
			off = tailFrom
			continue
		}
		p := make([]byte, 50_000)
		n, err := b.readAt(p, off)
		if err != nil {
			t.Fatalf("at %d of %d, head %d, tail from %d: %v", off, b.size, headEnd, tailFrom, err)
		}
		if !bytes.Equal(p[:n], all[off:][:n]) {
			t.Fatalf("other bytes at %d of %d, head %d, tail from %d", off, b.size, headEnd, tailFrom)
		}
		off += int64(n)
	}
	full := min(b.size, b.spool.headCap+b.spool.tailCap)
	if kept := headEnd + b.size - tailFrom; kept < full-wire.MaxData {
		t.Errorf("%d bytes are kept of %d", kept, b.size)
	}
	if b.charged != b.headEnd+min(b.size-max(b.headEnd, min(b.ringAt, b.size)), b.spool.tailCap) {
		t.Errorf("%d bytes are charged: head %d, ring from %d, size %d", b.charged, b.headEnd, b.ringAt, b.size)
	}
}

// What an edge acknowledged is found by the next one, wherever it was killed, and it goes on from there.
func TestTailOutlivesTheEdge(t *testing.T) {
	all := pattern(6 << 20)
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 40 {
		s := smallSpool(t, 1<<30)
		size := int64(0)
		for range 4 { // edges
			b := recovered(s)
			if b.size != size {
				t.Fatalf("round %d: %d bytes are found of %d that were acknowledged", round, b.size, size)
			}
			checkRecovered(t, b, all)
			for end := size + rnd.Int64N(1_400_000); b.size < end; {
				if err := b.write(all[b.size:][:1+rnd.IntN(wire.MaxData)]); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.toFile(); err != nil { // as before an acknowledgement
				t.Fatal(err)
			}
			size = b.size
			// Killed in the middle of the next piece: its bytes are in the ring, the header is not.
			if b.frozen && round%2 == 0 {
				n := int64(wire.MaxData)
				at := (size - b.ringAt) % s.tailCap
				if err := b.storeRing(bytes.Repeat([]byte("!"), int(min(n, s.tailCap-at))), at); err != nil {
					t.Fatal(err)
				}
			}
			b.close()
			s = &spool{dir: s.dir, node: s.node, headCap: s.headCap, tailCap: s.tailCap, totalCap: s.totalCap}
		}
	}
}

// After a gap in the middle of the tail, an edge that is killed before it kept anything more finds the gap.
func TestGapOutlivesTheEdge(t *testing.T) {
	s := smallSpool(t, 1<<30)
	b := recovered(s)
	all := pattern(3 << 20)
	for b.size < 2<<20 {
		if err := b.write(all[b.size:][:64<<10]); err != nil {
			t.Fatal(err)
		}
	}
	b.skip(b.size + 1000)
	if err := b.storeRing(bytes.Repeat([]byte("!"), 64<<10), 0); err != nil {
		t.Fatal(err)
	}
	b.close()
	again := recovered(s)
	if got := again.sizes(); got != (StreamSize{Size: 2<<20 + 1000, Head: 1 << 20}) {
		t.Errorf("%+v", got)
	}
	if _, err := again.readAt(make([]byte, 1), 2<<20); sandbox.ReasonOf(err) != "output_dropped" {
		t.Errorf("%v", err)
	}
}

// A file that no edge left so is no tail.
func TestBrokenRing(t *testing.T) {
	for name, content := range map[string][]byte{
		"empty": nil, "short": make([]byte, 10), "zeros": make([]byte, 4096), "garbage": pattern(4096), "negative": bytes.Repeat([]byte{0xff}, ringHeader),
	} {
		s := smallSpool(t, 1<<30)
		b := recovered(s)
		if err := b.write(make([]byte, memoryCap+1)); err != nil {
			t.Fatal(err)
		}
		b.close()
		if err := os.WriteFile(filepath.Join(s.dir, "x.1.tail"), content, 0o600); err != nil {
			t.Fatal(err)
		}
		again := recovered(s)
		if got := again.sizes(); got != (StreamSize{Size: memoryCap + 1, Head: memoryCap + 1}) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

const victimEnv = "GUEST_TEST_SPOOL"

// TestSpoolVictim is no test: it is the process that TestTailSurvivesKill kills.
func TestSpoolVictim(t *testing.T) {
	dir := os.Getenv(victimEnv)
	if dir == "" {
		return
	}
	s := newSpool(dir)
	s.headCap, s.tailCap = 1<<20, 1<<20
	all := pattern(64 << 20)
	rnd := rand.New(rand.NewPCG(uint64(os.Getpid()), 0))
	for b := recovered(s); b.size < int64(len(all))-wire.MaxData; {
		if err := b.write(all[b.size:][:1+rnd.IntN(wire.MaxData)]); err != nil {
			t.Fatal(err)
		}
		fmt.Println(b.stored()) // acknowledged
	}
}

func TestTailSurvivesKill(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	all := pattern(64 << 20)
	for range 10 {
		s := smallSpool(t, 1<<30)
		cmd := exec.Command(self, "-test.run=^TestSpoolVictim$")
		cmd.Env = append(os.Environ(), victimEnv+"="+s.dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		acked := int64(0)
		killAt := rand.Int64N(8 << 20)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			n, err := strconv.ParseInt(strings.TrimSpace(sc.Text()), 10, 64)
			if err != nil {
				continue // what testing says
			}
			if acked = n; n > killAt && killAt >= 0 {
				killAt = -1
				time.AfterFunc(rand.N(2*time.Millisecond), func() { _ = cmd.Process.Kill() })
			}
		}
		_ = cmd.Wait() // it was killed
		b := recovered(s)
		if b.size < acked {
			t.Errorf("%d bytes are found of %d that were acknowledged", b.size, acked)
		}
		checkRecovered(t, b, all)
		b.close()
	}
}
