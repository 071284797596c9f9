package edge

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

func TestBrake(t *testing.T) {
	const gib = 1 << 30
	sample := func(available int64, cpu, memory, io float64) HostSample {
		return HostSample{MemoryTotal: 10 * gib, MemoryAvailable: available * gib, Pressure: Pressure{CPU: cpu, Memory: memory, IO: io}}
	}
	var b brake
	for _, c := range []struct {
		what    string
		s       HostSample
		why     string
		refuses bool
	}{
		{"nothing", sample(9, 0, 0, 0), "", false},
		{"a wait for CPUs is what sandboxes are for", sample(9, 100, 0, 0), "", false},
		{"one sandbox thrashes, there is memory", sample(5, 0, 90, 0), "", false},
		{"memory is short, too", sample(1, 0, 20, 0), "memory", false},
		{"more of it", sample(1, 0, 45, 0), "memory", true},
		{"less, but not calm", sample(1, 0, 30, 0), "memory", true},
		{"calm enough to take some", sample(1, 0, 27, 0), "memory", false},
		{"not calm", sample(1, 0, 11, 0), "memory", false},
		{"calm", sample(1, 0, 10, 0), "", false},
		{"below the first figure again", sample(1, 0, 14, 0), "", false},
		{"disks", sample(9, 0, 0, 100), "io", false},
		{"not calm", sample(9, 0, 0, 36), "io", false},
		{"calm", sample(9, 0, 0, 34), "", false},
	} {
		b.sample(c.s)
		if b.why != c.why || b.refuses != c.refuses {
			t.Errorf("%s: %q, refuses %v; want %q, %v", c.what, b.why, b.refuses, c.why, c.refuses)
		}
		if err := b.refusal(); (err != nil) != c.refuses || err != nil && (sandbox.ReasonOf(err) != reasonPressure || err.Facts["short"] != c.why) {
			t.Errorf("%s: refusal %v", c.what, err)
		}
		if w := b.warning(); strings.Contains(w, "waits for "+c.why) != (c.why != "") {
			t.Errorf("%s: warning %q", c.what, w)
		}
	}
}

func TestParsePressure(t *testing.T) {
	for in, want := range map[string]float64{
		"some avg10=0.14 avg60=0.03 avg300=0.00 total=190452597\nfull avg10=9.00 avg60=0.03 avg300=0.00 total=61555425\n": 0.14,
		"full avg10=9.00 total=1\nsome avg10=100.00 avg60=0 total=2":                                                      100,
		"": 0, "some": 0, "some avg10=NaN": 0, "some avg10=-1": 0, "some avg10=101": 0, "some avg60=5": 0,
	} {
		if got := parsePressure(in); got != want {
			t.Errorf("%q: %v, want %v", in, got, want)
		}
	}
}

// Creates under pressure are late, then refused in a way that lets another node take them, with nothing made and nothing kept; the
// status says so, and when the pressure is gone they go on.
func TestCreatesUnderPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := roomyHost()
		w := newWorld(t, func(o *Options) { o.Host = host })
		status := func(short bool, pressure float64) *edgev1.Status {
			host.mu.Lock()
			host.s.MemoryAvailable, host.s.Pressure.Memory = host.s.MemoryTotal, pressure
			if short {
				host.s.MemoryAvailable /= 8
			}
			host.mu.Unlock()
			time.Sleep(time.Second)
			return w.status()
		}
		if st := status(true, 50); st.Accepting || !st.Braking || !strings.Contains(st.RefusingReason, "memory") || st.MemoryPressure != 50 {
			t.Errorf("status %v", st)
		}
		start := time.Now()
		r, err := w.tryCreate()
		if sandbox.ReasonOf(err) != reasonPressure || sandbox.ClassOf(err) != sandbox.ResourceExhausted || !r.RetryElsewhere {
			t.Errorf("create: %v %v", err, r)
		}
		if took := time.Since(start); took < brakeMost {
			t.Errorf("refused after %v", took)
		}
		if n := len(w.e.index.all()); n != 0 {
			t.Errorf("%d records of what was refused", n)
		}
		st := status(true, 20)
		if !st.Accepting || !st.Braking || !slices.ContainsFunc(st.Warnings, func(s string) bool { return strings.Contains(s, "held back") }) {
			t.Errorf("status %v", st)
		}
		start = time.Now()
		w.create()
		w.create()
		if took := time.Since(start); took < brakeStep || took > time.Minute {
			t.Errorf("two creates took %v under the brake", took)
		}
		if st := status(false, 0); !st.Accepting || st.Braking {
			t.Errorf("status %v", st)
		}
		w.close()
	})
}

// What comes near its end is told before it is refused, until it is clearly less.
func TestWarnings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := roomyHost()
		w := newWorld(t, func(o *Options) { o.Host = host })
		for _, c := range []struct {
			percent int64
			told    bool
		}{{50, false}, {80, false}, {93, true}, {86, true}, {70, false}, {86, false}} {
			host.mu.Lock()
			host.s.Tasks = host.s.TasksMax * c.percent / 100
			host.mu.Unlock()
			time.Sleep(time.Second)
			st := w.status()
			told := slices.ContainsFunc(st.Warnings, func(s string) bool { return strings.HasPrefix(s, "tasks: ") })
			if told != c.told || !st.Accepting {
				t.Errorf("%d %%: %v", c.percent, st)
			}
		}
		w.close()
	})
}
