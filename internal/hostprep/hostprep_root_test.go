//go:build rootful

package hostprep

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// victimEnv makes the test binary a process that prepares and restores this host until it is killed; it is the record's path.
const victimEnv = "DSEC_TEST_HOSTPREP_VICTIM"

func TestMain(m *testing.M) {
	if record := os.Getenv(victimEnv); record != "" {
		for h := thisHost(record); ; {
			_, err := h.Prepare(context.Background(), Options{SwapFile: record + ".swap", SwapBytes: 8 << 20})
			if _, back := h.Restore(context.Background()); err != nil || back != nil {
				os.Stderr.WriteString(errors.Join(err, back).Error())
				os.Exit(1)
			}
		}
	}
	os.Exit(m.Run())
}

func thisHost(record string) *Host {
	h, err := This(record)
	if err != nil {
		panic(err)
	}
	return h
}

func state(t *testing.T) string {
	t.Helper()
	h := thisHost("")
	var lines []string
	for _, n := range needs {
		v, err := h.read(n.name)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, n.name+"="+v)
	}
	swaps, err := os.ReadFile("/proc/swaps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(append(lines, string(swaps)), "\n")
}

// Only in the lab: it changes settings of the whole machine.
func TestRootKilledWhileItPreparesAHost(t *testing.T) {
	if os.Getenv("DSEC_LAB") == "" {
		t.Skip("this is not the lab")
	}
	before, record := state(t), filepath.Join(t.TempDir(), "record.json")
	for range 10 {
		victim := exec.Command(os.Args[0])
		victim.Env = append(os.Environ(), victimEnv+"="+record)
		var stderr strings.Builder
		victim.Stderr = &stderr
		if err := victim.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(20+rand.IntN(400)) * time.Millisecond)
		_ = victim.Process.Kill()
		_ = victim.Wait()
		if s := victim.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() {
			t.Fatalf("it ended by itself: %s", stderr.String())
		}
		// A program that it had started may still run for a moment.
		var err error
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			if _, err = thisHost(record).Restore(t.Context()); err == nil {
				break
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if after := state(t); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	done, err := thisHost(record).Prepare(t.Context(), Options{})
	if err != nil || len(done) == 0 {
		t.Fatalf("prepared %v, %v", done, err)
	}
	for _, c := range done {
		if now, _ := thisHost("").read(c.Name); c.Kind == kindSysctl && now != c.After {
			t.Errorf("%s is %s, want %s", c.Name, now, c.After)
		}
	}
	if _, err := thisHost(record).Restore(t.Context()); err != nil || state(t) != before {
		t.Errorf("%v\nbefore:\n%s\nafter:\n%s", err, before, state(t))
	}
}
