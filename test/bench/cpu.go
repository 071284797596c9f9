package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of times in /proc.
const tick = 10 * time.Millisecond

// procTimes are the CPU times of a process: its own, and those of the children that it waited for.
type procTimes struct{ user, system, children time.Duration }

func (t procTimes) all() time.Duration { return t.user + t.system + t.children }

func timesOf(pid int) (procTimes, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procTimes{}, err
	}
	// The name is in brackets and may hold anything.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 15 {
		return procTimes{}, fmt.Errorf("/proc/%d/stat is too short", pid)
	}
	ticks := func(i int) time.Duration {
		n, _ := strconv.ParseInt(f[i], 10, 64) // the kernel writes numbers
		return time.Duration(n) * tick
	}
	return procTimes{user: ticks(11), system: ticks(12), children: ticks(13) + ticks(14)}, nil
}

// busyTime is the time that all CPUs together have worked since boot.
func busyTime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 8 || f[0] != "cpu" {
		return 0, fmt.Errorf("unexpected first line of /proc/stat: %q", line)
	}
	var sum time.Duration
	for i, v := range f[1:9] {
		if i == 3 || i == 4 { // idle, iowait
			continue
		}
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	return sum, nil
}

// childrenOf are the processes that a process, by any of its threads, has started.
func childrenOf(pid int) ([]int, error) {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	var out []int
	for _, t := range threads {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, t.Name()))
		if err != nil {
			continue // the thread has ended
		}
		for f := range strings.FieldsSeq(string(b)) {
			n, err := strconv.Atoi(f)
			if err != nil {
				return nil, err
			}
			out = append(out, n)
		}
	}
	return out, nil
}

// A cpuMeter tells how much CPU time passed in which process of a platform.
type cpuMeter struct {
	p      *platform
	before map[string]time.Duration
}

func (p *platform) meter() (*cpuMeter, error) {
	m := &cpuMeter{p: p}
	var err error
	m.before, err = m.read()
	return m, err
}

// Parts of a platform's CPU time.
const (
	cpuClient  = "client"
	cpuUp      = "apiserver"
	cpuEdge    = "edge"
	cpuAether  = "aether"
	cpuCommand = "commands" // and what of their start counts as theirs
	cpuMachine = "machine"  // everything that ran, the kernel's threads included
)

func (m *cpuMeter) read() (map[string]time.Duration, error) {
	out := map[string]time.Duration{}
	for name, pid := range map[string]int{cpuClient: os.Getpid(), cpuUp: m.p.up, cpuEdge: m.p.edge} {
		t, err := timesOf(pid)
		if err != nil {
			return nil, err
		}
		out[name] = t.user + t.system
	}
	sandboxes, err := childrenOf(m.p.edge)
	if err != nil {
		return nil, err
	}
	for _, pid := range sandboxes {
		t, err := timesOf(pid)
		if err != nil {
			continue // it has ended
		}
		out[cpuAether] += t.user + t.system
		out[cpuCommand] += t.children
	}
	out[cpuMachine], err = busyTime()
	return out, err
}

// perOp is what was used since the meter was made, in milliseconds for each of n operations.
func (m *cpuMeter) perOp(n int) (map[string]float64, error) {
	now, err := m.read()
	if err != nil {
		return nil, err
	}
	out := make(map[string]float64, len(now))
	for name, t := range now {
		out[name] = float64(t-m.before[name]) / 1e6 / float64(max(n, 1))
	}
	return out, nil
}
