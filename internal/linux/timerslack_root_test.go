//go:build rootful

package linux

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"
)

// In a process of its own: what comes after it shall have the usual slack.
func TestRootSetTimerSlack(t *testing.T) {
	if os.Getenv("DSEC_TEST_SLACK") == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestRootSetTimerSlack$", "-test.v")
		cmd.Env = append(os.Environ(), "DSEC_TEST_SLACK=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	release := make(chan struct{})
	for range 8 { // threads
		go func() {
			runtime.LockOSThread()
			<-release
		}()
	}
	defer close(release)
	if err := SetTimerSlack(300 * time.Microsecond); err != nil {
		t.Fatal(err)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		b, err := os.ReadFile("/proc/" + thread.Name() + "/timerslack_ns")
		if err == nil && strings.TrimSpace(string(b)) != "300000" {
			t.Errorf("thread %s of %d has %s", thread.Name(), len(threads), b)
		}
	}
	b, err := exec.Command("cat", "/proc/self/timerslack_ns").Output()
	if err != nil || strings.TrimSpace(string(b)) != "300000" {
		t.Errorf("a program that was started has %s, %v", b, err)
	}
}
