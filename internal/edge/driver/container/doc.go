// Package container is the container backend: namespaces, an overlay and a list of things that are taken away.
//
// The edge makes every mount of a sandbox detached, in the initial user namespace, and hands descriptors to stage, a small C
// program, which enters the namespaces, attaches the mounts, gives up its rights and becomes aether. Nothing of a sandbox is
// mounted in the host's tree, so there is nothing to unmount after a crash: what is left goes with the last process.
//
// What surprises:
//
//   - Create holds what it made in this process (descriptors) until Start; if the edge dies between, the mounts vanish with
//     it. What outlives the process is one record file per sandbox, written before anything else and extended with
//     aether's pid before aether may run, a socket, and the range of ids.
//   - User namespaces are bound at <run>/users/<n> and used again, never by two live sandboxes. Each was made under its
//     range's first uid, so that budgets which the kernel keeps per user (inotify instances) are per sandbox, and none
//     may have a user namespace inside.
//   - The overlay is made under the sandbox's root uid (linux.WithFSIDs) and checked to be writable.
//   - aether's program has no path inside, and may be executed but not read: so the kernel makes its memory belong to the initial
//     user namespace, and root inside cannot trace it whatever capability it has.
//   - aether is a child of the edge although stage made it. After a restart of the edge it is not any more: its status is
//     then known only where the kernel keeps it.
//   - /dev is a read-only file system of each sandbox; /sys is one for all, of which each has a clone.
package container
