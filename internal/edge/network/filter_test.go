package network

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"dsec/sandbox"
)

// A change of the filter without `make generate` would not be in the program.
func TestFilterObjectIsOfItsSources(t *testing.T) {
	h := sha256.New()
	for _, name := range []string{"filter.c", "kernel.h", "generate.sh"} {
		b, err := os.ReadFile(filepath.Join("bpf", name))
		if err != nil {
			t.Fatal(err)
		}
		h.Write(b)
	}
	want, err := os.ReadFile("bpf/filter.sum")
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != strings.TrimSpace(string(want)) {
		t.Error("bpf/filter.o is of other sources: run make generate where clang and llvm are installed")
	}
}

// What Go writes into the filter's maps has the sizes that the filter reads.
func TestFilterMapsHaveTheSizesOfTheirTypes(t *testing.T) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(filterObject))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][2]int{
		"active":     {4, 4},
		"open4":      {binary.Size(filterKey4{}), binary.Size(filterRanges{})},
		"open6":      {binary.Size(filterKey6{}), binary.Size(filterRanges{})},
		"forbidden4": {binary.Size(filterBare4{}), 1},
		"forbidden6": {binary.Size(filterBare6{}), 1},
		"refused":    {4, binary.Size(filterCounts{})},
		"sampled":    {4, binary.Size(filterSamples{})},
	} {
		m := spec.Maps[name]
		if m == nil || int(m.KeySize) != want[0] || int(m.ValueSize) != want[1] {
			t.Errorf("%s: %+v, want %v", name, m, want)
		}
	}
	if n := spec.Maps["active"].MaxEntries; n != maxLinks {
		t.Errorf("the filter has room for %d links, not %d", n, maxLinks)
	}
}

func TestRangeGivesAddressesAndMAC(t *testing.T) {
	r, err := parseRange("")
	if err != nil {
		t.Fatal(err)
	}
	if a := r.addresses(300); a[0] != netip.MustParseAddr("198.18.1.44") || len(a) == 2 && a[1] != netip.MustParseAddr("fd64:7365:6300::12c") {
		t.Errorf("addresses %v", a)
	}
	if m := r.mac(300); m != [6]byte{2, 0x64, 198, 18, 1, 44} {
		t.Errorf("MAC %x", m)
	}
	for _, bad := range []string{"x", "10.0.0.0/24", "10.0.0.1/16", "fd00::/16", "0.0.0.0/0"} {
		if _, err := parseRange(bad); sandbox.ReasonOf(err) != "invalid_network_range" {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestNumbersAreUsedAgainLate(t *testing.T) {
	var n numbers
	first, err := n.get()
	if err != nil || first != firstLink {
		t.Fatal(first, err)
	}
	n.free = append(n.free, first)
	seen := 0
	for {
		got, err := n.get()
		if err != nil {
			t.Fatal(err)
		}
		if got == first {
			break
		}
		seen++
	}
	if seen < reuseAfter-1 {
		t.Errorf("a number came back after %d others", seen)
	}
	n = numbers{next: maxLinks}
	if _, err := n.get(); sandbox.ReasonOf(err) != "no_network_links" {
		t.Errorf("of none that is left: %v", err)
	}
}

func TestNumbersThatAnEarlierProcessUsedAreUsedAgain(t *testing.T) {
	var n numbers
	n.adopt(map[uint32]bool{maxLinks - 1: true, firstLink + 1: true})
	seen := make(map[uint32]bool)
	for {
		got, err := n.get()
		if err != nil {
			break
		}
		if seen[got] || got < firstLink || got >= maxLinks || got == firstLink+1 || got == maxLinks-1 {
			t.Fatalf("number %d is in use", got)
		}
		seen[got] = true
	}
	if want := maxLinks - firstLink - 2; len(seen) != want {
		t.Errorf("%d numbers are free after a restart, not %d", len(seen), want)
	}
}
