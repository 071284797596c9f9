package aether

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// Kinds of events: dsec.v1.FileEventKind.
const (
	eventCreated = iota + 1
	eventChanged
	eventRemoved
	eventMovedFrom
	eventMovedTo
	eventAttributes
)

type inotifyEvent struct {
	wd     int32
	mask   uint32
	cookie uint32 // the same of both events of a rename
	name   string
}

func parseEvent(b []byte) (e inotifyEvent, rest []byte, err error) {
	if len(b) < unix.SizeofInotifyEvent {
		return e, nil, fmt.Errorf("an event of %d bytes", len(b))
	}
	e.wd = int32(binary.NativeEndian.Uint32(b))
	e.mask = binary.NativeEndian.Uint32(b[4:])
	e.cookie = binary.NativeEndian.Uint32(b[8:])
	n := uint64(binary.NativeEndian.Uint32(b[12:]))
	b = b[unix.SizeofInotifyEvent:]
	if n > uint64(len(b)) {
		return e, nil, fmt.Errorf("an event's name of %d bytes", n)
	}
	e.name, _, _ = strings.Cut(string(b[:n]), "\x00")
	return e, b[n:], nil
}

var eventKinds = []struct{ mask, kind uint32 }{
	{unix.IN_CREATE, eventCreated}, {unix.IN_MODIFY | unix.IN_CLOSE_WRITE, eventChanged}, {unix.IN_DELETE, eventRemoved},
	{unix.IN_MOVED_FROM, eventMovedFrom}, {unix.IN_MOVED_TO, eventMovedTo}, {unix.IN_ATTRIB, eventAttributes},
}

func (w *watcher) event(e inotifyEvent) error {
	if e.mask&unix.IN_Q_OVERFLOW != 0 {
		w.rescan = w.recursive
		return w.out.add(&aetherv1.FileEvent{Overflow: true})
	}
	node := w.dirs[e.wd]
	if node == nil {
		return nil
	}
	if e.name == "" {
		return w.ofItself(e, node)
	}
	isDir := e.mask&unix.IN_ISDIR != 0
	if ours, replaces := isTemporary(e.name); ours {
		if e.mask&unix.IN_MOVED_FROM != 0 {
			w.publishes(e.cookie, replaces)
		}
		return nil
	}
	published := w.published[e.cookie]
	delete(w.published, e.cookie)
	for _, k := range eventKinds {
		if e.mask&k.mask == 0 {
			continue
		}
		if err := w.tell(e.wd, e.name, cmp.Or(published, k.kind), isDir); err != nil {
			return err
		}
		if isDir && w.recursive && (k.kind == eventCreated || k.kind == eventMovedTo) {
			return w.appeared(e.wd, e.name)
		}
	}
	return nil
}

// publishes notes that something of ours leaves its temporary name. The kernel tells the new one at once or soon after, or,
// among too many events, never.
func (w *watcher) publishes(cookie uint32, replaces bool) {
	if len(w.published) >= maxPublished {
		clear(w.published)
	}
	w.published[cookie] = eventCreated
	if replaces {
		w.published[cookie] = eventChanged
	}
}

// ofItself is an event of a watched directory itself; but for the top one, its parent's tells the same.
func (w *watcher) ofItself(e inotifyEvent, node *watched) error {
	top := e.wd == w.topWD
	switch {
	case top && e.mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT|unix.IN_IGNORED) != 0:
		return errGone
	case top && e.mask&unix.IN_ATTRIB != 0:
		return w.tell(e.wd, "", eventAttributes, true)
	case e.mask&unix.IN_IGNORED != 0:
		w.forget(e.wd)
	case e.mask&unix.IN_MOVE_SELF != 0 && node.moved:
		node.moved = false
	case e.mask&unix.IN_MOVE_SELF != 0:
		node.lost, w.sweep = true, true
	}
	return nil
}
