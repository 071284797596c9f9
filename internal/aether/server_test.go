package aether

import (
	"os"
	"testing"
)

func TestHeldPipesAreBounded(t *testing.T) {
	s := &Server{polled: make(map[*os.File]struct{})}
	var files []*os.File
	for range maxHeld + 3 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		defer r.Close()
		files = append(files, r)
		s.hold(r)
	}
	for i, f := range files {
		if closed := f.Close() != nil; closed != (i < 3) {
			t.Errorf("pipe %d: closed %v", i, closed)
		}
	}
	if len(s.held) != maxHeld {
		t.Errorf("%d are held", len(s.held))
	}
	ended := s.held[5]
	s.pump(ended, func() {})
	s.pumps.Wait()
	if len(s.held) != maxHeld-1 || s.held[5] == ended {
		t.Errorf("one that ended by itself is still held: %d", len(s.held))
	}
}
