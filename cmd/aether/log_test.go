package main

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A pipe that is full, or that nobody reads, holds no line of the log up. That the process lives on is
// TestLogWithoutAReader's, with the real aether.
func TestLogNeverWaits(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil { // blocking
		t.Fatal(err)
	}
	defer unix.Close(p[1])
	line := bytes.Repeat([]byte("x"), 10_000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 100 {
			if n, err := stderr(p[1]).Write(line); n != len(line) || err != nil {
				t.Errorf("%d, %v", n, err)
			}
		}
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("a full pipe holds the log up")
	}
	if n, err := unix.Read(p[0], make([]byte, 1<<20)); n < sure || err != nil {
		t.Errorf("read %d, %v", n, err)
	}
	unix.Close(p[0])
	if n, err := stderr(p[1]).Write(line); n != len(line) || err != nil {
		t.Errorf("without a reader: %d, %v", n, err)
	}
}
