package linux

import (
	"bytes"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OpenFiles is how many descriptors this process has open, and how many it may have. Since Linux 6.2 the size of the
// directory says so; else they are counted.
func OpenFiles() (open, most int64, err error) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 0, 0, fmt.Errorf("read limit of open files: %w", err)
	}
	const dir = "/proc/self/fd"
	info, err := os.Stat(dir)
	if err != nil {
		return 0, 0, err
	}
	if open = info.Size(); open == 0 {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return 0, 0, err
		}
		open = int64(len(entries)) - 1 // without the one that lists
	}
	return open, int64(min(r.Cur, 1<<62)), nil
}

// mountIDRequest is struct mnt_id_req of listmount(2).
type mountIDRequest struct {
	size, spare   uint32
	mount, param  uint64
	mountNSUnused uint64
}

// CountMounts is how many mounts this process's mount namespace has. With listmount (Linux 6.8) it takes 0.1 ms per
// thousand, else the table is read.
func CountMounts() (int64, error) {
	const (
		root  = ^uint64(0) // LSMT_ROOT
		first = 24         // MNT_ID_REQ_SIZE_VER0
	)
	req := mountIDRequest{size: first, mount: root}
	ids := make([]uint64, 4096)
	total := int64(0)
	for {
		n, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&req)), uintptr(unsafe.Pointer(&ids[0])), uintptr(len(ids)), 0, 0, 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return readMounts()
		}
		total += int64(n)
		if int(n) < len(ids) {
			return total, nil
		}
		req.param = ids[n-1]
	}
}

func readMounts() (int64, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	return int64(bytes.Count(table, []byte("\n"))), err
}
