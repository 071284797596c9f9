package aether

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	processPage = 512 // of one answer
	maxArgv     = 1 << 10
)

// listProcesses reads /proc, which is the kernel's: commands have no right to mount. What processes call themselves is theirs.
func (s *Server) listProcesses(r *aetherv1.ListProcesses) (*aetherv1.Reply, error) {
	pids, err := pidsAfter(int(r.AfterPid))
	if err != nil {
		return nil, err
	}
	m := &aetherv1.Processes{}
	if len(pids) > processPage {
		pids, m.NextAfter = pids[:processPage], int32(pids[processPage-1])
	}
	owners := s.commandsByCgroup()
	for _, pid := range pids {
		p, err := readProcess(pid)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) { // it has ended meanwhile
			continue
		} else if err != nil {
			return nil, err
		}
		p.CommandId = owners[cgroupNameOf(pid)]
		m.Processes = append(m.Processes, p)
	}
	return &aetherv1.Reply{Reply: &aetherv1.Reply_Processes{Processes: m}}, nil
}

// pidsAfter lists all processes but aether, ascending.
func pidsAfter(after int) ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var pids []int
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil && pid > after && pid != os.Getpid() {
				pids = append(pids, pid)
			}
		}
		if errors.Is(err, io.EOF) {
			slices.Sort(pids)
			return pids, nil
		} else if err != nil {
			return nil, err
		}
	}
}

// commandsByCgroup says which command runs in which group. What a command left behind when it ended is nobody's.
func (s *Server) commandsByCgroup() map[string]string {
	s.mu.Lock()
	commands := make([]*command, 0, s.running)
	for _, c := range s.commands {
		commands = append(commands, c)
	}
	s.mu.Unlock() // a command's lock comes before the server's
	names := make(map[string]string, len(commands))
	for _, c := range commands {
		c.mu.Lock()
		if c.cgroup != nil {
			names[c.cgroup.name] = c.id
		}
		c.mu.Unlock()
	}
	return names
}

// cgroupNameOf is the last part of a process's v2 group: the line "0::/…".
func cgroupNameOf(pid int) string {
	b, err := readSmall(pid, "cgroup", 4<<10)
	if err != nil {
		return ""
	}
	for line := range bytes.Lines(b) {
		if bytes.HasPrefix(line, []byte("0::")) {
			line = bytes.TrimSuffix(line, []byte("\n"))
			return string(line[bytes.LastIndexByte(line, '/')+1:])
		}
	}
	return ""
}

func readSmall(pid int, name string, most int64) ([]byte, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/" + name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, most))
}

func readProcess(pid int) (*aetherv1.Process, error) {
	stat, err := readSmall(pid, "stat", 4<<10)
	if err != nil {
		return nil, err
	}
	p, err := parseStat(stat)
	if err != nil {
		return nil, err
	}
	status, err := readSmall(pid, "status", 8<<10)
	if err != nil {
		return nil, err
	}
	p.Uid = statusUID(status)
	argv, err := readSmall(pid, "cmdline", maxArgv)
	if err != nil {
		return nil, err
	}
	if argv = bytes.TrimSuffix(argv, []byte{0}); len(argv) > 0 {
		p.Argv = bytes.Split(argv, []byte{0})
	}
	return p, nil
}

// parseStat reads /proc/<pid>/stat, see proc(5). The second field is the process's own word, in parentheses, and may hold
// anything, parentheses too.
func parseStat(b []byte) (*aetherv1.Process, error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return nil, errors.New("stat without a name")
	}
	pid, err := strconv.ParseInt(string(bytes.TrimSpace(b[:open])), 10, 32)
	if err != nil {
		return nil, err
	}
	f := bytes.Fields(b[end+1:]) // f[0] is field 3
	if len(f) < 22 {
		return nil, fmt.Errorf("stat with %d fields", len(f)+2)
	}
	number := func(field int) uint64 {
		n, nerr := strconv.ParseUint(string(f[field-3]), 10, 64)
		err = errors.Join(err, nerr)
		return n
	}
	p := &aetherv1.Process{
		Pid: int32(pid), Name: bytes.Clone(b[open+1 : end]), State: string(f[0]), Parent: int32(number(4)),
		CpuTicks: number(14) + number(15), Threads: uint32(number(20)), StartedTicks: number(22),
		MemoryBytes: number(24) * uint64(os.Getpagesize()),
	}
	return p, err
}

// statusUID is the effective user of /proc/<pid>/status.
func statusUID(b []byte) uint32 {
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) >= 3 && string(f[0]) == "Uid:" {
			n, _ := strconv.ParseUint(string(f[2]), 10, 32) // the kernel's own figure
			return uint32(n)
		}
	}
	return 0
}

// signalProcess signals one process. Through a pidfd, so that it is the one whose start was looked at.
func signalProcess(r *aetherv1.SignalProcess) error {
	gone := failf(aetherv1.Code_CODE_NOT_FOUND, "there is no process %d", r.Pid)
	switch {
	case r.Signal < 1 || r.Signal > maxSignal:
		return failf(aetherv1.Code_CODE_INVALID, "signal %d is not 1 to %d", r.Signal, maxSignal)
	case r.Pid < 1:
		return gone
	case int(r.Pid) == os.Getpid():
		return failf(aetherv1.Code_CODE_PERMISSION, "process %d is the platform's", r.Pid)
	}
	fd, err := unix.PidfdOpen(int(r.Pid), 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) { // EINVAL: a thread
		return gone
	} else if err != nil {
		return asFailure("find the process", err)
	}
	defer unix.Close(fd)
	if r.StartedTicks != 0 {
		stat, err := readSmall(int(r.Pid), "stat", 4<<10)
		if err != nil {
			return gone
		}
		if p, err := parseStat(stat); err != nil || p.StartedTicks != r.StartedTicks {
			return gone
		}
	}
	if err := unix.PidfdSendSignal(fd, unix.Signal(r.Signal), nil, 0); errors.Is(err, unix.ESRCH) {
		return gone
	} else if err != nil {
		return asFailure("signal the process", err)
	}
	return nil
}
