package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

// A Mode says where the limits of sandboxes are.
type Mode string

// Modes.
const (
	V2     Mode = "v2"    // one tree with controllers
	Hybrid Mode = "v1+v2" // limits in v1; the v2 tree kills, freezes and carries BPF
)

// controllers that every sandbox needs.
var controllers = []string{"memory", "cpu", "pids"}

const (
	subtreeControl = "cgroup.subtree_control"
	enableAll      = "+memory +cpu +pids"
)

// A layout is where a host has its cgroup hierarchies mounted.
type layout struct {
	mode Mode
	v2   string
	v1   map[string]string // controller -> mount point
}

// detect reads the table of mounts. Each candidate is confirmed by the magic number of its file system.
func detect(mounts []mountinfo.Mount, magic func(string) (int64, error), available func(string) ([]string, error)) (layout, error) {
	l := layout{v1: make(map[string]string)}
	for _, m := range mounts {
		want := map[string]int64{"cgroup2": linux.MagicCgroup2, "cgroup": linux.MagicCgroup}[m.Type]
		if want == 0 {
			continue
		}
		if got, err := magic(m.Point); err != nil || got != want {
			continue // hidden by a later mount
		}
		if m.Type == "cgroup2" {
			l.v2 = m.Point
			continue
		}
		for _, c := range controllers {
			if slices.Contains(m.Super, c) {
				l.v1[c] = m.Point
			}
		}
	}
	if l.v2 == "" {
		return l, sandbox.Errorf(sandbox.Unsupported, "no_cgroup2", "no cgroup2 file system is mounted on this host; mount one, for example at /sys/fs/cgroup/unified")
	}
	if len(l.v1) == len(controllers) {
		l.mode = Hybrid
		return l, nil
	}
	have, err := available(l.v2)
	if err != nil {
		return l, fmt.Errorf("read the controllers of %s: %w", l.v2, err)
	}
	for _, c := range controllers {
		if !slices.Contains(have, c) {
			return l, sandbox.Errorf(sandbox.Unsupported, "no_cgroup_controller",
				"the cgroup controllers memory, cpu and pids must all be in v1 or all in v2; v1 has %v, v2 at %s has %v", names(l.v1), l.v2, have)
		}
	}
	l.mode = V2
	return l, nil
}

func names(m map[string]string) []string {
	out := []string{}
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func readControllers(dir string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	return strings.Fields(string(b)), err
}

// ownV2 finds the calling process's v2 group in /proc/self/cgroup.
func ownV2(b []byte) (string, error) {
	for line := range strings.Lines(string(b)) {
		path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if !ok {
			continue
		}
		// A process outside of the root of its cgroup namespace sees /../x, which leads nowhere under the mount.
		if !strings.HasPrefix(path, "/") || strings.Contains(path+"/", "/../") {
			return "", fmt.Errorf("own control group %.200q is outside of the mounted tree", path)
		}
		return strings.TrimSuffix(path, " (deleted)"), nil
	}
	return "", fmt.Errorf("this process is in no v2 control group")
}
