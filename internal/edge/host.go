package edge

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/internal/linux"
)

// procHost measures this machine through /proc.
type procHost struct {
	mountsMax int64 // tests: a lower limit; 0 = the host's

	mu         sync.Mutex
	mounts     int64 // when they were last counted
	counted    time.Time
	busy, idle uint64 // jiffies of all CPUs at the last sample
	lastBusy   float64
}

// countEvery is how old a count of the mounts may be: it costs 0.1 ms for each thousand.
const countEvery = 5 * time.Second

// Sample reads eight small files: about 80 µs.
func (h *procHost) Sample() (HostSample, error) {
	var s HostSample
	mem, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return s, fmt.Errorf("reading memory: %w", err)
	}
	if s.MemoryTotal, s.MemoryAvailable, err = parseMeminfo(mem); err != nil {
		return s, err
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return s, fmt.Errorf("reading load: %w", err)
	}
	if s.Load1, s.Tasks, err = parseLoadavg(string(load)); err != nil {
		return s, err
	}
	if s.TasksMax, err = linux.MaxTasks(); err != nil {
		return s, err
	}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return s, fmt.Errorf("reading CPU times: %w", err)
	}
	busy, idle, cpus, err := parseStat(stat)
	if err != nil {
		return s, err
	}
	s.CPUs = float64(cpus)
	s.CPUBusy = h.share(busy, idle)
	s.Pressure = readPressure()
	if s.Files, s.FilesMax, err = linux.OpenFiles(); err != nil {
		return s, err
	}
	s.Mounts, s.MountsMax, err = h.countMounts()
	return s, err
}

func (h *procHost) countMounts() (n, most int64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if most = h.mountsMax; most == 0 {
		if most, err = linux.ReadSysctl("fs/mount-max"); err != nil {
			return 0, 0, err
		}
	}
	if time.Since(h.counted) >= countEvery {
		if h.mounts, err = linux.CountMounts(); err != nil {
			return 0, 0, fmt.Errorf("counting mounts: %w", err)
		}
		h.counted = time.Now()
	}
	return h.mounts, most, nil
}

// share is what of the CPU time since the last sample was busy.
func (h *procHost) share(busy, idle uint64) float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	db, di := busy-h.busy, idle-h.idle
	if h.busy+h.idle > 0 && busy >= h.busy && idle >= h.idle && db+di > 0 {
		h.lastBusy = float64(db) / float64(db+di)
	}
	h.busy, h.idle = busy, idle
	return h.lastBusy
}

// readPressure reads what the kernel tells of it; some kernels tell nothing, and then nothing is braked.
func readPressure() Pressure {
	var p Pressure
	for name, to := range map[string]*float64{"cpu": &p.CPU, "memory": &p.Memory, "io": &p.IO} {
		if b, err := os.ReadFile("/proc/pressure/" + name); err == nil {
			*to = parsePressure(string(b))
		}
	}
	return p
}

// parsePressure reads "some avg10=0.14 avg60=0.03 avg300=0.00 total=190452597".
func parsePressure(s string) float64 {
	for line := range strings.Lines(s) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "some" {
			v, err := strconv.ParseFloat(strings.TrimPrefix(f[1], "avg10="), 64)
			if err == nil && v >= 0 && v <= 100 {
				return v
			}
		}
	}
	return 0
}

func parseMeminfo(b []byte) (total, available int64, err error) {
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 2 || (f[0] != "MemTotal:" && f[0] != "MemAvailable:") {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 52)
		if err != nil {
			return 0, 0, fmt.Errorf("parsing meminfo: %w", err)
		}
		if f[0] == "MemTotal:" {
			total = kib << 10
		} else {
			available = kib << 10
		}
	}
	if total <= 0 || available <= 0 {
		return 0, 0, fmt.Errorf("parsing meminfo: no MemTotal or MemAvailable")
	}
	return total, available, nil
}

// parseLoadavg reads "0.20 0.18 0.12 1/80 11206".
func parseLoadavg(s string) (load1 float64, tasks int64, err error) {
	f := strings.Fields(s)
	if len(f) < 4 {
		return 0, 0, fmt.Errorf("parsing loadavg: %d fields", len(f))
	}
	if load1, err = strconv.ParseFloat(f[0], 64); err != nil {
		return 0, 0, fmt.Errorf("parsing loadavg: %w", err)
	}
	_, all, _ := strings.Cut(f[3], "/")
	if tasks, err = strconv.ParseInt(all, 10, 64); err != nil {
		return 0, 0, fmt.Errorf("parsing loadavg: %w", err)
	}
	return load1, tasks, nil
}

// parseStat reads the CPU lines of /proc/stat: user nice system idle iowait irq softirq steal.
func parseStat(b []byte) (busy, idle uint64, cpus int, err error) {
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, 1<<20) // the intr line is long
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 9 || !strings.HasPrefix(f[0], "cpu") {
			continue
		}
		if f[0] != "cpu" {
			cpus++
			continue
		}
		for i, v := range f[1:9] {
			n, err := strconv.ParseUint(v, 10, 64)
			if err != nil {
				return 0, 0, 0, fmt.Errorf("parsing CPU times: %w", err)
			}
			if i == 3 || i == 4 {
				idle += n
			} else {
				busy += n
			}
		}
	}
	if cpus == 0 {
		return 0, 0, 0, fmt.Errorf("parsing CPU times: no CPUs")
	}
	return busy, idle, cpus, nil
}
