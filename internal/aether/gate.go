package aether

import (
	"bytes"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
)

const (
	freezeTime   = 10 * time.Second // for all processes to stop
	parkTime     = 20 * time.Second // less than the edge waits for a start
	maxParked    = 8 << 20          // bytes of requests that wait; one may have 3 MiB
	minLook      = 200 * time.Microsecond
	maxLook      = 10 * time.Millisecond
	frozenAdvice = "a trusted command has stopped everything else in this sandbox; try again when it has ended"
)

// A gate stops all processes of the user's group while trusted commands run, and keeps new ones from being made: a child
// that is born in a frozen group stops before it has become a command, and with it the thread that makes it.
type gate struct {
	freeze, events int // control files of the user's group; -1 until armed

	mu     sync.Mutex
	held   int           // trusted commands that run, or wait for the others to stop
	busy   bool          // the user's spawner makes a process
	idle   chan struct{} // closed when it is done, if somebody waits
	parked []*parked
	bytes  int        // of their requests
	resume chan []job // to the user's spawner
}

type parked struct {
	job   job
	size  int
	timer *time.Timer
}

func newGate() *gate { return &gate{freeze: -1, events: -1, resume: make(chan []job, 1)} }

func (g *gate) arm(freeze, events int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.freeze, g.events = freeze, events
}

// enter is called by the user's spawner before it makes a process. If it may not, the job comes again later, or fails.
func (g *gate) enter(j job) bool {
	may, parked := g.enterOrPark(j)
	if !may && !parked {
		j.failed(failf(aetherv1.Code_CODE_FROZEN, frozenAdvice))
	}
	return may
}

func (g *gate) enterOrPark(j job) (may, waits bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == 0 {
		g.busy = true
		return true, false
	}
	size := proto.Size(j.req) + proto.Size(j.session) + jobCost
	if g.bytes+size > maxParked {
		return false, false
	}
	g.bytes += size
	wait := parkTime
	if j.c != nil && j.c.timeout > 0 {
		wait = min(wait, j.c.timeout)
	}
	p := &parked{job: j, size: size}
	p.timer = time.AfterFunc(wait, func() { g.expire(p) })
	g.parked = append(g.parked, p)
	return false, true
}

const jobCost = 1 << 10 // of one that waits, besides its request

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.busy = false
	if g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// expire ends the wait of a command that was never started.
func (g *gate) expire(p *parked) {
	g.mu.Lock()
	for i, q := range g.parked {
		if q == p {
			g.parked = append(g.parked[:i:i], g.parked[i+1:]...)
			g.bytes -= p.size
			g.mu.Unlock()
			p.job.failed(failf(aetherv1.Code_CODE_FROZEN, frozenAdvice))
			return
		}
	}
	g.mu.Unlock()
}

// hold stops everything. Whatever it returns, release must follow once. It is called by one goroutine only.
func (g *gate) hold() *failure {
	deadline := time.Now().Add(freezeTime)
	g.mu.Lock()
	g.held++
	if g.busy && g.idle == nil {
		g.idle = make(chan struct{})
	}
	idle := g.idle
	g.mu.Unlock()
	if idle != nil {
		t := time.NewTimer(freezeTime)
		defer t.Stop()
		select {
		case <-idle:
		case <-t.C:
			return failf(aetherv1.Code_CODE_NOT_STOPPED, "another command of this sandbox is being started and does not come to an end; try again")
		}
	}
	if err := writeFile(g.freeze, "1"); err != nil {
		return asFailure("stop the sandbox's processes", err)
	}
	for pause := minLook; ; pause = min(2*pause, maxLook) {
		frozen, err := g.frozen()
		switch {
		case err != nil:
			return asFailure("see whether the sandbox's processes have stopped", err)
		case frozen:
			return nil
		case time.Now().After(deadline):
			return failf(aetherv1.Code_CODE_NOT_STOPPED,
				"a process of this sandbox did not stop within %v, so that nothing can be trusted; end it, or the sandbox, and try again", freezeTime)
		}
		time.Sleep(pause)
	}
}

func (g *gate) frozen() (bool, error) {
	var b [128]byte
	n, err := unix.Pread(g.events, b[:], 0)
	return bytes.Contains(b[:max(n, 0)], []byte("frozen 1")), err
}

// release lets everything go on when the last trusted command has ended.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held--; g.held > 0 {
		return
	}
	if err := writeFile(g.freeze, "0"); err != nil {
		// The group is gone: then so is everything in it. There is no other reason.
		return
	}
	jobs := g.unparkLocked()
	if len(jobs) == 0 {
		return
	}
	select {
	case earlier := <-g.resume: // not taken yet
		jobs = append(earlier, jobs...)
	default:
	}
	g.resume <- jobs
}

func (g *gate) unparkLocked() []job {
	jobs := make([]job, 0, len(g.parked))
	for _, p := range g.parked {
		p.timer.Stop() // if it has fired, expire finds nothing
		jobs = append(jobs, p.job)
	}
	g.parked, g.bytes = nil, 0
	return jobs
}

// abandon gives what waits, when the spawner takes nothing any more.
func (g *gate) abandon() []job {
	g.mu.Lock()
	defer g.mu.Unlock()
	jobs := g.unparkLocked()
	select {
	case more := <-g.resume:
		jobs = append(jobs, more...)
	default:
	}
	return jobs
}

func writeFile(fd int, value string) error {
	if _, err := unix.Pwrite(fd, []byte(value), 0); err != nil {
		return fmt.Errorf("write %s to a control file: %w", value, err)
	}
	return nil
}
