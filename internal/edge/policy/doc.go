// Package policy is what a sandbox may not do, as data and as programs for the kernel: the system call filter, capabilities,
// masked paths and the device program. It decides nothing about files or the network.
//
// What surprises:
//
//   - The filter starts from moby's default profile (ProfileSource) and is stricter. It differs in three places where the
//     profile is stricter than it has to be here: clone3 is allowed, because the namespace flags in its memory cannot be
//     seen by a filter and are harmless without it (no user namespace can be made: user.max_user_namespaces is 0 in
//     the sandbox's; the others need CAP_SYS_ADMIN, which nobody inside has); unshare is allowed without namespace flags; and the
//     kernel's version is not asked.
//   - A call that the table does not know answers ENOSYS, so that a C library newer than this falls back; a call that is
//     known and refused answers EPERM.
//   - Only the low 32 bits of an argument are compared, since the arguments that are looked at are ints in the kernel.
//   - A filter that looks at arguments makes only those calls slower: for the others the kernel keeps a bitmap.
package policy
