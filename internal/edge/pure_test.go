package edge

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"dsec/internal/edge/driver/fake"
	"dsec/sandbox"
)

// Whatever happens in whatever order: the moves are the table's, quota is freed exactly once, a teardown is begun before
// anything ends, and every state that is not terminal has something that will move it on.
func TestLifeUnderRandomEvents(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		now := time.Unix(1_800_000_000, 0)
		l := life{state: sandbox.Creating, createdAt: now, createBy: now.Add(time.Minute), expiresAt: now.Add(time.Hour), idle: 5 * time.Minute, retention: time.Minute}
		u := use{last: now}
		var freed, endings, ended int
		tearing := false
		for range 60 {
			now = now.Add(time.Duration(r.IntN(int(2 * time.Minute))))
			var fx effects
			switch r.IntN(8) {
			case 0:
				l.ready(now)
			case 1:
				fx = l.end(now, sandbox.ReasonDeleted, "x")
			case 2:
				fx = l.fault(now, sandbox.ReasonGuestDied, "x")
			case 3, 4:
				if tearing {
					tearing = false
					fx = l.torn(now, []string{"", "busy"}[r.IntN(2)])
				}
			case 5:
				u = use{last: now, busy: r.IntN(2) == 0}
			default:
				fx = l.tick(now, u)
			}
			if fx&freeQuota != 0 {
				freed++
			}
			if fx&recordEnding != 0 {
				endings++
			}
			if fx&recordEnded != 0 {
				ended++
			}
			if fx&beginTeardown != 0 {
				if tearing {
					t.Fatalf("seed %d: a second teardown beside the first", seed)
				}
				tearing = true
			}
			if fx&forget != 0 && !l.state.Terminal() {
				t.Fatalf("seed %d: forgotten while %v", seed, l.state)
			}
			if l.wake(now, u).IsZero() && !tearing {
				t.Fatalf("seed %d: nothing will ever move it on: %+v", seed, l)
			}
			if l.holdsQuota() != (freed == 0) || freed > 1 || endings != freed || ended > 1 || l.state.Terminal() != (ended == 1) {
				t.Fatalf("seed %d: %v freed %d endings %d ended %d", seed, l.state, freed, endings, ended)
			}
			if (l.state == sandbox.Stopped && l.reason.Code != sandbox.ReasonDeleted && l.reason.Code != sandbox.ReasonIdle && l.reason.Code != sandbox.ReasonLifetime) ||
				(l.state == sandbox.Failed && sandbox.Ended(l.reason.Code)) {
				t.Fatalf("seed %d: %v for %q", seed, l.state, l.reason.Code)
			}
		}
	}
}

func TestTeardownBackoffGrowsAndIsBounded(t *testing.T) {
	last := time.Duration(0)
	for n := 1; n < 1000; n++ {
		d := teardownBackoff(n)
		if d < last || d > 30*time.Second || d <= 0 {
			t.Fatalf("attempt %d: %v after %v", n, d, last)
		}
		last = d
	}
	if last != 30*time.Second {
		t.Errorf("ends at %v", last)
	}
}

func TestWakeupsAgainstAPlainMap(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	var w wakeups
	plain := make(map[sandbox.ID]time.Time)
	now := time.Unix(0, 0)
	ids := make([]sandbox.ID, 50)
	for i := range ids {
		ids[i] = sandbox.NewID(testEdge)
	}
	for range 20_000 {
		id := ids[r.IntN(len(ids))]
		switch r.IntN(3) {
		case 0:
			at := now.Add(time.Duration(r.IntN(1000)) * time.Second)
			w.set(id, at)
			plain[id] = at
		case 1:
			w.set(id, time.Time{})
			delete(plain, id)
		case 2:
			now = now.Add(time.Duration(r.IntN(100)) * time.Second)
			for _, id := range w.due(now, 10) {
				if at, ok := plain[id]; !ok || at.After(now) {
					t.Fatalf("%s is not due", id)
				}
				delete(plain, id)
			}
		}
		var first time.Time
		for _, at := range plain {
			if first.IsZero() || at.Before(first) {
				first = at
			}
		}
		if !w.next().Equal(first) || len(w.heap) != len(plain) || len(w.entry) != len(plain) {
			t.Fatalf("next %v, want %v; %d entries, want %d", w.next(), first, len(w.heap), len(plain))
		}
	}
}

func TestHostMeasurements(t *testing.T) {
	h := &procHost{}
	s, err := h.Sample()
	if err != nil {
		t.Fatal(err)
	}
	if s.MemoryTotal < s.MemoryAvailable || s.Tasks <= 0 || s.TasksMax <= s.Tasks || s.CPUs < 1 || s.CPUBusy < 0 || s.CPUBusy > 1 {
		t.Errorf("%+v", s)
	}
	for _, bad := range []string{"", "MemTotal: x kB", "MemTotal: 5 kB", "MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB"} {
		if _, _, err := parseMeminfo([]byte(bad)); err == nil {
			t.Errorf("meminfo %q: accepted", bad)
		}
	}
	for _, bad := range []string{"", "1 2", "x 1 1 1/2", "1 1 1 12", "1 1 1 1/x"} {
		if _, _, err := parseLoadavg(bad); err == nil {
			t.Errorf("loadavg %q: accepted", bad)
		}
	}
	busy, idle, cpus, err := parseStat([]byte("cpu  1 2 3 40 5 6 7 8 0 0\ncpu0 1 2 3 40 5 6 7 8 0 0\nintr 1 2\n"))
	if err != nil || busy != 27 || idle != 45 || cpus != 1 {
		t.Errorf("%d %d %d %v", busy, idle, cpus, err)
	}
	for _, bad := range []string{"", "cpu 1 2", "cpu  a b c d e f g h"} {
		if _, _, _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("stat %q: accepted", bad)
		}
	}
	if h.share(1000, 1000); h.share(1075, 1025) != 0.75 {
		t.Errorf("share %v", h.lastBusy)
	}
}

func TestSignalNames(t *testing.T) {
	for n, want := range map[int]string{0: "", -1: "", 9: "SIGKILL", 15: "SIGTERM", 34: "SIG34", 64: "SIG64", 65: "", 1 << 30: ""} {
		if got := signalName(n); got != want {
			t.Errorf("%d: %q", n, got)
		}
	}
}

func TestEverySignalOfTheTableIsNamed(t *testing.T) {
	for n, name := range signalNames[1:] {
		if !strings.HasPrefix(name, "SIG") {
			t.Errorf("signal %d has no name", n+1)
		}
	}
}

func TestThisMachineIsMeasured(t *testing.T) {
	h := &procHost{mountsMax: 7}
	s, err := h.Sample()
	if err != nil {
		t.Fatal(err)
	}
	if s.MemoryTotal <= 0 || s.Tasks <= 0 || s.TasksMax < s.Tasks || s.Files <= 0 || s.FilesMax < s.Files || s.Mounts <= 0 || s.MountsMax != 7 {
		t.Errorf("%+v", s)
	}
	a := newAdmission(Admission{}, h, fake.NewHost().Uppers(), testLog())
	if err := a.fullLocked(); sandbox.ReasonOf(err) != reasonFull || err.Facts["short"] != "mounts" {
		t.Errorf("with a limit of 7 mounts: %v", err)
	}
}
