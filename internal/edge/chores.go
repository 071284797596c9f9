package edge

import "sync"

// chores are what must be done some time, such as the removal of files: one after the other, beside everything else. The
// zero value is ready.
type chores struct {
	mu    sync.Mutex
	queue []func()
	busy  bool // a goroutine works on the queue
}

// later runs f after those before it. When the edge stops, what is left is not done: Shutdown removes all, and the next
// Recover what belongs to nobody.
func (e *Edge) later(f func()) {
	c := &e.chores
	c.mu.Lock()
	c.queue = append(c.queue, f)
	begin := !c.busy
	c.busy = true
	c.mu.Unlock()
	if begin {
		e.spawn(e.doChores)
	}
}

func (e *Edge) doChores() {
	c := &e.chores
	for {
		c.mu.Lock()
		if len(c.queue) == 0 || e.ctx.Err() != nil {
			c.queue, c.busy = nil, false
			c.mu.Unlock()
			return
		}
		f := c.queue[0]
		c.queue[0] = nil
		c.queue = c.queue[1:]
		c.mu.Unlock()
		f()
	}
}
