package pax

import (
	"errors"
	"syscall"
)

// firstHole is the smallest hole that is kept at first.
const firstHole = 4 << 10

// Values of whence of Linux's lseek(2).
const (
	seekData = 3
	seekHole = 4
)

// Runs finds the data of a file with holes by its lseek; nil means: take it as it is. A file with too many holes keeps the
// larger ones.
func Runs(size int64, seek func(off int64, whence int) (int64, error)) []Segment {
	data := []Segment{}
	hole := int64(firstHole)
	for off := int64(0); off < size; {
		start, err := seek(off, seekData)
		if errors.Is(err, syscall.ENXIO) { // only a hole is left
			break
		}
		if err != nil {
			return nil
		}
		end, err := seek(start, seekHole)
		if err != nil || end <= start {
			return nil
		}
		if start >= size { // it grew
			break
		}
		end = min(end, size)
		if n := len(data); n > 0 && start-(data[n-1].Off+data[n-1].Len) < hole {
			data[n-1].Len = end - data[n-1].Off
		} else {
			data = append(data, Segment{Off: start, Len: end - start})
		}
		for len(data) > MaxSegments/2 {
			hole *= 2
			data = merged(data, hole)
		}
		off = end
	}
	if len(data) == 1 && data[0] == (Segment{Off: 0, Len: size}) {
		return nil
	}
	return data
}

// merged closes all holes that are smaller.
func merged(data []Segment, hole int64) []Segment {
	kept := data[:1]
	for _, s := range data[1:] {
		last := &kept[len(kept)-1]
		if s.Off-(last.Off+last.Len) < hole {
			last.Len = s.Off + s.Len - last.Off
		} else {
			kept = append(kept, s)
		}
	}
	return kept
}
