package linux

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// SetTimerSlack lets the kernel end every sleep of this process up to that much late, so that it can end several at once.
// It counts for all threads, those to come included, and for programs that they start.
func SetTimerSlack(d time.Duration) error {
	value := []byte(strconv.FormatInt(d.Nanoseconds(), 10))
	set := make(map[string]bool)
	for more := true; more; { // a thread made meanwhile has the slack of the one that made it
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("list threads: %w", err)
		}
		more = false
		for _, t := range threads {
			if set[t.Name()] {
				continue
			}
			set[t.Name()], more = true, true
			err := os.WriteFile("/proc/"+t.Name()+"/timerslack_ns", value, 0)
			if err != nil && !IsGone(err) && !os.IsNotExist(err) {
				return fmt.Errorf("set the timer slack of thread %s: %w", t.Name(), err)
			}
		}
	}
	return nil
}
