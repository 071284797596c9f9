package linux

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Project quotas of ext4 and XFS: each file belongs to a project, a number that it takes from its directory, and limits are
// per project. What is not in golang.org/x/sys is laid out here (linux/fs.h, linux/dqblk_xfs.h).
const (
	fsIocFSGetXattr = 0x801c581f // _IOR('X', 31, struct fsxattr)
	fsIocFSSetXattr = 0x401c5820 // _IOW('X', 32, struct fsxattr)

	fsXflagProjInherit = 0x200

	projectQuota = 2
	quotaGet     = 'X'<<8 + 3 // Q_XGETQUOTA
	quotaSet     = 'X'<<8 + 4 // Q_XSETQLIM
	quotaBlock   = 512        // bytes of a unit

	quotaFieldInodes = 1 << 1 // FS_DQ_IHARD
	quotaFieldBlocks = 1 << 3 // FS_DQ_BHARD
)

// fsXattr is struct fsxattr.
type fsXattr struct {
	flags, extentSize, extents, project, cowExtentSize uint32
	_                                                  [8]byte
}

// diskQuota is struct fs_disk_quota.
type diskQuota struct {
	version, kind         int8
	fields                uint16
	id                    uint32
	blocksHard, blocksSft uint64
	inodesHard, inodesSft uint64
	blocks, inodes        uint64
	_                     [56]byte
}

// A ProjectUsage is what a project has, and what it may have at most; 0 is no limit.
type ProjectUsage struct{ Bytes, Inodes, MaxBytes, MaxInodes int64 }

// SetProject gives an empty directory to a project, with all that will ever be made in it. Who is not in the initial user
// namespace cannot change that.
func SetProject(dir *os.File, project uint32) error {
	var x fsXattr
	if err := ioctlPtr(dir, "read project", fsIocFSGetXattr, unsafe.Pointer(&x)); err != nil {
		return err
	}
	x.project, x.flags = project, x.flags|fsXflagProjInherit
	return ioctlPtr(dir, "set project", fsIocFSSetXattr, unsafe.Pointer(&x))
}

// ProjectOf is the project of a directory, 0 if it has none.
func ProjectOf(dir *os.File) (uint32, error) {
	var x fsXattr
	err := ioctlPtr(dir, "read project", fsIocFSGetXattr, unsafe.Pointer(&x))
	return x.project, err
}

// LimitProject limits a project on the file system of root; 0 is no limit.
func LimitProject(root *os.File, project uint32, bytes, inodes int64) error {
	q := diskQuota{version: 1, kind: 1 << 1, fields: quotaFieldInodes | quotaFieldBlocks, id: project,
		blocksHard: uint64(bytes) / quotaBlock, inodesHard: uint64(inodes)}
	return quotactl(root, quotaSet, project, &q)
}

// UsageOfProject is what a project has on the file system of root.
func UsageOfProject(root *os.File, project uint32) (ProjectUsage, error) {
	var q diskQuota
	err := quotactl(root, quotaGet, project, &q)
	if err == unix.ENOENT { // nothing was ever counted for it
		return ProjectUsage{}, nil
	}
	return ProjectUsage{Bytes: int64(q.blocks) * quotaBlock, Inodes: int64(q.inodes),
		MaxBytes: int64(q.blocksHard) * quotaBlock, MaxInodes: int64(q.inodesHard)}, err
}

func quotactl(root *os.File, command int, id uint32, q *diskQuota) error {
	raw, err := root.SyscallConn()
	if err != nil {
		return err
	}
	var errno unix.Errno
	err = raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall6(unix.SYS_QUOTACTL_FD, fd, uintptr(command<<8|projectQuota), uintptr(id), uintptr(unsafe.Pointer(q)), 0, 0)
	})
	switch {
	case err != nil:
		return err
	case errno == unix.ENOENT:
		return errno
	case errno != 0:
		return fmt.Errorf("quotactl on %s: %w", root.Name(), errno)
	}
	return nil
}
