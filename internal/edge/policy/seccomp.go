package policy

import (
	"slices"
	"strings"

	"dsec/sandbox"
)

// ProfileSource names where the list of allowed calls comes from.
const ProfileSource = "moby/profiles seccomp/default.json at 02e898b137ae, resolved for amd64, Docker's capabilities less NET_RAW, kernel >= 4.8"

// allowed are the calls that the source allows without looking at arguments.
var allowed = strings.Fields(`
accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown chroot
clock_adjtime clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup
dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old
eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir
fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr
fstat fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake futimesat get_robust_list
get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid
getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init inotify_init1
inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit ioprio_get ioprio_set kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listmount
listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier
memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect
mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd
msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open
pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2
prlimit64 process_mrelease process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev pwritev2 read
readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop
sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid
setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs
statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete
timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate
umask uname unlink unlinkat uretprobe utime utimensat utimes vfork vmsplice wait4 waitid write writev
`)

// An Action is what the kernel does with a call: the value a filter returns.
type Action uint32

// Actions. Errno is SECCOMP_RET_ERRNO with the number in the low 16 bits.
const (
	Allow Action = 0x7fff0000
	errno Action = 0x00050000

	ErrnoPerm  = errno | 1  // EPERM: known and refused
	ErrnoNosys = errno | 38 // ENOSYS: not known here
	ErrnoProto = errno | 93 // EPROTONOSUPPORT: what it says of such a protocol
	ErrnoAfnos = errno | 97 // EAFNOSUPPORT: what socket() says of a family that is not there
)

// A Match holds if the low 32 bits of an argument, masked, have a value.
type Match struct {
	Arg         int
	Mask, Value uint32
}

// A Clause is an action for calls to which all matches apply.
type Clause struct {
	When []Match
	Then Action
}

// A Rule is what happens to one system call: the first clause that applies, or else Otherwise.
type Rule struct {
	Clauses   []Clause
	Otherwise Action
}

// A Profile maps system call numbers to rules. Calls that it does not hold answer ENOSYS.
type Profile map[uint32]Rule

const (
	all32 = ^uint32(0)

	afUnix, afInet, afInet6, afNetlink = 1, 2, 10, 16
	sockTypeMask, sockPacket           = 0xf, 10
	netlinkRoute                       = 0

	protoAny, protoICMP, protoTCP, protoUDP, protoICMP6 = 0, 1, 6, 17, 58

	// CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}, and NEWTIME, which is a signal number to clone but a flag to unshare.
	namespaceFlags = 0x7e020000
	newTime        = 0x80
)

func equal(arg int, values ...uint32) []Clause {
	var cs []Clause
	for _, v := range values {
		cs = append(cs, Clause{When: []Match{{arg, all32, v}}, Then: Allow})
	}
	return cs
}

// conditional are the calls whose arguments decide.
func conditional() map[string]Rule {
	return map[string]Rule{
		"socket":     {Otherwise: ErrnoAfnos, Clauses: socketClauses()},
		"socketpair": {Otherwise: ErrnoAfnos, Clauses: equal(0, afUnix)},
		"clone":      {Otherwise: ErrnoPerm, Clauses: []Clause{{When: []Match{{0, namespaceFlags, 0}}, Then: Allow}}},
		"unshare":    {Otherwise: ErrnoPerm, Clauses: []Clause{{When: []Match{{0, namespaceFlags | newTime, 0}}, Then: Allow}}},
		"clone3":     {Otherwise: Allow},
		"personality": {Otherwise: ErrnoPerm, Clauses: equal(0,
			0, 8, 0x20000, 0x20008, 0xffffffff)}, // PER_LINUX, PER_LINUX32, with UNAME26, and the query
		"ioctl": {Otherwise: Allow, Clauses: refusedIoctls()},
	}
}

// socketClauses: no AF_VSOCK (it reaches the hypervisor's host from any namespace), no AF_ALG, no AF_PACKET: also not by its
// old spelling, SOCK_PACKET of AF_INET. Netlink is for routes only. Of the internet's protocols those that everybody
// needs: asking for another (SCTP, DCCP, L2TP, SMC) makes the host's kernel load its module.
func socketClauses() []Clause {
	cs := []Clause{
		{When: []Match{{1, sockTypeMask, sockPacket}}, Then: ErrnoPerm},
		{When: []Match{{0, all32, afNetlink}, {2, all32, netlinkRoute}}, Then: Allow},
		{When: []Match{{0, all32, afUnix}}, Then: Allow},
	}
	for _, family := range []uint32{afInet, afInet6} {
		for _, protocol := range []uint32{protoAny, protoTCP, protoUDP, protoICMP, protoICMP6} {
			cs = append(cs, Clause{When: []Match{{0, all32, family}, {2, all32, protocol}}, Then: Allow})
		}
		cs = append(cs, Clause{When: []Match{{0, all32, family}}, Then: ErrnoProto})
	}
	return cs
}

// refusedIoctls push input into terminals, exchange the extents of files behind the back of layers and quota, or manage
// a file system that the node owns. Commands of file systems are compared by type and number only, so that another
// argument size is no way around.
func refusedIoctls() []Clause {
	const typeAndNumber, typeOnly = 0xffff, 0xff00
	var cs []Clause
	for _, cmd := range []uint32{0x5412, 0x541c} { // TIOCSTI, TIOCLINUX
		cs = append(cs, Clause{[]Match{{1, all32, cmd}}, ErrnoPerm})
	}
	for _, cmd := range []uint32{
		'X'<<8 | 109, 'X'<<8 | 129, 'X'<<8 | 130, 'X'<<8 | 131, // XFS_IOC_SWAPEXT, EXCHANGE_RANGE, START_COMMIT, COMMIT_RANGE
		'f'<<8 | 15, // EXT4_IOC_MOVE_EXT
	} {
		cs = append(cs, Clause{[]Match{{1, typeAndNumber, cmd}}, ErrnoPerm})
	}
	// Of btrfs only what became generic: FICLONE, FICLONERANGE, FIDEDUPERANGE, FS_IOC_GETFSLABEL.
	for _, cmd := range []uint32{0x40049409, 0x4020940d, 0xc0189436, 0x81009431} {
		cs = append(cs, Clause{[]Match{{1, all32, cmd}}, Allow})
	}
	return append(cs, Clause{[]Match{{1, typeOnly, 0x94 << 8}}, ErrnoPerm})
}

// DefaultProfile is the profile of every sandbox.
func DefaultProfile() Profile {
	p := make(Profile, len(syscallNumbers))
	for _, nr := range syscallNumbers {
		p[nr] = Rule{Otherwise: ErrnoPerm}
	}
	for _, name := range allowed {
		p[syscallNumbers[name]] = Rule{Otherwise: Allow}
	}
	for name, r := range conditional() {
		p[syscallNumbers[name]] = r
	}
	return p
}

// SeccompProgram is the compiled default profile as the kernel takes it: an array of struct sock_filter in host order. The
// architecture is an argument so that the refusal can be tested.
func SeccompProgram(goarch string) ([]byte, error) {
	if goarch != "amd64" {
		return nil, sandbox.Errorf(sandbox.Unsupported, "unsupported_architecture",
			"the system call filter knows x86-64 only, not %s; without it no sandbox is started", goarch)
	}
	prog, err := compile(DefaultProfile())
	if err != nil {
		return nil, err
	}
	return encode(prog), nil
}

// AllowedNames are the calls that are allowed whatever their arguments, by name.
func AllowedNames() []string { return slices.Clone(allowed) }
