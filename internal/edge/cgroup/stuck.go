package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
)

// KillStuck kills the children of aether that have not become a command for that long, and says how many. aether's thread
// waits within its fork until the child has executed, so that one child stopped there by a signal from the sandbox (root
// inside may send it), or waiting for somebody's lease on the program, stops aether. Until it executes, such a child runs
// aether's program in a command's group, which nothing else does for long. One that only waits for a CPU or a disk, be it
// for seconds, is spared.
func (t *Tree) KillStuck(cg driver.Cgroups, age time.Duration) (killed int, err error) {
	program, err := programOf(cg.V2Aether)
	if program == nil || err != nil {
		return 0, err
	}
	err = walk(cg.V2User, func(dir string) error {
		pids, err := readPids(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			return err
		}
		for _, pid := range pids {
			err := linux.KillIf(pid, func() bool {
				held, err := linux.IsHeld(pid, age)
				stuck := err == nil && held && runs(pid, program)
				if stuck {
					killed++
				}
				return stuck
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	return killed, err
}

// programOf is what the processes of a group run; nil if there is none.
func programOf(dir string) (os.FileInfo, error) {
	pids, err := readPids(filepath.Join(dir, "cgroup.procs"))
	if linux.IsGone(err) || err == nil && len(pids) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(exeOf(pids[0]))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return info, err
}

func runs(pid int, program os.FileInfo) bool {
	info, err := os.Stat(exeOf(pid))
	return err == nil && os.SameFile(info, program)
}

func exeOf(pid int) string { return "/proc/" + strconv.Itoa(pid) + "/exe" }
