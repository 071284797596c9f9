package aether

import (
	"os"
	"strings"
	"testing"

	aetherv1 "dsec/api/aether/v1"
)

func TestParseStat(t *testing.T) {
	const tail = " S 7 8 8 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 12345 4096 42 18446744073709551615 1 1"
	for _, name := range []string{"sh", "a b", "x) S 1 (", "line\nbreak", "\xff\xfe", ""} {
		p, err := parseStat([]byte("12 (" + name + ")" + tail + "\n"))
		if err != nil {
			t.Fatal(err)
		}
		if p.Pid != 12 || string(p.Name) != name || p.State != "S" || p.Parent != 7 || p.CpuTicks != 300 || p.Threads != 3 ||
			p.StartedTicks != 12345 || p.MemoryBytes != 42*uint64(os.Getpagesize()) {
			t.Errorf("%q: %v", name, p)
		}
	}
	for _, bad := range []string{"", "12", "12 (sh", "12 sh)", "x (sh)" + tail, "12 (sh) S 7", "12 (sh)" + strings.Replace(tail, "250", "-1", 1)} {
		if p, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q: %v", bad, p)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("12 (sh) S 7 8 8 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 12345 4096 42 0 1 1"))
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = parseStat(b) })
}

func TestSignalProcessRefuses(t *testing.T) {
	for _, r := range []*aetherv1.SignalProcess{
		{Pid: int32(os.Getpid()), Signal: 9}, {Pid: 0, Signal: 9}, {Pid: -1, Signal: 9}, {Pid: 1 << 30, Signal: 9},
		{Pid: 2, Signal: 65}, {Pid: 2, Signal: 0}, {Pid: 2, Signal: -1}, {Pid: int32(os.Getppid()), Signal: 9, StartedTicks: 1},
	} {
		if err := signalProcess(r); err == nil {
			t.Errorf("%v was sent", r)
		}
	}
}
