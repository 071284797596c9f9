// Package layers mounts the EROFS layers of environments, each once per node however many sandboxes use it.
//
// What surprises:
//
//   - A layer is known by the digests of all its files, not of its metadata alone: the metadata does not say what must be in
//     its data blobs, so the same metadata with other blobs is another layer, and nobody's mount.
//   - What was verified is what is mounted: files are opened once, checked and mounted through the same descriptors. The metadata
//     is hashed whole before every mount, a blob before its first one on this node and again when its file has changed (inode,
//     size, times). So the first sandbox of an environment waits until all of it was read. A mount that an earlier run left
//     is trusted, since only root can have made it.
//   - A mount without a holder is kept for the next sandbox, the most recently used ones up to Options.KeepIdle. Unmounting takes
//     nothing from a sandbox that still runs: its overlay has its own reference.
//   - Holders are not on disk. After a restart the edge acquires again for the sandboxes it recovered, which costs nothing
//     where the mount exists.
//   - The kernel reads the files without loop devices. Where their file system does not allow it (tmpfs, overlay, kernels before
//     6.12) they go through loop devices; Fallbacks counts these mounts.
package layers

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// closePause is the pause between two tries to unmount what is still in use.
const closePause = 10 * time.Millisecond

// Options of Open.
type Options struct {
	RunDir   string // on a private mount
	KeepIdle int    // mounts without a holder that are kept
	Log      *slog.Logger
}

// Mounts are the mounted layers of one node.
type Mounts struct {
	dir      string
	verified string // directory of what blobs were verified: by digest, the file that had it
	keepIdle int
	log      *slog.Logger

	fallbacks atomic.Int64

	work    context.Context // of the goroutines that mount; ends with Close
	stop    context.CancelFunc
	pending sync.WaitGroup

	mu     sync.Mutex
	layers map[string]*layer                // by key
	held   map[sandbox.ID]map[string]*layer // what each holder holds
	idle   *list.List                       // of *layer without a holder, the longest unused first
	closed bool
}

// A layer is mounted or about to be.
type layer struct {
	key, dir string
	ready    chan struct{} // closed once err is final
	err      error
	users    int           // holders, and calls of Acquire that wait for it
	idle     *list.Element // in Mounts.idle, or nil
}

// failed reports whether mounting it has failed.
func (l *layer) failed() bool {
	select {
	case <-l.ready:
		return l.err != nil
	default:
		return false
	}
}

// Open adopts the mounts of an earlier run below o.RunDir.
func Open(ctx context.Context, o Options) (*Mounts, error) {
	if err := os.MkdirAll(o.RunDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of layers: %w", err)
	}
	dir, err := filepath.EvalSymlinks(o.RunDir) // as the table of mounts names it
	if err != nil {
		return nil, err
	}
	m := &Mounts{dir: dir, verified: dir + ".verified", keepIdle: o.KeepIdle, log: o.Log,
		layers: make(map[string]*layer), held: make(map[sandbox.ID]map[string]*layer), idle: list.New()}
	if err := os.MkdirAll(m.verified, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of verified blobs: %w", err)
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	if err := m.adopt(); err != nil {
		return nil, fmt.Errorf("adopt mounted layers: %w", err)
	}
	m.work, m.stop = context.WithCancel(context.WithoutCancel(ctx))
	return m, nil
}

// adopt takes every complete mount as an idle layer and removes what a process killed before mounting left.
func (m *Mounts) adopt() error {
	mounts, err := mountinfo.Self()
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(m.dir, e.Name())
		mount, mounted := mountinfo.At(mounts, path)
		if mounted && mount.Type == "erofs" && isKey(e.Name()) {
			l := &layer{key: e.Name(), dir: path, ready: make(chan struct{})}
			close(l.ready)
			m.layers[l.key] = l
			l.idle = m.idle.PushBack(l)
			continue
		}
		m.log.Warn("removing what is no layer", "path", path)
		if err := unmount(path); err != nil {
			return err
		}
	}
	return nil
}

// Acquire mounts the layers of one sandbox, lowest first, and gives their directories in overlay's order, topmost first. They
// stay mounted until the holder is released. A holder may acquire several times; on an error it holds what it held before.
func (m *Mounts) Acquire(ctx context.Context, holder sandbox.ID, sources []rootfs.Source) (lowers []string, err error) {
	if _, err := sandbox.ParseID(string(holder)); err != nil {
		return nil, err
	}
	for _, s := range sources {
		if err := validate(s); err != nil {
			return nil, err
		}
	}
	taken := make([]*layer, 0, len(sources))
	defer func() {
		if err != nil {
			m.drop(taken...)
		}
	}()
	for _, s := range sources {
		l, err := m.take(s)
		if err != nil {
			return nil, err
		}
		taken = append(taken, l)
	}
	lowers = make([]string, len(taken))
	for i, l := range taken {
		select {
		case <-l.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if l.err != nil {
			return nil, l.err
		}
		lowers[len(taken)-1-i] = l.dir
	}
	m.hold(holder, taken)
	return lowers, nil
}

// take finds the layer or begins to mount it, and counts the caller as a user. The first caller's context does not matter to
// the mounting: others may wait for the same.
func (m *Mounts) take(s rootfs.Source) (*layer, error) {
	key := keyOf(s)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the edge is shutting down")
	}
	l, ok := m.layers[key]
	if !ok || l.failed() { // what failed for others may be right by now: who waits for it gets its error, who comes later does not
		l = &layer{key: key, dir: filepath.Join(m.dir, key), ready: make(chan struct{})}
		m.layers[key] = l
		m.pending.Go(func() {
			l.err = m.mount(m.work, l, s)
			close(l.ready)
		})
	}
	l.users++
	if l.idle != nil {
		m.idle.Remove(l.idle)
		l.idle = nil
	}
	return l, nil
}

// hold turns the uses of one Acquire into the holder's. A layer that it has already, or twice, counts once.
func (m *Mounts) hold(holder sandbox.ID, taken []*layer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	has := m.held[holder]
	if has == nil {
		has = make(map[string]*layer)
		m.held[holder] = has
	}
	for _, l := range taken {
		if has[l.key] != nil {
			l.users--
		}
		has[l.key] = l
	}
}

// Release gives up what the holder holds. Without that it does nothing. A layer that cannot be unmounted now stays idle and is
// tried again, so the holder has nothing to do about it: the error is always nil.
func (m *Mounts) Release(_ context.Context, holder sandbox.ID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.held[holder] {
		m.dropLocked(l)
	}
	delete(m.held, holder)
	m.evictLocked(m.keepIdle)
	return nil
}

func (m *Mounts) drop(layers ...*layer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range layers {
		m.dropLocked(l)
	}
	m.evictLocked(m.keepIdle)
}

// dropLocked takes one use from a layer. One whose mounting failed is forgotten, so that the next caller tries anew.
func (m *Mounts) dropLocked(l *layer) {
	l.users--
	failed := l.failed()
	if failed && m.layers[l.key] == l {
		delete(m.layers, l.key)
	}
	if l.users == 0 && !failed && l.idle == nil {
		l.idle = m.idle.PushBack(l)
	}
}

// evictLocked unmounts the longest unused layers until at most keep are idle. What cannot be unmounted now stays idle.
func (m *Mounts) evictLocked(keep int) {
	surplus := m.idle.Len() - keep
	for e := m.idle.Front(); e != nil && surplus > 0; {
		l, next := e.Value.(*layer), e.Next()
		if m.removeLocked(l) {
			surplus--
		}
		e = next
	}
}

func (m *Mounts) removeLocked(l *layer) (gone bool) {
	select {
	case <-l.ready:
	default:
		return false // everyone who asked for it left while it was being mounted; it is idle once it is there
	}
	if l.err == nil {
		if err := unmount(l.dir); err != nil {
			m.log.Warn("cannot unmount an idle layer", "path", l.dir, "error", err)
			return false
		}
	}
	m.idle.Remove(l.idle)
	l.idle = nil
	if m.layers[l.key] == l {
		delete(m.layers, l.key)
	}
	return true
}

// unmount removes a mount point with all that is mounted on it.
func unmount(path string) error {
	for {
		if err := linux.UnmountPath(path, false); err != nil {
			return err
		}
		err := os.Remove(path)
		switch {
		case err == nil || errors.Is(err, fs.ErrNotExist):
			return nil
		case !linux.IsBusy(err): // busy: mounted more than once
			return err
		}
	}
}

// Fallbacks is how many layers had to be mounted through loop devices so far.
func (m *Mounts) Fallbacks() int64 { return m.fallbacks.Load() }

// Sweep releases every holder that is not in keep, and unmounts idle layers beyond KeepIdle. It returns these holders.
func (m *Mounts) Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var gone []sandbox.ID
	for holder, has := range m.held {
		if keep[holder] {
			continue
		}
		gone = append(gone, holder)
		for _, l := range has {
			m.dropLocked(l)
		}
		delete(m.held, holder)
	}
	m.evictLocked(m.keepIdle)
	return gone, ctx.Err()
}

// Detach ends the work in hand and leaves every mount as it is, for the next Open.
func (m *Mounts) Detach() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.stop()
	m.pending.Wait()
}

// Close unmounts every layer. One that is still in use is tried again until ctx ends, and is then left to its last user.
func (m *Mounts) Close(ctx context.Context) error {
	m.Detach()
	if _, err := m.Sweep(context.WithoutCancel(ctx), nil); err != nil {
		return err
	}
	for !m.empty() {
		timer := time.NewTimer(closePause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(fmt.Errorf("layers are still in use: %w", ctx.Err()), m.detachAll())
		case <-timer.C:
		}
	}
	return errors.Join(linux.RemoveDir(m.dir), os.RemoveAll(m.verified))
}

// empty unmounts what it can and reports whether nothing is left.
func (m *Mounts) empty() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.evictLocked(0)
	return m.idle.Len() == 0
}

func (m *Mounts) detachAll() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for e := m.idle.Front(); e != nil; e = e.Next() {
		dir := e.Value.(*layer).dir
		errs = append(errs, linux.UnmountPath(dir, true), linux.RemoveDir(dir))
	}
	return errors.Join(errs...)
}
