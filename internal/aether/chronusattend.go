package aether

import (
	"time"

	"golang.org/x/sys/unix"
)

// attendPause is the longest time between two looks at whether a shell still runs what it reads.
const attendPause = 5 * time.Second

// attend ends a shell that reads on and runs nothing (set -n, or something else in place of command or .): the status of c will
// never come. It is an empty line that tells. Once the shell has read it, it is done with all lines before, and a status would
// stand in the pipe by now: of those two none comes before the other. A shell may read several lines at once, so this line is
// written when the others were read. For commands that have just begun nobody looks; see settleTime.
func (x *chronus) attend(c *command, pause time.Duration, asked bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.running != c || x.over || x.ended || x.reason != "" {
		return
	}
	unread, err := unix.IoctlGetInt(x.pipes.tell, unix.TIOCINQ)
	switch {
	case err != nil:
		return
	case unread > 0: // it runs something
	case !asked:
		if !x.tell("\n") { // nobody is there to read it: it is another program now
			return
		}
		asked, pause = true, settleTime
	default:
		x.hearRest()
		switch {
		case x.running != c || x.over:
		case x.silence: // it has closed that pipe
			x.end("broken")
		default:
			x.end("unresponsive")
		}
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.reaped {
		c.attend = time.AfterFunc(pause, func() { x.attend(c, min(2*pause, attendPause), asked) })
	}
}
