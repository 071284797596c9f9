package upper

import (
	"testing"

	"dsec/sandbox"
)

func TestPoolSize(t *testing.T) {
	const gib = int64(1) << 30
	for _, c := range []struct {
		asked, free, want int64
		reason            string
	}{
		{0, 100 * gib, 50 * gib, ""},
		{0, 100*gib + 4097*2, 50*gib + 4096, ""},
		{80 * gib, 100 * gib, 80 * gib, ""},
		{80*gib + 4096, 100 * gib, 0, "pool_too_large"},
		{0, gib / 4, 0, "pool_too_small"},
		{1000, 100 * gib, 0, "pool_too_small"},
		{-5, 100 * gib, 0, "pool_too_small"},
	} {
		got, err := poolSize(c.asked, c.free)
		if got != c.want || (err != nil) != (c.reason != "") || c.reason != "" && sandbox.ReasonOf(err) != c.reason {
			t.Errorf("poolSize(%d, %d) = %d, %v; want %d %s", c.asked, c.free, got, err, c.want, c.reason)
		}
	}
}
