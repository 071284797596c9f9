// Package config is what the launcher hands to aether: the fixed file descriptors and one message. It is a leaf, so that
// a driver can use it without linking aether.
//
// # Inherited file descriptors
//
//	fd    what                                                  how aether uses it
//	0-2   /dev/null, or a bounded log for 2                     panics
//	3     listening AF_UNIX stream socket                       the edge connects; made outside the sandbox's mount
//	                                                            namespace, so that nothing inside has a path to it
//	4     pipe or memfd at offset 0 with one Config (Encode)    read once, then closed
//	5     O_DIRECTORY of the v2 cgroup <sandbox>/user           mkdirat, CLONE_INTO_CGROUP, cgroup.kill; absent (closed) if
//	                                                            Cgroup is "none"
//	6...  V1Tasks v1 `tasks` files of <sandbox>/user, O_WRONLY  the spawner thread writes "0" to each, once
//
// Its environment should be GOMAXPROCS=1 and nothing else: aether sets that itself, too, but by then the runtime has made
// a second processor, which costs 100 KiB at rest.
//
// What surprises:
//
//   - CLONE_INTO_CGROUP asks for write permission on cgroup.procs of the nearest common ancestor of the parent's group and
//     the target. With aether in <sandbox>/aether that is <sandbox>: the launcher must give cgroup.procs of <sandbox> (that one
//     file), and of <sandbox>/user the directory, cgroup.procs, cgroup.threads and cgroup.subtree_control, to the owner of the
//     user namespace's root.
//   - v1 groups are per thread: only the spawner thread enters <sandbox>/user, so the pids limit there must be one more than
//     the user's.
//   - aether keeps CAP_SYS_RESOURCE in its permitted set and drops it from the bounding set of the thread that forks:
//     commands cannot get it, and a process that lacks a capability of PID 1 cannot ptrace it.
package config

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
)

// The fixed descriptors. V1 tasks files follow from FDTasks on.
const (
	FDListener = 3
	FDConfig   = 4
	FDCgroup   = 5
	FDTasks    = 6
)

// Cgroup modes.
const (
	CgroupNone   = "none"  // no control groups: kills go to process groups
	CgroupV2     = "v2"    // v2 with controllers
	CgroupHybrid = "v1+v2" // limits by v1 tasks files, the v2 tree kills and freezes
)

// KeyLen is the length of the key in bytes.
const KeyLen = 32

const (
	maxEncoded = 1 << 20
	maxV1Tasks = 16
)

// Config is the one message to aether.
type Config struct {
	Key      []byte            // KeyLen bytes; the edge proves itself with it
	Hostname string            // for HOSTNAME; the launcher has set the real one
	Env      map[string]string // for commands, where they set none
	Cgroup   string
	V1Tasks  int   // how many fds from FDTasks on
	CPUs     []int // CPU mask of commands; empty = all
}

// Validate checks what aether relies on.
func (c Config) Validate() error {
	switch {
	case len(c.Key) != KeyLen:
		return fmt.Errorf("config: key of %d bytes, want %d", len(c.Key), KeyLen)
	case c.Cgroup != CgroupNone && c.Cgroup != CgroupV2 && c.Cgroup != CgroupHybrid:
		return fmt.Errorf("config: unknown cgroup mode %q", c.Cgroup)
	case c.V1Tasks < 0 || c.V1Tasks > maxV1Tasks:
		return fmt.Errorf("config: %d v1 tasks files", c.V1Tasks)
	case c.V1Tasks > 0 && c.Cgroup != CgroupHybrid:
		return fmt.Errorf("config: v1 tasks files in mode %q", c.Cgroup)
	}
	for _, n := range c.CPUs {
		if n < 0 || n >= 1024 {
			return fmt.Errorf("config: cpu %d", n)
		}
	}
	return nil
}

// Encode makes the message: a big-endian uint32 length, then an aether.v1.Config.
func (c Config) Encode() ([]byte, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	m := &aetherv1.Config{Key: c.Key, Hostname: c.Hostname, Cgroup: c.Cgroup, V1Tasks: uint32(c.V1Tasks)}
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		m.Env = append(m.Env, k+"="+c.Env[k])
	}
	for _, n := range c.CPUs {
		m.Cpus = append(m.Cpus, uint32(n))
	}
	body, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode config: %w", err)
	}
	if len(body) > maxEncoded {
		return nil, fmt.Errorf("config of %d bytes, at most %d", len(body), maxEncoded)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...), nil
}

// Decode reads one message.
func Decode(r io.Reader) (Config, error) {
	var c Config
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return c, fmt.Errorf("read config: %w", err)
	}
	n := binary.BigEndian.Uint32(length[:])
	if n > maxEncoded {
		return c, errors.New("config is too long")
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return c, fmt.Errorf("read config: %w", err)
	}
	m := new(aetherv1.Config)
	if err := proto.Unmarshal(body, m); err != nil {
		return c, fmt.Errorf("decode config: %w", err)
	}
	c = Config{Key: m.Key, Hostname: m.Hostname, Cgroup: m.Cgroup, V1Tasks: int(m.V1Tasks)}
	for _, kv := range m.Env {
		if k, v, ok := strings.Cut(kv, "="); ok {
			if c.Env == nil {
				c.Env = make(map[string]string)
			}
			c.Env[k] = v
		}
	}
	for _, n := range m.Cpus {
		c.CPUs = append(c.CPUs, int(n))
	}
	return c, c.Validate()
}
