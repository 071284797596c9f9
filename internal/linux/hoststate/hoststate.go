// Package hoststate describes what is on a host, so that a test can prove that nothing is left after dsec ended: mounts, control
// groups, loop devices, network links and namespaces, processes, BPF objects, files, and descriptors of the own process.
//
// Everything is in one set of lines, so that a difference reads as it stands. What changes by itself is left out: kernel threads,
// and mount ids. Other people's processes are not: filter with State.Only where a host is shared. It needs root.
package hoststate

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
)

// A Kind is what an Item is.
type Kind string

// Kinds.
const (
	Mount   Kind = "mount"
	Cgroup  Kind = "cgroup"
	Loop    Kind = "loop"
	Link    Kind = "link"
	Netns   Kind = "netns"
	Process Kind = "process"
	BPF     Kind = "bpf"
	File    Kind = "file"
	FD      Kind = "fd"
)

// An Item is one thing on the host. Name says which and what, and is equal as long as it is the same.
type Item struct {
	Kind Kind
	Name string
}

func (i Item) String() string { return string(i.Kind) + " " + i.Name }

// A State is a multiset of what is there: the same thing may be mounted twice.
type State map[Item]int

// Snapshot reads the state of this host, with the files below dirs.
func Snapshot(dirs ...string) (State, error) {
	s := make(State)
	mounts, err := mountinfo.Self()
	if err != nil {
		return nil, err
	}
	s.addMounts(mounts)
	for _, add := range []func() error{
		func() error { return s.addCgroups(mounts) }, s.addLoops, s.addLinks, s.addNetns, s.addProcesses, s.addBPF, s.addFDs,
	} {
		if err := add(); err != nil {
			return nil, fmt.Errorf("reading the state of the host: %w", err)
		}
	}
	for _, dir := range dirs {
		if err := s.addFiles(dir); err != nil {
			return nil, fmt.Errorf("reading the state of the host: %w", err)
		}
	}
	return s, nil
}

// Only keeps what keep wants.
func (s State) Only(keep func(Item) bool) State {
	s = maps.Clone(s)
	maps.DeleteFunc(s, func(i Item, _ int) bool { return !keep(i) })
	return s
}

// Diff lists what changed from a to b: "+" is new, "-" is gone. It is empty if nothing did.
func Diff(a, b State) []string {
	var out []string
	for i, n := range b {
		for range n - a[i] {
			out = append(out, "+ "+i.String())
		}
	}
	for i, n := range a {
		for range n - b[i] {
			out = append(out, "- "+i.String())
		}
	}
	slices.Sort(out)
	return out
}

func (s State) add(k Kind, format string, args ...any) { s[Item{k, fmt.Sprintf(format, args...)}]++ }

func (s State) addMounts(mounts []mountinfo.Mount) {
	for _, m := range mounts {
		s.add(Mount, "%s %s %s %s", m.Point, m.Type, m.Source, m.Root)
	}
}

func (s State) addCgroups(mounts []mountinfo.Mount) error {
	for _, m := range mounts {
		if m.Type != "cgroup" && m.Type != "cgroup2" {
			continue
		}
		err := filepath.WalkDir(m.Point, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // removed meanwhile
			}
			if err == nil && d.IsDir() {
				s.add(Cgroup, "%s", path)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s State) addLoops() error {
	devices, err := linux.LoopDevices()
	for name, backing := range devices {
		s.add(Loop, "%s %s", name, backing)
	}
	return err
}

func (s State) addLinks() error {
	links, err := net.Interfaces()
	for _, l := range links {
		s.add(Link, "%d %s", l.Index, l.Name)
	}
	return err
}

// addNetns lists the namespaces that have names. Those kept by a bind mount elsewhere are among the mounts.
func (s State) addNetns() error {
	entries, err := os.ReadDir("/run/netns")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		s.add(Netns, "%s", e.Name())
	}
	return err
}

func (s State) addProcesses() error {
	return eachProcess(func(pid int, p linux.ProcessStat) {
		if !p.Kernel {
			s.add(Process, "%s", lineOf(pid, p))
		}
	})
}

// Descendants lists the processes that descend from pid, as Snapshot names them.
func Descendants(pid int) ([]string, error) {
	stats := make(map[int]linux.ProcessStat)
	if err := eachProcess(func(pid int, p linux.ProcessStat) { stats[pid] = p }); err != nil {
		return nil, err
	}
	var out []string
	for n, p := range stats {
		for at := p.Parent; at > 0; at = stats[at].Parent {
			if at == pid {
				out = append(out, lineOf(n, p))
				break
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

func lineOf(pid int, p linux.ProcessStat) string {
	return fmt.Sprintf("%d %s started %d", pid, p.Name, p.Start)
}

func eachProcess(visit func(pid int, p linux.ProcessStat)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // ended meanwhile
		}
		p, err := linux.ParseProcessStat(stat)
		if err != nil {
			return err
		}
		visit(pid, p)
	}
	return nil
}

func (s State) addBPF() error {
	for id, err := ebpf.ProgramGetNextID(0); ; id, err = ebpf.ProgramGetNextID(id) {
		if errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return err
		}
		s.addProgram(id)
	}
	for id, err := ebpf.MapGetNextID(0); ; id, err = ebpf.MapGetNextID(id) {
		if errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return err
		}
		s.add(BPF, "map %d", id)
	}
	links := new(link.Iterator)
	defer links.Close()
	for links.Next() {
		s.add(BPF, "link %d", links.ID)
	}
	return links.Err()
}

func (s State) addProgram(id ebpf.ProgramID) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return // unloaded meanwhile
	}
	defer p.Close()
	name := ""
	if info, err := p.Info(); err == nil {
		name = info.Name
	}
	s.add(BPF, "program %d %s %s", id, p.Type(), name)
}

func (s State) addFiles(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			s.add(File, "%s", path)
		}
		return err
	})
}

// addFDs lists the descriptors of the own process. Those of the runtime's poller, which it opens once and keeps, are left out.
func (s State) addFDs() error {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || target == "anon_inode:[eventpoll]" || target == "anon_inode:[eventfd]" {
			continue // the descriptor of this listing itself, or the poller's
		}
		s.add(FD, "%s %s", e.Name(), target)
	}
	return err
}
