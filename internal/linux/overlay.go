package linux

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// An Overlay is what an overlay file system is made of: descriptors of directories.
type Overlay struct {
	Lowers      []int // the topmost first
	Upper, Work int   // 0: there is none
	Options     []FSOption
	Mounts      []int // those of which these are directories, attached nowhere
}

// FSMountOverlay makes an overlay, not attached anywhere, whose devices do not work. It gives the kernel the layers one by
// one; a kernel that does not take them, or not from mounts that are attached nowhere, answers EINVAL.
func FSMountOverlay(o Overlay) (int, error) {
	options := make([]FSOption, 0, len(o.Lowers)+len(o.Options)+2)
	for _, fd := range o.Lowers {
		options = append(options, FSOption{Key: "lowerdir+", Value: fdPath(fd)})
	}
	return FSMount("overlay", append(append(options, o.upper()...), o.Options...), MountNoDev)
}

// MountOverlay is FSMountOverlay for kernels before 6.7, whose layers are one string, which only mount(2) takes in such a
// length: up to a page, some 240 layers; and for later ones, to about 6.14, that take only layers which are attached somewhere.
// So these, and the overlay itself, are for a moment mounted over one another at place, an empty directory on a private mount
// that nobody else uses meanwhile. If this process is killed in between, they stay there.
func MountOverlay(o Overlay, place string) (fd int, err error) {
	defer func() {
		if undo := UnmountAll(place); undo != nil {
			Close(fd)
			fd, err = -1, errors.Join(err, undo)
		}
	}()
	for _, m := range o.Mounts {
		if err := AttachMount(m, place); err != nil {
			return -1, err
		}
	}
	lowers := make([]string, len(o.Lowers))
	for i, fd := range o.Lowers {
		lowers[i] = fdPath(fd)
	}
	options := []string{"lowerdir=" + strings.Join(lowers, ":")}
	for _, opt := range append(o.upper(), o.Options...) {
		if opt.Flag {
			options = append(options, opt.Key)
		} else {
			options = append(options, opt.Key+"="+opt.Value)
		}
	}
	text := strings.Join(options, ",")
	if len(text) >= os.Getpagesize() {
		return -1, fmt.Errorf("create overlay of %d layers: this kernel takes at most a page of options: %w", len(lowers), unix.E2BIG)
	}
	if err := retryEINTR(func() error { return unix.Mount("overlay", place, "overlay", unix.MS_NODEV, text) }); err != nil {
		return -1, fmt.Errorf("create overlay: %w", err)
	}
	return CloneMountWith(place, MountAttr{})
}

// UnmountAll unmounts everything that is mounted at path, one over another.
func UnmountAll(path string) error {
	for {
		err := retryEINTR(func() error { return unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) })
		switch err {
		case nil:
		case unix.EINVAL, unix.ENOENT: // no more
			return nil
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

func (o Overlay) upper() []FSOption {
	if o.Upper == 0 {
		return nil
	}
	return []FSOption{{Key: "upperdir", Value: fdPath(o.Upper)}, {Key: "workdir", Value: fdPath(o.Work)}}
}

func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }
