package linux

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestStartTimeOfThisProcess(t *testing.T) {
	first, err := StartTime(os.Getpid())
	if err != nil || first == 0 {
		t.Fatalf("%d, %v", first, err)
	}
	if again, err := StartTime(os.Getpid()); err != nil || again != first {
		t.Errorf("%d, then %d, %v", first, again, err)
	}
	if _, err := StartTime(1 << 30); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of no process: %v", err)
	}
}

// The name of a program may look like the rest of the line.
func TestParseProcessStat(t *testing.T) {
	const rest = " S 1 2 3 4 5 4194560 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"
	for _, name := range []string{"sh", "a b", ") S 1 2 3", "(((", "a (b) c", ""} {
		want := ProcessStat{Name: name, State: 'S', Parent: 1, Start: 4242}
		if got, err := ParseProcessStat([]byte("7 (" + name + ")" + rest)); err != nil || got != want {
			t.Errorf("%q: %+v, %v", name, got, err)
		}
	}
	if got, err := ParseProcessStat([]byte("7 (sh)" + strings.Replace(rest, "4194560", "69238880", 1))); err != nil || !got.Kernel {
		t.Errorf("a kernel thread: %+v, %v", got, err)
	}
	for _, bad := range []string{
		"", ")(", "7 (sh", "7 sh S 1", "7 (sh) S 1 2 3", "7 (sh) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x 20",
		"7 (sh)" + strings.Replace(rest, "4194560", "x", 1), "7 (sh)" + strings.Replace(rest, " 1 ", " x ", 1),
	} {
		if got, err := ParseProcessStat([]byte(bad)); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

func FuzzProcessStat(f *testing.F) {
	f.Add([]byte("7 (sh) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"))
	f.Add([]byte("7 ()"))
	f.Add([]byte(")("))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = ParseProcessStat(b) })
}

func TestWaitForAChild(t *testing.T) {
	for script, want := range map[string]Exit{"exit 3": {Code: 3}, "kill -9 $$": {Code: -1, Signal: 9}, "true": {}} {
		cmd := exec.Command("/bin/sh", "-c", "read x; "+script)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p, err := OpenProcess(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if _, done, err := tryWait(int(p.file.Fd()), p.Pid); done || err != nil {
			t.Errorf("%s: ended before it could: %v", script, err)
		}
		p.Close()
		if p, err = OpenProcess(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		stdin.Close()
		if got, err := p.Wait(); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", script, got, err, want)
		}
		p.Close()
	}
}

// Close lets go of whoever waits; the process lives on.
func TestCloseEndsWaiting(t *testing.T) {
	cmd := exec.Command("/bin/cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := OpenProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error)
	go func() {
		_, err := p.Wait()
		waited <- err
	}()
	p.Close()
	if err := <-waited; !errors.Is(err, os.ErrClosed) {
		t.Errorf("wait: %v", err)
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("the process did not live on: %v", err)
	}
	if _, err := OpenProcess(1 << 30); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("open of no process: %v", err)
	}
}

func TestIsHeld(t *testing.T) {
	start := func(script string) int {
		cmd := exec.Command("/bin/sh", "-c", script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd.Process.Pid
	}
	stopped, spinning := start("kill -STOP $$"), start("while :; do :; done")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		held, err := IsHeld(stopped, 0)
		if err != nil {
			t.Fatal(err)
		}
		if held {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a stopped process is not held")
		}
	}
	if held, err := IsHeld(stopped, time.Hour); held || err != nil {
		t.Errorf("of an hour's age: %v, %v", held, err)
	}
	if held, err := IsHeld(spinning, 0); held || err != nil {
		t.Errorf("one that runs or wants to: %v, %v", held, err)
	}
	if _, err := IsHeld(1<<30, 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("none: %v", err)
	}
	for state, want := range map[string]bool{"R": false, "D": false, "Z": false, "S": true, "T": true, "t": true} {
		stat := "7 (x) " + state + strings.Repeat(" 1", 30)
		if held, err := isHeld([]byte(stat), 0); held != want || err != nil {
			t.Errorf("state %s: %v, %v", state, held, err)
		}
	}
}
