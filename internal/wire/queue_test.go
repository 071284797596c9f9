package wire

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// FuzzQueue compares a Queue with a slice.
func FuzzQueue(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed, uint16(300))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps uint16) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		var q Queue
		var want []byte
		next := byte(0)
		fill := func(p []byte) {
			for i := range p {
				p[i] = next
				next += 7
			}
		}
		size := 1 << rnd.IntN(17)
		for range steps % 1000 {
			switch n := rnd.IntN(size + 1); rnd.IntN(5) {
			case 0:
				p := make([]byte, n)
				fill(p)
				q.Append(p)
				want = append(want, p...)
			case 1:
				p := q.Space(n + 1)
				if len(p) < 1 || len(p) > n+1 {
					t.Fatalf("room for %d bytes, wanted %d", len(p), n+1)
				}
				p = p[:rnd.IntN(len(p)+1)]
				fill(p)
				q.Extend(len(p))
				want = append(want, p...)
			case 2:
				n = min(n, len(want))
				q.Discard(n)
				want = want[n:]
			case 3:
				i := min(n, len(want))
				if got := q.From(i); !bytes.HasPrefix(want[i:], got) || (len(got) == 0) != (i == len(want)) {
					t.Fatalf("other bytes from %d on", i)
				}
			case 4:
				if rnd.IntN(10) == 0 {
					q.Drop()
					want = nil
				}
			}
			if q.Len() != len(want) || len(want) > 1<<22 {
				t.Fatalf("%d bytes, wanted %d", q.Len(), len(want))
			}
			i := rnd.IntN(len(want) + 1)
			limit := rnd.IntN(size + 1)
			if got := q.AppendTo([]byte("x"), i, limit); !bytes.Equal(got[1:], want[i:min(len(want), i+limit)]) {
				t.Fatalf("other bytes from %d on, %d at most", i, limit)
			}
			if len(want) > 1<<20 {
				q.Discard(len(want))
				want = nil
			}
		}
	})
}
