package cgroup

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Limits of all trusted commands of a sandbox together. They are beside the user part's: what stands still in that part holds
// its memory and pids.
const (
	TrustedMemory = 256 << 20
	trustedPIDs   = 256
)

// Trusted makes the groups of a sandbox's trusted commands, or finds them, and gives the v2 one to the owner of the user
// part. They are made when they are first needed: on two CPUs they cost 0.2 ms and 45 KiB of the kernel's memory, and
// more with more CPUs, which 10,000 sandboxes that run no trusted command do not need. Remove removes them with the rest.
func (t *Tree) Trusted(ctx context.Context, id sandbox.ID, cg driver.Cgroups, l sandbox.Limits) (driver.Trusted, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return driver.Trusted{}, err
	}
	groups, made := t.planTrusted(id, l)
	for _, g := range groups {
		if err := ctx.Err(); err != nil {
			return driver.Trusted{}, err
		}
		if err := mkdir(g.dir); err != nil {
			return driver.Trusted{}, fmt.Errorf("make control groups of trusted commands: %w", err)
		}
		for _, s := range g.settings {
			if err := linux.WriteControl(filepath.Join(g.dir, s.file), s.value); err != nil {
				return driver.Trusted{}, fmt.Errorf("limit trusted commands: %w", err)
			}
		}
	}
	made.Freeze = filepath.Join(cg.V2User, "cgroup.freeze")
	return made, delegate(made.V2, cg.V2User)
}

func (t *Tree) planTrusted(id sandbox.ID, l sandbox.Limits) ([]group, driver.Trusted) {
	v2 := filepath.Join(t.v2, string(id), "trusted")
	var quota []setting
	q := t.quota(l.CPU)
	if t.layout.mode == V2 {
		if q > 0 {
			quota = []setting{{"cpu.max", decimal(q) + " " + decimal(quotaPeriod)}}
		}
		settings := append(memoryV2(TrustedMemory), setting{"pids.max", decimal(trustedPIDs)})
		settings = append(settings, delegated(trustedPIDs)...)
		return []group{{v2, append(settings, quota...)}}, driver.Trusted{V2: v2}
	}
	if q > 0 {
		quota = []setting{{"cpu.cfs_quota_us", decimal(q)}}
	}
	v1 := map[string]string{
		"memory": filepath.Join(t.v1["memory"], string(id)+".trusted"),
		"cpu":    filepath.Join(t.v1["cpu"], string(id), "trusted"),
		"pids":   filepath.Join(t.v1["pids"], string(id)+".trusted"),
	}
	return []group{
		{v2, delegated(trustedPIDs)},
		{v1["memory"], t.memoryV1(TrustedMemory)},
		{v1["cpu"], quota},
		{v1["pids"], []setting{{"pids.max", decimal(trustedPIDs + 1)}}}, // aether's thread that starts them is in it
	}, driver.Trusted{V2: v2, V1: v1}
}

// delegate gives a v2 group to who has another: to make groups in it, and processes.
func delegate(dir, as string) error {
	uid, gid, err := linux.OwnerOf(as)
	if err != nil {
		return fmt.Errorf("delegate control group: %w", err)
	}
	for _, path := range []string{dir, filepath.Join(dir, "cgroup.procs"), filepath.Join(dir, "cgroup.threads"), filepath.Join(dir, subtreeControl)} {
		if err := os.Lchown(path, uid, gid); err != nil {
			return fmt.Errorf("delegate control group: %w", err)
		}
	}
	return nil
}

// trustedKills counts the OOM kills among trusted commands, if there were any.
func trustedKills(cg driver.Cgroups) int64 {
	file := filepath.Join(filepath.Dir(cg.V2User), "trusted", "memory.events")
	if dir, ok := cg.V1User["memory"]; ok {
		file = filepath.Join(trustedBeside(dir), "memory.oom_control")
	}
	n, err := flatValue(file, "oom_kill")
	if err != nil { // there are no such groups
		return 0
	}
	return n
}

// trustedBeside is <id>.trusted for <id>.user.
func trustedBeside(user string) string {
	return user[:len(user)-len(filepath.Ext(user))] + ".trusted"
}
