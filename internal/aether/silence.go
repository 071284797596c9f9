package aether

import (
	"time"

	"golang.org/x/sys/unix"
)

// A silence is the time-out of a command that writes nothing. Its command's lock guards it.
type silence struct {
	after time.Duration // 0 = none
	last  time.Time     // when output was read
	timer *time.Timer
}

// startSilence begins to wait for output. c.mu is held.
func (c *command) startSilence() {
	if c.quiet.after > 0 {
		c.quiet.last = time.Now()
		c.quiet.timer = time.AfterFunc(c.quiet.after, c.fellSilent)
	}
}

// fellSilent ends a command that has written nothing for so long. One that we keep from writing is not silent.
func (c *command) fellSilent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return
	}
	if c.heldBack() {
		c.quiet.last = time.Now()
	}
	if left := c.quiet.after - time.Since(c.quiet.last); left > 0 {
		c.quiet.timer.Reset(left)
		return
	}
	c.timedOut, c.noOutput = true, true
	c.killTree()
}

// heldBack reports whether output waits that was not read yet.
func (c *command) heldBack() bool {
	for i := range c.out {
		waiting := 0
		c.out[i].control(func(fd int) { waiting, _ = unix.IoctlGetInt(fd, unix.TIOCINQ) })
		if waiting > 0 || (c.chronus != nil && c.out[i].room() == 0) { // a session's pipes are not c's own
			return true
		}
	}
	return false
}
