package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
)

// A figure is where one of driver.Stats stands in a control file. An empty key means the whole file.
type figure struct {
	name  string
	file  string
	key   string
	scale float64 // what one unit of the kernel's is
	to    func(s *driver.Stats, v float64)
}

func integer(p func(*driver.Stats) *int64) func(*driver.Stats, float64) {
	return func(s *driver.Stats, v float64) { *p(s) = int64(v) }
}

// figuresOf lists where the figures of a sandbox are. The v2 tree counts CPU time also without the controller.
func figuresOf(cg driver.Cgroups) []figure {
	f := []figure{{"cpu_seconds", filepath.Join(cg.V2User, "cpu.stat"), "usage_usec", 1e-6, func(s *driver.Stats, v float64) { s.CPU = v }}}
	add := func(name, file, key string, scale float64, to func(*driver.Stats, float64)) {
		f = append(f, figure{name, file, key, scale, to})
	}
	var (
		periods   = integer(func(s *driver.Stats) *int64 { return &s.ThrottledPeriods })
		throttled = func(s *driver.Stats, v float64) { s.Throttled = v }
		memory    = integer(func(s *driver.Stats) *int64 { return &s.Memory })
		anon      = integer(func(s *driver.Stats) *int64 { return &s.MemoryAnon })
		peak      = integer(func(s *driver.Stats) *int64 { return &s.MemoryPeak })
		limit     = integer(func(s *driver.Stats) *int64 { return &s.MemoryLimit })
		hits      = integer(func(s *driver.Stats) *int64 { return &s.MemoryHits })
		kills     = integer(func(s *driver.Stats) *int64 { return &s.OOMKills })
		pids      = integer(func(s *driver.Stats) *int64 { return &s.PIDs })
		pidsLimit = integer(func(s *driver.Stats) *int64 { return &s.PIDsLimit })
		pidsHits  = integer(func(s *driver.Stats) *int64 { return &s.PIDsHits })
		aether    = integer(func(s *driver.Stats) *int64 { return &s.AetherMemory })
	)
	if len(cg.V1User) == 0 {
		u := func(name string) string { return filepath.Join(cg.V2User, name) }
		add("cpu_throttled_periods", u("cpu.stat"), "nr_throttled", 1, periods)
		add("cpu_throttled_seconds", u("cpu.stat"), "throttled_usec", 1e-6, throttled)
		add("memory_bytes", u("memory.current"), "", 1, memory)
		add("memory_anon_bytes", u("memory.stat"), "anon", 1, anon)
		add("memory_peak_bytes", u("memory.peak"), "", 1, peak)
		add("memory_limit_bytes", u("memory.max"), "", 1, limit)
		add("memory_limit_hits", u("memory.events"), "max", 1, hits)
		add("oom_kills", u("memory.events"), "oom_kill", 1, kills)
		add("pids", u("pids.current"), "", 1, pids)
		add("pids_limit", u("pids.max"), "", 1, pidsLimit)
		add("pids_limit_hits", u("pids.events"), "max", 1, pidsHits)
		add("aether_memory_bytes", filepath.Join(cg.V2Aether, "memory.current"), "", 1, aether)
		return f
	}
	u := func(controller, name string) string { return filepath.Join(cg.V1User[controller], name) }
	add("cpu_throttled_periods", u("cpu", "cpu.stat"), "nr_throttled", 1, periods)
	add("cpu_throttled_seconds", u("cpu", "cpu.stat"), "throttled_time", 1e-9, throttled)
	add("memory_bytes", u("memory", "memory.usage_in_bytes"), "", 1, memory)
	add("memory_anon_bytes", u("memory", "memory.stat"), "rss", 1, anon)
	add("memory_peak_bytes", u("memory", "memory.max_usage_in_bytes"), "", 1, peak)
	add("memory_limit_bytes", u("memory", "memory.limit_in_bytes"), "", 1, limit)
	add("memory_limit_hits", u("memory", "memory.failcnt"), "", 1, hits)
	add("oom_kills", u("memory", "memory.oom_control"), "oom_kill", 1, kills)
	// The thread of aether that starts commands is in this group: see planHybrid.
	add("pids", u("pids", "pids.current"), "", 1, func(s *driver.Stats, v float64) { s.PIDs = max(0, int64(v)-1) })
	add("pids_limit", u("pids", "pids.max"), "", 1, func(s *driver.Stats, v float64) { s.PIDsLimit = max(0, int64(v)-1) })
	add("pids_limit_hits", u("pids", "pids.events"), "max", 1, pidsHits)
	add("aether_memory_bytes", filepath.Join(cg.V1Aether["memory"], "memory.usage_in_bytes"), "", 1, aether)
	return f
}

// Stats reads the accounts of a sandbox: some ten small files. Figures that the host lacks are left out; groups that are gone are
// an error.
func (t *Tree) Stats(cg driver.Cgroups) (driver.Stats, error) {
	var s driver.Stats
	figures := figuresOf(cg)
	var last string
	var content []byte
	var buf [16 << 10]byte
	for _, f := range figures {
		if f.file != last {
			b, err := linux.ReadControl(f.file, buf[:])
			if linux.IsGone(err) {
				b, err = nil, nil
			}
			if err != nil {
				return driver.Stats{}, fmt.Errorf("read the accounts: %w", err)
			}
			last, content = f.file, b
		}
		v, err := f.value(content)
		if err != nil {
			s.Unavailable = append(s.Unavailable, f.name)
			continue
		}
		f.to(&s, v*f.scale)
	}
	if len(s.Unavailable) == len(figures) {
		return driver.Stats{}, fmt.Errorf("read the accounts: %s is gone", cg.V2User)
	}
	return s, nil
}

var errNoFigure = errors.New("not in the file")

func (f figure) value(content []byte) (float64, error) {
	if len(content) == 0 {
		return 0, errNoFigure
	}
	if f.key != "" {
		n, err := parseFlat(content, f.key)
		return float64(n), err
	}
	word := string(bytes.TrimSpace(content))
	if word == "max" {
		return 0, errNoFigure
	}
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil {
		return 0, err
	}
	return float64(n), nil
}
