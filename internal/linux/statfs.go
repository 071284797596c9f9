package linux

import (
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
)

// Magic numbers of file systems, as FSMagic returns them.
const (
	MagicBtrfs   = unix.BTRFS_SUPER_MAGIC
	MagicCgroup  = unix.CGROUP_SUPER_MAGIC
	MagicCgroup2 = unix.CGROUP2_SUPER_MAGIC
	MagicErofs   = unix.EROFS_SUPER_MAGIC_V1
	MagicNsfs    = unix.NSFS_MAGIC
	MagicSysfs   = unix.SYSFS_MAGIC
	MagicTmpfs   = unix.TMPFS_MAGIC
)

// FSMagic says which file system path is on. It is the only safe way to tell cgroup v2 from a tmpfs at the same place, on
// which mkdir and writes to control files "succeed" as well.
func FSMagic(path string) (int64, error) {
	st, err := statfs(path)
	if err != nil {
		return 0, err
	}
	return int64(st.Type), nil
}

// DiskSpace is the size of the file system that holds path, and what root can still write to it, in bytes.
func DiskSpace(path string) (total, free int64, err error) {
	st, err := statfs(path)
	if err != nil {
		return 0, 0, err
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil
}

// IsReadOnlyFS reports whether nothing can be written to the file system that holds path: it was mounted so, or it has become
// so, as btrfs does when a write of its own metadata fails.
func IsReadOnlyFS(path string) (bool, error) {
	st, err := statfs(path)
	return st.Flags&unix.ST_RDONLY != 0, err
}

func statfs(path string) (unix.Statfs_t, error) {
	var st unix.Statfs_t
	err := retryEINTR(func() error { return unix.Statfs(path, &st) })
	if err != nil {
		return st, fmt.Errorf("statfs %s: %w", path, err)
	}
	return st, nil
}

// retryEINTR repeats a call that a signal interrupted.
func retryEINTR(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// UnmountPath unmounts what is at path. With detach it becomes invisible at once and ends when its last user is gone. That
// nothing is mounted there is no error.
func UnmountPath(path string, detach bool) error {
	flags := unix.UMOUNT_NOFOLLOW
	if detach {
		flags |= unix.MNT_DETACH
	}
	switch err := retryEINTR(func() error { return unix.Unmount(path, flags) }); err {
	case nil, unix.EINVAL, unix.ENOENT:
		return nil
	default:
		return fmt.Errorf("unmount %s: %w", path, err)
	}
}

// OwnerOf is the owner of a file that is there, itself if it is a link.
func OwnerOf(path string) (uid, gid int, err error) {
	var st unix.Stat_t
	if err := retryEINTR(func() error { return unix.Lstat(path, &st) }); err != nil {
		return 0, 0, &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	return int(st.Uid), int(st.Gid), nil
}
