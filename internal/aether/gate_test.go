package aether

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	aetherv1 "dsec/api/aether/v1"
)

// newTestGate has plain files in the place of control files, by which everything has stopped at once.
func newTestGate(t *testing.T) (*gate, func() string) {
	t.Helper()
	dir := t.TempDir()
	freeze, err := os.Create(filepath.Join(dir, "freeze"))
	if err != nil {
		t.Fatal(err)
	}
	events, err := os.Create(filepath.Join(dir, "events"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := events.WriteString("populated 1\nfrozen 1\n"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { freeze.Close(); events.Close() })
	g := newGate()
	g.arm(int(freeze.Fd()), int(events.Fd()))
	return g, func() string {
		b, err := os.ReadFile(freeze.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

func jobOf(s *Server, id string, timeout time.Duration) job {
	req := &aetherv1.Start{CommandId: id, Shell: "true", Cwd: "/", TimeoutMs: uint64(timeout.Milliseconds())}
	s.running++ // as Server.command does
	s.active.Add(1)
	return job{c: newCommand(s, nil, 1, req), req: req}
}

func TestGateParksUntilTheLastHasEnded(t *testing.T) {
	g, state := newTestGate(t)
	s := &Server{commands: map[string]*command{}, gate: g, resting: true}
	if !g.enter(jobOf(s, "before", 0)) {
		t.Fatal("nothing is held, and yet a command waits")
	}
	g.leave()
	for range 2 {
		if f := g.hold(); f != nil {
			t.Fatal(f)
		}
	}
	if state() != "1" {
		t.Errorf("held: %q is written", state())
	}
	waiting := jobOf(s, "waiting", 0)
	if g.enter(waiting) {
		t.Error("a command may start beside a trusted one")
	}
	g.release()
	select {
	case <-g.resume:
		t.Error("commands go on before the last trusted one has ended")
	default:
	}
	if state() != "1" {
		t.Errorf("one is left, and %q is written", state())
	}
	g.release()
	if state() != "0" {
		t.Errorf("none is left, and %q is written", state())
	}
	if jobs := <-g.resume; len(jobs) != 1 || jobs[0].c != waiting.c {
		t.Errorf("%d commands go on", len(jobs))
	}
}

func TestGateWaitsForWhatIsBeingStarted(t *testing.T) {
	g, state := newTestGate(t)
	s := &Server{commands: map[string]*command{}, gate: g, resting: true}
	if !g.enter(jobOf(s, "starting", 0)) {
		t.Fatal("held")
	}
	done := make(chan *failure)
	go func() { done <- g.hold() }()
	for { // until it waits
		g.mu.Lock()
		waits := g.idle != nil
		g.mu.Unlock()
		if waits {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if state() != "" {
		t.Error("everything is stopped in the middle of a start")
	}
	g.leave()
	if f := <-done; f != nil || state() != "1" {
		t.Errorf("%v, %q", f, state())
	}
	g.release()
}

// A command whose own time is over while it waits has not run, and says so.
func TestGateParksNoLongerThanTheCommandsTime(t *testing.T) {
	g, _ := newTestGate(t)
	s := &Server{commands: map[string]*command{}, gate: g, resting: true}
	if f := g.hold(); f != nil {
		t.Fatal(f)
	}
	j := jobOf(s, "short", 10*time.Millisecond)
	if g.enter(j) {
		t.Fatal("not parked")
	}
	for {
		j.c.mu.Lock()
		f := j.c.failure
		j.c.mu.Unlock()
		if f != nil {
			if f.code != aetherv1.Code_CODE_FROZEN {
				t.Error(f)
			}
			break
		}
		time.Sleep(time.Millisecond)
	}
	g.release()
	if jobs := g.abandon(); len(jobs) != 0 {
		t.Errorf("%d commands are left", len(jobs))
	}
}

func TestTrustedUsersAreNumbers(t *testing.T) {
	for spec, want := range map[string]account{"": {}, "root": {}, "0": {}, "7": {uid: 7}, "7:8": {uid: 7, gid: 8}} {
		if got, err := numericAccount(spec); err != nil || got.uid != want.uid || got.gid != want.gid {
			t.Errorf("%q: %+v, %v", spec, got, err)
		}
	}
	for _, spec := range []string{"games", "-1", "4294967295", "7:", "7:staff", ":", "root:wheel", " 0"} {
		if got, err := numericAccount(spec); err == nil {
			t.Errorf("%q is %+v", spec, got)
		}
	}
}

func TestCheckTrusted(t *testing.T) {
	for _, bad := range []*aetherv1.Start{
		{Argv: []string{"/bin/ls"}}, {Argv: []string{"../ls"}}, {Shell: "id", User: "games"}, {Shell: "id", Session: "s"},
		{Shell: "id", Terminal: &aetherv1.Terminal{Rows: 1, Cols: 1}},
	} {
		bad.CommandId, bad.Cwd, bad.Trusted = "x", "/", true
		if checkStart(bad) == nil {
			t.Errorf("%v is taken", bad)
		}
	}
	if f := checkStart(&aetherv1.Start{CommandId: "x", Cwd: "/", Trusted: true, Argv: []string{"ls", "/bin"}}); f != nil {
		t.Error(f)
	}
}

// What waits holds its requests in memory, of which there is little.
func TestGateParksLittle(t *testing.T) {
	g, _ := newTestGate(t)
	s := &Server{commands: map[string]*command{}, gate: g, resting: true}
	if f := g.hold(); f != nil {
		t.Fatal(f)
	}
	refused := 0
	for range 10 {
		j := jobOf(s, "large", 0)
		j.req.Shell = strings.Repeat("x", 1<<20)
		if g.enter(j) {
			t.Fatal("not parked")
		}
		if j.c.failure != nil {
			refused++
		}
	}
	if n := len(g.parked); n != 7 || refused != 3 {
		t.Errorf("%d wait, %d are refused", n, refused)
	}
	g.release()
	if jobs := <-g.resume; len(jobs) != 7 || g.bytes != 0 {
		t.Errorf("%d go on, %d bytes are left", len(jobs), g.bytes)
	}
}
