package aether

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestInHosts(t *testing.T) {
	const file = "# comment\n127.0.0.1 localhost\n10.0.0.1\tDB db.local # trailing db2\n::2 db\nfe80::1%eth0 db\nnonsense db\n10.0.0.2\n"
	var got []string
	for _, a := range inHosts(strings.NewReader(file), "db") {
		got = append(got, a.String())
	}
	if !slices.Equal(got, []string{"10.0.0.1", "::2"}) {
		t.Errorf("%v", got)
	}
	if found := inHosts(strings.NewReader(file), "db2"); found != nil {
		t.Errorf("%v", found)
	}
	if found := inHosts(strings.NewReader(strings.Repeat("10.0.0.1 x\n", 1000)), "x"); len(found) != 16 {
		t.Errorf("%d", len(found))
	}
}

func FuzzInHosts(f *testing.F) {
	f.Add("127.0.0.1 localhost", "localhost")
	f.Fuzz(func(t *testing.T, file, name string) {
		for _, a := range inHosts(strings.NewReader(file), name) {
			if !a.IsValid() || a.Zone() != "" {
				t.Errorf("%v", a)
			}
		}
	})
}

func TestHostsMayBeAnything(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", filepath.Join(dir, "loop")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, dir, filepath.Join(dir, "loop"), "/dev/zero"} {
		if f, err := openHosts(path); err == nil {
			f.Close()
			t.Errorf("%s was opened", path)
		}
	}
}

func TestLookupWithoutFiles(t *testing.T) {
	for host, want := range map[string][]netip.Addr{"": loopback, "LocalHost.": loopback, "10.1.2.3": {netip.MustParseAddr("10.1.2.3")}, "::1": {netip.IPv6Loopback()}} {
		if got, f := lookup(host); f != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v %v", host, got, f)
		}
	}
}
