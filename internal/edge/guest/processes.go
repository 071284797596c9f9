package guest

import (
	"context"
	"slices"
	"strings"

	aetherv1 "dsec/api/aether/v1"
	"dsec/sandbox"
)

const (
	maxProcesses = 10_000 // of one listing
	maxPage      = 1024
	maxArgv      = 1 << 10 // bytes of a process's arguments, of which each counts for argCost at least
	argCost      = 16
	processGone  = "process_not_found"
)

// A Process is one process inside, as it calls itself: valid UTF-8 and nothing more is promised of its words.
type Process struct {
	PID, Parent  int
	UID          uint32
	Name         string
	Argv         []string
	State        string
	CPUTicks     uint64 // of 1/100 s
	Memory       int64  // resident, bytes
	StartedTicks uint64
	Command      string // "" = of none that runs
	Threads      int
}

// Processes lists what runs inside, ascending by pid. more: there are more than it lists.
func (c *Client) Processes(ctx context.Context) (list []Process, more bool, err error) {
	after := int32(0)
	for len(list) < maxProcesses {
		req := &aetherv1.Call{Call: &aetherv1.Call_ListProcesses{ListProcesses: &aetherv1.ListProcesses{AfterPid: after}}}
		reply, err := c.call(ctx, req, processGone, requestTimeout)
		if err != nil {
			return nil, false, err
		}
		page := reply.GetProcesses()
		if len(page.GetProcesses()) > maxPage {
			return nil, false, c.violated("a page of too many processes")
		}
		for _, m := range page.GetProcesses() {
			if m.GetPid() <= after {
				return nil, false, c.violated("processes out of order")
			}
			after = m.GetPid()
			list = append(list, processOf(m))
		}
		next := page.GetNextAfter()
		if next == 0 {
			return list, false, nil
		}
		if next < after || (next == after && len(page.GetProcesses()) == 0) {
			return nil, false, c.violated("a page of processes that goes back")
		}
		after = next
	}
	return list[:maxProcesses], true, nil
}

func processOf(m *aetherv1.Process) Process {
	p := Process{
		PID: int(m.Pid), Parent: int(m.Parent), UID: m.Uid, Name: cleanText(m.Name, 64), State: cleanText([]byte(m.State), 4),
		CPUTicks: m.CpuTicks, Memory: int64(min(m.MemoryBytes, 1<<62)), StartedTicks: m.StartedTicks, Threads: int(m.Threads),
	}
	if sandbox.ValidCommandID(m.CommandId) {
		p.Command = m.CommandId
	}
	left := maxArgv
	for _, a := range m.Argv {
		if left <= 0 {
			break
		}
		p.Argv = append(p.Argv, cleanText(a, left))
		left -= max(len(a)+1, argCost) // ten thousand processes may have a thousand empty ones each
	}
	return p
}

// cleanText makes valid UTF-8 of at most some n bytes of b.
func cleanText(b []byte, n int) string {
	return strings.ToValidUTF8(string(slices.Clone(b[:min(len(b), n)])), "\uFFFD")
}

// Signal signals one process; startedTicks, if not 0, must be its own.
func (c *Client) Signal(ctx context.Context, pid, signal int, startedTicks uint64) error {
	req := &aetherv1.SignalProcess{Pid: int32(pid), Signal: int32(signal), StartedTicks: startedTicks}
	_, err := c.call(ctx, &aetherv1.Call{Call: &aetherv1.Call_SignalProcess{SignalProcess: req}}, processGone, requestTimeout)
	return err
}

// violated ends the connection for what the answer to a call said.
func (c *Client) violated(what string) error {
	err := violation(what)
	c.mu.Lock()
	l := c.link
	c.mu.Unlock()
	if l != nil {
		l.conn.Fail(err)
	}
	return err
}
