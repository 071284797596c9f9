package aether

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	maxTreeDepth = 20_000  // directories below each other
	maxOpen      = 64      // of these, open at once
	maxPending   = 4 << 20 // bytes of names that wait
	nameCost     = 32      // of each besides
	levelCost    = 192     // of each level besides its name
	direntSize   = 32 << 10
)

func idOf(st *unix.Stat_t) fileID { return fileID{st.Dev, st.Ino} }

// A treeDir is one directory of a walk.
type treeDir struct {
	fd      int // -1 while it is closed
	id      fileID
	depth   int      // 0 at the top
	start   int      // of its name in walker.prefix
	pending []string // directories in it that are still to be entered
	read    bool     // to its end
	tries   int      // of leave

	out   int // copying: the directory that it becomes; -1 if none is open
	outID fileID
}

// A walker goes through a tree from the top without recursion, by descriptors: whoever moves or replaces directories
// meanwhile cannot lead it elsewhere, links are never followed, and nothing but directories is opened. What it holds is
// bounded: of the directories above it the innermost are open; those further out are read to their end, keep the names of
// what is still to be entered, and are found again by "..", if that is still where it came from.
type walker struct {
	ctx  context.Context
	held share
	// visit looks at one entry and says whether it is to be entered.
	visit func(dir *treeDir, name string) (enter bool, err error)
	// entered and leave may be nil. leave is called when all below dir is done; name is dir's in parent, which is nil at the top.
	// errAgain makes the walker read dir once more.
	entered func(parent, dir *treeDir, name string) error
	leave   func(parent, dir *treeDir, name string) error
	// unopened decides about a directory that could not be entered; nil: what is gone is passed over.
	unopened func(dir *treeDir, name string, err error) error
	madeUp   bool // file systems of the kernel are passed over below the top, instead of refused

	levels  []*treeDir
	prefix  []byte // "a/b/" of the innermost level, from the top
	pending int    // bytes
	buf     []byte
	names   []string
}

var errAgain = errors.New("read the directory again")

// run walks what is below fd, which it closes.
func (w *walker) run(fd int) error {
	defer w.close()
	w.buf = make([]byte, direntSize)
	if err := w.push(fd, ""); err != nil {
		return err
	}
	for len(w.levels) > 0 {
		if err := w.step(w.levels[len(w.levels)-1]); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) close() {
	for _, l := range w.levels {
		l.close()
	}
	w.levels = nil
	w.held.end()
}

func (l *treeDir) close() {
	for _, fd := range []*int{&l.fd, &l.out} {
		if *fd >= 0 {
			_ = unix.Close(*fd)
		}
		*fd = -1
	}
}

func (w *walker) step(l *treeDir) error {
	if w.ctx.Err() != nil {
		return errCanceled
	}
	switch n := len(l.pending); {
	case n > 0:
		name := l.pending[n-1]
		l.pending = l.pending[:n-1]
		w.pending -= len(name) + nameCost
		w.held.give(len(name) + nameCost)
		return w.descend(l, name)
	case !l.read:
		return w.batch(l)
	}
	return w.ascend(l)
}

// batch reads some entries of l and visits them.
func (w *walker) batch(l *treeDir) error {
	n, err := readDents(l.fd, w.buf)
	if err != nil {
		return err
	}
	if n == 0 {
		l.read = true
		return nil
	}
	_, _, w.names = unix.ParseDirent(w.buf[:n], -1, w.names[:0])
	for _, name := range w.names {
		if w.ctx.Err() != nil {
			return errCanceled
		}
		enter, err := w.visit(l, name)
		if err != nil {
			return err
		}
		if !enter {
			continue
		}
		if w.pending += len(name) + nameCost; w.pending > maxPending {
			return failf(aetherv1.Code_CODE_RESOURCES, "the tree is too deep and too wide at once; do it by a command, or in parts")
		}
		if !w.held.take(len(name) + nameCost) {
			return errNames
		}
		l.pending = append(l.pending, name)
	}
	return nil
}

// readDents reads some entries of a directory: none at its end, or once it was removed.
func readDents(fd int, b []byte) (int, error) {
	for {
		n, err := unix.Getdents(fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ENOENT):
			return 0, nil
		default:
			return max(n, 0), err
		}
	}
}

func openDirAt(dir int, name string) (int, error) {
	for {
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func (w *walker) descend(l *treeDir, name string) error {
	fd, err := openDirAt(l.fd, name)
	if err != nil {
		if w.unopened != nil {
			return w.unopened(l, name, err)
		}
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	if len(w.levels) >= maxTreeDepth {
		_ = unix.Close(fd)
		return failf(aetherv1.Code_CODE_RESOURCES, "the tree is more than %d directories deep; do it by a command, or in parts", maxTreeDepth)
	}
	return w.push(fd, name)
}

// push makes fd the innermost level.
func (w *walker) push(fd int, name string) error {
	l := &treeDir{fd: fd, out: -1, start: len(w.prefix), depth: len(w.levels)}
	w.levels = append(w.levels, l)
	if !w.held.take(len(name) + levelCost) {
		return errNames
	}
	if name != "" {
		w.prefix = append(append(w.prefix, name...), '/')
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	l.id = idOf(&st)
	parent := w.above(1)
	if parent == nil || parent.id.dev != l.id.dev {
		if err := checkStored(fd); err != nil {
			if parent == nil || !w.madeUp {
				return err
			}
			l.read = true
		}
	}
	if w.entered != nil {
		if err := w.entered(parent, l, name); err != nil {
			return err
		}
	}
	return w.closeOuter()
}

// above is the level n above the innermost, or nil.
func (w *walker) above(n int) *treeDir {
	if i := len(w.levels) - 1 - n; i >= 0 {
		return w.levels[i]
	}
	return nil
}

// closeOuter closes the outermost of too many open levels.
func (w *walker) closeOuter() error {
	l := w.above(maxOpen)
	if l == nil || l.fd < 0 {
		return nil
	}
	// Its entries are visited while the prefix is another's.
	inner := w.prefix
	w.prefix = w.prefix[:w.above(maxOpen-1).start:w.above(maxOpen-1).start]
	for !l.read {
		if err := w.batch(l); err != nil {
			return err
		}
	}
	w.prefix = inner
	l.close()
	return nil
}

// ascend leaves l, the innermost.
func (w *walker) ascend(l *treeDir) error {
	parent := w.above(1)
	if parent != nil && parent.fd < 0 {
		if err := parent.reopen(l); err != nil {
			return err
		}
	}
	name := string(w.prefix[l.start:max(l.start, len(w.prefix)-1)])
	if w.leave != nil {
		err := w.leave(parent, l, name)
		if errors.Is(err, errAgain) {
			l.read = false
			l.tries++
			_, err = unix.Seek(l.fd, 0, unix.SEEK_SET)
			return err
		}
		if err != nil {
			return err
		}
	}
	l.close()
	w.held.give(len(name) + levelCost)
	w.prefix = w.prefix[:l.start]
	w.levels = w.levels[:len(w.levels)-1]
	return nil
}

// reopen finds l again above child.
func (l *treeDir) reopen(child *treeDir) (err error) {
	if l.fd, err = openAbove(child.fd, l.id); err != nil {
		return err
	}
	if child.out >= 0 {
		l.out, err = openAbove(child.out, l.outID)
	}
	return err
}

func openAbove(dir int, id fileID) (int, error) {
	fd, err := openDirAt(dir, "..")
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && idOf(&st) != id {
		err = failf(aetherv1.Code_CODE_IO, "a directory was moved away while it was worked on")
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
