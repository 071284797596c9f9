package linux

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reapPause is how often orphans are looked for besides SIGCHLD, which the kernel merges.
const reapPause = time.Second

// AdoptOrphans makes this process the parent of descendants whose own parent ends, and reaps them until stop is called.
// Processes for which mine is true are left to whoever waits for them. Without it orphans go to the host's init, and not
// every init reaps.
func AdoptOrphans(mine func(pid int) bool) (stop func(), err error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become the reaper of orphans: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, unix.SIGCHLD)
		defer signal.Stop(signals)
		tick := time.NewTicker(reapPause)
		defer tick.Stop()
		for ctx.Err() == nil {
			select {
			case <-signals:
			case <-tick.C:
			case <-ctx.Done():
			}
			reapOrphans(mine)
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}, nil
}

// reapOrphans reaps all that have ended and are nobody's. It asks the kernel for any, since there may be thousands of children.
// One that is somebody's hides those behind it: then it looks through their list.
func reapOrphans(mine func(pid int) bool) {
	for {
		var info siginfoChild
		err := retryEINTR(func() error {
			return unix.Waitid(unix.P_ALL, 0, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		})
		if err != nil || info.pid == 0 {
			return
		}
		if mine(int(info.pid)) {
			break
		}
		unix.Wait4(int(info.pid), nil, unix.WNOHANG, nil)
	}
	reapListed(mine)
}

// reapListed tries each child.
func reapListed(mine func(pid int) bool) {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	for _, task := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		if err != nil {
			continue // the thread has ended; its children are another's now
		}
		for _, field := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(field); err == nil && !mine(pid) {
				unix.Wait4(pid, nil, unix.WNOHANG, nil)
			}
		}
	}
}
