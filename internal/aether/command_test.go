package aether

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// Whether a process lacks the CPU: one that sleeps does not, nor one that has had enough, nor one that is not there.
func TestStarved(t *testing.T) {
	start := func(argv ...string) *command {
		cmd := exec.Command(argv[0], argv[1:]...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return &command{pid: cmd.Process.Pid}
	}
	spinning, sleeping := start("/bin/sh", "-c", "while :; do :; done"), start("sleep", "1000")
	if !spinning.starved(time.Hour) {
		t.Error("a process that runs has had an hour of CPU time")
	}
	for name, satisfied := range map[string]func() bool{
		"one that sleeps":         func() bool { return !sleeping.starved(time.Hour) },
		"one that has had enough": func() bool { return !spinning.starved(time.Millisecond) },
	} {
		for deadline := time.Now().Add(time.Minute); !satisfied(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s is starved", name)
			}
		}
	}
	if (&command{pid: 1 << 28}).starved(time.Hour) {
		t.Error("none is starved")
	}
}

func TestSilent(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c := &command{}
	c.out[0].fd, c.out[1].fd = -1, int(r.Fd())
	if !c.silent() {
		t.Error("nothing was written")
	}
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if c.silent() {
		t.Error("a byte waits to be read")
	}
}
