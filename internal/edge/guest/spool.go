package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// What is kept of output, in bytes.
const (
	HeadCap    = 32 << 20  // from the start of a stream
	TailCap    = 32 << 20  // from its end
	SandboxCap = 256 << 20 // of all streams of a sandbox; the oldest finished go first

	memoryCap   = 64 << 10 // of one stream, then it goes to a file
	scarceCap   = 4 << 10  // the same once a sandbox has memoryTotal bytes in memory
	memoryTotal = 8 << 20
)

// A spool accounts for what the streams of one sandbox occupy, and owns the directory.
type spool struct {
	dir string

	mu       sync.Mutex
	made     bool
	disk     int64      // bytes in files
	memory   int64      // bytes in memory
	spooled  []*Command // finished, with bytes in files, oldest first
	headCap  int64      // HeadCap, smaller in tests
	tailCap  int64
	totalCap int64
}

func newSpool(dir string) *spool {
	return &spool{dir: dir, headCap: HeadCap, tailCap: TailCap, totalCap: SandboxCap}
}

// create makes a file of the spool. The directory is made with the first.
func (s *spool) create(name string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.made {
		if err := os.MkdirAll(s.dir, 0o700); err != nil {
			return nil, fmt.Errorf("make spool directory: %w", err)
		}
		s.made = true
	}
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make spool file: %w", err)
	}
	return f, nil
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
}

// reserve asks for n more bytes of disk and makes room by dropping the oldest finished output. It must be called with
// no command's lock but holder's: what is dropped are finished commands, and never holder.
func (s *spool) reserve(holder *Command, n int64) bool {
	for {
		s.mu.Lock()
		if s.disk+n <= s.totalCap {
			s.disk += n
			s.mu.Unlock()
			return true
		}
		if len(s.spooled) == 0 || s.spooled[0] == holder {
			s.mu.Unlock()
			return false
		}
		oldest := s.spooled[0]
		s.spooled = s.spooled[1:]
		s.mu.Unlock()
		oldest.dropBodies()
	}
}

func (s *spool) free(n int64) {
	s.mu.Lock()
	s.disk -= n
	s.mu.Unlock()
}

// finished says that m's output may be dropped from now on.
func (s *spool) finished(m *Command) {
	if !m.onDisk() {
		return
	}
	s.mu.Lock()
	s.spooled = append(s.spooled, m)
	s.mu.Unlock()
}

// forget drops m's output with m.
func (s *spool) forget(m *Command) {
	s.mu.Lock()
	if i := slices.Index(s.spooled, m); i >= 0 {
		s.spooled = slices.Delete(s.spooled, i, i+1)
	}
	s.mu.Unlock()
	m.dropBodies()
}
