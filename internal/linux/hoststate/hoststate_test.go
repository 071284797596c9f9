package hoststate

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestDiff(t *testing.T) {
	a := State{{Mount, "/a"}: 1, {Mount, "/b"}: 2, {FD, "3 x"}: 1}
	b := State{{Mount, "/a"}: 2, {Mount, "/b"}: 1, {Process, "7 sh"}: 1}
	want := []string{"+ mount /a", "+ process 7 sh", "- fd 3 x", "- mount /b"}
	if got := Diff(a, b); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := Diff(a, a); len(got) != 0 {
		t.Errorf("a state differs from itself by %q", got)
	}
	only := b.Only(func(i Item) bool { return i.Kind == Mount })
	if len(only) != 2 || len(b) != 3 {
		t.Errorf("Only gives %v of %v", only, b)
	}
}

const stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0 0"

func TestParseStat(t *testing.T) {
	p, err := parseStat([]byte(stat))
	if err != nil || p != (process{comm: "a (b) c", start: "123456"}) {
		t.Errorf("got %+v, %v", p, err)
	}
	p, err = parseStat([]byte(strings.Replace(stat, "4194560", "69238880", 1)))
	if err != nil || !p.kernel {
		t.Errorf("a kernel thread: %+v, %v", p, err)
	}
	for _, bad := range []string{"", "7 a S 1", "7 (a", "7 (a) S 1", strings.Replace(stat, "4194560", "x", 1), ")("} {
		if p, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q gives %+v", bad, p)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte(stat))
	f.Add([]byte("1 (x) "))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := parseStat(b); err == nil && p.start == "" {
			t.Error("no start time")
		}
	})
}

func TestFilesAndDescriptorsAreSeen(t *testing.T) {
	dir := t.TempDir()
	before := make(State)
	if err := before.addFDs(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	after := make(State)
	if err := after.addFDs(); err != nil {
		t.Fatal(err)
	}
	if err := after.addFiles(dir); err != nil {
		t.Fatal(err)
	}
	diff := Diff(before, after)
	for _, want := range []string{"+ file " + f.Name(), " " + f.Name()} {
		if !slices.ContainsFunc(diff, func(l string) bool { return strings.HasSuffix(l, want) }) {
			t.Errorf("%q has no %q", diff, want)
		}
	}
}
