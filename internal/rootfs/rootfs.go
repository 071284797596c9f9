// Package rootfs is plain data: what the environment of a sandbox is made of once the node has it. The steps around a
// driver produce it, drivers consume it, and nothing here does anything.
package rootfs

// A Container is a stack of read-only directories under one writable directory.
type Container struct {
	// Lowers are mounted, read-only directories of this host, the topmost first (overlayfs order). Root-owned files
	// have uid 0 on disk; the driver maps ids.
	Lowers []string `json:"lowers"`
	// Upper is a directory with a hard quota that belongs to this sandbox alone.
	Upper Upper `json:"upper"`
}

// An Upper is the writable layer's home on the host. It holds three entries: "u" (the overlay's upperdir), "w" (its
// workdir) and "etc" (files that are bind-mounted into the sandbox and are no part of its difference).
type Upper struct {
	Dir   string `json:"dir"`
	Bytes int64  `json:"bytes"` // the quota
	Kind  string `json:"kind"`  // how it is enforced: "btrfs-squota", "ext4-loop", ...
}

// A Source names one layer for the node: where its files are and what they must be.
type Source struct {
	Metadata File   `json:"metadata"`
	Data     []File `json:"data"` // in the order of the metadata's device table
}

// A File is one immutable file of the image store.
type File struct {
	Path   string `json:"path"`
	Digest string `json:"digest"` // "sha256:<hex>"
	Size   int64  `json:"size"`
}
