package aether

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// untracePause is the first pause between two looks at what holds a process that was killed, and untraceTime how long it is looked.
const (
	untracePause = 10 * time.Millisecond
	untraceTime  = time.Minute
)

// untrace sees to it that a process which was killed can be reaped: the kernel tells its tracer first, which may be a process of
// another command and need never listen. Such a tracer is killed, too. It returns when gone does.
func untrace(pid int, gone func() bool) {
	pause := untracePause
	for deadline := time.Now().Add(untraceTime); !gone() && time.Now().Before(deadline); pause = min(2*pause, time.Second) {
		for _, tracer := range tracersOf(pid) {
			_ = unix.Kill(tracer, unix.SIGKILL) // it may have ended
		}
		time.Sleep(pause)
	}
}

// tracersOf are those of all threads of a process. It is not reaped, so that the number is its own.
func tracersOf(pid int) (tracers []int) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	threads, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, t := range threads {
		b, err := readProc(dir + "/" + t.Name() + "/status")
		if tracer := parseTracer(b); err == nil && tracer > 1 && tracer != os.Getpid() {
			tracers = append(tracers, tracer)
		}
	}
	return tracers
}

// parseTracer reads proc(5) status; 0 is none.
func parseTracer(status []byte) int {
	_, rest, _ := bytes.Cut(status, []byte("\nTracerPid:\t")) // the kernel escapes newlines in the name before it
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	n, err := strconv.Atoi(string(line))
	if err != nil || n < 0 {
		return 0
	}
	return n
}
