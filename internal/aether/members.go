package aether

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tick is how /proc counts time: in USER_HZ, which is 100 on every machine that we run on.
const tick = time.Second / 100

// A moment divides the processes of this PID namespace into those before and after it.
type moment struct {
	ticks uint64
	pid   int // the last that was given out
}

func now() moment {
	var m moment
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) == nil {
		m.ticks = uint64(time.Duration(t.Nano()) / tick)
	}
	if b, err := readProc("/proc/loadavg"); err == nil {
		fields := strings.Fields(string(b))
		if len(fields) > 0 {
			m.pid, _ = strconv.Atoi(fields[len(fields)-1]) // 0: more are taken for new
		}
	}
	return m
}

// A member is a process of a session.
type member struct {
	pid, parent, sid int
	started          uint64 // ticks
}

func (p member) after(m moment) bool {
	return p.started > m.ticks || (p.started == m.ticks && p.pid > m.pid)
}

// members are the processes of a session: of its control group or, without one, those that descend from the shell or share its
// kernel session. x.mu is held.
func (x *chronus) members() []member {
	if x.cgroup != nil {
		return x.cgroup.members()
	}
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // as many as there are
	all := make(map[int]member)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if p, err := readMember(pid); err == nil {
				all[pid] = p
			}
		}
	}
	var out []member
	for _, p := range all {
		for q, depth := p, 0; q.pid != 0 && depth < len(all); q, depth = all[q.parent], depth+1 {
			if q.pid == x.pid || q.sid == x.pid {
				out = append(out, p)
				break
			}
		}
	}
	return out
}

// members are the processes of g.
func (g *cgroup) members() []member {
	fd, err := unix.Openat(g.dir, "cgroup.procs", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "cgroup.procs")
	defer f.Close()
	var out []member
	var buf [4096]byte
	rest := ""
	for {
		n, err := f.Read(buf[:])
		lines := strings.Split(rest+string(buf[:n]), "\n")
		rest = lines[len(lines)-1]
		for _, line := range lines[:len(lines)-1] {
			if pid, err := strconv.Atoi(line); err == nil {
				if p, err := readMember(pid); err == nil {
					out = append(out, p)
				}
			}
		}
		if err != nil {
			return out
		}
	}
}

func readMember(pid int) (member, error) {
	b, err := readProc("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return member{}, err
	}
	return parseMember(pid, b)
}

var errStat = errors.New("a line of /proc/<pid>/stat that is none")

// parseMember reads proc(5) stat. The name in parentheses may hold anything.
func parseMember(pid int, b []byte) (member, error) {
	const parent, sid, started = 1, 3, 19 // behind the name
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= started {
		return member{}, errStat
	}
	p := member{pid: pid}
	var err1, err2, err3 error
	p.parent, err1 = strconv.Atoi(string(fields[parent]))
	p.sid, err2 = strconv.Atoi(string(fields[sid]))
	p.started, err3 = strconv.ParseUint(string(fields[started]), 10, 64)
	return p, errors.Join(err1, err2, err3)
}

// readProc reads a small file of /proc.
func readProc(name string) ([]byte, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var buf [1024]byte
	for {
		n, err := unix.Read(fd, buf[:])
		if err == nil {
			return bytes.Clone(buf[:n]), nil
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, err
		}
	}
}
