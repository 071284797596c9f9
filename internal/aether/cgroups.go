package aether

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	maxFreeCgroups = 16 // kept open and empty for the next commands
	restCgroups    = 2  // of these, at rest: each has two descriptors
	reclaimStep    = 4  // groups with background processes that one acquire looks at again
)

// A cgroup is the v2 group of one command and of everything that descends from it: setsid and double forks do not
// escape its kill.
type cgroup struct {
	pool   *cgroupPool
	name   string
	dir    int // O_PATH; -1 while it only lingers
	events int

	// killed: cgroup.kill was written. The kernel compares the kill count of a group with that of the forking one when a
	// child is made by CLONE_INTO_CGROUP (seen on 6.18), so that a child made in a group that was ever killed dies at once.
	killed bool
}

// cgroupPool makes groups below the delegated directory and uses them again once they are empty. A group whose command
// left processes behind lingers with them.
type cgroupPool struct {
	root int // descriptor of <sandbox>/user

	mu        sync.Mutex
	free      []*cgroup
	lingering []*cgroup // names only: their number is bounded by the pids limit, descriptors are not to be
	last      uint64
}

func newCgroupPool(root int) (*cgroupPool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(root, &st); err != nil {
		return nil, fmt.Errorf("stat delegated cgroup: %w", err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("delegated cgroup is on file system %#x, not cgroup2", st.Type)
	}
	return &cgroupPool{root: root}, nil
}

// acquire returns an empty group.
func (p *cgroupPool) acquire() (*cgroup, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		p.reclaim()
	}
	if n := len(p.free); n > 0 {
		g := p.free[n-1]
		p.free = p.free[:n-1]
		return g, nil
	}
	for {
		p.last++
		g := &cgroup{pool: p, name: strconv.FormatUint(p.last, 10)}
		err := unix.Mkdirat(p.root, g.name, 0o755)
		if errors.Is(err, unix.EEXIST) { // of an earlier aether in the same tree
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("make cgroup of a command: %w", err)
		}
		if err := g.open(p.root); err != nil {
			_ = unix.Unlinkat(p.root, g.name, unix.AT_REMOVEDIR)
			return nil, err
		}
		return g, nil
	}
}

// reclaim looks again at a few groups that had background processes. p.mu is held.
func (p *cgroupPool) reclaim() {
	for range min(reclaimStep, len(p.lingering)) {
		g := p.lingering[0]
		p.lingering = p.lingering[1:]
		if g.open(p.root) != nil || !g.empty() {
			g.close()
			p.lingering = append(p.lingering, g)
			continue
		}
		if g.killed {
			p.remove(g)
			continue
		}
		p.free = append(p.free, g)
		return
	}
}

// release takes back the group of a command that ended.
func (p *cgroupPool) release(g *cgroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !g.empty():
		g.close()
		p.lingering = append(p.lingering, g)
	case len(p.free) < maxFreeCgroups && !g.killed:
		p.free = append(p.free, g)
	default:
		p.remove(g)
	}
}

// trim gives back what only a busy sandbox needs.
func (p *cgroupPool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.free) > restCgroups {
		p.remove(p.free[len(p.free)-1])
		p.free = p.free[:len(p.free)-1]
	}
}

// remove gives an empty group back to the kernel.
func (p *cgroupPool) remove(g *cgroup) {
	g.close()
	_ = unix.Unlinkat(p.root, g.name, unix.AT_REMOVEDIR) // if it fails, the edge removes it with the sandbox
}

// close removes the groups that are empty.
func (p *cgroupPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range append(p.free, p.lingering...) {
		p.remove(g)
	}
	p.free, p.lingering = nil, nil
}

func (g *cgroup) open(root int) error {
	var err error
	g.dir, err = unix.Openat(root, g.name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		g.dir, g.events = -1, -1
		return fmt.Errorf("open cgroup of a command: %w", err)
	}
	g.events, err = unix.Openat(g.dir, "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(g.dir)
		g.dir, g.events = -1, -1
		return fmt.Errorf("open cgroup.events: %w", err)
	}
	return nil
}

func (g *cgroup) close() {
	if g.dir >= 0 {
		unix.Close(g.dir)
		unix.Close(g.events)
	}
	g.dir, g.events = -1, -1
}

func (g *cgroup) empty() bool {
	var b [64]byte
	n, err := unix.Pread(g.events, b[:], 0)
	return err == nil && bytes.Contains(b[:n], []byte("populated 0"))
}

// kill ends every process in g, also those being forked this moment.
func (g *cgroup) kill() error {
	g.killed = true
	fd, err := unix.Openat(g.dir, "cgroup.kill", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open cgroup.kill: %w", err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("1")); err != nil {
		return fmt.Errorf("write cgroup.kill: %w", err)
	}
	return nil
}
