package linux

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"dsec/internal/linux/mountinfo"
)

// MountRunDir makes dir, if need be, a tmpfs of its own that only root can enter. It is private: what is mounted below it
// is not copied into other mount namespaces that share ours. A tmpfs that is there already is kept.
func MountRunDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.Point == dir && m.Type == "tmpfs" {
			return nil
		}
	}
	options := []FSOption{{Key: "mode", Value: "0700"}, {Key: "size", Value: "1g"}}
	// Huge pages for programs in it; not every kernel has them.
	fd, err := FSMount("tmpfs", append(options, FSOption{Key: "huge", Value: "within_size"}), MountNoSUID|MountNoDev)
	if errors.Is(err, unix.EINVAL) {
		fd, err = FSMount("tmpfs", options, MountNoSUID|MountNoDev)
	}
	if err != nil {
		return err
	}
	defer Close(fd)
	if err := AttachMount(fd, dir); err != nil {
		return err
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		unix.Unmount(dir, unix.MNT_DETACH)
		return fmt.Errorf("make %s private: %w", dir, err)
	}
	return nil
}

// UnmountRunDir undoes MountRunDir. It fails while something is mounted below dir.
func UnmountRunDir(dir string) error {
	if err := UnmountPath(dir, false); err != nil && !IsGone(err) {
		return err
	}
	if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove run directory: %w", err)
	}
	return nil
}
