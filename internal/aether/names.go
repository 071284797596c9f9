package aether

import (
	"sync/atomic"

	aetherv1 "dsec/api/aether/v1"
)

// maxNamesHeld is how many bytes all requests together may hold of what a tree that they go through makes them remember: names,
// paths, and levels. This process has little memory, the tree is hostile, and there may be many requests.
const maxNamesHeld = 16 << 20

// names counts them. nil counts nothing.
type names struct{ held atomic.Int64 }

// take asks for n bytes, which are to be given back.
func (m *names) take(n int) bool {
	if m == nil {
		return true
	}
	if m.held.Add(int64(n)) > maxNamesHeld {
		m.held.Add(-int64(n))
		return false
	}
	return true
}

func (m *names) give(n int) {
	if m != nil {
		m.held.Add(-int64(n))
	}
}

// A share is what one request holds of them.
type share struct {
	of *names
	n  int
}

func (s *share) take(n int) bool {
	if !s.of.take(n) {
		return false
	}
	s.n += n
	return true
}

func (s *share) give(n int) {
	s.n -= n
	s.of.give(n)
}

// end gives back what is left.
func (s *share) end() { s.give(s.n) }

var errNames = failf(aetherv1.Code_CODE_RESOURCES,
	"requests that go through trees of this sandbox hold too many names; try again when some are done, do it by a command, or in parts")
