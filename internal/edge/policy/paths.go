package policy

// Masked are paths over which nothing (a file that is empty, a directory without entries) is mounted: Docker's list, and
// what tells of physical pages. Those that a kernel does not have are left out. What has to be hidden of /sys is hidden once, in the
// mount that belongs to the network slot.
func Masked() []string {
	return []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/kpagecgroup", "/proc/kpagecount",
		"/proc/kpageflags", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
	}
}

// ReadOnly are paths that are mounted read-only: Docker's list.
func ReadOnly() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}
