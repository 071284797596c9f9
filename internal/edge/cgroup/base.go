package cgroup

import (
	"fmt"
	"path/filepath"

	"dsec/internal/linux"
)

// What all sandboxes together leave to the host: to the edge, the control plane and everything else on it.
const (
	minTasksLeft  = 1 << 10
	minMemoryLeft = 256 << 20
)

// maxTasks is how many of the threads that a host may have are for sandboxes: nine tenths.
func maxTasks(host int64) int64 { return max(host-max(host/10, minTasksLeft), host/2) }

// maxMemory is how much of a host's memory is for sandboxes: what admission leaves free of it stays out.
func maxMemory(host int64) int64 { return max(host-max(host/20, minMemoryLeft), host/2) }

// limitAll limits what all sandboxes together may use.
func (t *Tree) limitAll() error {
	tasks, err := linux.MaxTasks()
	if err != nil {
		return err
	}
	memory, err := linux.TotalMemory()
	if err != nil {
		return err
	}
	for _, g := range t.baseSettings(maxTasks(tasks), maxMemory(memory)) {
		for _, s := range g.settings {
			if err := linux.WriteControl(filepath.Join(g.dir, s.file), s.value); err != nil {
				return fmt.Errorf("limit all sandboxes together: %w", err)
			}
		}
	}
	return nil
}

func (t *Tree) baseSettings(tasks, memory int64) []group {
	pids := setting{"pids.max", decimal(tasks)}
	if t.layout.mode == V2 {
		return []group{{t.v2, []setting{pids, {"memory.max", decimal(memory)}}}}
	}
	return []group{
		{t.v1["pids"], []setting{pids}},
		{t.v1["memory"], []setting{{"memory.limit_in_bytes", decimal(memory)}}},
	}
}
