/*
 * What root in a sandbox tries. One argument: a group of attempts. Each prints a line "name<TAB>errno", 0 if it succeeded. Numbers of
 * calls are written out where a C library may not have them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static void say(const char *name, long result)
{
	printf("%s\t%d\n", name, result < 0 ? errno : 0);
	fflush(stdout);
}

#define TRY(name, call) (errno = 0, say(name, (long)(call)))

/* ---- PID 1 ------------------------------------------------------------------------------------------------------- */

static void read_file(const char *path, int flags)
{
	char name[300], b[64];
	int fd = open(path, flags);
	long r = fd;
	if (fd >= 0 && (flags & O_ACCMODE) == O_RDONLY && !(flags & O_DIRECTORY))
		r = read(fd, b, sizeof b);
	else if (fd >= 0 && (flags & O_ACCMODE) == O_WRONLY)
		r = write(fd, "1", 1);
	int e = errno;
	snprintf(name, sizeof name, "%s %s", (flags & O_ACCMODE) == O_RDONLY ? "read" : "write", path);
	errno = e;
	say(name, r);
	if (fd >= 0)
		close(fd);
}

static void each_task(void (*f)(int tid))
{
	DIR *d = opendir("/proc/1/task");
	struct dirent *e;
	while (d && (e = readdir(d)))
		if (atoi(e->d_name) > 0)
			f(atoi(e->d_name));
	if (d)
		closedir(d);
	else
		say("list tasks", -1);
}

static void trace(int tid)
{
	char buf[64], path[64];
	struct iovec here = {buf, sizeof buf}, there = {(void *)0x400000, sizeof buf};
	TRY("attach", ptrace(PTRACE_ATTACH, tid, 0, 0));
	TRY("seize", ptrace(PTRACE_SEIZE, tid, 0, 0));
	TRY("process_vm_readv", process_vm_readv(tid, &here, 1, &there, 1, 0));
	TRY("process_vm_writev", process_vm_writev(tid, &here, 1, &there, 1, 0));
	TRY("kcmp", syscall(SYS_kcmp, tid, getpid(), 0, 0, 0));
	static const char *const files[] = {"mem", "environ", "maps", "smaps", "auxv", "exe", "stack", "syscall", "io", "personality",
					    "pagemap", "wchan", "root/etc/passwd", "cwd/etc/passwd", "fd/0", "fd/3", "ns/mnt", "ns/user", "map_files"};
	for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
		snprintf(path, sizeof path, "/proc/1/task/%d/%s", tid, files[i]);
		read_file(path, O_RDONLY);
		snprintf(path, sizeof path, "/proc/%d/%s", tid, files[i]);
		read_file(path, O_RDONLY);
	}
	static const char *const written[] = {"mem", "oom_score_adj", "oom_adj", "comm", "coredump_filter", "clear_refs", "sched",
					      "uid_map", "gid_map", "setgroups", "attr/current", "timerslack_ns", "autogroup", "loginuid"};
	for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
		snprintf(path, sizeof path, "/proc/%d/%s", tid, written[i]);
		read_file(path, O_WRONLY);
	}
}

static void limits(int tid)
{
	struct rlimit none = {0, 0};
	for (int r = 0; r < 16; r++)
		TRY("prlimit", prlimit(tid, r, &none, NULL));
}

static void pid1(void)
{
	each_task(trace);
	each_task(limits);
	int p = (int)syscall(SYS_pidfd_open, 1, 0);
	TRY("pidfd_open", p);
	for (int fd = 0; fd < 16; fd++)
		TRY("pidfd_getfd", syscall(438, p, fd, 0));
	TRY("process_madvise", syscall(440, p, 0, 0, 4, 0));
	TRY("process_mrelease", syscall(448, p, 0));
	TRY("setns", syscall(SYS_setns, p, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWUSER));
	TRY("move_pages", syscall(SYS_move_pages, 1, 0, 0, 0, 0, 0));
	TRY("migrate_pages", syscall(SYS_migrate_pages, 1, 0, 0, 0));
	TRY("list fds", open("/proc/1/fd", O_DIRECTORY) >= 0 && opendir("/proc/1/fd") ? 0 : -1);
}

static void signal_task(int tid)
{
	siginfo_t info;
	for (int s = 1; s <= 64; s++) {
		kill(1, s);
		syscall(SYS_tgkill, 1, tid, s);
		memset(&info, 0, sizeof info);
		info.si_signo = s;
		info.si_code = SI_QUEUE;
		syscall(SYS_rt_sigqueueinfo, 1, s, &info);
		syscall(SYS_rt_tgsigqueueinfo, 1, tid, s, &info);
		int p = (int)syscall(SYS_pidfd_open, 1, 0);
		syscall(SYS_pidfd_send_signal, p, s, NULL, 0);
		close(p);
	}
}

static void signals(void)
{
	for (int round = 0; round < 20; round++)
		each_task(signal_task);
	say("signals", 0);
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

static int namespaces(void)
{
	static const struct {
		const char *name;
		int flag;
	} all[] = {{"mnt", CLONE_NEWNS}, {"user", CLONE_NEWUSER}, {"net", CLONE_NEWNET}, {"pid", CLONE_NEWPID}, {"ipc", CLONE_NEWIPC},
		   {"uts", CLONE_NEWUTS}, {"cgroup", 0x02000000}, {"time", 0x80}};
	char name[64];
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		snprintf(name, sizeof name, "unshare %s", all[i].name);
		TRY(name, unshare(all[i].flag));
		/* The flags are 64 bits wide, and the kernel looks at 32 of them. */
		snprintf(name, sizeof name, "unshare wide %s", all[i].name);
		TRY(name, syscall(SYS_unshare, 0xffffffff00000000UL | (unsigned)all[i].flag));
		uint64_t args[11] = {(unsigned)all[i].flag, [4] = SIGCHLD};
		snprintf(name, sizeof name, "clone3 %s", all[i].name);
		errno = 0;
		long pid = syscall(435, args, sizeof args);
		if (pid == 0)
			_exit(0);
		say(name, pid);
	}
	return 0;
}

static long in_i386(long nr, long arg)
{
	long r;
	__asm__ volatile("int $0x80" : "=a"(r) : "a"(nr), "b"(arg) : "memory", "r8", "r9", "r10", "r11");
	if (r < 0 && r > -4096) {
		errno = (int)-r;
		return -1;
	}
	return r;
}

/* Without IA32 emulation in the kernel the instruction faults, which is as good as a refusal. */
static void i386(void)
{
	int status;
	pid_t p = fork();
	if (p == 0) {
		in_i386(20 /* getpid */, 0);
		_exit(errno == ENOSYS ? 38 : 0);
	}
	waitpid(p, &status, 0);
	errno = WIFEXITED(status) ? WEXITSTATUS(status) : ENOSYS;
	say("i386 getpid", errno ? -1 : 0);
}

static void calls(void)
{
	char buf[256] = {0};
	namespaces();
	i386();
	TRY("x32 getpid", syscall(0x40000000 | SYS_getpid));
	TRY("mount", mount("x", "/mnt", "tmpfs", 0, ""));
	TRY("remount /", mount("", "/", "", MS_REMOUNT | MS_BIND, ""));
	TRY("remount /proc/sys", mount("", "/proc/sys", "", MS_REMOUNT | MS_BIND, ""));
	TRY("bind", mount("/", "/mnt", "", MS_BIND, ""));
	TRY("propagate", mount("", "/", "", MS_SHARED | MS_REC, ""));
	TRY("umount /proc/kcore", umount2("/proc/kcore", MNT_DETACH));
	TRY("umount /", umount2("/", MNT_DETACH));
	TRY("pivot_root", syscall(SYS_pivot_root, "/", "/"));
	static const struct {
		const char *name;
		long nr;
	} refused[] = {{"open_tree", 428}, {"move_mount", 429}, {"fsopen", 430}, {"fsconfig", 431}, {"fsmount", 432}, {"fspick", 433},
		       {"mount_setattr", 442}, {"open_tree_attr", 467}, {"bpf", SYS_bpf}, {"perf_event_open", SYS_perf_event_open},
		       {"io_uring_setup", 425}, {"io_uring_enter", 426}, {"io_uring_register", 427}, {"userfaultfd", SYS_userfaultfd},
		       {"keyctl", SYS_keyctl}, {"add_key", SYS_add_key}, {"request_key", SYS_request_key},
		       {"open_by_handle_at", SYS_open_by_handle_at}, {"fanotify_init", SYS_fanotify_init}, {"quotactl", SYS_quotactl},
		       {"quotactl_fd", 443}, {"init_module", SYS_init_module}, {"finit_module", SYS_finit_module},
		       {"delete_module", SYS_delete_module}, {"kexec_load", SYS_kexec_load}, {"kexec_file_load", SYS_kexec_file_load},
		       {"reboot", SYS_reboot}, {"swapon", SYS_swapon}, {"swapoff", SYS_swapoff}, {"acct", SYS_acct}, {"syslog", SYS_syslog},
		       {"iopl", SYS_iopl}, {"ioperm", SYS_ioperm}, {"settimeofday", SYS_settimeofday}, {"clock_settime", SYS_clock_settime},
		       {"sethostname", SYS_sethostname}, {"setdomainname", SYS_setdomainname}, {"vhangup", SYS_vhangup},
		       {"lookup_dcookie", SYS_lookup_dcookie}, {"nfsservctl", SYS_nfsservctl}};
	for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
		TRY(refused[i].name, syscall(refused[i].nr, 0, buf, buf, 0, 0, 0));
	TRY("TIOCSTI", ioctl(0, TIOCSTI, buf));
	TRY("TIOCLINUX", ioctl(0, 0x541c, buf));
	int fd = open("/tmp", O_RDONLY), hosts = open("/etc/hosts", O_RDWR);
	TRY("swap extents", ioctl(fd, 0xc0c0586d, buf));
	TRY("exchange range", ioctl(fd, 0x40285881, buf));
	TRY("move extents", ioctl(fd, 0xc028660f, buf));
	TRY("btrfs subvolume", ioctl(hosts, 0x5000940e, buf));
	TRY("btrfs tree search", ioctl(hosts, 0xd0009411, buf));
	TRY("btrfs quota", ioctl(hosts, 0xc0109428, buf));
	TRY("immutable", (errno = 0, ioctl(hosts, 0x40086602, &(long){0x10})));
	TRY("freeze", ioctl(fd, 0xc0045877, 0));
	TRY("trim", ioctl(fd, 0xc0185879, buf));
	TRY("personality without randomisation", syscall(SYS_personality, 0x0040000));
}

static void sockets(void)
{
	char name[64];
	for (int family = 0; family < 48; family++) {
		if (family == AF_UNIX || family == AF_INET || family == AF_INET6 || family == AF_NETLINK)
			continue;
		for (int type = 1; type <= 5; type++) {
			snprintf(name, sizeof name, "family %d", family);
			TRY(name, socket(family, type, 0));
		}
	}
	for (int p = 1; p < 32; p++) {
		snprintf(name, sizeof name, "netlink %d", p);
		TRY(name, socket(AF_NETLINK, SOCK_RAW, p));
	}
	TRY("raw", socket(AF_INET, SOCK_RAW, 1));
	TRY("raw6", socket(AF_INET6, SOCK_RAW, 58));
	TRY("old packet", socket(AF_INET, SOCK_PACKET, 0x300));
	TRY("old packet, with flags", socket(AF_INET, SOCK_PACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0x300));
	TRY("packet with wide family", syscall(SYS_socket, 0x100000000UL | AF_PACKET, SOCK_RAW, 0x300));
	TRY("vsock with wide family", syscall(SYS_socket, 0xffffffff00000000UL | 40, SOCK_STREAM, 0));
	TRY("netlink with wide protocol", syscall(SYS_socket, AF_NETLINK, SOCK_RAW, 0x100000000UL | 12));
	static const int protocols[] = {33 /* DCCP */, 115 /* L2TP */, 132 /* SCTP */, 256 /* SMC */};
	for (size_t i = 0; i < sizeof protocols / sizeof *protocols; i++)
		for (int type = 1; type <= 6; type++) {
			snprintf(name, sizeof name, "protocol %d", protocols[i]);
			TRY(name, socket(AF_INET, type, protocols[i]));
			TRY(name, socket(AF_INET6, type, protocols[i]));
		}
	int vs[2];
	TRY("socketpair tipc", socketpair(30, SOCK_STREAM, 0, vs));
}

static void devices(void)
{
	static const struct {
		const char *name;
		mode_t type;
		int major, minor;
	} nodes[] = {{"null", S_IFCHR, 1, 3}, {"mem", S_IFCHR, 1, 1}, {"kmsg", S_IFCHR, 1, 11}, {"console", S_IFCHR, 5, 1}, {"tty0", S_IFCHR, 4, 0},
		     {"loop0", S_IFBLK, 7, 0}, {"vda", S_IFBLK, 254, 0}, {"sda", S_IFBLK, 8, 0}, {"fuse", S_IFCHR, 10, 229},
		     {"kvm", S_IFCHR, 10, 232}, {"tun", S_IFCHR, 10, 200}, {"loop-control", S_IFCHR, 10, 237}};
	char path[64], name[64];
	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		snprintf(path, sizeof path, "/tmp/dev-%s", nodes[i].name);
		snprintf(name, sizeof name, "mknod %s", nodes[i].name);
		TRY(name, mknod(path, nodes[i].type | 0666, makedev(nodes[i].major, nodes[i].minor)));
		snprintf(path, sizeof path, "/dev/%s-x", nodes[i].name);
		snprintf(name, sizeof name, "mknod in /dev %s", nodes[i].name);
		TRY(name, mknod(path, nodes[i].type | 0666, makedev(nodes[i].major, nodes[i].minor)));
		if (i) { /* what is not there is not there, not even to look at */
			snprintf(path, sizeof path, "/dev/%s", nodes[i].name);
			snprintf(name, sizeof name, "open /dev/%s", nodes[i].name);
			TRY(name, open(path, O_RDWR | O_NOCTTY));
		}
	}
	TRY("replace /dev/null", unlink("/dev/null"));
	TRY("chmod /dev/null", chmod("/dev/null", 0));
}

/* ---- what is kept busy ------------------------------------------------------------------------------------------- */

static void stop_all(int s)
{
	for (;;)
		kill(-1, s);
}

static void lease(const char *path)
{
	signal(SIGIO, SIG_IGN);
	int fd = open(path, O_RDONLY);
	TRY("lease", fcntl(fd, F_SETLEASE, F_WRLCK));
	for (;;)
		pause();
}

/* Writes to its output as fast as it can, a byte or a lot at a time. */
static void flood(size_t piece)
{
	static char b[1 << 16];
	memset(b, 'x', sizeof b);
	for (;;)
		if (write(1, b, piece) < 0)
			_exit(1);
}

/* Leaves that many children to PID 1 within the limit of pids. */
static void orphans(int n)
{
	for (int i = 0; i < n; i++) {
		pid_t p;
		while ((p = fork()) < 0)
			usleep(500);
		if (p == 0) {
			while ((p = fork()) < 0)
				usleep(500);
			_exit(0); /* both: the parent too, so that the grandchild is an orphan */
		}
		waitpid(p, NULL, 0);
	}
	say("orphans", 0);
}

static void bomb(void)
{
	for (;;)
		if (fork() < 0)
			sched_yield();
}

/* Keeps a descriptor of every pipe that somebody has as its output. */
static void hoard(void)
{
	static char seen[1 << 22];
	char path[64], link[64];
	struct rlimit most;
	getrlimit(RLIMIT_NOFILE, &most);
	most.rlim_cur = most.rlim_max;
	setrlimit(RLIMIT_NOFILE, &most);
	for (;;) {
		DIR *d = opendir("/proc");
		struct dirent *e;
		while (d && (e = readdir(d))) {
			int pid = atoi(e->d_name);
			if (pid < 2 || pid == getpid())
				continue;
			for (int f = 1; f < 3; f++) {
				snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, f);
				ssize_t n = readlink(path, link, sizeof link - 1);
				if (n < 6 || strncmp(link, "pipe:[", 6))
					continue;
				link[n] = 0;
				unsigned inode = (unsigned)atoi(link + 6) & ((1 << 22) - 1);
				if (!seen[inode] && open(path, O_WRONLY | O_NONBLOCK) >= 0)
					seen[inode] = 1;
			}
		}
		if (d)
			closedir(d);
	}
}

/* Makes path a file and a link in turns. */
static void swap(const char *path, const char *file, const char *target)
{
	char link[256], other[256];
	snprintf(link, sizeof link, "%s.link", path);
	snprintf(other, sizeof other, "%s.other", path);
	if (symlink(target, link) < 0 && errno != EEXIST) {
		say("swap", -1);
		return;
	}
	if (rename(file, path) < 0) {
		say("swap", -1);
		return;
	}
	for (;;)
		syscall(SYS_renameat2, AT_FDCWD, link, AT_FDCWD, path, 2 /* RENAME_EXCHANGE */);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "pid1"))
		pid1();
	else if (argc == 2 && !strcmp(argv[1], "signals"))
		signals();
	else if (argc == 2 && !strcmp(argv[1], "calls"))
		calls();
	else if (argc == 2 && !strcmp(argv[1], "sockets"))
		sockets();
	else if (argc == 2 && !strcmp(argv[1], "devices"))
		devices();
	else if (argc == 2 && !strcmp(argv[1], "stop"))
		stop_all(SIGSTOP);
	else if (argc == 3 && !strcmp(argv[1], "lease"))
		lease(argv[2]);
	else if (argc == 3 && !strcmp(argv[1], "orphans"))
		orphans(atoi(argv[2]));
	else if (argc == 3 && !strcmp(argv[1], "flood"))
		flood((size_t)atoi(argv[2]));
	else if (argc == 2 && !strcmp(argv[1], "bomb"))
		bomb();
	else if (argc == 2 && !strcmp(argv[1], "hoard"))
		hoard();
	else if (argc == 5 && !strcmp(argv[1], "swap"))
		swap(argv[2], argv[3], argv[4]);
	else
		return 2;
	return 0;
}
