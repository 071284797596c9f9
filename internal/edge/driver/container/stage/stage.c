/*
 * stage: the system calls between the edge and aether. The edge, which is threaded, cannot enter namespaces and become
 * another user by itself; this program can, and starts in a fraction of the time that a Go program takes.
 *
 * It has four modes, by its first argument:
 *
 *   run     joins control groups and namespaces, clones the sandbox's PID 1 as a child of the edge (CLONE_PARENT), and ends. The
 *           child attaches the mounts that the edge made, leaves the host's tree, gives up its rights and becomes aether.
 *   users   makes one user namespace under the uid given, and lives until its control socket closes.
 *   mounts  makes the small mount namespace from which all sandboxes are cloned, and lives until its control socket closes.
 *   steps   prints the names of the steps, one a line: the edge's table is compared with it.
 *
 * Kill-safe: PID 1 becomes aether only after a byte from the edge which says that its pid is recorded. If the edge dies
 * before, the control socket closes and everything here ends. Nothing is retried, nothing is parsed: the plan is a struct, and
 * what it points to is by descriptor. All failures are reported as (step, errno) on the control socket.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Numbers that the C library's headers may not have yet; they are the same on every architecture. */
#ifndef SYS_move_mount
#define SYS_move_mount 429
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#define FROM_FD 0x00000004 /* MOVE_MOUNT_F_EMPTY_PATH */
#define TO_FD 0x00000040   /* MOVE_MOUNT_T_EMPTY_PATH */
#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x02000000
#endif

/* What the edge passes, by number. Keep in step with plan.go. */
enum {
	FD_CONTROL = 3,
	FD_MOUNTNS,
	FD_USERNS,
	FD_NETNS,
	FD_ROOT,
	FD_DEV,
	FD_SYS,
	FD_ETC, /* ETC_FILES of them */
	FD_AETHER = FD_ETC + 3,
	FD_LISTENER,
	FD_CONFIG,
	FD_CGROUP,
	FD_TASKS, /* first those of aether's groups, then those of the user's groups */
	FD_PROC = 4,  /* in the mode users, which has no others */
	FD_KEEP = 60, /* where control and aether's program wait while the table of aether is laid out */
};
#define ETC_FILES 3
#define GUEST_FD 3 /* aether's table begins here: listener, config, cgroup, tasks */
#define MAX_TASKS 16
#define MAX_PLAN (64 << 10)

static const char *const etc_paths[ETC_FILES] = {"etc/hosts", "etc/hostname", "etc/resolv.conf"};

#define STEPS(X)                                                                                                       \
	X(PLAN, "plan") X(CGROUP, "cgroup") X(NETNS, "network_namespace") X(MOUNTNS, "mount_namespace")                \
	X(USERNS, "user_namespace") X(CLONE, "clone") X(IDENTITY, "identity") X(ROOT, "root") X(ETC, "etc")            \
	X(DEV, "dev") X(SYS, "sys") X(PROC, "proc") X(PTS, "pts") X(MQUEUE, "mqueue") X(SHM, "shm") X(MASK, "mask")    \
	X(PIVOT, "pivot") X(HOSTNAME, "hostname") X(LIMITS, "limits") X(SESSION, "session") X(FDS, "descriptors")      \
	X(SECCOMP, "seccomp") X(CAPABILITIES, "capabilities") X(RECORDED, "recorded") X(EXEC, "exec")
#define AS_ENUM(id, name) STEP_##id,
#define AS_NAME(id, name) name,
enum step { STEP_NONE, STEPS(AS_ENUM) STEP_END };
static const char *const step_names[] = {"none", STEPS(AS_NAME)};

struct plan {
	uint32_t magic;
	uint32_t fail_step; /* tests: this step fails with EIO */
	uint32_t aether_tasks, user_tasks;
	uint64_t capabilities;
	uint64_t nofile;
	uint64_t shm_bytes;
	uint32_t etc;         /* bit i: FD_ETC + i is a mount */
	uint32_t text_bytes;  /* host name, then (kind, path)s, each with its NUL; an empty string ends */
	uint32_t filter_len;  /* instructions, behind the text, which is padded to 8 */
	uint32_t total_bytes; /* of the whole message */
	uint32_t cgroup_ns;   /* the sandbox gets a cgroup namespace, with aether's group as its root */
	uint32_t unused;
};
#define PLAN_MAGIC 0x31534432

struct report {
	int32_t kind, value, error;
};
enum { REPORT_PID = 1, REPORT_FAILURE, REPORT_READY };

static union {
	struct plan p;
	char bytes[MAX_PLAN];
} message;
static struct plan *const plan = &message.p;
static int control = FD_CONTROL;

static void report(int kind, int value, int error)
{
	struct report r = {kind, value, error};
	while (send(control, &r, sizeof r, MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

__attribute__((noreturn)) static void fail(enum step s)
{
	report(REPORT_FAILURE, s, errno);
	_exit(1);
}

/* A step begins: the place where tests make it fail. */
static void step(enum step s)
{
	if (plan->fail_step == (uint32_t)s) {
		errno = EIO;
		fail(s);
	}
}

#define TRY(s, call)                                                                                                   \
	do {                                                                                                           \
		if ((call) < 0)                                                                                        \
			fail(s);                                                                                       \
	} while (0)

static void read_plan(void)
{
	ssize_t n;
	do
		n = recv(control, message.bytes, sizeof message, 0);
	while (n < 0 && errno == EINTR);
	errno = EPROTO;
	if (n < (ssize_t)sizeof(struct plan) || plan->magic != PLAN_MAGIC || plan->total_bytes != (uint64_t)n ||
	    plan->text_bytes < 2 || plan->text_bytes > n - sizeof(struct plan) || plan->text_bytes % 8 ||
	    plan->filter_len > BPF_MAXINSNS ||
	    sizeof(struct plan) + plan->text_bytes + plan->filter_len * sizeof(struct sock_filter) != (uint64_t)n ||
	    plan->aether_tasks > MAX_TASKS || plan->user_tasks > MAX_TASKS ||
	    message.bytes[sizeof(struct plan) + plan->text_bytes - 1] != 0)
		fail(STEP_PLAN);
	step(STEP_PLAN);
}

/* ---- run: before the clone -------------------------------------------------------------------------------------- */

static void join(void)
{
	step(STEP_CGROUP);
	for (uint32_t i = 0; i < plan->aether_tasks; i++) /* v1; the v2 group is where we were born */
		TRY(STEP_CGROUP, write(FD_TASKS + i, "0", 1));
	step(STEP_NETNS);
	TRY(STEP_NETNS, setns(FD_NETNS, CLONE_NEWNET));
	step(STEP_MOUNTNS);
	TRY(STEP_MOUNTNS, setns(FD_MOUNTNS, CLONE_NEWNS));
	step(STEP_USERNS); /* last: from here on we have no rights over the host */
	TRY(STEP_USERNS, setns(FD_USERNS, CLONE_NEWUSER));
}

static long clone_child(void)
{
	/* struct clone_args, first version; no exit signal: CLONE_PARENT inherits ours. */
	uint64_t args[8] = {CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_PARENT | (plan->cgroup_ns ? CLONE_NEWCGROUP : 0)};
	return syscall(SYS_clone3, args, sizeof args);
}

/* ---- run: in the new PID 1 --------------------------------------------------------------------------------------- */

static int move_mount(int fd, int dir, const char *path, unsigned flags)
{
	return (int)syscall(SYS_move_mount, fd, "", dir, path, FROM_FD | flags);
}

/* Opens a place in the sandbox's root, whatever links the image put there: nothing leads outside. At "..", if anybody on
 * the machine mounts or renames meanwhile, the kernel cannot be sure and says EAGAIN. */
static int open_in_root(const char *path, uint64_t resolve, uint64_t flags)
{
	struct open_how how = {.flags = O_PATH | O_CLOEXEC | flags, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | resolve};
	int fd;
	do
		fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
	while (fd < 0 && (errno == EAGAIN || errno == EINTR));
	return fd;
}

static void attach_root(void)
{
	step(STEP_IDENTITY); /* first, so that what is mounted below belongs to the sandbox's root */
	TRY(STEP_IDENTITY, setgroups(0, NULL));
	TRY(STEP_IDENTITY, setresgid(0, 0, 0));
	TRY(STEP_IDENTITY, setresuid(0, 0, 0));
	TRY(STEP_IDENTITY, unshare(CLONE_NEWIPC)); /* its message queues belong to whoever makes it */
	umask(022);
	step(STEP_ROOT);
	TRY(STEP_ROOT, move_mount(FD_ROOT, AT_FDCWD, "/r", 0));
	TRY(STEP_ROOT, chdir("/r"));
}

/* The three files are optional: an image may have a link to nowhere, or a directory. */
static void attach_etc(void)
{
	step(STEP_ETC);
	for (int i = 0; i < ETC_FILES; i++) {
		if (!(plan->etc & 1u << i))
			continue;
		int to = open_in_root(etc_paths[i], 0, 0);
		if (to < 0)
			continue;
		if (move_mount(FD_ETC + i, to, "", TO_FD) < 0 && errno != ENOTDIR && errno != EINVAL)
			fail(STEP_ETC);
		close(to);
	}
}

static void attach_dir(enum step s, int fd, const char *path)
{
	step(s);
	int to = open_in_root(path, RESOLVE_NO_SYMLINKS, O_DIRECTORY);
	TRY(s, to);
	TRY(s, move_mount(fd, to, "", TO_FD));
	close(to);
}

/* All sandboxes together may have what kernel.pty.max (4096) less a reserve of 1024 allows; one may not have them all. */
#define PTS_OPTIONS "newinstance,ptmxmode=0666,mode=620,gid=5,max=128"

static void mount_kernel_filesystems(void)
{
	char options[64];
	step(STEP_PROC);
	int to = open_in_root("proc", RESOLVE_NO_SYMLINKS, O_DIRECTORY);
	TRY(STEP_PROC, to); /* a real directory: "proc" below cannot lead elsewhere */
	close(to);
	TRY(STEP_PROC, mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
	step(STEP_PTS);
	TRY(STEP_PTS, mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, PTS_OPTIONS));
	step(STEP_MQUEUE);
	TRY(STEP_MQUEUE, mount("mqueue", "dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
	step(STEP_SHM);
	snprintf(options, sizeof options, "mode=1777,size=%llu", (unsigned long long)plan->shm_bytes);
	TRY(STEP_SHM, mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, options));
}

/* Paths are below proc, which was mounted a moment ago and holds no links of anybody. */
static void mask_paths(void)
{
	step(STEP_MASK);
	const char *t = message.bytes + sizeof(struct plan);
	for (t += strlen(t) + 1; *t; t += strlen(t) + 1) {
		const char *path = t + 1;
		int r = 0;
		switch (*t) {
		case 'f':
			r = mount("dev/null", path, NULL, MS_BIND, NULL);
			break;
		case 'd':
			r = mount("/e", path, NULL, MS_BIND, NULL);
			break;
		case 'r':
			r = mount(path, path, NULL, MS_BIND | MS_REC, NULL);
			if (r == 0)
				r = mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
			break;
		}
		if (r < 0 && errno != ENOENT)
			fail(STEP_MASK);
	}
}

static void leave_host(void)
{
	step(STEP_PIVOT);
	TRY(STEP_PIVOT, syscall(SYS_pivot_root, ".", "."));
	TRY(STEP_PIVOT, umount2(".", MNT_DETACH));
	TRY(STEP_PIVOT, chdir("/"));
	step(STEP_HOSTNAME);
	const char *name = message.bytes + sizeof(struct plan);
	TRY(STEP_HOSTNAME, sethostname(name, strlen(name)));
	step(STEP_LIMITS);
	struct rlimit core = {0, 0}, nofile = {plan->nofile, plan->nofile};
	TRY(STEP_LIMITS, setrlimit(RLIMIT_CORE, &core));
	TRY(STEP_LIMITS, setrlimit(RLIMIT_NOFILE, &nofile));
	step(STEP_SESSION);
	TRY(STEP_SESSION, setsid());
}

/* Lays out aether's table and closes everything else. */
static void arrange_descriptors(void)
{
	step(STEP_FDS);
	int first_user = FD_TASKS + plan->aether_tasks, end = GUEST_FD + 3;
	TRY(STEP_FDS, dup3(FD_CONTROL, FD_KEEP, O_CLOEXEC));
	control = FD_KEEP;
	TRY(STEP_FDS, dup3(FD_AETHER, FD_KEEP + 1, O_CLOEXEC));
	TRY(STEP_FDS, dup2(FD_LISTENER, GUEST_FD));
	TRY(STEP_FDS, dup2(FD_CONFIG, GUEST_FD + 1));
	TRY(STEP_FDS, dup2(FD_CGROUP, GUEST_FD + 2));
	for (uint32_t i = 0; i < plan->user_tasks; i++, end++) /* moves down, so nothing is overwritten before it is moved */
		TRY(STEP_FDS, dup2(first_user + i, end));
	TRY(STEP_FDS, syscall(SYS_close_range, end, FD_KEEP - 1, 0));
	TRY(STEP_FDS, syscall(SYS_close_range, FD_KEEP + 2, ~0u, 0));
}

/* A real group that no command has together with the others. The kernel lets whoever has all of a process's ids set its
 * limits (prlimit), however little else he may do to it: root inside could leave aether without descriptors or memory.
 * Of all ids only the real ones stay over an exec; aether's thread that forks trades this one for a saved one, which does
 * not. */
#define GUARD_GID 65534

/* The filter goes first: installing it without no_new_privs, which would break sudo inside, needs CAP_SYS_ADMIN. */
static void drop_rights(void)
{
	step(STEP_SECCOMP);
	struct sock_fprog prog = {(unsigned short)plan->filter_len,
				  (struct sock_filter *)(message.bytes + sizeof(struct plan) + plan->text_bytes)};
	TRY(STEP_SECCOMP, syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog));
	step(STEP_CAPABILITIES);
	TRY(STEP_CAPABILITIES, setresgid(GUARD_GID, 0, 0));
	TRY(STEP_CAPABILITIES, prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
	for (int c = 0; c < 64; c++) {
		if (plan->capabilities & 1ULL << c)
			continue;
		if (prctl(PR_CAPBSET_DROP, c, 0, 0, 0) < 0) {
			if (errno == EINVAL)
				break; /* the kernel has no more */
			fail(STEP_CAPABILITIES);
		}
	}
	uint32_t low = (uint32_t)plan->capabilities, high = (uint32_t)(plan->capabilities >> 32);
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2] = {{low, low, 0}, {high, high, 0}};
	TRY(STEP_CAPABILITIES, syscall(SYS_capset, &header, data));
}

__attribute__((noreturn)) static void become_aether(void)
{
	char go;
	ssize_t n;
	step(STEP_RECORDED);
	do
		n = recv(control, &go, 1, 0);
	while (n < 0 && errno == EINTR);
	if (n != 1)
		_exit(1); /* the edge is gone and has no record of us */
	step(STEP_EXEC);
	/* The Go runtime's monitor sleeps for 20 us again and again while anything runs. With a slack of 0.5 ms it does so
	 * a seventh as often: an exec costs aether a third less CPU time. aether gives commands the usual slack. */
	prctl(PR_SET_TIMERSLACK, 500000UL, 0, 0, 0);
	/* One processor from the start: the Go runtime makes room for each, 110 KiB of it, before aether can say so. */
	char *argv[] = {"aether", NULL}, *envp[] = {"GOMAXPROCS=1", NULL};
	syscall(SYS_execveat, FD_KEEP + 1, "", argv, envp, AT_EMPTY_PATH);
	fail(STEP_EXEC);
}

static int run(void)
{
	read_plan();
	join();
	step(STEP_CLONE);
	long pid = clone_child();
	TRY(STEP_CLONE, pid);
	if (pid > 0) {
		report(REPORT_PID, (int)pid, 0);
		return 0;
	}
	attach_root();
	attach_etc();
	attach_dir(STEP_DEV, FD_DEV, "dev");
	attach_dir(STEP_SYS, FD_SYS, "sys");
	mount_kernel_filesystems();
	mask_paths();
	leave_host();
	arrange_descriptors();
	drop_rights();
	become_aether();
}

/* ---- users and mounts -------------------------------------------------------------------------------------------- */

static void wait_for_edge(void)
{
	char c;
	ssize_t n;
	do
		n = recv(control, &c, 1, 0);
	while (n < 0 && errno == EINTR);
	if (n != 1)
		_exit(1);
}

/* In a proc that few use: see linux.PrivateProc. */
static void write_file(const char *path, const char *text)
{
	int fd = openat(FD_PROC, path, O_WRONLY | O_CLOEXEC);
	TRY(STEP_USERNS, fd);
	TRY(STEP_USERNS, write(fd, text, strlen(text)));
	close(fd);
}

/* The uid that makes a user namespace is the one that the kernel's per-user budgets (inotify and others) are counted for. */
static int users(const char *base)
{
	uid_t id = (uid_t)strtoul(base, NULL, 10);
	if (id == 0) {
		errno = EINVAL;
		fail(STEP_IDENTITY);
	}
	TRY(STEP_IDENTITY, setgroups(0, NULL));
	TRY(STEP_IDENTITY, setresgid(id, id, id));
	TRY(STEP_IDENTITY, setresuid(id, id, id));
	TRY(STEP_USERNS, unshare(CLONE_NEWUSER));
	report(REPORT_READY, 0, 0);
	wait_for_edge(); /* it writes the maps */
	write_file("sys/user/max_user_namespaces", "0");
	write_file("sys/user/max_net_namespaces", "0");
	report(REPORT_READY, 0, 0);
	wait_for_edge();
	return 0;
}

/* One tmpfs with r (the sandbox's root goes there), e (empty) and p: the kernel mounts a new proc in a user namespace only
 * where a whole one is visible already. Cloning two mounts costs nothing, cloning the host's hundreds does. */
static int mounts(const char *dir)
{
	TRY(STEP_MOUNTNS, unshare(CLONE_NEWNS));
	TRY(STEP_MOUNTNS, mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	TRY(STEP_MOUNTNS, mount("stage", dir, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=64k"));
	TRY(STEP_MOUNTNS, chdir(dir));
	TRY(STEP_MOUNTNS, mkdir("r", 0755));
	TRY(STEP_MOUNTNS, mkdir("e", 0555));
	TRY(STEP_MOUNTNS, mkdir("p", 0555));
	TRY(STEP_PROC, mount("proc", "p", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
	TRY(STEP_PIVOT, syscall(SYS_pivot_root, ".", "."));
	TRY(STEP_PIVOT, umount2(".", MNT_DETACH));
	TRY(STEP_PIVOT, mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
	report(REPORT_READY, 0, 0);
	wait_for_edge();
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "run"))
		return run();
	if (argc == 3 && !strcmp(argv[1], "users"))
		return users(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "mounts"))
		return mounts(argv[2]);
	if (argc == 2 && !strcmp(argv[1], "steps")) {
		for (int i = 1; i < STEP_END; i++)
			puts(step_names[i]);
		return 0;
	}
	fputs("stage is started by the edge\n", stderr);
	return 2;
}
