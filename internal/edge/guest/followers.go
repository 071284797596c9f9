package guest

import "time"

// holdTime is how long a command is held back for a follower that went away before the end: one whose connection was cut, or
// whose edge was killed, asks again, and shall find what it has not had.
const holdTime = 10 * time.Second

// followers are those who follow one stream of a command. Its command's lock guards them.
type followers struct {
	present map[*outputReader]struct{}
	held    *hold
}

// A hold stands for followers who went away: for the one that had read the least.
type hold struct {
	offset int64
	timer  *time.Timer
}

// add takes note of a follower. It may be the one that is held for.
func (f *followers) add(r *outputReader) {
	if f.present == nil {
		f.present = make(map[*outputReader]struct{})
	}
	f.present[r] = struct{}{}
	if h := f.held; h != nil && r.offset <= h.offset && r.offset >= h.offset-r.m.c.spool.onTheWay() {
		h.timer.Stop()
		f.held = nil
	}
}

// slowest is the offset of the one who has read the least.
func (f *followers) slowest() (offset int64, ok bool) {
	offset = maxOffset
	for r := range f.present {
		offset = min(offset, r.offset)
	}
	if f.held != nil {
		offset = min(offset, f.held.offset)
	}
	return offset, offset < maxOffset
}

// leave takes note that a follower is gone. m.mu is held.
func (m *Command) leave(r *outputReader) {
	f := &m.followers[r.stream]
	if _, ok := f.present[r]; !ok {
		return
	}
	delete(f.present, r)
	if !m.done {
		m.hold(r.stream, r.offset)
	}
}

// hold holds output back for a while as a follower at that offset would. m.mu is held.
func (m *Command) hold(i int, offset int64) {
	f := &m.followers[i]
	if f.held != nil {
		f.held.offset = min(f.held.offset, offset)
		f.held.timer.Reset(m.c.spool.holdTime)
		return
	}
	h := &hold{offset: offset}
	h.timer = time.AfterFunc(m.c.spool.holdTime, func() { m.endHold(i, h) })
	f.held = h
}

func (m *Command) endHold(i int, h *hold) {
	m.mu.Lock()
	var l *link
	if m.followers[i].held == h {
		m.followers[i].held = nil
		if m.acknowledge(i, false) {
			l = m.link
		}
	}
	m.mu.Unlock()
	if l != nil {
		l.conn.Flush()
	}
}

// endHolds is for a command that has ended. m.mu is held.
func (m *Command) endHolds() {
	for i := range m.followers {
		if h := m.followers[i].held; h != nil {
			h.timer.Stop()
			m.followers[i].held = nil
		}
	}
}
