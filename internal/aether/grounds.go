package aether

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// What trusted commands need comes from the edge when they are first asked for, as descriptors: most sandboxes never run one,
// and a memory control group costs the kernel 44 KiB on two CPUs, and more on more.

// The places of descriptors in Grounds; v1 tasks files follow.
const (
	groundFreeze = iota // cgroup.freeze of the user's group
	groundGroup         // v2 directory
	groundTools
	groundTasks

	maxGrounds = groundTasks + 8
)

// errHandedOver ends a connection that was made to hand over.
var errHandedOver = errors.New("everything was handed over")

// A receiver is a connection over which descriptors may come, until it is told that none will.
type receiver struct {
	*net.UnixConn
	files []int
	plain bool
}

// Read is called by the connection's reader only, as its handlers are.
func (r *receiver) Read(b []byte) (int, error) {
	if r.plain {
		return r.UnixConn.Read(b)
	}
	oob := make([]byte, unix.CmsgSpace(4*maxGrounds))
	n, m, flags, _, err := r.ReadMsgUnix(b, oob) // close-on-exec
	if m > 0 {
		r.take(oob[:m])
	}
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("too many descriptors")
	}
	return n, err
}

func (r *receiver) take(oob []byte) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return
	}
	for i := range messages {
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
			r.files = append(r.files, fds...)
		}
	}
	if len(r.files) > maxGrounds {
		r.drop()
	}
}

// drop closes what was not used.
func (r *receiver) drop() {
	for _, fd := range r.files {
		unix.Close(fd)
	}
	r.files = nil
}

// takeGrounds begins to serve trusted commands. Who has them already needs none.
func (s *Server) takeGrounds(r *receiver, m *aetherv1.Grounds) error {
	if r == nil {
		return errors.New("no descriptors can come over this connection")
	}
	defer r.drop()
	if len(r.files) != groundTasks+int(m.V1Tasks) {
		return fmt.Errorf("%d descriptors, of which %d v1 tasks files", len(r.files), m.V1Tasks)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trusted != nil {
		return nil
	}
	if s.pool == nil || s.closing {
		return errors.New("there are no control groups, or no more")
	}
	pool, err := newCgroupPool(r.files[groundGroup])
	if err != nil {
		return err
	}
	events, err := unix.Openat(s.pool.root, "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open cgroup.events: %w", err)
	}
	s.gate.arm(r.files[groundFreeze], events)
	t := &spawner{
		jobs: make(chan job, maxTrusted), tasks: r.files[groundTasks:], cpus: s.spawner.cpus, pool: pool, reaper: s.reaper, forking: s.spawner.forking,
		guarded: s.spawner.guarded, stopped: make(chan struct{}), gate: s.gate, trusted: true, tools: r.files[groundTools],
	}
	r.files = nil
	ready := make(chan error, 1)
	go t.run(ready)
	if err := <-ready; err != nil {
		return fmt.Errorf("place the spawner of trusted commands: %w", err)
	}
	s.trusted = t
	return nil
}
