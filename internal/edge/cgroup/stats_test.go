package cgroup

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"dsec/internal/edge/driver"
)

// fakeGroups writes control files below a directory.
func fakeGroups(t *testing.T, files map[string]string) string {
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestStatsOfBothKinds(t *testing.T) {
	v2 := fakeGroups(t, map[string]string{
		"user/cpu.stat":       "usage_usec 2500000\nuser_usec 1\nnr_throttled 4\nthrottled_usec 1500000\n",
		"user/memory.current": "1000\n", "user/memory.peak": "3000\n", "user/memory.max": "4096\n",
		"user/memory.stat": "anon 700\nfile 300\n", "user/memory.events": "low 0\nmax 5\noom 1\noom_kill 2\n",
		"user/pids.current": "6\n", "user/pids.max": "100\n", "user/pids.events": "max 7\n", "aether/memory.current": "900\n",
	})
	v1 := fakeGroups(t, map[string]string{
		"user/cpu.stat": "usage_usec 2500000\n", "cpu/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n",
		"mem/memory.usage_in_bytes": "1000\n", "mem/memory.max_usage_in_bytes": "3000\n", "mem/memory.limit_in_bytes": "4096\n",
		"mem/memory.stat": "cache 300\nrss 700\n", "mem/memory.failcnt": "5\n", "mem/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
		"pids/pids.current": "7\n", "pids/pids.max": "101\n", "pids/pids.events": "max 7\n", "aether/memory.usage_in_bytes": "900\n",
	})
	want := driver.Stats{
		CPU: 2.5, ThrottledPeriods: 4, Throttled: 1.5, Memory: 1000, MemoryAnon: 700, MemoryPeak: 3000, MemoryLimit: 4096, MemoryHits: 5,
		OOMKills: 2, PIDs: 6, PIDsLimit: 100, PIDsHits: 7, AetherMemory: 900,
	}
	for name, cg := range map[string]driver.Cgroups{
		"v2": {V2User: filepath.Join(v2, "user"), V2Aether: filepath.Join(v2, "aether")},
		"v1": {
			V2User: filepath.Join(v1, "user"), V1Aether: map[string]string{"memory": filepath.Join(v1, "aether")},
			V1User: map[string]string{"cpu": filepath.Join(v1, "cpu"), "memory": filepath.Join(v1, "mem"), "pids": filepath.Join(v1, "pids")},
		},
	} {
		got, err := new(Tree).Stats(cg)
		if err != nil || len(got.Unavailable) > 0 {
			t.Errorf("%s: %v, without %v", name, err, got.Unavailable)
		}
		got.Throttled, got.CPU = round(got.Throttled), round(got.CPU)
		if !equal(got, want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func round(v float64) float64 { return float64(int64(v*1e6+0.5)) / 1e6 }

func equal(a, b driver.Stats) bool {
	a.Unavailable, b.Unavailable = nil, nil
	return slices.Equal([]any{a.CPU, a.ThrottledPeriods, a.Throttled, a.Memory, a.MemoryAnon, a.MemoryPeak, a.MemoryLimit, a.MemoryHits, a.OOMKills, a.PIDs, a.PIDsLimit, a.PIDsHits, a.AetherMemory},
		[]any{b.CPU, b.ThrottledPeriods, b.Throttled, b.Memory, b.MemoryAnon, b.MemoryPeak, b.MemoryLimit, b.MemoryHits, b.OOMKills, b.PIDs, b.PIDsLimit, b.PIDsHits, b.AetherMemory})
}

func TestStatsNameWhatIsMissing(t *testing.T) {
	dir := fakeGroups(t, map[string]string{"cpu.stat": "usage_usec 1\n", "memory.max": "max\n", "pids.current": "2\n"})
	s, err := new(Tree).Stats(driver.Cgroups{V2User: dir, V2Aether: dir})
	if err != nil || s.PIDs != 2 || !slices.Contains(s.Unavailable, "memory_limit_bytes") || slices.Contains(s.Unavailable, "pids") {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := new(Tree).Stats(driver.Cgroups{V2User: "/nonexistent", V2Aether: "/nonexistent"}); err == nil {
		t.Errorf("%+v of groups that are gone", s)
	}
}
