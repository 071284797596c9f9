// Package upper makes the writable directories of sandboxes, each with a hard quota.
//
// They are subvolumes of a btrfs pool: a sparse file below the data directory, attached as a loop device and mounted. Simple
// quotas charge each subvolume what it wrote, data and metadata, in constant time; removing one is a single call, whatever
// is in it.
//
// What surprises:
//
//   - The pool lives as long as its mount. A mount is found again after the edge was killed; where there is none, the machine was
//     reset or the edge closed in order, no sandbox is left that could want its files, and the pool is made anew.
//   - A full quota is EDQUOT inside, not ENOSPC. Metadata counts as well: an empty directory costs 16 KiB, a file of a few
//     hundred bytes about what it holds. Data is refused exactly at the limit, by the byte of a 4 KiB block.
//   - Usage lags behind by up to one commit (30 s): the kernel charges when it allocates extents. The limit does not lag, since
//     reservations count at once.
//   - Files are not shifted: what root inside writes belongs to uid 0 here, set-user-id bits included. So the mount is nosuid
//     and nodev, and its root can be entered by root alone.
//   - Data has no checksums: they would turn direct writes, by which aether brings large files, into buffered ones. See
//     docs/decisions/0008-uppers-have-no-checksums-of-data.md.
//   - Quotas may add up to more than the pool, and the pool's file to more than the disk. Free is what the edge's admission
//     looks at: the least of what the pool and the disk under it still have, less a reserve of the disk, since the disk holds
//     output, layers and the journal too.
//   - When a write of the pool to the disk below it fails, because that is full after all, btrfs makes itself read-only for good.
//     Then nothing can be made in the pool, and nothing need be removed from it: it goes as a whole, with Close or the next
//     Open. Until then admission is told that nothing is free.
package upper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// Kind is how the quota of this package's directories is enforced.
const Kind = "btrfs-squota"

const (
	maxReserve  = 8 << 30
	minPool     = 256 << 20 // bytes; mkfs.btrfs wants 109 MiB
	maxShare    = 0.8       // of the free disk that a pool may take
	sectorSize  = 4096
	closePause  = 20 * time.Millisecond
	reapEvery   = 64 // removals between two looks for quota groups that the kernel left
	poolFile    = "pool.btrfs"
	mountPoint  = "uppers"
	directories = "u w etc" // what rootfs.Upper promises
)

// Options of Open.
type Options struct {
	DataDir string // on a disk, not a tmpfs
	RunDir  string // unused by this kind
	Bytes   int64  // size of a new pool; 0 is half of the free disk
	Log     *slog.Logger
}

// A Pool is the writable directories of one edge.
type Pool struct {
	dir, file string
	log       *slog.Logger
	root      *os.File // of the mount; the one descriptor that all ioctls use
	qgroups   string   // directory of /sys with the live counters

	// making is held for reading while a subvolume exists that is not yet in the table, and for writing while groups without
	// a subvolume in the table are removed: a kernel that does not check would take the limit of a live one.
	making sync.RWMutex

	mu       sync.Mutex
	subvols  map[sandbox.ID]uint64
	removals int
	lost     bool // it was found read-only
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
	p := &Pool{dir: filepath.Join(data, mountPoint), file: filepath.Join(data, poolFile), log: o.Log, subvols: make(map[sandbox.ID]uint64)}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		return nil, err
	}
	switch m, mounted := mountinfo.At(mounts, p.dir); {
	case mounted && m.Type != "btrfs":
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "uppers_taken", "a %s file system is mounted at %s; unmount it", m.Type, p.dir)
	case mounted && p.readOnly():
		// Sandboxes that still run on it have mounts of their own.
		if err := linux.UnmountPath(p.dir, true); err != nil {
			return nil, err
		}
		p.lost, mounted = false, false
		fallthrough
	case !mounted:
		if err := p.makePool(ctx, o.Bytes); err != nil {
			return nil, err
		}
	}
	if err := p.attach(); err != nil {
		return nil, errors.Join(err, p.abandon())
	}
	return p, nil
}

// makePool replaces the pool's file by an empty file system and mounts it.
func (p *Pool) makePool(ctx context.Context, bytes int64) error {
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
	// Under a name that nobody else uses: an mkfs outlives the process that started it, if that is killed.
	f, err := os.CreateTemp(filepath.Dir(p.file), poolFile+".")
	if err != nil {
		return err
	}
	defer f.Close()
	err = f.Truncate(bytes)
	if err == nil {
		err = mkfs(ctx, f.Name())
	}
	if err == nil {
		err = os.Rename(f.Name(), p.file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	device, err := linux.AttachLoop(f, linux.LoopOptions{DirectIO: true, BlockSize: sectorSize})
	if err != nil {
		return fmt.Errorf("attach the pool of uppers: %w", err)
	}
	defer device.Close() // from here on the mount keeps it
	return linux.MountBtrfs(device.Name(), p.dir)
}

// removeFiles removes the file of an earlier pool, also one that was not finished.
func (p *Pool) removeFiles() error {
	entries, err := os.ReadDir(filepath.Dir(p.file))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), poolFile) {
			err = errors.Join(err, os.Remove(filepath.Join(filepath.Dir(p.file), e.Name())))
		}
	}
	return err
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

func mkfs(ctx context.Context, file string) error {
	path, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_mkfs_btrfs", "mkfs.btrfs is missing; install the package btrfs-progs")
	}
	cmd := exec.CommandContext(ctx, path, "--quiet", "--force", "--nodiscard", "--data", "single", "--metadata", "single", file)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("mkfs.btrfs %s: %w: %.500s", file, err, output.String())
	}
	return nil
}

// attach opens the mounted pool and makes sure that its quotas are on.
func (p *Pool) attach() (err error) {
	if p.root, err = os.Open(p.dir); err != nil {
		return err
	}
	if err := p.root.Chmod(0o700); err != nil {
		return err
	}
	if err := linux.BtrfsEnableSimpleQuota(p.root); err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_simple_quota",
			"this kernel has no simple quotas of btrfs, which limit the disk space of a sandbox; Linux 6.7 or newer is needed").WithCause(err)
	}
	uuid, err := linux.BtrfsUUID(p.root)
	if err != nil {
		return err
	}
	p.qgroups = filepath.Join("/sys/fs/btrfs", uuid, "qgroups")
	mode, err := os.ReadFile(filepath.Join(p.qgroups, "mode"))
	if err != nil || strings.TrimSpace(string(mode)) != "squota" {
		return fmt.Errorf("quota mode of %s is %.20q, want squota: %w", p.dir, mode, errors.Join(err, errors.ErrUnsupported))
	}
	ids, err := p.list()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if p.subvols[id], err = p.subvolOf(id); err != nil {
			return err
		}
	}
	return nil
}

// abandon undoes an Open that failed. A pool with directories in it stays: they belong to live sandboxes.
func (p *Pool) abandon() error {
	if p.root != nil {
		_ = p.root.Close()
	}
	if ids, err := p.list(); err != nil || len(ids) > 0 {
		return err
	}
	if err := linux.UnmountPath(p.dir, false); err != nil {
		return err
	}
	return os.Remove(p.file)
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
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return rootfs.Upper{}, err
	}
	if bytes < sandbox.MinDisk {
		return rootfs.Upper{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_disk_limit", "a disk limit of %d bytes; at least 1 MiB is needed", bytes)
	}
	err := p.make(id, bytes)
	if errors.Is(err, fs.ErrExist) {
		if err = p.Remove(ctx, id); err == nil {
			err = p.make(id, bytes)
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
	return rootfs.Upper{Dir: p.path(id), Bytes: bytes, Kind: Kind}, nil
}

// make makes a subvolume and limits it before anything is in it.
func (p *Pool) make(id sandbox.ID, bytes int64) error {
	subvol, err := p.makeSubvol(id)
	if err != nil {
		return err
	}
	if err := linux.BtrfsQgroupLimit(p.root, subvol, bytes); err != nil {
		return err
	}
	for name := range strings.FieldsSeq(directories) {
		if err := os.Mkdir(filepath.Join(p.path(id), name), 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pool) makeSubvol(id sandbox.ID) (uint64, error) {
	p.making.RLock()
	defer p.making.RUnlock()
	if err := linux.BtrfsSubvolCreate(p.root, string(id)); err != nil {
		return 0, err
	}
	subvol, err := p.subvolOf(id)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subvols[id] = subvol
	return subvol, nil
}

func (p *Pool) subvolOf(id sandbox.ID) (uint64, error) {
	f, err := os.Open(p.path(id))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return linux.BtrfsSubvolID(f)
}

// Remove removes the directory of id with all that is in it. It does not wait for the disk: the kernel frees the space in the
// background, and with it the quota group. Without a directory it does nothing; one in a lost pool goes with the pool.
func (p *Pool) Remove(ctx context.Context, id sandbox.ID) error {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return err
	}
	err := linux.BtrfsSubvolDestroy(p.root, string(id))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !p.readOnly() {
		return fmt.Errorf("remove the writable directory of %s: %w", id, err)
	}
	p.mu.Lock()
	delete(p.subvols, id)
	p.removals++
	reap := p.removals%reapEvery == 0
	p.mu.Unlock()
	if reap && err == nil {
		p.reapQgroups()
	}
	return nil
}

// Usage is the bytes that the directory of id holds, as of the last commit, and its limit.
func (p *Pool) Usage(id sandbox.ID) (used, limit int64, err error) {
	p.mu.Lock()
	subvol, ok := p.subvols[id]
	p.mu.Unlock()
	if !ok {
		return 0, 0, sandbox.Errorf(sandbox.NotFound, "no_upper", "sandbox %s has no writable directory", id)
	}
	dir := filepath.Join(p.qgroups, "0_"+strconv.FormatUint(subvol, 10))
	if used, err = readCount(filepath.Join(dir, "referenced")); err != nil {
		return 0, 0, err
	}
	limit, err = readCount(filepath.Join(dir, "max_referenced"))
	return used, limit, err
}

func readCount(path string) (int64, error) {
	var buf [64]byte
	b, err := linux.ReadControl(path, buf[:])
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
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
	p.reapQgroups()
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

// reapQgroups removes quota groups of subvolumes that are gone. Newer kernels do it themselves; older ones leave them, and each
// makes every commit a little slower. One that is still being freed is busy and waits for the next time.
func (p *Pool) reapQgroups() {
	p.making.Lock()
	defer p.making.Unlock()
	stale, err := p.staleQgroups()
	if err != nil {
		p.log.Warn("cannot list quota groups", "error", err)
		return
	}
	for _, subvol := range stale {
		if err := linux.BtrfsQgroupRemove(p.root, subvol); err != nil && !linux.IsBusy(err) && !errors.Is(err, fs.ErrNotExist) {
			p.log.Warn("cannot remove a quota group", "subvolume", subvol, "error", err)
		}
	}
}

// staleQgroups lists the groups without a subvolume of ours. Ids below 256 are the file system's own.
func (p *Pool) staleQgroups() ([]uint64, error) {
	entries, err := os.ReadDir(p.qgroups)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	live := make(map[uint64]bool, len(p.subvols))
	for _, subvol := range p.subvols {
		live[subvol] = true
	}
	var stale []uint64
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "0_")
		if !ok {
			continue
		}
		if n, err := strconv.ParseUint(number, 10, 64); err == nil && n >= 256 && !live[n] {
			stale = append(stale, n)
		}
	}
	return stale, nil
}

// Detach closes what this process has open and leaves the pool as it is, for the next Open.
func (p *Pool) Detach() error { return p.root.Close() }

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
