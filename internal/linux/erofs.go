package linux

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// MountErofs mounts an EROFS image from open files: its metadata, and its data devices in the order of its device table. What
// is mounted is what the caller verified through the same files, whatever happens to their paths. The kernel reads the files
// themselves, without loop devices, from Linux 6.12 and on file systems that allow it. ENOTBLK says that it does not, and then
// MountErofsLoop works. Set-user-id programs stay effective, because images need them; device nodes do not.
//
// source is what the table of mounts will show. It must be a path where nothing is: a link to the file is there for the length
// of the call. A name like /proc/self/fd/3 must not stay in the table, because every program that compares sources
// of mounts with its own files, as mkfs does, would see its own descriptor 3 mounted.
func MountErofs(target, source string, metadata *os.File, data []*os.File) (err error) {
	paths := make([]string, len(data))
	for i, f := range data {
		paths[i] = procFD(f)
	}
	if err := os.Symlink(procFD(metadata), source); err != nil {
		return fmt.Errorf("name the source of a mount: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(source)) }()
	return mountErofs(target, source, paths)
}

// MountErofsLoop is MountErofs through loop devices, which end with the mount.
func MountErofsLoop(target string, metadata *os.File, data []*os.File) (err error) {
	var paths []string
	for _, f := range append([]*os.File{metadata}, data...) {
		device, err := AttachLoop(f, LoopOptions{ReadOnly: true})
		if err != nil {
			return err
		}
		defer device.Close()
		paths = append(paths, device.Name())
	}
	return mountErofs(target, paths[0], paths[1:])
}

func mountErofs(target, source string, devices []string) error {
	options := make([]string, len(devices))
	for i, d := range devices {
		options[i] = "device=" + d
	}
	err := retryEINTR(func() error {
		return unix.Mount(source, target, "erofs", unix.MS_RDONLY|unix.MS_NODEV, strings.Join(options, ","))
	})
	if err != nil {
		return fmt.Errorf("mount erofs at %s: %w", target, err)
	}
	return nil
}

// NeedsLoop reports whether a mount failed because its file system does not let the kernel read a file directly.
func NeedsLoop(err error) bool { return errors.Is(err, unix.ENOTBLK) }

func procFD(f *os.File) string { return fdPath(int(f.Fd())) }
