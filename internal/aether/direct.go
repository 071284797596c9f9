package aether

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// directFrom is how much of a file goes through the page cache, where a command finds it that reads it next. More would not
	// stay there: the cache is charged to our own small group, and to reclaim it costs more than the rest of a transfer.
	directFrom  = 4 << 20
	directAlign = 4096
	directLeast = 128 << 10 // in one step; less costs more time than it saves
)

// pass has what follows pass by the page cache, or no more.
func (c *content) pass(pieces [][]byte) {
	if want := c.size >= directFrom && c.aligned(pieces); want != c.direct {
		c.setDirect(want)
	}
}

func (c *content) aligned(pieces [][]byte) bool {
	size := 0
	for _, p := range pieces {
		size += len(p)
		if len(p)%directAlign != 0 || uintptr(unsafe.Pointer(unsafe.SliceData(p)))%directAlign != 0 {
			return false
		}
	}
	return size >= directLeast && c.size%directAlign == 0
}

func (c *content) setDirect(on bool) {
	c.direct = on
	fd := int(c.file.Fd())
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err == nil {
		set := flags &^ unix.O_DIRECT
		if on {
			set |= unix.O_DIRECT
		}
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, set)
	}
	if err != nil {
		c.direct = false // its file system knows no such thing
	}
}
