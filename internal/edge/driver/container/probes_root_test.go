//go:build rootful

package container

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

var empty = []byte{0}

func ptr(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }

// probes are what hostile code tries. Keep the names in step with the table in hostile_root_test.go.
var probes = map[string]func() error{
	"mount tmpfs":        func() error { return unix.Mount("x", "/mnt", "tmpfs", 0, "") },
	"remount /proc/sys":  func() error { return unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND, "") },
	"umount /proc/kcore": func() error { return unix.Unmount("/proc/kcore", 0) },
	"move_mount":         func() error { return unix.MoveMount(-1, "", -1, "", 0) },
	"open_tree":          func() error { _, err := unix.OpenTree(-100, "/", 1); return err },
	"fsopen":             func() error { _, err := unix.Fsopen("tmpfs", 0); return err },
	"pivot_root":         func() error { return unix.PivotRoot("/", "/") },
	"unshare user":       func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
	"unshare net":        func() error { return unix.Unshare(unix.CLONE_NEWNET) },
	"unshare files":      func() error { return unix.Unshare(unix.CLONE_FILES) },
	"clone user":         func() error { return call(unix.SYS_CLONE, unix.CLONE_NEWUSER|17) },
	"clone3 user":        cloneUser,
	"setns":              func() error { return unix.Setns(0, 0) },
	"keyctl":             func() error { return call(unix.SYS_KEYCTL, 0, 0xfffffffd, 1) },
	"add_key":            func() error { return call(unix.SYS_ADD_KEY, ptr(empty), ptr(empty), 0, 0, 0xfffffffd) },
	"bpf":                func() error { return call(unix.SYS_BPF, 0, ptr(make([]byte, 128)), 128) },
	"perf_event_open": func() error {
		return call(unix.SYS_PERF_EVENT_OPEN, ptr(make([]byte, 128)), 0, ^uintptr(0), ^uintptr(0), 0)
	},
	"io_uring_setup":         func() error { return call(unix.SYS_IO_URING_SETUP, 1, ptr(make([]byte, 256))) },
	"userfaultfd":            func() error { return call(unix.SYS_USERFAULTFD, 0) },
	"open_by_handle_at":      func() error { return call(unix.SYS_OPEN_BY_HANDLE_AT, ^uintptr(99), ptr(make([]byte, 128)), 0) },
	"init_module":            func() error { return call(unix.SYS_INIT_MODULE, 0, 0, ptr(empty)) },
	"kexec_load":             func() error { return call(unix.SYS_KEXEC_LOAD) },
	"reboot":                 func() error { return call(unix.SYS_REBOOT, 0xfee1dead, 672274793, 0) },
	"syslog":                 func() error { return call(unix.SYS_SYSLOG, 3, ptr(empty), 1) },
	"sethostname":            func() error { return unix.Sethostname([]byte("x")) },
	"unknown call":           func() error { return call(4000) },
	"x32 getpid":             func() error { return call(0x40000000 | unix.SYS_GETPID) },
	"i386 getpid":            i386Getpid,
	"raw socket":             socketOf(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP),
	"packet socket":          socketOf(unix.AF_PACKET, unix.SOCK_RAW, 0x300),
	"old packet socket":      socketOf(unix.AF_INET, 10, 0x300),
	"vsock":                  socketOf(unix.AF_VSOCK, unix.SOCK_STREAM, 0),
	"alg socket":             socketOf(unix.AF_ALG, unix.SOCK_SEQPACKET, 0),
	"netlink netfilter":      socketOf(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER),
	"netlink route":          socketOf(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE),
	"tcp socket":             socketOf(unix.AF_INET, unix.SOCK_STREAM, 0),
	"unix socket":            socketOf(unix.AF_UNIX, unix.SOCK_STREAM, 0),
	"mknod null":             func() error { return unix.Mknod("/tmp/null", unix.S_IFCHR|0o666, 1<<8|3) },
	"mknod disk":             func() error { return unix.Mknod("/tmp/disk", unix.S_IFBLK|0o666, 7<<8) },
	"device of a layer":      openFor("/opt/disk", unix.O_RDONLY),
	"memory of a layer":      openFor("/opt/mem", unix.O_RDONLY),
	"write /dev":             openFor("/dev/x", unix.O_CREAT|unix.O_RDWR),
	"write /dev/null":        openFor("/dev/null", unix.O_RDWR),
	"read /dev/urandom":      readByte("/dev/urandom"),
	"open ptmx":              openFor("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY),
	"write /dev/shm":         openFor("/dev/shm/x", unix.O_CREAT|unix.O_RDWR),
	"read kcore":             readByte("/proc/kcore"),
	"read keys":              readByte("/proc/keys"),
	"read kpagecount":        readByte("/proc/kpagecount"),
	"read timer_list":        readByte("/proc/timer_list"),
	"write sysrq":            openFor("/proc/sysrq-trigger", unix.O_WRONLY),
	"write /proc/sys":        openFor("/proc/sys/kernel/shmmax", unix.O_WRONLY),
	"write max namespaces":   openFor("/proc/sys/user/max_user_namespaces", unix.O_WRONLY),
	"write /sys":             func() error { return os.Mkdir("/sys/fs/x", 0o755) },
	"firmware of /sys":       func() error { return listsNothing("/sys/firmware") },
	"cgroups of /sys":        func() error { return listsNothing("/sys/fs/cgroup") },
	"write root":             openFor("/x", unix.O_CREAT|unix.O_RDWR),
	"write tmp":              openFor("/tmp/y", unix.O_CREAT|unix.O_RDWR),
	"ptrace pid 1":           func() error { return unix.PtraceAttach(1) },
	"seize pid 1":            func() error { return unix.PtraceSeize(1) },
	"pidfd_getfd pid 1":      stealDescriptor,
	"process_vm_readv pid 1": readMemory,
	"mem of pid 1":           openFor("/proc/1/mem", unix.O_RDWR),
	"environ of pid 1":       readByte("/proc/1/environ"),
	"maps of pid 1":          readByte("/proc/1/maps"),
	"fds of pid 1":           func() error { return listsNothing("/proc/1/fd") },
	"root of pid 1":          func() error { return listsNothing("/proc/1/root") },
	"exe of pid 1":           openFor("/proc/1/exe", unix.O_RDONLY),
	"ns of pid 1":            openFor("/proc/1/ns/mnt", unix.O_RDONLY),
	"kill pid 1":             func() error { return signalOne(unix.SIGKILL) },
	"stop pid 1":             func() error { return signalOne(unix.SIGSTOP) },
	"read own program":       openFor("/proc/self/exe", unix.O_RDONLY), // by PID 1 of itself
	"inotify budget":         inotifyBudget,
	"TIOCSTI":                func() error { return call(unix.SYS_IOCTL, 0, unix.TIOCSTI, ptr(empty)) },
	"swap extents":           func() error { return call(unix.SYS_IOCTL, 0, 0xc0c0586d, ptr(make([]byte, 256))) },
	"btrfs subvolume":        func() error { return call(unix.SYS_IOCTL, 0, 0x5000940e, ptr(make([]byte, 4096))) },
	"descriptors":            descriptors,
	"config":                 func() error { return checkConfig() },
	"tasks":                  func() error { _, err := unix.Write(6, []byte("0")); return err },
	"own cgroup":             func() error { return unix.Mkdirat(5, fmt.Sprintf("c%d", unix.Getpid()), 0o755) },
	"above cgroup":           aboveCgroup,
	"limit of cgroup":        func() error { _, err := unix.Openat(5, "../cgroup.kill", unix.O_WRONLY, 0); return err },
	"thaw cgroup":            func() error { _, err := unix.Openat(5, "cgroup.freeze", unix.O_WRONLY, 0); return err },
	"limits of pid 1": func() error {
		limit := unix.Rlimit{Cur: 3, Max: 3}
		return unix.Prlimit(1, unix.RLIMIT_NOFILE, &limit, nil)
	},
	"capabilities": func() error { return errors.New(statusLine("CapEff") + statusLine("CapBnd") + statusLine("Seccomp:")) },
	"setuid":       func() error { return unix.Setresuid(1000, 1000, 1000) },
}

// aboveCgroup looks where ".." leads from the one directory that PID 1 was given.
func aboveCgroup() error {
	var dir, above unix.Stat_t
	if err := errors.Join(unix.Fstat(5, &dir), unix.Fstatat(5, "../..", &above, 0)); err != nil {
		return err
	}
	if dir.Dev != above.Dev || dir.Ino != above.Ino {
		return errors.New("the host's tree")
	}
	return nil
}

func cloneUser() error {
	args := [8]uint64{unix.CLONE_NEWUSER}
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), 64, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
	return nil
}

func stealDescriptor() error {
	fd, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return err
	}
	_, err = unix.PidfdGetfd(fd, 3, 0)
	return err
}

func readMemory() error {
	buf := make([]byte, 8)
	local := []unix.Iovec{{Base: &buf[0], Len: 8}}
	_, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: 0x400000, Len: 8}}, 0)
	return err
}

// signalOne sends PID 1 what it cannot ignore, and sees that it makes no difference.
func signalOne(s unix.Signal) error {
	if err := unix.Kill(1, s); err != nil {
		return err
	}
	stat, err := os.ReadFile("/proc/1/stat")
	if err != nil {
		return err
	}
	if state := stat[strings.LastIndexByte(string(stat), ')')+2]; state == 'T' || state == 'Z' {
		return fmt.Errorf("pid 1 is in state %c", state)
	}
	return nil
}

func inotifyBudget() error {
	for n := 0; ; n++ {
		if _, err := unix.InotifyInit1(0); err != nil {
			return fmt.Errorf("%d", n)
		}
	}
}

func listsNothing(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return errors.New("empty")
	}
	return nil
}

// descriptors describes what PID 1 was given, by kind.
func descriptors() error {
	var out []string
	for fd := 0; fd < 64; fd++ {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && fd < 16 {
			out = append(out, fmt.Sprintf("%d:%c", fd, map[uint32]rune{unix.S_IFCHR: 'c', unix.S_IFDIR: 'd', unix.S_IFSOCK: 's', unix.S_IFIFO: 'p', unix.S_IFREG: 'f'}[st.Mode&unix.S_IFMT]))
		}
	}
	return errors.New(strings.Join(out, " "))
}

func checkConfig() error {
	if guestConfigErr != nil {
		return guestConfigErr
	}
	return fmt.Errorf("%s %s %d", guestConfig.Hostname, guestConfig.Cgroup, guestConfig.V1Tasks)
}

func statusLine(key string) string {
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, key) {
			return strings.Join(strings.Fields(line), "") + " "
		}
	}
	return ""
}
