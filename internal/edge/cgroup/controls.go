package cgroup

import (
	"os"
	"path/filepath"

	"dsec/internal/edge/driver"
)

// extras are controls that this host may have beyond those that every sandbox needs.
var extras = []string{"memory.high", "memory.reclaim", "memory.swap.max", "memory.peak", "cgroup.freeze", "cgroup.kill", "cpu.pressure", "memory.pressure", "io.pressure"}

// Controls says which further controls the groups of a sandbox have, and which not, by their files. That memory.peak can be
// set back is told by its mode: Linux 6.12 made it writable.
func Controls(cg driver.Cgroups) (has, hasNot []string) {
	for _, name := range extras {
		info, err := os.Stat(filepath.Join(cg.V2User, name))
		if err != nil {
			hasNot = append(hasNot, name)
			continue
		}
		has = append(has, name)
		if name != "memory.peak" {
			continue
		}
		if back := "memory.peak set back"; info.Mode().Perm()&0o200 != 0 {
			has = append(has, back)
		} else {
			hasNot = append(hasNot, back)
		}
	}
	return has, hasNot
}
