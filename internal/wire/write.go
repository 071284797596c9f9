package wire

import (
	"errors"
	"sync"
	"syscall"
	"time"
)

// batches start small: most carry a few control frames, and the pool is emptied at every collection.
var batches = sync.Pool{New: func() any { b := make([]byte, 0, 2<<10); return &b }}

// Flush writes what is queued, as far as the kernel takes it at once; a goroutine writes the rest. If somebody is
// writing already, they will.
func (c *Conn) Flush() {
	defer c.contained()
	c.mu.Lock()
	if c.writing || c.err != nil || (len(c.control) == 0 && len(c.sources) == 0) {
		c.mu.Unlock()
		return
	}
	c.writing = true
	c.mu.Unlock()
	if c.raw == nil {
		c.background(nil)
		return
	}
	for {
		buf := c.gather()
		if buf == nil {
			return
		}
		n, err := c.tryWrite(*buf)
		if err != nil {
			recycle(buf)
			c.fail(err)
			return
		}
		if n < len(*buf) {
			*buf = (*buf)[:copy(*buf, (*buf)[n:])]
			c.background(buf)
			return
		}
		recycle(buf)
	}
}

// background writes first and then all that is queued in a goroutine that may block.
func (c *Conn) background(first *[]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil { // Serve may be waiting for writers already
		return
	}
	c.writers.Go(func() {
		defer c.contained()
		for buf := first; ; buf = nil {
			if buf == nil {
				if buf = c.gather(); buf == nil {
					return
				}
			}
			if c.timeout > 0 {
				_ = c.nc.SetWriteDeadline(time.Now().Add(c.timeout)) // fails only on a closed connection, as Write will
			}
			_, err := c.nc.Write(*buf)
			recycle(buf)
			if c.timeout > 0 {
				_ = c.nc.SetWriteDeadline(time.Time{}) // or a later write without waiting would fail by it
			}
			if err != nil {
				c.fail(err)
				return
			}
		}
	})
}

// gather takes the next batch: all control, then data of ready sources in turn. It returns nil, and nobody is writing
// any more, if there is nothing.
func (c *Conn) gather() *[]byte {
	buf := batches.Get().(*[]byte)
	b := (*buf)[:0]
	for {
		c.mu.Lock()
		b = c.takeControl(b)
		var s *Source
		if len(c.sources) > 0 && len(b) < batch {
			s = c.sources[0]
			c.sources = append(c.sources[:0], c.sources[1:]...)
			s.queued = false
		}
		if s == nil {
			empty := len(b) == 0
			if empty {
				c.writing = false
			}
			c.mu.Unlock()
			*buf = b
			if empty {
				recycle(buf)
				return nil
			}
			return buf
		}
		c.mu.Unlock()
		b = c.fill(b, s)
	}
}

// takeControl moves the control queue to b. c.mu is held.
func (c *Conn) takeControl(b []byte) []byte {
	if len(c.control) == 0 {
		return b
	}
	b = append(b, c.control...)
	if cap(c.control) > keepCap {
		c.control = nil
	}
	c.control = c.control[:0]
	if c.room != nil {
		close(c.room)
		c.room = nil
	}
	return b
}

func (c *Conn) fill(b []byte, s *Source) []byte {
	start := len(b)
	b = appendData(b, s.Stream, s.Channel, 0, 0, 0)
	body := len(b)
	b, offset, flags, more := s.Fill(b, MaxData)
	if n := len(b) - body; n > 0 || flags != 0 {
		appendData(b[:start], s.Stream, s.Channel, offset, flags, n) // in place: the header's length is fixed
	} else {
		b = b[:start]
	}
	if more {
		c.Ready(s)
	}
	return b
}

// tryWrite writes without waiting and returns how much the kernel took.
func (c *Conn) tryWrite(b []byte) (n int, err error) {
	werr := c.raw.Write(func(fd uintptr) bool {
		for {
			n, err = syscall.Write(int(fd), b)
			if !errors.Is(err, syscall.EINTR) {
				return true
			}
		}
	})
	if werr != nil {
		return 0, werr
	}
	if errors.Is(err, syscall.EAGAIN) {
		return 0, nil
	}
	return max(n, 0), err
}

func recycle(b *[]byte) {
	if cap(*b) <= 4*batch {
		*b = (*b)[:0]
		batches.Put(b)
	}
}
