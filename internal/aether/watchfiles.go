package aether

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	maxWatchers  = 8      // at once: the kernel keeps up to 16,384 events for each
	maxWatches   = 32_768 // directories, of all watchers together
	watchBuffer  = 16 << 10
	maxPublished = 64
	maxLast      = 64 << 10 // bytes of paths whose last events are remembered
	// watchPause lets events come together, and bounds how often a sandbox can wake this process.
	watchPause = 20 * time.Millisecond

	watchMask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

// A watched directory is known by where it is in another: so all below it moves along with it.
type watched struct {
	parent int32 // 0 at the top
	name   string
	moved  bool // it was found at a new place, and its own event of that is still to come
	lost   bool // it was moved out of the tree
	seen   int  // the last of watcher.scans that met it
}

// A watcher tells what happens in a directory and, if asked, in all below it.
type watcher struct {
	srv       *Server
	ctx       context.Context
	acc       account
	top       string
	topID     fileID
	topWD     int32
	recursive bool
	file      *os.File
	fd        int
	dirs      map[int32]*watched
	out       records
	last      map[string]uint32 // path -> kind of its last event, in one batch
	lastBytes int
	scans     int
	rescan    bool
	sweep     bool
	published map[uint32]uint32 // cookies of temporary names that were left -> what that is for the name that is told next
}

var errGone = failf(aetherv1.Code_CODE_NOT_FOUND, "the watched directory is gone, or has moved away")

func (b *byteStream) watchFiles(req *aetherv1.WatchFiles) (*aetherv1.Done, error) {
	srv := b.s.srv
	top, err := checkPath(string(req.Path))
	if err != nil {
		return nil, err
	}
	acc, err := srv.accts.lookup(req.User)
	if err != nil {
		return nil, err
	}
	if srv.watchers.Add(1) > maxWatchers {
		srv.watchers.Add(-1)
		return nil, failf(aetherv1.Code_CODE_RESOURCES, "%d directories are being watched in this sandbox; end one of them, or watch one above several, recursively", maxWatchers)
	}
	defer srv.watchers.Add(-1)
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, watchFailure(err)
	}
	w := &watcher{
		srv: srv, ctx: b.ctx, acc: acc, top: top, recursive: req.Recursive, file: os.NewFile(uintptr(fd), "inotify"), fd: fd,
		dirs: make(map[int32]*watched), out: records{w: b}, last: make(map[string]uint32), published: make(map[uint32]uint32),
	}
	defer w.close()
	defer context.AfterFunc(b.ctx, func() { _ = w.file.Close() })() // ends the read that waits
	if err := w.start(); err != nil && b.ctx.Err() == nil {
		return nil, asFailure("watch "+clip(string(req.Path), 256), err)
	}
	b.accept()
	if err = w.run(); !errors.Is(err, errCanceled) {
		err = asFailure("watch "+clip(string(req.Path), 256), err)
	}
	return nil, err
}

func (w *watcher) close() {
	_ = w.file.Close()
	w.srv.watches.Add(-int64(len(w.dirs)))
}

// watchFailure tells limits of the kernel, which are the sandbox's own, from a full disk.
func watchFailure(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return failf(aetherv1.Code_CODE_RESOURCES, "the sandbox has no more watches of directories (fs.inotify.max_user_watches): end programs inside that watch files, or watch less")
	case errors.Is(err, unix.EMFILE):
		return failf(aetherv1.Code_CODE_RESOURCES, "the sandbox can watch no more (fs.inotify.max_user_instances): end programs inside that watch files")
	}
	return err
}

func (w *watcher) start() error {
	return asUser(w.acc, func() error {
		top, err := openRef(w.top, unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer unix.Close(top)
		var st unix.Stat_t
		if err := unix.Fstat(top, &st); err != nil {
			return err
		}
		if err := checkStored(top); err != nil {
			return err
		}
		w.topID = idOf(&st)
		fd, wd, err := w.add(top, ".", &watched{})
		if err != nil {
			return err
		}
		w.topWD = wd
		return w.fill(top, fd, wd, false)
	})
}

// add watches a directory and opens it, in this order: whoever lists it then misses nothing.
func (w *watcher) add(top int, rel string, node *watched) (fd int, wd int32, err error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	if fd, err = unix.Openat2(top, rel, &how); err != nil {
		return -1, 0, err
	}
	n, err := unix.InotifyAddWatch(w.fd, refPath(fd), watchMask)
	if err != nil {
		_ = unix.Close(fd)
		return -1, 0, watchFailure(err)
	}
	wd = int32(n)
	if old := w.dirs[wd]; old != nil { // moved, or seen again
		old.moved = old.moved || old.parent != node.parent || old.name != node.name
		old.parent, old.name, old.lost, old.seen = node.parent, node.name, false, w.scans
		return fd, wd, nil
	}
	w.dirs[wd] = node
	node.seen = w.scans
	if w.srv.watches.Add(1) > maxWatches {
		_ = unix.Close(fd)
		return -1, 0, failf(aetherv1.Code_CODE_RESOURCES, "more than %d directories would be watched in this sandbox; watch less, or not recursively", maxWatches)
	}
	return fd, wd, nil
}

// fill watches all directories below wd, which is open as fd, and closes it. With tell, what is there counts as created: it came
// before there was a watch.
func (w *watcher) fill(top, fd int, wd int32, tell bool) error {
	if !w.recursive && !tell {
		return unix.Close(fd)
	}
	type found struct {
		parent int32
		name   string
	}
	var queue []found
	held := share{of: &w.srv.names}
	defer held.end()
	buf := make([]byte, direntSize)
	for {
		err := eachEntry(fd, buf, func(name string) error {
			isDir := false
			var st unix.Stat_t
			if unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
				isDir = st.Mode&unix.S_IFMT == unix.S_IFDIR
			}
			ours, _ := isTemporary(name)
			if isDir && !ours && w.recursive && st.Dev == w.topID.dev {
				if !held.take(len(name) + nameCost) {
					return errNames
				}
				queue = append(queue, found{wd, name})
			}
			if len(queue) > maxWatches {
				return watchFailure(unix.ENOSPC)
			}
			if tell && !ours {
				return w.tell(wd, name, eventCreated, isDir)
			}
			return nil
		})
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
		for fd = -1; fd < 0; {
			if len(queue) == 0 {
				return nil
			}
			if w.ctx.Err() != nil {
				return errCanceled
			}
			next := queue[len(queue)-1]
			queue = queue[:len(queue)-1]
			held.give(len(next.name) + nameCost)
			if fd, wd, err = w.addBelow(top, next.parent, next.name); err != nil {
				return err
			}
		}
	}
}

// addBelow is add for a directory that was seen; fd is -1 if it is gone, or not the user's to read.
func (w *watcher) addBelow(top int, parent int32, name string) (fd int, wd int32, err error) {
	rel, ok := w.path(parent, name)
	if !ok {
		return -1, 0, nil
	}
	if len(rel) >= maxPath {
		return -1, 0, failf(aetherv1.Code_CODE_RESOURCES, "the watched tree is deeper than a path may be long; watch a part of it, or not recursively")
	}
	fd, wd, err = w.add(top, rel, &watched{parent: parent, name: name})
	for _, passed := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EACCES, unix.EXDEV} {
		if errors.Is(err, passed) {
			return -1, 0, nil
		}
	}
	return fd, wd, err
}

func eachEntry(fd int, buf []byte, f func(name string) error) error {
	var names []string
	for {
		n, err := readDents(fd, buf)
		if n == 0 || err != nil {
			return err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			if err := f(name); err != nil {
				return err
			}
		}
	}
}

// path is where a name in a watched directory is, from the top; false if that is no longer known.
func (w *watcher) path(wd int32, name string) (string, bool) {
	var parts []string
	if name != "" {
		parts = append(parts, name)
	}
	for range maxTreeDepth {
		if wd == w.topWD {
			slices.Reverse(parts)
			return strings.Join(parts, "/"), true
		}
		node := w.dirs[wd]
		if node == nil || node.lost {
			break
		}
		parts = append(parts, node.name)
		wd = node.parent
	}
	return "", false
}

// tell sends an event. One that says the same of a path as the one before, in one batch, is left out.
func (w *watcher) tell(wd int32, name string, kind uint32, isDir bool) error {
	p, ok := w.path(wd, name)
	if !ok || w.last[p] == kind {
		return nil
	}
	if _, known := w.last[p]; known || w.lastBytes < maxLast {
		if !known {
			w.lastBytes += len(p) + nameCost
		}
		w.last[p] = kind
	}
	return w.out.add(&aetherv1.FileEvent{Path: []byte(p), Kind: kind, Directory: isDir})
}

// run tells events until the caller leaves or it goes no further.
func (w *watcher) run() error {
	buf := make([]byte, watchBuffer)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			if w.ctx.Err() != nil {
				return errCanceled
			}
			return err
		}
		if err := w.batch(buf[:n]); err != nil {
			_ = w.out.flush() // what happened before; the error is told anyway
			return err
		}
		if err := w.out.flush(); err != nil {
			return err
		}
		select {
		case <-w.ctx.Done():
			return errCanceled
		case <-time.After(watchPause):
		}
	}
}

func (w *watcher) batch(b []byte) error {
	clear(w.last)
	w.lastBytes = 0
	for len(b) > 0 {
		e, rest, err := parseEvent(b)
		if err != nil {
			return err
		}
		b = rest
		if err := w.event(e); err != nil {
			return err
		}
	}
	if w.rescan {
		w.rescan = false
		if err := w.again(); err != nil {
			return err
		}
	}
	if w.sweep {
		w.sweep = false
		w.removeLost()
	}
	return nil
}

func (w *watcher) forget(wd int32) {
	if w.dirs[wd] != nil {
		delete(w.dirs, wd)
		w.srv.watches.Add(-1)
	}
}

// appeared watches a directory that is new in the tree, and tells what it holds already.
func (w *watcher) appeared(parent int32, name string) error {
	return w.withTop(func(top int) error {
		fd, wd, err := w.addBelow(top, parent, name)
		if err != nil || fd < 0 {
			return err
		}
		return w.fill(top, fd, wd, true)
	})
}

// again looks for directories whose coming or going was lost among too many events.
func (w *watcher) again() error {
	w.scans++
	err := w.withTop(func(top int) error {
		fd, err := openDirAt(top, ".")
		if err != nil {
			return err
		}
		return w.fill(top, fd, w.topWD, false)
	})
	for wd, node := range w.dirs {
		if node.seen != w.scans && wd != w.topWD {
			w.unwatch(wd)
		}
	}
	return err
}

// withTop opens the top directory with the user's rights. It is not kept open: then the kernel would not tell its end.
func (w *watcher) withTop(f func(top int) error) error {
	return asUser(w.acc, func() error {
		top, err := openRef(w.top, unix.O_DIRECTORY)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return errGone
		}
		if err != nil {
			return err
		}
		defer unix.Close(top)
		var st unix.Stat_t
		if err := unix.Fstat(top, &st); err != nil {
			return err
		}
		if idOf(&st) != w.topID {
			return errGone
		}
		return f(top)
	})
}

// removeLost ends the watches of what was moved out of the tree, and of all below it.
func (w *watcher) removeLost() {
	for wd := range w.dirs {
		if _, ok := w.path(wd, ""); ok {
			continue
		}
		w.unwatch(wd)
	}
}

func (w *watcher) unwatch(wd int32) {
	_, _ = unix.InotifyRmWatch(w.fd, uint32(wd)) // fails if the directory is gone, and its watch with it
	w.forget(wd)
}
