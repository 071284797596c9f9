package aether

import (
	"testing"

	"golang.org/x/sys/unix"
)

func FuzzInotify(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00name\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte("\xff\xff\xff\xff\x00\x40\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte("\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for len(b) > 0 {
			e, rest, err := parseEvent(b)
			if err != nil {
				return
			}
			if len(rest) > len(b)-unix.SizeofInotifyEvent || len(e.name) > len(b) {
				t.Fatalf("%d bytes of %d are left", len(rest), len(b))
			}
			b = rest
		}
	})
}
