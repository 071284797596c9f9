package linux

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// loopAttempts bounds the race for a free loop device: between asking for one and taking it another process may take it.
const loopAttempts = 64

// LoopOptions say how a file becomes a block device.
type LoopOptions struct {
	ReadOnly  bool
	DirectIO  bool // do not cache the backing file a second time; silently off where its file system cannot
	BlockSize uint32
}

// AttachLoop makes a block device of backing. The device detaches itself when its last user, the returned file or a mount,
// is gone; so nothing is left of it if this process is killed. Close the file once the device is mounted.
func AttachLoop(backing *os.File, o LoopOptions) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	mode := os.O_RDWR
	if o.ReadOnly {
		mode = os.O_RDONLY
	}
	for range loopAttempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("loop ctl_get_free: %w", err)
		}
		device, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), mode, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed again by somebody else
		} else if err != nil {
			return nil, err
		}
		err = configureLoop(device, backing, o)
		if err == nil {
			return device, nil
		}
		_ = device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no free loop device after %d attempts: %w", loopAttempts, unix.EBUSY)
}

func configureLoop(device, backing *os.File, o LoopOptions) error {
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: o.BlockSize}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	if o.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if o.DirectIO {
		config.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	copy(config.Info.File_name[:len(config.Info.File_name)-1], backing.Name())
	return ioctlPtr(device, "loop configure", unix.LOOP_CONFIGURE, unsafe.Pointer(&config))
}

// LoopDevices maps each loop device in use ("loop3") to its backing file, as the kernel names it.
func LoopDevices() (map[string]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	out := make(map[string]string)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // detached meanwhile
		}
		out[strings.Split(f, "/")[3]] = strings.TrimSpace(string(b))
	}
	return out, nil
}
