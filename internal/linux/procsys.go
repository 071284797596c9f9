package linux

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// privateProc is a proc of this process's own. In one that is mounted for all, each namespace whose sysctls somebody looked at has
// an entry of its own beside those of all others, under the same name, which each further look passes: with
// thousands of namespaces that takes milliseconds. This one is given up before it has many.
var privateProc struct {
	mu   sync.Mutex
	fd   int
	left int // uses
}

const procUses = 32

// PrivateProc is a directory that shows what /proc does. Its sysctls are those of the namespaces of who opens them. The caller closes it.
func PrivateProc() (fd int, err error) {
	p := &privateProc
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 {
		fresh, err := FSMount("proc", nil, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
		if err != nil {
			return -1, fmt.Errorf("private proc: %w", err)
		}
		if p.fd == 0 {
			p.fd = fresh
		} else { // the number stays, for who compares what is open
			err = unix.Dup3(fresh, p.fd, unix.O_CLOEXEC)
			Close(fresh)
			if err != nil {
				return -1, fmt.Errorf("private proc: %w", err)
			}
		}
		p.left = procUses
	}
	p.left--
	return retryFD("private proc", func() (int, error) { return unix.FcntlInt(uintptr(p.fd), unix.F_DUPFD_CLOEXEC, 3) })
}
