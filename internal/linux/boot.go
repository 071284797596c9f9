package linux

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// BootID changes with every start of the machine: what only lives in the kernel is gone when it differs.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// AllowedCPUs lists the CPUs that this process may run on, in ascending order.
func AllowedCPUs() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	cpus := make([]int, 0, set.Count())
	for i := 0; len(cpus) < set.Count(); i++ {
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	return cpus, nil
}

// MaxTasks is how many threads this host may have at a time: the least of kernel.pid_max and kernel.threads-max.
func MaxTasks() (int64, error) {
	pids, err := ReadSysctl("kernel/pid_max")
	if err != nil {
		return 0, err
	}
	threads, err := ReadSysctl("kernel/threads-max")
	return min(pids, threads), err
}

// ReadSysctl reads a setting of the kernel that is a number: "fs/mount-max".
func ReadSysctl(name string) (int64, error) {
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return 0, fmt.Errorf("reading a setting of the kernel: %w", err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("setting %s of the kernel: %w", name, err)
	}
	return n, nil
}

// TotalMemory is the memory of this host in bytes.
func TotalMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("sysinfo: %w", err)
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

// ThreadID is the calling thread's, which is the caller's own only while it is locked to it.
func ThreadID() int { return unix.Gettid() }
