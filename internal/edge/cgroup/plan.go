package cgroup

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Weights of the CPU. The user part has the kernel's default; aether gets what makes it run as soon as it wakes.
const (
	sharesPerCore = 1024
	minShares     = 2
	maxShares     = 262144
	aetherShares  = "65536"

	weightPerCore = 100
	minWeight     = 1
	maxWeight     = 10000
	aetherWeight  = "10000"

	quotaPeriod = 100_000 // µs, the kernel's default
	minQuota    = 1_000   // µs, the kernel's least
)

// groupsAhead is how many groups without a process aether may have besides one per process: it uses them again.
const groupsAhead = 256

// A plan is what Create does, as data: groups in the order of their making, parents first, each with its settings.
type plan struct {
	groups  []group
	cgroups driver.Cgroups
	spent   *spent // has groups that will do as the one of aether's memory, whose settings are always the same
}

const aetherSuffix = ".aether"

type group struct {
	dir      string
	settings []setting
}

type setting struct{ file, value string }

func (p plan) make() error {
	for _, g := range p.groups {
		if p.spent != nil && g.dir == p.cgroups.V1Aether["memory"] {
			if taken, err := p.spent.take(g.dir); taken {
				continue
			} else if err != nil {
				return err
			}
		}
		if err := os.Mkdir(g.dir, 0o755); err != nil {
			return err
		}
		for _, s := range g.settings {
			if err := linux.WriteControl(filepath.Join(g.dir, s.file), s.value); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *Tree) plan(id sandbox.ID, l sandbox.Limits) plan {
	if t.layout.mode == V2 {
		return t.planV2(id, l)
	}
	return t.planHybrid(id, l)
}

// planV2 puts everything into one tree. Nothing is enabled below "user", so that commands may have groups of their own in it.
func (t *Tree) planV2(id sandbox.ID, l sandbox.Limits) plan {
	dir := filepath.Join(t.v2, string(id))
	aether, user := filepath.Join(dir, "aether"), filepath.Join(dir, "user")
	userSettings := append(memoryV2(l.Memory), setting{"memory.oom.group", "0"}, setting{"pids.max", decimal(l.PIDs)})
	userSettings = append(userSettings, delegated(l.PIDs)...)
	if q := t.quota(l.CPU); q > 0 {
		userSettings = append(userSettings, setting{"cpu.max", decimal(q) + " " + decimal(quotaPeriod)})
	}
	return plan{
		groups: []group{
			{dir, []setting{{"cpu.weight", decimal(scale(l.CPU, weightPerCore, minWeight, maxWeight))}, {subtreeControl, enableAll}}},
			{aether, append(memoryV2(AetherMemory), setting{"cpu.weight", aetherWeight}, setting{"pids.max", decimal(aetherPIDs)})},
			{user, userSettings},
		},
		cgroups: driver.Cgroups{V2Aether: aether, V2User: user},
	}
}

// delegated bounds what can be made in the group that belongs to the sandbox's root: one level, as aether does. An aether that
// was taken over could fill the host's memory with groups, or nest them until nobody gets to the lowest.
func delegated(pids int64) []setting {
	return []setting{{"cgroup.max.depth", "1"}, {"cgroup.max.descendants", decimal(pids + groupsAhead)}}
}

func memoryV2(bytes int64) []setting {
	return []setting{{"memory.max", decimal(bytes)}, {"memory.swap.max", "0"}}
}

// planHybrid puts the limits into v1. The user part's pids are one more than asked for: the thread of aether that starts
// commands is in that group.
func (t *Tree) planHybrid(id sandbox.ID, l sandbox.Limits) plan {
	memory, pids := filepath.Join(t.v1["memory"], string(id)), filepath.Join(t.v1["pids"], string(id))
	cpu, v2 := filepath.Join(t.v1["cpu"], string(id)), filepath.Join(t.v2, string(id))
	cg := driver.Cgroups{
		V2Aether: filepath.Join(v2, "aether"),
		V2User:   filepath.Join(v2, "user"),
		V1Aether: map[string]string{"memory": memory + aetherSuffix, "cpu": filepath.Join(cpu, "aether"), "pids": pids + aetherSuffix},
		V1User:   map[string]string{"memory": memory + ".user", "cpu": filepath.Join(cpu, "user"), "pids": pids},
	}
	var quota []setting
	if q := t.quota(l.CPU); q > 0 {
		quota = []setting{{"cpu.cfs_quota_us", decimal(q)}}
	}
	return plan{
		groups: []group{
			{v2, nil},
			{cg.V2Aether, nil},
			{cg.V2User, delegated(l.PIDs)},
			{cg.V1Aether["memory"], t.memoryV1(AetherMemory)},
			{cg.V1User["memory"], t.memoryV1(l.Memory)},
			{cpu, []setting{{"cpu.shares", decimal(scale(l.CPU, sharesPerCore, minShares, maxShares))}}},
			{cg.V1Aether["cpu"], []setting{{"cpu.shares", aetherShares}}},
			{cg.V1User["cpu"], quota},
			{cg.V1Aether["pids"], []setting{{"pids.max", decimal(aetherPIDs)}}},
			{cg.V1User["pids"], []setting{{"pids.max", decimal(l.PIDs + 1)}}},
		},
		cgroups: cg,
		spent:   &t.spent,
	}
}

// memoryV1 forbids swap where the kernel accounts it. The order matters: the sum may not be less than the memory.
func (t *Tree) memoryV1(bytes int64) []setting {
	s := []setting{{"memory.limit_in_bytes", decimal(bytes)}}
	if t.memsw {
		// A page more: the kernel looks at the sum first, and counts only how often the memory's own limit is run into.
		s = append(s, setting{"memory.memsw.limit_in_bytes", decimal(bytes + int64(os.Getpagesize()))})
	}
	return s
}

// v1Dirs are the v1 directories of a sandbox that removeTree removes with what is below them.
func (t *Tree) v1Dirs(id sandbox.ID) []string {
	if t.layout.mode == V2 {
		return nil
	}
	memory, pids := filepath.Join(t.v1["memory"], string(id)), filepath.Join(t.v1["pids"], string(id))
	return []string{memory + ".user", memory + aetherSuffix, memory + ".trusted", pids + ".trusted", filepath.Join(t.v1["cpu"], string(id)), pids, pids + aetherSuffix}
}

// quota is the CPU time per period in µs, or 0 for none: where a sandbox may use the whole node a weight is enough, and setting
// a quota makes the kernel walk all task groups.
func (t *Tree) quota(cores float64) int64 {
	if cores >= float64(len(t.cpus)) {
		return 0
	}
	return max(minQuota, int64(math.Round(cores*quotaPeriod)))
}

func scale(cores float64, perCore, least, most int64) int64 {
	return int64(min(max(cores*float64(perCore), float64(least)), float64(most)))
}

func cpusFor(cores float64) int { return max(1, int(math.Ceil(cores))) }

// rotate takes n of the CPUs, from one on, in ascending order.
func rotate(cpus []int, from uint64, n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = cpus[(from+uint64(i))%uint64(len(cpus))]
	}
	slices.Sort(out)
	return out
}

func decimal(n int64) string { return strconv.FormatInt(n, 10) }
