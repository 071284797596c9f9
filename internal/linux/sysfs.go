package linux

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// sysfsSkeleton are the directories that programs expect in /sys. They stay empty.
var sysfsSkeleton = []string{"block", "bus", "class", "class/net", "dev", "devices", "devices/system", "devices/virtual",
	"devices/virtual/net", "firmware", "fs", "fs/cgroup", "kernel", "module", "power"}

// sysfsShown are the only parts of the kernel's sysfs that are seen. The links in class/net point into devices/virtual/net.
var sysfsShown = []string{"class/net", "devices/virtual/net"}

const sysfsFlags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// MountMaskedSysfs makes, at an existing directory, a read-only /sys of the calling thread's network namespace. It is built by
// allowing, not by masking: a tmpfs of empty directories in which only the network interfaces are real. So nothing
// of the host can be read, also nothing that a later kernel adds, and a copy costs three mounts instead of some eighty.
// The namespace must outlive the mount, or the interfaces vanish from it.
func MountMaskedSysfs(target string) (err error) {
	defer func() {
		if err != nil {
			_ = UnmountPath(target, true)
		}
	}()
	if err := mountTmpfs(target); err != nil {
		return err
	}
	for _, d := range sysfsSkeleton {
		if err := os.Mkdir(filepath.Join(target, d), 0o555); err != nil {
			return err
		}
	}
	whole := filepath.Join(target, "kernel") // a place to put it for a moment
	if err := unix.Mount("sysfs", whole, "sysfs", sysfsFlags, ""); err != nil {
		return fmt.Errorf("mount sysfs: %w", err)
	}
	for _, d := range sysfsShown {
		if err := unix.Mount(filepath.Join(whole, d), filepath.Join(target, d), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s of sysfs: %w", d, err)
		}
	}
	if err := unix.Unmount(whole, 0); err != nil {
		return fmt.Errorf("unmount the whole sysfs: %w", err)
	}
	if err := unix.Mount("", target, "", unix.MS_REMOUNT|sysfsFlags, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", target, err)
	}
	return nil
}

// mountTmpfs mounts a small private tmpfs.
func mountTmpfs(target string) error {
	const options = "mode=0555,size=64k,nr_inodes=64"
	if err := unix.Mount("tmpfs", target, "tmpfs", sysfsFlags&^unix.MS_RDONLY, options); err != nil {
		return fmt.Errorf("mount tmpfs at %s: %w", target, err)
	}
	if err := unix.Mount("", target, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make %s private: %w", target, err)
	}
	return nil
}
