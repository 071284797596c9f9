package policy

// capabilityNames are the names of the kernel's capabilities, in the order of their numbers.
var capabilityNames = [...]string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO",
	"SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
	"SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG",
	"WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

// commandCapabilities are Docker's, less NET_RAW.
var commandCapabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "SETGID", "SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE",
	"SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

// guardCapability is what aether has and no command gets: who lacks a capability of a process may not trace it.
const guardCapability = "SYS_RESOURCE"

func capabilityMask(names ...string) uint64 {
	var mask uint64
	for _, n := range names {
		for bit, known := range capabilityNames {
			if n == known {
				mask |= 1 << bit
			}
		}
	}
	return mask
}

// CommandCapabilities is the set that root's commands have in the sandbox, a bit per capability.
func CommandCapabilities() uint64 { return capabilityMask(commandCapabilities...) }

// GuestCapabilities is the set with which aether is started. It drops the one more from its bounding set.
func GuestCapabilities() uint64 { return CommandCapabilities() | capabilityMask(guardCapability) }

// CapabilityNames lists a set by name, with the prefix CAP_.
func CapabilityNames(mask uint64) []string {
	var names []string
	for bit, n := range capabilityNames {
		if mask&(1<<bit) != 0 {
			names = append(names, "CAP_"+n)
		}
	}
	return names
}
