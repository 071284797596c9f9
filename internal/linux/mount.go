package linux

import (
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Attributes of a mount, for MountAttr and FSMount.
const (
	MountReadOnly = unix.MOUNT_ATTR_RDONLY
	MountNoSUID   = unix.MOUNT_ATTR_NOSUID
	MountNoDev    = unix.MOUNT_ATTR_NODEV
	MountNoExec   = unix.MOUNT_ATTR_NOEXEC
)

// Close closes a raw descriptor. Negative ones, which stand for "not open", are ignored.
func Close(fds ...int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// OpenPath opens a path for use as an O_PATH descriptor, close-on-exec. A symbolic link at the end is not followed.
func OpenPath(path string) (int, error) {
	return retryFD("open "+path, func() (int, error) { return unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0) })
}

// OpenAt opens name below dir with flags; close-on-exec is added.
func OpenAt(dir int, name string, flags int, mode uint32) (int, error) {
	return retryFD("open "+name, func() (int, error) { return unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode) })
}

// OpenPathAt is OpenPath below a directory.
func OpenPathAt(dir int, name string) (int, error) {
	return OpenAt(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
}

// CloneMount copies the mount at path, with all that is mounted below it if recursive. The copy is attached to nothing and
// vanishes with its descriptor.
func CloneMount(path string, recursive bool) (int, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_SYMLINK_NOFOLLOW)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	return retryFD("clone mount "+path, func() (int, error) { return unix.OpenTree(unix.AT_FDCWD, path, flags) })
}

// MountAttr are changes of a detached mount. UserNS, if positive, makes ids on disk appear through that user namespace; a
// mount's mapping can be set once.
type MountAttr struct {
	Set, Clear uint64
	UserNS     int
	Recursive  bool

	propagation uint64
}

// SetMountAttr changes the mount that fd, from CloneMount or FSMount, stands for.
func SetMountAttr(fd int, a MountAttr) error {
	attr := unix.MountAttr{Attr_set: a.Set, Attr_clr: a.Clear, Propagation: a.propagation}
	if a.UserNS > 0 {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(a.UserNS)
	}
	flags := uint(unix.AT_EMPTY_PATH)
	if a.Recursive {
		flags |= unix.AT_RECURSIVE
	}
	if err := retryEINTR(func() error { return unix.MountSetattr(fd, "", flags, &attr) }); err != nil {
		return fmt.Errorf("set mount attributes: %w", err)
	}
	return nil
}

// CloneMountWith is CloneMount and SetMountAttr. The copy is private: what is mounted on it is mounted nowhere else.
func CloneMountWith(path string, a MountAttr) (int, error) {
	fd, err := CloneMount(path, a.Recursive)
	if err != nil {
		return -1, err
	}
	a.propagation = unix.MS_PRIVATE
	if err := SetMountAttr(fd, a); err != nil {
		Close(fd)
		return -1, fmt.Errorf("%s: %w", path, err)
	}
	return fd, nil
}

// An FSOption is one parameter of a new file system. A flag has no value.
type FSOption struct {
	Key, Value string
	Flag       bool
}

// FSMount makes a file system, not attached anywhere. What the kernel says about a refusal is in the error.
func FSMount(fstype string, options []FSOption, attrs int) (int, error) {
	ctx, err := retryFD("fsopen "+fstype, func() (int, error) { return unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC) })
	if err != nil {
		return -1, err
	}
	defer Close(ctx)
	for _, o := range options {
		if o.Flag {
			err = unix.FsconfigSetFlag(ctx, o.Key)
		} else {
			err = unix.FsconfigSetString(ctx, o.Key, o.Value)
		}
		if err != nil {
			return -1, fmt.Errorf("%s option %s%s: %w", fstype, o.Key, fsLog(ctx), err)
		}
	}
	if err := retryEINTR(func() error { return unix.FsconfigCreate(ctx) }); err != nil {
		return -1, fmt.Errorf("create %s%s: %w", fstype, fsLog(ctx), err)
	}
	return retryFD("fsmount "+fstype, func() (int, error) { return unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, attrs) })
}

// fsLog is what the kernel said while a file system was configured, for people: " (e overlay: ...)".
func fsLog(ctx int) string {
	var lines []string
	buf := make([]byte, 512)
	for range 8 {
		n, err := unix.Read(ctx, buf)
		if err != nil || n <= 0 {
			break
		}
		lines = append(lines, strings.TrimSpace(string(buf[:n])))
	}
	if len(lines) == 0 {
		return ""
	}
	return " (" + strings.Join(lines, "; ") + ")"
}

// AttachMount attaches a detached mount at path.
func AttachMount(fd int, path string) error {
	err := retryEINTR(func() error { return unix.MoveMount(fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH) })
	if err != nil {
		return fmt.Errorf("attach mount at %s: %w", path, err)
	}
	return nil
}

// MountDisk mounts a block device for directories of sandboxes, private: no set-user-id program and no device node in them
// means anything to the host.
func MountDisk(device, target, fstype, options string) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME
	err := retryEINTR(func() error { return unix.Mount(device, target, fstype, flags, options) })
	if err != nil {
		return fmt.Errorf("mount %s %s at %s: %w", fstype, device, target, err)
	}
	if err := unix.Mount("", target, "", unix.MS_PRIVATE, ""); err != nil {
		_ = UnmountPath(target, true)
		return fmt.Errorf("make %s private: %w", target, err)
	}
	return nil
}

// BindMount makes src visible at dst, which exists. It also pins namespaces: src may be /proc/<pid>/ns/user.
func BindMount(src, dst string) error {
	if err := retryEINTR(func() error { return unix.Mount(src, dst, "", unix.MS_BIND, "") }); err != nil {
		return fmt.Errorf("bind %s to %s: %w", src, dst, err)
	}
	return nil
}

// CheckWritable makes sure that a file can be made in the directory fd, by making one without a name, or where the file system
// has none (overlay before Linux 6.3) one that is removed again. An overlay whose upper directory does not fit its id map mounts
// without complaint and then refuses every write (EOVERFLOW, EROFS).
func CheckWritable(dir int) error {
	fd, err := OpenAt(dir, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
	if errors.Is(err, unix.EOPNOTSUPP) {
		name := ".dsec-" + rand.Text() // no layer has it, so that removing it leaves no whiteout
		if fd, err = OpenAt(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o600); err == nil {
			err = retryEINTR(func() error { return unix.Unlinkat(dir, name, 0) })
		}
	}
	if err != nil {
		Close(fd)
		return fmt.Errorf("check that it is writable: %w", err)
	}
	Close(fd)
	return nil
}

// WithFSIDs runs f on this thread with another identity towards file systems, keeping the capabilities. f must not start
// goroutines that rely on it.
//
// An overlay takes over the credentials of its maker for everything it does in the upper directory; through an idmapped
// mount of that directory host root has no id, so the maker must be the one that the mapping knows.
func WithFSIDs(uid, gid int, f func() error) error {
	runtime.LockOSThread()
	setFSIDs(uid, gid)
	if err := raiseCapabilities(); err != nil {
		restoreFSIDs()
		return fmt.Errorf("raise capabilities under uid %d: %w", uid, err)
	}
	err := f()
	restoreFSIDs()
	return err
}

// setFSIDs sets this thread's ids. The calls have no errors, only a previous value.
func setFSIDs(uid, gid int) {
	unix.SetfsgidRetGid(gid)
	unix.SetfsuidRetUid(uid)
}

// restoreFSIDs gives the thread back to the scheduler if it is what it was, else leaves it locked: then it ends with the
// goroutine and never runs anything else.
func restoreFSIDs() {
	setFSIDs(0, 0)
	uid, err := unix.SetfsuidRetUid(-1) // an invalid id only reads
	if err == nil && uid == 0 {
		runtime.UnlockOSThread()
	}
}

// raiseCapabilities makes all permitted capabilities effective: a change of the file system uid from 0 drops some.
func raiseCapabilities() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	for i := range data {
		data[i].Effective = data[i].Permitted
	}
	return unix.Capset(&hdr, &data[0])
}

// retryFD is retryEINTR for calls that open something.
func retryFD(what string, f func() (int, error)) (int, error) {
	for {
		fd, err := f()
		switch {
		case err == nil:
			return fd, nil
		case !errors.Is(err, unix.EINTR):
			return -1, fmt.Errorf("%s: %w", what, err)
		}
	}
}

// UnshareMounts gives this thread a mount namespace of its own in which path is not mounted. The thread must be locked and
// end with its goroutine.
func UnshareMounts(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare mounts: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return UnmountPath(path, true)
}

// MountBPF mounts a file system for pinned BPF objects at dir.
func MountBPF(dir string) error {
	err := retryEINTR(func() error {
		return unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	})
	if err != nil {
		return fmt.Errorf("mount bpf at %s: %w", dir, err)
	}
	return nil
}
