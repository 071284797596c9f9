package store

import (
	"os"
	"syscall"
)

const syncFileRangeWrite = 2

// startWriteback asks the kernel to begin writing a range to disk, and does not wait. It is advice: failure costs time.
func startWriteback(f *os.File, off, n int64) {
	c, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = c.Control(func(fd uintptr) { _ = syscall.SyncFileRange(int(fd), off, n, syncFileRangeWrite) })
}
