//go:build rootful

package container

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"dsec/internal/aether/config"
)

// hostile is what root's commands in a sandbox get for each attempt. Several answers where kernels differ, or where it does
// not matter which of two guards answers first.
var hostile = map[string][]string{
	"mount tmpfs": {"EPERM"}, "remount /proc/sys": {"EPERM"}, "umount /proc/kcore": {"EPERM"}, "move_mount": {"EPERM"},
	"open_tree": {"EPERM"}, "fsopen": {"EPERM"}, "pivot_root": {"EPERM"}, "setns": {"EPERM"},
	"unshare user": {"EPERM"}, "unshare net": {"EPERM"}, "unshare files": {"ok"}, "clone user": {"EPERM"},
	"clone3 user": {"ENOSPC"}, // the budget of user namespaces is 0
	"keyctl":      {"EPERM"}, "add_key": {"EPERM"}, "bpf": {"EPERM"}, "perf_event_open": {"EPERM"}, "io_uring_setup": {"EPERM"},
	"userfaultfd": {"EPERM"}, "open_by_handle_at": {"EPERM"}, "init_module": {"EPERM"}, "kexec_load": {"EPERM"},
	"reboot": {"EPERM"}, "syslog": {"EPERM"}, "sethostname": {"EPERM"},
	"unknown call": {"ENOSYS"}, "x32 getpid": {"ENOSYS"}, "i386 getpid": {"ENOSYS", "fault"},
	"raw socket": {"EPERM"}, "packet socket": {"EAFNOSUPPORT"}, "old packet socket": {"EPERM"}, "vsock": {"EAFNOSUPPORT"},
	"alg socket": {"EAFNOSUPPORT"}, "netlink netfilter": {"EAFNOSUPPORT"}, "netlink route": {"ok"}, "tcp socket": {"ok"}, "unix socket": {"ok"},
	"mknod null": {"EPERM"}, "mknod disk": {"EPERM"}, "device of a layer": {"EACCES"}, "memory of a layer": {"EACCES"},
	"write /dev": {"EROFS"}, "write /dev/null": {"ok"}, "read /dev/urandom": {"ok"}, "open ptmx": {"ok"}, "write /dev/shm": {"ok"},
	"read kcore": {"empty", "ENOENT"}, "read keys": {"empty"}, "read kpagecount": {"empty"}, "read timer_list": {"empty"},
	"write sysrq": {"EROFS", "EACCES", "ENOENT"}, "write /proc/sys": {"EROFS", "EACCES"}, "write max namespaces": {"EROFS", "EACCES"},
	"write /sys": {"EROFS", "EPERM"}, "firmware of /sys": {"empty", "ENOENT", "EACCES"}, "cgroups of /sys": {"empty", "ENOENT", "EACCES"},
	"write root": {"ok"}, "write tmp": {"ok"}, "setuid": {"ok"},
	"ptrace pid 1": {"EPERM"}, "seize pid 1": {"EPERM"}, "pidfd_getfd pid 1": {"EPERM"}, "process_vm_readv pid 1": {"EPERM"},
	"mem of pid 1": {"EACCES"}, "environ of pid 1": {"EACCES"}, "maps of pid 1": {"EACCES"}, "fds of pid 1": {"EACCES"},
	"root of pid 1": {"EACCES"}, "exe of pid 1": {"EACCES"}, "ns of pid 1": {"EACCES"},
	"limits of pid 1": {"EPERM"},
	"kill pid 1":      {"ok"}, "stop pid 1": {"ok"}, // sent, and without effect
	"TIOCSTI": {"EPERM"}, "swap extents": {"EPERM"}, "btrfs subvolume": {"EPERM"},
}

func TestRootHostileCommands(t *testing.T) {
	b := newBench(t)
	h := b.start()
	for name, want := range hostile {
		if got := b.ask(h, request{Probe: name, Command: true}); !slices.Contains(want, got) {
			t.Errorf("%s: %s, want %s", name, got, strings.Join(want, " or "))
		}
	}
	if got := b.ask(h, request{Probe: "write root"}); got != "ok" {
		t.Errorf("PID 1 after all that: %s", got)
	}
	for name := range probes {
		if _, listed := hostile[name]; !listed && !slices.Contains(otherProbes, name) {
			t.Errorf("probe %q is tried by no test", name)
		}
	}
}

// otherProbes are tried by tests of their own.
var otherProbes = []string{
	"read own program", "inotify budget", "descriptors", "config", "tasks", "own cgroup", "above cgroup", "limit of cgroup",
	"thaw cgroup", "capabilities",
}

// PID 1 itself, which keeps one capability more and descriptors, is as far from the host.
func TestRootHostileGuest(t *testing.T) {
	b := newBench(t)
	h := b.start()
	wants := map[string][]string{
		"mount tmpfs": {"EPERM"}, "setns": {"EPERM"}, "clone3 user": {"ENOSPC"}, "write max namespaces": {"EROFS"}, "bpf": {"EPERM"},
		"vsock": {"EAFNOSUPPORT"}, "raw socket": {"EPERM"}, "read own program": {"EACCES"}, "mknod disk": {"EPERM"},
		"above cgroup": {"ok"}, "limit of cgroup": {"EACCES"}, "thaw cgroup": {"EACCES"},
		"own cgroup": {"ok"},
	}
	if len(b.spec().Cgroups.V1User) > 0 {
		wants["tasks"] = []string{"ok"}
	}
	for name, want := range wants {
		if got := b.ask(h, request{Probe: name}); !slices.Contains(want, got) {
			t.Errorf("%s: %s, want %s", name, got, strings.Join(want, " or "))
		}
	}
}

func TestRootGuestGetsItsTable(t *testing.T) {
	b := newBench(t)
	h := b.start()
	tasks := len(b.spec().Cgroups.V1User)
	got := b.ask(h, request{Probe: "descriptors"})
	want := "0:c 1:c 2:p 3:s 5:d"
	for i := range tasks {
		want += fmt.Sprintf(" %d:f", 6+i)
	}
	// 4 is the config, which Decode leaves to the collector; behind the table come descriptors of the Go runtime.
	got = strings.Replace(got, "4:p ", "", 1)
	if !strings.HasPrefix(got, want) {
		t.Errorf("descriptors %q, want %q", got, want)
	}
	mode := config.CgroupV2
	if tasks > 0 {
		mode = config.CgroupHybrid
	}
	if got, want := b.ask(h, request{Probe: "config"}), fmt.Sprintf("box %s %d", mode, tasks); got != want {
		t.Errorf("config %q, want %q", got, want)
	}
	// CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT MKNOD AUDIT_WRITE SETFCAP
	if got, want := b.ask(h, request{Probe: "capabilities", Command: true}), "CapEff:00000000a80405fb CapBnd:00000000a80405fb Seccomp:2 "; got != want {
		t.Errorf("rights of a command %q, want %q", got, want)
	}
	if got, want := b.ask(h, request{Probe: "capabilities", Command: true, UID: 1000}), "CapEff:0000000000000000 CapBnd:00000000a80405fb Seccomp:2 "; got != want {
		t.Errorf("rights of a user's command %q, want %q", got, want)
	}
	if got, want := b.ask(h, request{Probe: "capabilities"}), "CapEff:00000000a90405fb CapBnd:00000000a80405fb Seccomp:2 "; got != want {
		t.Errorf("rights of PID 1 %q, want %q", got, want)
	}
}

// Budgets that the kernel keeps per user are per sandbox.
func TestRootInotifyBudgetIsPerSandbox(t *testing.T) {
	b := newBench(t)
	first, second := b.start(), b.start()
	one := b.ask(first, request{Probe: "inotify budget"}) // kept by PID 1
	two := b.ask(second, request{Probe: "inotify budget", Command: true})
	n, err := strconv.Atoi(one)
	if err != nil || n < 100 || one != two {
		t.Errorf("inotify instances: %s in the first sandbox, then %s in the second", one, two)
	}
}
