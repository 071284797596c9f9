package linux

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctls of btrfs (linux/btrfs.h). Structures are laid out by hand: all their fields are 64 bits wide and naturally aligned.
const (
	btrfsIocSnapDestroy  = 0x5000940f // _IOW(0x94, 15, struct btrfs_ioctl_vol_args)
	btrfsIocSubvolCreate = 0x5000940e // _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
	btrfsIocInoLookup    = 0xd0009412 // _IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)
	btrfsIocFSInfo       = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	btrfsIocQuotaCtl     = 0xc0109428 // _IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)
	btrfsIocQgroupCreate = 0x4010942a // _IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)
	btrfsIocQgroupLimit  = 0x8030942b // _IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)
	btrfsIocSync         = 0x9408     // _IO(0x94, 8)

	btrfsQuotaEnable          = 1
	btrfsQuotaEnableSimple    = 4
	btrfsQgroupLimitMaxRfer   = 1
	btrfsFirstFreeObjectID    = 256 // inode of every subvolume's root directory
	btrfsSubvolNameMax        = 255
	btrfsVolArgsNameOffset    = 8
	btrfsFSInfoUUIDOffset     = 16
	btrfsQgroupLimitArgsWords = 6
)

// BtrfsEnableSimpleQuota turns on simple quotas (Linux 6.7): extents are charged to the subvolume that first wrote them, with
// no back-reference walks. Enabling them again is no error. An older kernel answers EINVAL.
func BtrfsEnableSimpleQuota(root *os.File) error {
	args := [2]uint64{btrfsQuotaEnableSimple, 0}
	return ioctlPtr(root, "btrfs quota_ctl", btrfsIocQuotaCtl, unsafe.Pointer(&args))
}

// BtrfsEnableQuota turns on the quotas of older kernels, which find out at every commit to whom extents belong: exact, and
// dearer by the number of snapshots. Enabling them again is no error.
func BtrfsEnableQuota(root *os.File) error {
	args := [2]uint64{btrfsQuotaEnable, 0}
	return ioctlPtr(root, "btrfs quota_ctl", btrfsIocQuotaCtl, unsafe.Pointer(&args))
}

// BtrfsSubvolCreate makes an empty subvolume called name in dir.
func BtrfsSubvolCreate(dir *os.File, name string) error {
	args, err := btrfsVolArgs(name)
	if err != nil {
		return err
	}
	return ioctlPtr(dir, "btrfs subvol_create", btrfsIocSubvolCreate, unsafe.Pointer(args))
}

// BtrfsSubvolDestroy unlinks the subvolume called name in dir, with all that is in it. The call is fast and does not wait for
// the disk: the kernel frees the contents in the background, after the next commit.
func BtrfsSubvolDestroy(dir *os.File, name string) error {
	args, err := btrfsVolArgs(name)
	if err != nil {
		return err
	}
	return ioctlPtr(dir, "btrfs snap_destroy", btrfsIocSnapDestroy, unsafe.Pointer(args))
}

func btrfsVolArgs(name string) (*[4096]byte, error) {
	if name == "" || len(name) > btrfsSubvolNameMax {
		return nil, fmt.Errorf("subvolume name of %d bytes: %w", len(name), unix.EINVAL)
	}
	var args [4096]byte
	copy(args[btrfsVolArgsNameOffset:], name)
	return &args, nil
}

// BtrfsSubvolID is the id of the subvolume that f is in, which is also the id of its quota group.
func BtrfsSubvolID(f *os.File) (uint64, error) {
	var args [4096]byte
	*(*uint64)(unsafe.Pointer(&args[8])) = btrfsFirstFreeObjectID
	if err := ioctlPtr(f, "btrfs ino_lookup", btrfsIocInoLookup, unsafe.Pointer(&args)); err != nil {
		return 0, err
	}
	return *(*uint64)(unsafe.Pointer(&args[0])), nil
}

// BtrfsQgroupLimit sets the most bytes, data and metadata, that a subvolume may hold.
func BtrfsQgroupLimit(root *os.File, subvol uint64, bytes int64) error {
	args := [btrfsQgroupLimitArgsWords]uint64{subvol, btrfsQgroupLimitMaxRfer, uint64(bytes)}
	return ioctlPtr(root, "btrfs qgroup_limit", btrfsIocQgroupLimit, unsafe.Pointer(&args))
}

// BtrfsQgroupRemove removes the quota group of a subvolume that is gone. ENOENT means that it is gone already, EBUSY that
// the kernel still frees the subvolume.
func BtrfsQgroupRemove(root *os.File, subvol uint64) error {
	args := [2]uint64{0, subvol}
	return ioctlPtr(root, "btrfs qgroup_create", btrfsIocQgroupCreate, unsafe.Pointer(&args))
}

// BtrfsUUID is the file system's id, as in /sys/fs/btrfs/<uuid>.
func BtrfsUUID(root *os.File) (string, error) {
	var args [1024]byte
	if err := ioctlPtr(root, "btrfs fs_info", btrfsIocFSInfo, unsafe.Pointer(&args)); err != nil {
		return "", err
	}
	u := args[btrfsFSInfoUUIDOffset : btrfsFSInfoUUIDOffset+16]
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16]), nil
}

// BtrfsSync commits the current transaction and wakes the thread that frees destroyed subvolumes.
func BtrfsSync(root *os.File) error { return ioctlPtr(root, "btrfs sync", btrfsIocSync, nil) }

// ioctlPtr keeps f and what arg points to alive over the call.
func ioctlPtr(f *os.File, what string, request uintptr, arg unsafe.Pointer) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	var errno unix.Errno
	err = raw.Control(func(fd uintptr) {
		for {
			_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg))
			if errno != unix.EINTR {
				return
			}
		}
	})
	if err == nil && errno != 0 {
		err = errno
	}
	if err != nil {
		return fmt.Errorf("%s on %s: %w", what, f.Name(), err)
	}
	return nil
}
