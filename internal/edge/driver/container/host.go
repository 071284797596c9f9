package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"dsec/internal/edge/policy"
	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
)

// host is what all sandboxes of an edge use: made once, read-only.
type host struct {
	mountNS  int // the small mount namespace from which sandboxes are cloned
	aether   int // aether's program: a mount of its own, without a path
	filter   []byte
	masks    []mask
	nofile   uint64
	overlays overlays
	// Control groups of version 2 are delegated by cgroup namespace, as systemd mounts them: whoever is in one cannot place a
	// process in a group outside, so aether, whose own group is beside those of commands, has none.
	nsDelegate bool
}

const maxNofile = 1 << 16

func openHost(ctx context.Context, o Options, d dirs, stage *stageRunner) (_ *host, err error) {
	h := &host{mountNS: -1, aether: -1}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	if h.filter, err = policy.SeccompProgram(runtime.GOARCH); err != nil {
		return nil, err
	}
	if h.nofile, err = linux.HardNofile(); err != nil {
		return nil, err
	}
	h.nofile = min(h.nofile, maxNofile)
	h.masks = presentMasks("/")
	if err := makeSkeleton(d.skeleton); err != nil {
		return nil, err
	}
	if h.overlays, err = openOverlays(d.places, filepath.Join(d.skeleton, "etc"), filepath.Join(d.skeleton, "tmp")); err != nil {
		return nil, err
	}
	if h.nsDelegate, err = delegatesByNamespace(); err != nil {
		return nil, err
	}
	if h.mountNS, err = makeMountNS(ctx, stage, d.skeleton); err != nil {
		return nil, err
	}
	if h.aether, err = installAether(o.Aether, d.aether); err != nil {
		return nil, err
	}
	return h, nil
}

// delegatesByNamespace asks the table of mounts: the option is of the hierarchy, wherever that is mounted.
func delegatesByNamespace() (bool, error) {
	mounts, err := mountinfo.Self()
	return slices.ContainsFunc(mounts, func(m mountinfo.Mount) bool {
		return m.Type == "cgroup2" && slices.Contains(m.Super, "nsdelegate")
	}), err
}

func (h *host) close() { linux.Close(h.mountNS, h.aether) }

// presentMasks are the masks for what this kernel has.
func presentMasks(root string) []mask {
	var masks []mask
	add := func(path string, readOnly bool) {
		info, err := os.Lstat(filepath.Join(root, path))
		if err != nil {
			return
		}
		m := mask{kind: 'f', path: strings.TrimPrefix(path, "/")}
		switch {
		case readOnly:
			m.kind = 'r'
		case info.IsDir():
			m.kind = 'd'
		}
		masks = append(masks, m)
	}
	for _, p := range policy.Masked() {
		add(p, false)
	}
	for _, p := range policy.ReadOnly() {
		add(p, true)
	}
	return masks
}

// devTree makes a sandbox's /dev: a read-only tmpfs that belongs to its root. Each has one of its own, which costs some 0.1 ms:
// locks and watches belong to files, so that with one tree for all everybody could hold a lock on /dev/null, and see through a
// watch when others use it.
func devTree(root int) (fd int, err error) {
	err = linux.WithFSIDs(root, root, func() error {
		fd, err = linux.FSMount("tmpfs", []linux.FSOption{{Key: "mode", Value: "755"}, {Key: "size", Value: "64k"}},
			linux.MountNoSUID|linux.MountNoExec)
		if err == nil {
			err = fillDevTree(fd)
		}
		return err
	})
	if err == nil {
		err = linux.SetMountAttr(fd, linux.MountAttr{Set: linux.MountReadOnly})
	}
	if err != nil {
		linux.Close(fd)
		return -1, fmt.Errorf("make device tree: %w", err)
	}
	return fd, nil
}

var (
	devNodes = []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}
	devLinks = [][2]string{
		{"ptmx", "pts/ptmx"}, {"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"},
	}
	devDirs = []string{"pts", "shm", "mqueue"} // other mounts go there
)

func fillDevTree(dir int) error {
	for _, d := range devNodes {
		if err := linux.MakeCharDeviceAt(dir, d.name, d.major, d.minor); err != nil {
			return err
		}
	}
	for _, l := range devLinks {
		if err := linux.SymlinkAt(l[1], dir, l[0]); err != nil {
			return err
		}
	}
	for _, name := range devDirs {
		if err := linux.MkdirAt(dir, name); err != nil {
			return err
		}
	}
	return nil
}

// makeMountNS lets stage make the small mount namespace, and keeps it by descriptor. place is any directory.
func makeMountNS(ctx context.Context, stage *stageRunner, place string) (int, error) {
	h, err := stage.helper(ctx, "mounts", place)
	if err != nil {
		return -1, fmt.Errorf("make mount namespace: %w", err)
	}
	defer h.end()
	return linux.OpenNamespace(h.pid, "mnt")
}

// installAether copies the program to a file of our own that may be executed by all and read by nobody inside (its owner is
// host root, who has no id there), and returns a read-only, nosuid, nodev mount of it. A program of an earlier process of
// the edge lives on in the sandboxes that run it.
func installAether(from, to string) (int, error) {
	tmp := to + ".new"
	if err := copyFile(from, tmp, 0o111); err != nil {
		return -1, fmt.Errorf("install aether: %w", err)
	}
	if err := os.Rename(tmp, to); err != nil {
		return -1, fmt.Errorf("install aether: %w", err)
	}
	fd, err := linux.CloneMountWith(to, linux.MountAttr{Set: linux.MountReadOnly | linux.MountNoSUID | linux.MountNoDev})
	if err != nil {
		return -1, fmt.Errorf("install aether: %w", err)
	}
	return fd, nil
}

func copyFile(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	// In its full length first: only then does the tmpfs put it into huge pages, by which each start of aether costs 0.5 ms
	// of CPU time less.
	info, err := in.Stat()
	if err == nil {
		err = out.Truncate(info.Size())
	}
	if err == nil {
		_, err = io.Copy(out, in)
	}
	return errors.Join(err, out.Chmod(mode), out.Close())
}
