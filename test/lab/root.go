package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// tools of the root tests, beside what Debian's minbase has.
var tools = []string{"apparmor", "attr", "btrfs-progs", "busybox-static", "e2fsprogs", "erofs-utils", "iproute2", "kmod", "procps", "python3-minimal", "xfsprogs"}

// mountPoints of a guest's root.
var mountPoints = []string{"lab", "scratch", "minbase", "edge-layer", "usr/lib/modules"}

// root makes the disk that is the guests' root file system. Beside it there are the layers that tests share, which
// they would make once per machine: a minimal Debian as a directory, and as EROFS.
func (s store) root(ctx context.Context) (string, error) {
	dir, err := s.get("root", keyOf(append(tools, mountPoints...)...), func(dir string) error {
		say("making the root file system (about a minute, once)")
		tree := filepath.Join(dir, "tree")
		if _, err := command(ctx, "", "mmdebstrap", "--variant=minbase", "--include="+strings.Join(tools, ","), "bookworm", tree); err != nil {
			return err
		}
		for _, p := range mountPoints {
			if err := os.MkdirAll(filepath.Join(tree, p), 0o755); err != nil {
				return err
			}
		}
		minbase, layer := filepath.Join(tree, "minbase"), filepath.Join(tree, "edge-layer")
		if err := makeMinbase(ctx, minbase); err != nil {
			return err
		}
		blob := filepath.Join(layer, "blob")
		if _, err := command(ctx, "", "mkfs.erofs", "--chunksize=4096", "--blobdev="+blob, filepath.Join(layer, "meta"), minbase); err != nil {
			return err
		}
		if err := os.WriteFile(blob+".done", nil, 0o644); err != nil {
			return err
		}
		if err := makeDisk(ctx, filepath.Join(dir, "root.ext4"), tree); err != nil {
			return err
		}
		return os.RemoveAll(tree)
	})
	return filepath.Join(dir, "root.ext4"), err
}

// makeMinbase takes what tests have made on this host, or makes it.
func makeMinbase(ctx context.Context, dir string) error {
	const ours = "/var/tmp/dsec-test/minbase"
	if _, err := os.Stat(ours + "/bin/sh"); err == nil {
		if err := os.Remove(dir); err != nil {
			return err
		}
		_, err := command(ctx, "", "cp", "-a", ours, dir)
		return err
	}
	_, err := command(ctx, "", "mmdebstrap", "--variant=minbase", "bookworm", dir)
	return err
}

// makeDisk makes a file system of what is in a directory.
func makeDisk(ctx context.Context, path, tree string) error {
	out, err := command(ctx, "", "du", "-s", "--apparent-size", "--block-size=1M", tree)
	if err != nil {
		return err
	}
	var size int
	if _, err := fmt.Sscan(out, &size); err != nil {
		return err
	}
	_, err = command(ctx, "", "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-N", "60000", "-d", tree, path, fmt.Sprintf("%dM", size*5/4+96))
	return err
}
