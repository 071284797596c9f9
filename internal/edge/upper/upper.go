// Package upper makes the writable directories of sandboxes, each with a hard quota.
//
// They are in a pool: a sparse file below the data directory, attached as a loop device and mounted. How directories are kept
// and charged in it is one of several kinds (see Kinds); a new pool takes the best one that this host can make, which is found
// out by making it. The best are subvolumes of btrfs with simple quotas, which charge each what it wrote, data and metadata,
// in constant time; removing one is a single call, whatever is in it.
//
// What surprises:
//
//   - The pool lives as long as its mount. A mount is found again after the edge was killed; where there is none, the machine was
//     reset or the edge closed in order, no sandbox is left that could want its files, and the pool is made anew.
//   - A full quota is EDQUOT inside, not ENOSPC. With btrfs metadata counts as well: an empty directory costs 16 KiB, a file of a
//     few hundred bytes about what it holds; ext4 counts inodes instead, one for each 8 KiB. Data is refused exactly at the
//     limit, by the byte of a 4 KiB block.
//   - With btrfs usage lags behind by up to one commit (30 s): the kernel charges when it allocates extents. The limit does not
//     lag, since reservations count at once.
//   - Files are not shifted: what root inside writes belongs to uid 0 here, set-user-id bits included. So the mount is nosuid
//     and nodev, and its root can be entered by root alone.
//   - Data has no checksums: they would turn direct writes, by which aether brings large files, into buffered ones. See
//     docs/decisions/0008-uppers-have-no-checksums-of-data.md.
//   - Quotas may add up to more than the pool, and the pool's file to more than the disk. Free is what the edge's admission
//     looks at: the least of what the pool and the disk under it still have, less a reserve of the disk, since the disk holds
//     output, layers and the journal too.
//   - When a write of the pool to the disk below it fails, because that is full after all, a pool of btrfs makes itself read-only
//     for good, one of ext4 when it was a write of its journal; before, it loses that data alone.
//     Then nothing can be made in the pool, and nothing need be removed from it: it goes as a whole, with Close or the next
//     Open. Until then admission is told that nothing is free.
package upper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

const (
	maxReserve  = 8 << 30
	minPool     = 256 << 20 // bytes; mkfs.btrfs wants 109 MiB
	maxShare    = 0.8       // of the free disk that a pool may take
	sectorSize  = 4096
	closePause  = 20 * time.Millisecond
	reapEvery   = 64 // removals between two looks for quota groups that the kernel left
	poolFile    = "pool.img"
	oldPoolFile = "pool.btrfs" // of an earlier version
	mountPoint  = "uppers"
	directories = "u w etc" // what rootfs.Upper promises
)

// Options of Open.
type Options struct {
	DataDir string // on a disk, not a tmpfs
	RunDir  string // unused
	Bytes   int64  // size of a new pool; 0 is half of the free disk
	Kind    string // of a new pool; "" is the first that works
	Log     *slog.Logger
}

// A Pool is the writable directories of one edge.
type Pool struct {
	dir, file string
	kind      string
	keep      keeper
	refused   error // why it is of no better kind
	log       *slog.Logger
	root      *os.File // of the mount; the one descriptor that all ioctls use

	mu   sync.Mutex
	lost bool // it was found read-only
}

// Open finds the pool of an earlier run that is still mounted, or makes a new one. An Unsupported error says what the host lacks.
func Open(ctx context.Context, o Options) (*Pool, error) {
	if err := os.MkdirAll(filepath.Join(o.DataDir, mountPoint), 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of uppers: %w", err)
	}
	data, err := filepath.EvalSymlinks(o.DataDir) // as the table of mounts names it
	if err != nil {
		return nil, err
	}
	p := &Pool{dir: filepath.Join(data, mountPoint), file: filepath.Join(data, poolFile), log: o.Log}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		return nil, err
	}
	m, mounted := mountinfo.At(mounts, p.dir)
	if mounted && p.readOnly() {
		// Sandboxes that still run on it have mounts of their own.
		if err := linux.UnmountPath(p.dir, true); err != nil {
			return nil, err
		}
		p.lost, mounted = false, false
	}
	kinds := Kinds()
	if o.Kind != "" {
		kinds = []string{o.Kind}
	}
	if mounted {
		err = p.adopt(m.Type)
	} else {
		err = p.firstThatWorks(ctx, kinds, o.Bytes)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Kind is how the quotas of this pool are enforced.
func (p *Pool) Kind() string { return p.kind }

// Refused says why this host makes no better kind of pool; nil if it is the best, or was found mounted.
func (p *Pool) Refused() error { return p.refused }

// adopt takes over a pool that is mounted.
func (p *Pool) adopt(fstype string) (err error) {
	if old := filepath.Join(filepath.Dir(p.file), oldPoolFile); exists(old) {
		p.file = old
	}
	if p.root, err = os.Open(p.dir); err != nil {
		return err
	}
	if p.kind, err = p.mountedKind(fstype); err == nil {
		err = p.attach()
	}
	if err != nil {
		_ = p.root.Close()
	}
	return err
}

// makePool replaces the pool's file by an empty file system and mounts it. On an error nothing of it is left.
func (p *Pool) makePool(ctx context.Context, kind string, bytes int64) (err error) {
	if err := p.removeFiles(); err != nil {
		return err
	}
	_, free, err := linux.DiskSpace(filepath.Dir(p.file))
	if err != nil {
		return err
	}
	if bytes, err = poolSize(bytes, free); err != nil {
		return err
	}
	disk, ok := disks[kind]
	if !ok {
		return sandbox.Errorf(sandbox.InvalidArgument, "unknown_quota", "there is no kind of quota %q; there are %s", kind, strings.Join(Kinds(), ", "))
	}
	// Under a name that nobody else uses: an mkfs outlives the process that started it, if that is killed.
	f, err := os.CreateTemp(filepath.Dir(p.file), poolFile+".")
	if err != nil {
		return err
	}
	defer f.Close()
	defer func() {
		if err != nil {
			err = errors.Join(err, p.unmount(), linux.RemoveFile(f.Name()))
		}
	}()
	if err := f.Truncate(bytes); err != nil {
		return err
	}
	if err := disk.make(ctx, f.Name()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), p.file); err != nil {
		return err
	}
	device, err := linux.AttachLoop(f, linux.LoopOptions{DirectIO: true, BlockSize: sectorSize})
	if err != nil {
		return fmt.Errorf("attach the pool of uppers: %w", err)
	}
	defer device.Close() // from here on the mount keeps it
	if err := linux.MountDisk(device.Name(), p.dir, disk.fstype, disk.options); err != nil {
		return err
	}
	if p.root, err = os.Open(p.dir); err != nil {
		return err
	}
	p.kind = kind
	return p.attach()
}

// removeFiles removes the file of an earlier pool, also one that was not finished, or that an earlier version had.
func (p *Pool) removeFiles() error {
	dir := filepath.Dir(p.file)
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), poolFile) || strings.HasPrefix(e.Name(), oldPoolFile) {
			err = errors.Join(err, linux.RemoveFile(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// poolSize is how large a new pool becomes.
func poolSize(asked, free int64) (int64, error) {
	most := int64(maxShare * float64(free))
	size := asked
	if size == 0 {
		size = free / 2
	}
	size -= size % sectorSize
	switch {
	case asked > most:
		return 0, sandbox.Errorf(sandbox.ResourceExhausted, "pool_too_large",
			"a pool of %d bytes is more than 80 %% of the free disk (%d bytes); configure a smaller one or free space", asked, free)
	case size < minPool:
		return 0, sandbox.Errorf(sandbox.ResourceExhausted, "pool_too_small",
			"a pool of writable directories needs at least %d bytes, and %d are free; free space", int64(minPool), free)
	}
	return size, nil
}

// attach makes sure that the quotas of the mounted pool are on.
func (p *Pool) attach() error {
	if err := p.root.Chmod(0o700); err != nil {
		return err
	}
	ids, err := p.list()
	if err != nil {
		return err
	}
	p.keep = p.keeperOf(p.kind)
	return p.keep.adopt(ids)
}

// readOnly reports whether the pool is lost, and says so once.
func (p *Pool) readOnly() bool {
	lost, err := linux.IsReadOnlyFS(p.dir)
	if err != nil || !lost {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.lost {
		p.lost = true
		p.log.Error("the pool of writable directories has become read-only, as it does when the disk below it is full or fails; "+
			"free disk space and start the node's agent again: it makes a new pool", "file", p.file)
	}
	return true
}

func (p *Pool) path(id sandbox.ID) string { return filepath.Join(p.dir, string(id)) }

// Create makes the directory of id, limited to that many bytes. One that an earlier attempt left is removed first.
func (p *Pool) Create(ctx context.Context, id sandbox.ID, bytes int64) (rootfs.Upper, error) {
	return p.create(ctx, id, bytes, 0)
}

func (p *Pool) create(ctx context.Context, id sandbox.ID, bytes, inodes int64) (rootfs.Upper, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return rootfs.Upper{}, err
	}
	if bytes < sandbox.MinDisk {
		return rootfs.Upper{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_disk_limit", "a disk limit of %d bytes; at least 1 MiB is needed", bytes)
	}
	err := p.make(id, bytes, inodes)
	if errors.Is(err, fs.ErrExist) {
		if err = p.Remove(ctx, id); err == nil {
			err = p.make(id, bytes, inodes)
		}
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), sandbox.StoppingDeadline)
		defer cancel()
		err = errors.Join(err, p.Remove(undo, id))
		if p.readOnly() {
			return rootfs.Upper{}, sandbox.Errorf(sandbox.ResourceExhausted, "node_disk_lost",
				"this node's disk for sandboxes has become read-only (the disk below it was full); free space and restart the platform, or try another node").WithCause(err)
		}
		if linux.IsQuotaFull(err) {
			return rootfs.Upper{}, sandbox.Errorf(sandbox.ResourceExhausted, "node_disk_full",
				"this node has no disk space left for another sandbox; try again when others have ended").WithCause(err)
		}
		return rootfs.Upper{}, fmt.Errorf("make the writable directory: %w", err)
	}
	return rootfs.Upper{Dir: p.path(id), Bytes: bytes, Kind: p.kind}, nil
}

// make makes a directory with its limit, and what is promised in it.
func (p *Pool) make(id sandbox.ID, bytes, inodes int64) error {
	if err := p.keep.make(id, bytes, inodes); err != nil {
		return err
	}
	for name := range strings.FieldsSeq(directories) {
		if err := os.Mkdir(filepath.Join(p.path(id), name), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// Remove removes the directory of id with all that is in it. It does not wait for the disk: the space comes back in the
// background. Without a directory it does nothing; one in a lost pool goes with the pool.
func (p *Pool) Remove(ctx context.Context, id sandbox.ID) error {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return err
	}
	if err := p.keep.remove(id); err != nil && !errors.Is(err, fs.ErrNotExist) && !p.readOnly() {
		return fmt.Errorf("remove the writable directory of %s: %w", id, err)
	}
	return nil
}

// Usage is the bytes that the directory of id holds, as of the last commit, and its limit.
func (p *Pool) Usage(id sandbox.ID) (used, limit int64, err error) {
	if used, limit, err = p.keep.usage(id); errors.Is(err, fs.ErrNotExist) {
		return 0, 0, sandbox.Errorf(sandbox.NotFound, "no_upper", "sandbox %s has no writable directory", id)
	}
	return used, limit, err
}

// Free is the bytes that all sandboxes together can still write, and the size of the pool.
func (p *Pool) Free() (free, total int64, err error) {
	total, free, err = linux.DiskSpace(p.dir)
	if err != nil {
		return 0, 0, err
	}
	size, disk, err := linux.DiskSpace(filepath.Dir(p.file))
	if err != nil {
		return 0, 0, err
	}
	if p.readOnly() {
		return 0, total, nil
	}
	return max(0, min(free, disk-diskReserve(size))), total, nil
}

// diskReserve is what stays free of the disk below the pool: a fiftieth of it, and not more than can be written while a
// full node is being noticed.
func diskReserve(size int64) int64 { return min(size/50, maxReserve) }

// Sweep removes the directories of every id that is not in keep and returns these ids.
func (p *Pool) Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error) {
	ids, err := p.list()
	if err != nil {
		return nil, err
	}
	var gone []sandbox.ID
	var errs []error
	for _, id := range ids {
		if keep[id] {
			continue
		}
		if err := ctx.Err(); err != nil {
			errs = append(errs, err)
			break
		}
		gone = append(gone, id)
		errs = append(errs, p.Remove(ctx, id))
	}
	p.keep.tidy()
	return gone, errors.Join(errs...)
}

func (p *Pool) list() ([]sandbox.ID, error) {
	entries, err := os.ReadDir(p.dir)
	if err != nil {
		return nil, err
	}
	var ids []sandbox.ID
	for _, e := range entries {
		if id, err := sandbox.ParseID(e.Name()); err == nil {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Detach closes what this process has open and leaves the pool as it is, for the next Open.
func (p *Pool) Detach() error {
	p.keep.close()
	return p.root.Close()
}

// Close removes every directory, unmounts the pool and deletes its file. It waits until the loop device is gone. If ctx ends
// before, somebody outside has a copy of the mount (a mount namespace made meanwhile): that is an error, and the space comes
// back when they end.
func (p *Pool) Close(ctx context.Context) error {
	if _, err := p.Sweep(ctx, nil); err != nil {
		p.log.Warn("directories are left in the pool of uppers, which is removed with them", "error", err)
	}
	if err := p.Detach(); err != nil {
		return err
	}
	if err := until(ctx, func() (bool, error) {
		err := linux.UnmountPath(p.dir, false)
		return err == nil, ignoreBusy(err)
	}); err != nil {
		return fmt.Errorf("unmount the pool of uppers: %w", err)
	}
	err := until(ctx, p.detached)
	if err != nil {
		err = fmt.Errorf("detach the pool of uppers: %w", err)
	}
	return errors.Join(err, os.Remove(p.file), linux.RemoveDir(p.dir))
}

// detached reports whether the loop device of the pool is gone.
func (p *Pool) detached() (bool, error) {
	devices, err := linux.LoopDevices()
	if err != nil {
		return false, err
	}
	for _, backing := range devices {
		if backing == p.file {
			return false, nil
		}
	}
	return true, nil
}

func ignoreBusy(err error) error {
	if linux.IsBusy(err) {
		return nil
	}
	return err
}

// until tries again and again until try is done, fails, or ctx ends.
func until(ctx context.Context, try func() (bool, error)) error {
	for {
		done, err := try()
		if done || err != nil {
			return err
		}
		timer := time.NewTimer(closePause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("it is still in use: %w", ctx.Err())
		case <-timer.C:
		}
	}
}
