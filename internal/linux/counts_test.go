package linux

import (
	"os"
	"testing"
)

func TestOpenFilesAreCounted(t *testing.T) {
	before, most, err := OpenFiles()
	if err != nil || before <= 0 || most < before {
		t.Fatalf("%d of %d, %v", before, most, err)
	}
	for range 10 {
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	if after, _, err := OpenFiles(); err != nil || after < before+8 || after > before+12 {
		t.Errorf("%d, then %d with ten more, %v", before, after, err)
	}
}

func TestMountsAreCountedAsTheTableHasThem(t *testing.T) {
	got, err := CountMounts()
	if err != nil {
		t.Fatal(err)
	}
	want, err := readMounts()
	if err != nil {
		t.Fatal(err)
	}
	// Others mount meanwhile; the table leaves out what is outside of the own root.
	if got < want-20 || got > want+20 {
		t.Errorf("%d mounts, the table has %d", got, want)
	}
}

func BenchmarkCountMounts(b *testing.B) {
	n, _ := CountMounts()
	for b.Loop() {
		if _, err := CountMounts(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(n), "mounts")
}
