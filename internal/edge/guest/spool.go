package guest

import (
	"container/list"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/linux"
	"dsec/internal/wire"
)

// What is kept of output, in bytes.
const (
	HeadCap    = 32 << 20  // from the start of a stream
	TailCap    = 32 << 20  // from its end
	SandboxCap = 256 << 20 // of all streams of a sandbox; the oldest finished go first
	NodeShare  = 20        // of all sandboxes: this part of the file system's size; the same

	memoryCap   = 64 << 10 // of one stream, then it goes to a file
	scarceCap   = 4 << 10  // the same once a sandbox has memoryTotal bytes in memory
	memoryTotal = 8 << 20
	nodeMemory  = 256 << 20 // of all sandboxes in memory, then all goes to files
	endedMemory = 64 << 10  // of a sandbox that has ended
)

// A node accounts for what the sandboxes of this process occupy together.
type node struct {
	memoryCap int64
	memory    atomic.Int64 // asked for with every piece of output

	mu      sync.Mutex
	disk    int64
	diskCap int64     // 0 until the first file is made
	spooled list.List // of *Command: finished, with bytes in files, oldest first
}

// thisNode is the process's: it has one edge, whose options it would only be handed through.
var thisNode = newNode()

func newNode() *node { return &node{memoryCap: nodeMemory} }

// measure finds the cap on disk from the file system of dir. Without an answer there is none but the sandboxes' own.
func (n *node) measure(dir string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.diskCap == 0 {
		if total, _, err := linux.DiskSpace(dir); err == nil {
			n.diskCap = total / NodeShare
		}
	}
}

// memoryFull reports whether that part of the memory is used up.
func (n *node) memoryFull(share int64) bool {
	return n.memory.Load() > n.memoryCap/share
}

// A spool accounts for what the streams of one sandbox occupy, and owns the directory.
type spool struct {
	dir  string
	node *node

	mu       sync.Mutex
	made     bool
	closed   bool       // nothing is kept any more
	disk     int64      // bytes in files
	memory   int64      // bytes in memory
	spooled  []*Command // finished, with bytes in files, oldest first
	headCap  int64      // HeadCap, smaller in tests
	tailCap  int64
	totalCap int64
	holdTime time.Duration // holdTime, the same
}

// onTheWay is how much of what a follower has read is kept for it: in the buffers of connections and proxies it may be lost.
func (s *spool) onTheWay() int64 { return min(s.tailCap/2, s.tailCap-wire.Window) }

func newSpool(dir string) *spool {
	return &spool{dir: dir, node: thisNode, headCap: HeadCap, tailCap: TailCap, totalCap: SandboxCap, holdTime: holdTime}
}

// create makes a file of the spool. The directory is made with the first.
func (s *spool) create(name string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("make spool file: %w", os.ErrClosed)
	}
	if !s.made {
		if err := os.MkdirAll(s.dir, 0o700); err != nil {
			return nil, fmt.Errorf("make spool directory: %w", err)
		}
		s.made = true
		s.node.measure(s.dir)
	}
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make spool file: %w", err)
	}
	return f, nil
}

// close ends the making of files: somebody is about to remove the directory.
func (s *spool) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
}

func (s *spool) path(name string) string { return filepath.Join(s.dir, name) }

// keepOnly removes the files of commands that are not named.
func (s *spool) keepOnly(names map[string]bool) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return // not made yet, or as unreadable as it will be for those who need it
	}
	for _, e := range entries {
		id, _, _ := strings.Cut(e.Name(), ".") // a command id has no dot
		if !names[id] {
			_ = os.Remove(s.path(e.Name())) // the sandbox's end removes the directory
		}
	}
}

// memoryLimit is how much one stream may hold in memory.
func (s *spool) memoryLimit() int {
	if s.node.memoryFull(1) {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memory > memoryTotal {
		return scarceCap
	}
	return memoryCap
}

func (s *spool) addMemory(n int) {
	s.mu.Lock()
	s.memory += int64(n)
	s.mu.Unlock()
	s.node.memory.Add(int64(n))
}

// reserve asks for n more bytes of disk and makes room by dropping the oldest finished output: of the sandbox if that has too
// much, of the node if all have. It must be called with no command's lock but holder's. What is dropped are finished
// commands, and never holder: who writes for a finished command withdraws it first.
func (s *spool) reserve(holder *Command, n int64) bool {
	for {
		s.mu.Lock()
		s.node.mu.Lock()
		ofSandbox := s.disk+n > s.totalCap
		ofNode := s.node.diskCap > 0 && s.node.disk+n > s.node.diskCap
		var oldest *Command
		switch {
		case !ofSandbox && !ofNode:
			s.disk += n
			s.node.disk += n
			s.node.mu.Unlock()
			s.mu.Unlock()
			return true
		case ofSandbox && len(s.spooled) > 0:
			oldest = s.spooled[0]
		case !ofSandbox && s.node.spooled.Len() > 0:
			oldest = s.node.spooled.Front().Value.(*Command)
		}
		s.node.mu.Unlock()
		s.mu.Unlock()
		if oldest == nil || oldest == holder {
			return false
		}
		if oldest.c.spool.withdraw(oldest) {
			oldest.dropBodies()
		}
	}
}

func (s *spool) free(n int64) {
	s.mu.Lock()
	s.disk -= n
	s.mu.Unlock()
	s.node.mu.Lock()
	s.node.disk -= n
	s.node.mu.Unlock()
}

// finished says that m's output may be dropped from now on.
func (s *spool) finished(m *Command) {
	if !m.onDisk() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if m.spooled == nil && !s.closed {
		m.spooled = s.node.spooled.PushBack(m)
		s.spooled = append(s.spooled, m)
	}
}

// withdraw says that m's output may not be dropped, and reports whether it could be until now.
func (s *spool) withdraw(m *Command) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if m.spooled == nil {
		return false
	}
	s.node.spooled.Remove(m.spooled)
	m.spooled = nil
	if i := slices.Index(s.spooled, m); i >= 0 {
		s.spooled = slices.Delete(s.spooled, i, i+1)
	}
	return true
}

// archive moves m's output from memory to files.
func (s *spool) archive(m *Command) {
	s.withdraw(m)
	m.spill()
	s.finished(m)
}

// forget drops m's output with m.
func (s *spool) forget(m *Command) {
	s.withdraw(m)
	m.dropBodies()
}
