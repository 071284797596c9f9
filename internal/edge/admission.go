package edge

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"dsec/sandbox"
)

// Admission bounds what this node takes. Zero values mean the defaults in parentheses.
type Admission struct {
	MaxSandboxes  int64   // (2000)
	MemoryReserve int64   // bytes of available memory that stay free (5 % of all, at least 256 MiB)
	DiskReserve   int64   // bytes of the uppers' disk that stay free (2 % of it)
	TaskReserve   int64   // threads that stay free (2 % of the most there may be)
	FileReserve   int64   // descriptors of the edge that stay free (5 % of its limit)
	MountReserve  int64   // mounts that stay free (5 % of fs.mount-max)
	WarnAt        float64 // share of MaxSandboxes from which on the log warns (0.9)
}

// What a sandbox is expected to need before the measurements show it.
const (
	expectMemory = 8 << 20
	expectDisk   = 1 << 20
	expectTasks  = 16
	expectFiles  = 8
	expectMounts = 4
)

// Shares of fs.mount-max between which the log and the status of the node do not change what they say.
const (
	mountsWarn = 0.8
	mountsCalm = 0.75
)

// warnCalm is by how much less must be in use before a warning is taken back.
const warnCalm = 0.05

// measureEvery is how old a measurement may be.
const measureEvery = 200 * time.Millisecond

// admission decides whether there is room. Limits are hard per sandbox and overcommitted per node, so room is what is
// measured now, less what was admitted since the measurement.
type admission struct {
	limits Admission
	host   Host
	uppers Uppers
	log    *slog.Logger

	mu        sync.Mutex
	sandboxes int64
	byProject map[string]int64
	since     int64 // admitted since the measurement
	sample    HostSample
	diskFree  int64
	diskTotal int64
	sampled   time.Time
	err       error // of the measurement
	warned    bool
	brake     brake
	passed    time.Time       // when a create was let pass the brake
	full      map[string]bool // resources of which so much is used that the status warns
	crowded   string          // that the mounts come near their limit; "" if they do not
}

func newAdmission(l Admission, h Host, u Uppers, log *slog.Logger) *admission {
	setDefault(&l.MaxSandboxes, 2000)
	setDefault(&l.WarnAt, 0.9)
	return &admission{limits: l, host: h, uppers: u, log: log, byProject: make(map[string]int64), full: make(map[string]bool)}
}

// measureLocked refreshes what is measured if it is old.
func (a *admission) measureLocked() {
	if now := time.Now(); a.sampled.IsZero() || now.Sub(a.sampled) >= measureEvery {
		a.sample, a.err = a.host.Sample()
		if a.err == nil {
			a.diskFree, a.diskTotal, a.err = a.uppers.Free()
		}
		a.sampled, a.since = now, 0
		a.watchMountsLocked()
		a.watchPressureLocked()
	}
}

// watchMountsLocked warns, once for each time, before the kernel refuses mounts to everybody in the edge's namespace.
func (a *admission) watchMountsLocked() {
	share := float64(a.sample.Mounts) / float64(max(a.sample.MountsMax, 1))
	switch {
	case share > mountsWarn:
		if a.crowded == "" {
			a.log.Warn("the mounts of this node come near their limit", "mounts", a.sample.Mounts, "limit", a.sample.MountsMax)
		}
		a.crowded = fmt.Sprintf("%d of at most %d mounts are in use; raise the sysctl fs.mount-max", a.sample.Mounts, a.sample.MountsMax)
	case share < mountsCalm:
		a.crowded = ""
	}
}

// watchPressureLocked logs when the brake is put on and released.
func (a *admission) watchPressureLocked() {
	was := a.brake
	if a.brake.sample(a.sample); a.brake != was {
		p := a.sample.Pressure
		a.log.Warn("pressure on this node changed what creates meet", "short", a.brake.why, "refuses", a.brake.refuses, "cpu", p.CPU, "memory", p.Memory, "io", p.IO)
	}
}

// A room is how much there is of one thing.
type room struct {
	what                          string
	free, need, reserve, capacity int64
}

// roomsLocked is what is bounded by measurement.
func (a *admission) roomsLocked() []room {
	s := a.sample
	return []room{
		{"memory_bytes", s.MemoryAvailable, expectMemory, orDefault(a.limits.MemoryReserve, max(s.MemoryTotal/20, 256<<20)), s.MemoryTotal},
		{"disk_bytes", a.diskFree, expectDisk, orDefault(a.limits.DiskReserve, a.diskTotal/50), a.diskTotal},
		{"tasks", s.TasksMax - s.Tasks, expectTasks, orDefault(a.limits.TaskReserve, s.TasksMax/50), s.TasksMax},
		{"files", s.FilesMax - s.Files, expectFiles, orDefault(a.limits.FileReserve, s.FilesMax/20), s.FilesMax},
		{"mounts", s.MountsMax - s.Mounts, expectMounts, orDefault(a.limits.MountReserve, s.MountsMax/20), s.MountsMax},
	}
}

// warningsLocked tells what comes near the end of its room before creates are refused, and what holds them back.
func (a *admission) warningsLocked() []string {
	var out []string
	warn := func(what string, used, most int64) {
		limit := a.limits.WarnAt
		if a.full[what] { // it stays said until it is clearly less
			limit -= warnCalm
		}
		if a.full[what] = most > 0 && float64(used) >= limit*float64(most); a.full[what] {
			out = append(out, fmt.Sprintf("%s: %d of %d that creates may use are in use", what, used, most))
		}
	}
	warn("sandboxes", a.sandboxes, a.limits.MaxSandboxes)
	for _, r := range a.roomsLocked() {
		warn(r.what, r.capacity-r.free, r.capacity-r.reserve)
	}
	if w := a.brake.warning(); w != "" {
		out = append(out, w)
	}
	return out
}

// full is the error that says what is short, or nil.
func (a *admission) fullLocked() *sandbox.Error {
	a.measureLocked()
	if a.err != nil {
		return sandbox.Errorf(sandbox.ResourceExhausted, reasonFull, "the node cannot measure what it has left and takes no more sandboxes").WithCause(a.err)
	}
	if a.sandboxes >= a.limits.MaxSandboxes {
		return short("sandboxes", a.limits.MaxSandboxes-a.sandboxes, 1, a.limits.MaxSandboxes)
	}
	for _, r := range a.roomsLocked() {
		if r.free-r.reserve < r.need*(a.since+1) {
			return short(r.what, r.free, r.reserve+r.need*(a.since+1), r.capacity)
		}
	}
	if err := a.brake.refusal(); err != nil {
		return err
	}
	return nil
}

func orDefault(v, d int64) int64 {
	if v != 0 {
		return v
	}
	return d
}

const reasonFull = "node_full"

func short(what string, free, needed, capacity int64) *sandbox.Error {
	return sandbox.Errorf(sandbox.ResourceExhausted, reasonFull, "the node is full: %s: %d left, %d needed; try again later or on another node", what, free, needed).
		WithFact("short", what).WithFact("free", fmt.Sprint(free)).WithFact("needed", fmt.Sprint(needed)).WithFact("capacity", fmt.Sprint(capacity))
}

// refusedByAdmission reports whether a create failed before anything was made, so that another node may take it.
func refusedByAdmission(err error) bool {
	reason := sandbox.ReasonOf(err)
	return err != nil && (reason == reasonFull || reason == reasonPressure)
}

// reserve takes room for in, or says what is short.
func (e *Edge) reserve(in *instance) error {
	a := e.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.fullLocked(); err != nil {
		return err
	}
	in.mu.Lock()
	if in.reserved || !in.life.holdsQuota() { // ended while it waited for its turn
		in.mu.Unlock()
		return sandbox.Errorf(sandbox.Canceled, sandbox.ReasonCanceled, "the sandbox was ended before it was made")
	}
	in.reserved = true
	in.mu.Unlock()
	a.takeLocked(in)
	return nil
}

func (a *admission) takeLocked(in *instance) {
	a.sandboxes++
	a.since++
	a.byProject[in.intent.Project]++
	if share := float64(a.sandboxes) / float64(a.limits.MaxSandboxes); share >= a.limits.WarnAt && !a.warned {
		a.warned = true
		a.log.Warn("node is nearly full", "sandboxes", a.sandboxes, "capacity", a.limits.MaxSandboxes)
	}
}

// adopt counts a sandbox that an earlier process admitted, whether there is room or not.
func (a *admission) adopt(in *instance) {
	a.mu.Lock()
	defer a.mu.Unlock()
	in.mu.Lock()
	in.reserved = true
	in.mu.Unlock()
	a.takeLocked(in)
}

// release frees what reserve took; again is harmless.
func (e *Edge) release(in *instance) {
	a := e.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	in.mu.Lock()
	held := in.reserved
	in.reserved = false
	in.mu.Unlock()
	if !held {
		return
	}
	a.sandboxes--
	if a.byProject[in.intent.Project]--; a.byProject[in.intent.Project] == 0 {
		delete(a.byProject, in.intent.Project)
	}
	if float64(a.sandboxes) < (a.limits.WarnAt-warnCalm)*float64(a.limits.MaxSandboxes) {
		a.warned = false
	}
}
