package linux

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// FileID tells whether a file is the same and unchanged: device, inode, size, and the times of its last changes, of which the
// second cannot be set. It is for comparing only.
func FileID(f *os.File) (string, error) {
	var st unix.Stat_t
	if err := retryEINTR(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return "", fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	return fmt.Sprintf("%x:%d %d %d.%09d %d.%09d\n", st.Dev, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec), nil
}

// AdviseSequential tells the kernel that f is read from its start to its end. A file system that does not care is no error.
func AdviseSequential(f *os.File) { _ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_SEQUENTIAL) }
