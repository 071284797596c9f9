package container

import (
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"dsec/sandbox"
)

func TestForeignRanges(t *testing.T) {
	const base, capacity = 0x10000, 10
	for text, want := range map[string][]int{
		"":                               nil,
		"# comment\nbad\na:b:c\nx:1:2:3": nil,
		"u:100:50":                       nil,    // below
		"u:65536:1":                      {0},    // the first id
		"u:0:65537":                      {0},    // reaches into it
		"u:131071:2":                     {0, 1}, // across a border
		"u:196608:131072":                {2, 3}, // whole ranges
		"u:720895:1":                     {9},    // the last id
		"u:720896:65536":                 nil,    // behind
		"u:65536:0":                      nil,    // nothing
		"u:0:4294967295":                 {0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		"u:99999999999:5\nv:131072:1":    {1},
	} {
		got := map[int]bool{}
		markForeign(strings.NewReader(text), base, capacity, got)
		if keys := slices.Sorted(maps.Keys(got)); !slices.Equal(keys, want) {
			t.Errorf("%q: %v, want %v", text, keys, want)
		}
	}
}

func FuzzForeignRanges(f *testing.F) {
	f.Add("root:100000:65536\n")
	f.Add("a:18446744073709551615:1\n")
	f.Fuzz(func(t *testing.T, text string) {
		got := map[int]bool{}
		markForeign(strings.NewReader(text), defaultIDBase, 100, got)
		for n := range got {
			if n < 0 || n >= 100 {
				t.Errorf("range %d", n)
			}
		}
	})
}

func testRanges(t *testing.T, capacity int) *idRanges {
	return &idRanges{
		dir: t.TempDir(), base: defaultIDBase, capacity: capacity, log: slog.New(slog.DiscardHandler), fill: make(chan struct{}, 1),
		lent: map[int]sandbox.ID{}, making: map[int]bool{}, broken: map[int]bool{},
	}
}

// A clean-up that comes late must not take a range from the sandbox that has it now.
func TestReleaseByAnotherOwner(t *testing.T) {
	r := testRanges(t, 4)
	r.ready = []int{0}
	slot, err := r.acquire(t.Context(), "first")
	if err != nil {
		t.Fatal(err)
	}
	r.release(slot, "first")
	if again, err := r.acquire(t.Context(), "second"); err != nil || again != slot {
		t.Fatalf("slot %d, %v", again, err)
	}
	r.release(slot, "first")
	if r.lent[slot] != "second" || len(r.ready) != 0 {
		t.Error("the range was taken from its owner")
	}
	r.release(slot, "second")
	r.release(slot, "second")
	if !slices.Equal(r.ready, []int{slot}) {
		t.Errorf("ready %v", r.ready)
	}
}

func TestClaimSkipsWhatIsNotFree(t *testing.T) {
	r := testRanges(t, 6)
	r.broken[0], r.making[1], r.lent[2] = true, true, "x"
	if err := os.WriteFile(r.path(3), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{4, 5} {
		if got, err := r.claimNewLocked(); err != nil || got != want {
			t.Errorf("claimed %d, %v; want %d", got, err, want)
		}
	}
	if _, err := r.claimNewLocked(); sandbox.ReasonOf(err) != "id_ranges_exhausted" {
		t.Errorf("claim of nothing: %v", err)
	}
	r.forget(4)
	if got, err := r.claimNewLocked(); err != nil || got != 4 {
		t.Errorf("after a failure: %d, %v", got, err)
	}
}

// What an earlier process left: unfinished places go, numbers in use are not given again.
func TestAdopt(t *testing.T) {
	r := testRanges(t, 100)
	r.lent[5] = "x"
	for _, n := range []int{2, 5} {
		if err := os.WriteFile(r.path(n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.adopt(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(r.path(2)); err == nil {
		t.Error("an unfinished place is still there")
	}
	seen := map[int]bool{}
	for range 10 {
		n, err := r.claimNewLocked()
		if err != nil || n == 5 || seen[n] {
			t.Fatalf("claimed %d, %v", n, err)
		}
		seen[n] = true
	}
}

func TestOptions(t *testing.T) {
	good := Options{RunDir: "/run/x", Stage: "/bin/stage", Aether: "/bin/aether"}
	if o, err := good.withDefaults(); err != nil || o.IDBase != defaultIDBase || o.IDCapacity != defaultCapacity || o.Log == nil {
		t.Errorf("%+v, %v", o, err)
	}
	for name, spoil := range map[string]func(*Options){
		"relative": func(o *Options) { o.RunDir = "x" }, "no stage": func(o *Options) { o.Stage = "" }, "no aether": func(o *Options) { o.Aether = "" },
		"root's ids": func(o *Options) { o.IDBase = 1 }, "too many": func(o *Options) { o.IDCapacity = 1 << 16 }, "negative": func(o *Options) { o.IDCapacity = -1 },
	} {
		o := good
		spoil(&o)
		if _, err := o.withDefaults(); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
}
