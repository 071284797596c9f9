package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"dsec/internal/edge/policy"
	"dsec/internal/linux"
)

// host is what all sandboxes of an edge use: made once, read-only.
type host struct {
	dev      string // the tree of /dev, mounted
	skeleton string // the lowest layer: places that every sandbox needs
	mountNS  int    // the small mount namespace from which sandboxes are cloned
	aether   int    // aether's program: a mount of its own, without a path
	filter   []byte
	masks    []mask
	nofile   uint64
}

const maxNofile = 1 << 16

func openHost(ctx context.Context, o Options, d dirs, stage *stageRunner) (_ *host, err error) {
	h := &host{dev: d.dev, skeleton: d.skeleton, mountNS: -1, aether: -1}
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
	if err := mountDevTree(d.dev); err != nil {
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

// makeSkeleton makes the lowest layer, so that a mount finds its place also in an image without it, and nothing has to be
// written to the upper directory. It is never changed while sandboxes use it: what is there is left as it is.
func makeSkeleton(dir string) error {
	modes := []struct {
		path string
		mode os.FileMode
	}{{"proc", 0o555}, {"sys", 0o555}, {"dev", 0o755}, {"etc", 0o755}, {"run", 0o755}, {"tmp", 0o777 | os.ModeSticky}}
	for _, m := range modes {
		path := filepath.Join(dir, m.path)
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := errors.Join(os.Mkdir(path, 0o755), os.Chmod(path, m.mode)); err != nil {
			return fmt.Errorf("make skeleton: %w", err)
		}
	}
	for _, name := range etcFiles {
		f, err := os.OpenFile(filepath.Join(dir, "etc", name), os.O_CREATE|os.O_RDONLY, 0o644)
		if err != nil {
			return fmt.Errorf("make skeleton: %w", err)
		}
		f.Close()
	}
	return nil
}

// mountDevTree makes the one tree of /dev. Sandboxes get read-only clones of it. An old one, of an earlier process of
// the edge, lives on in the sandboxes that have it.
func mountDevTree(dir string) error {
	if err := linux.UnmountPath(dir, true); err != nil {
		return err
	}
	fd, err := linux.FSMount("tmpfs", []linux.FSOption{{Key: "mode", Value: "755"}, {Key: "size", Value: "64k"}},
		linux.MountNoSUID|linux.MountNoExec)
	if err != nil {
		return fmt.Errorf("make device tree: %w", err)
	}
	defer linux.Close(fd)
	if err := linux.AttachMount(fd, dir); err != nil {
		return fmt.Errorf("make device tree: %w", err)
	}
	return fillDevTree(dir)
}

func fillDevTree(dir string) error {
	devices := []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}
	for _, d := range devices {
		if err := linux.MakeCharDevice(filepath.Join(dir, d.name), d.major, d.minor); err != nil {
			return err
		}
	}
	links := [][2]string{
		{"ptmx", "pts/ptmx"}, {"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"},
	}
	var errs []error
	for _, l := range links {
		errs = append(errs, os.Symlink(l[1], filepath.Join(dir, l[0])))
	}
	for _, name := range []string{"pts", "shm", "mqueue"} {
		errs = append(errs, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("fill device tree: %w", err)
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
