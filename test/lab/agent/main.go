// Command agent runs in a guest of the lab: it reads jobs from a virtio serial port, runs one after the other, and says what
// they print and how they end. It ends when the lab hangs up.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"dsec/test/lab/job"
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func run(port string) error {
	f, err := os.OpenFile(port, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	a := &agent{out: json.NewEncoder(f)}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err
	}
	if err := a.out.Encode(job.Event{Ready: strings.TrimSpace(string(release))}); err != nil {
		return err
	}
	in := json.NewDecoder(bufio.NewReader(f))
	for {
		var j job.Job
		if err := in.Decode(&j); err != nil {
			return err
		}
		done := job.Event{Done: true}
		if err := a.run(j); err != nil {
			done.Error = err.Error()
		}
		if err := a.out.Encode(done); err != nil {
			return err
		}
	}
}

type agent struct{ out *json.Encoder }

func (a *agent) run(j job.Job) error {
	cmd := exec.Command(j.Args[0], j.Args[1:]...)
	cmd.Dir, cmd.Env = j.Dir, append(os.Environ(), j.Env...)
	// A pipe of our own: a child that outlives the job and holds its output must not hold up the next one.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	copied := make(chan error, 1)
	go func() { copied <- a.copy(r) }()
	err = <-ended
	_ = r.SetReadDeadline(drained())
	if err := <-copied; err != nil {
		return err
	}
	r.Close()
	return err
}
