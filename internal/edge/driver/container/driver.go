package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Name is the driver's name in handles.
const Name = sandbox.BackendContainer

// handleVersion is that of handleData.
const handleVersion = 1

// Options say where things are. RunDir is a directory that only root can enter, on a tmpfs that is mounted private: bound
// namespaces must not spread to other mount namespaces.
type Options struct {
	RunDir     string
	Stage      string // the program stage
	Aether     string // aether's program; it is copied
	IDBase     uint32 // first host id of the first range; 0 = 0x10000000
	IDCapacity int    // ranges of 65,536 ids, so the most sandboxes at a time; 0 = 16384
	Log        *slog.Logger
}

// dirs are the places under RunDir.
type dirs struct {
	users, sockets, records, skeleton, skeletons, aether, places string
}

// A Driver runs sandboxes as containers. It implements driver.Driver.
type Driver struct {
	log       *slog.Logger
	dirs      dirs
	stage     *stageRunner
	host      *host
	ranges    *idRanges
	skeletons skeletons
	sockets   *linux.SocketDir
	records   records

	failStep uint32             // tests: the step of stage that fails
	reached  func(point string) // tests: called where a kill of this process is interesting

	watchers sync.WaitGroup

	mu     sync.Mutex
	boxes  map[sandbox.ID]*box
	closed bool
}

var _ driver.Driver = (*Driver)(nil)

// A box is what this process knows of a sandbox beyond its record. Fields are guarded by the driver's mu, but for exit.
type box struct {
	built   *built         // from Create until Start takes it
	process *linux.Process // since Start or Recover
	log     *linux.LogPipe // what aether wrote; nil after a restart of the edge
	done    chan struct{}  // closed when the process has ended
	exit    driver.Exit    // valid after done
}

// Open prepares this host and finds again what an earlier process of the edge left. One Driver at a time uses a RunDir.
func Open(ctx context.Context, o Options) (_ *Driver, err error) {
	if o, err = o.withDefaults(); err != nil {
		return nil, err
	}
	d := &Driver{log: o.Log, boxes: map[sandbox.ID]*box{}, dirs: dirs{
		users: filepath.Join(o.RunDir, "users"), sockets: filepath.Join(o.RunDir, "g"), records: filepath.Join(o.RunDir, "c"),
		skeleton: filepath.Join(o.RunDir, "skeleton"), skeletons: filepath.Join(o.RunDir, "skeletons"), aether: filepath.Join(o.RunDir, "aether"), places: filepath.Join(o.RunDir, "m"),
	}}
	d.records = records{dir: d.dirs.records}
	d.skeletons.common, d.skeletons.own = d.dirs.skeleton, d.dirs.skeletons
	defer func() {
		if err != nil {
			d.closeFiles()
		}
	}()
	for _, dir := range []string{d.dirs.users, d.dirs.sockets, d.dirs.records, d.dirs.skeleton, d.dirs.skeletons} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make run directory: %w", err)
		}
	}
	// An earlier version had one /dev for all; the sandboxes of its time keep theirs.
	old := filepath.Join(o.RunDir, "dev")
	if err := errors.Join(linux.UnmountPath(old, true), linux.RemoveDir(old)); err != nil {
		return nil, err
	}
	null, err := linux.OpenAt(-1, "/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	d.stage = &stageRunner{bin: o.Stage, null: null}
	if d.sockets, err = linux.OpenSocketDir(d.dirs.sockets); err != nil {
		return nil, err
	}
	if d.host, err = openHost(ctx, o, d.dirs, d.stage); err != nil {
		return nil, err
	}
	lent, err := d.lentSlots()
	if err != nil {
		return nil, err
	}
	if d.ranges, err = openRanges(ctx, d.dirs.users, o, d.stage, lent); err != nil {
		return nil, err
	}
	return d, nil
}

func (o Options) withDefaults() (Options, error) {
	const maxID = 1<<32 - 2 // 2^32-1 is no id
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.IDBase == 0 {
		o.IDBase = defaultIDBase
	}
	if o.IDCapacity == 0 {
		o.IDCapacity = defaultCapacity
	}
	switch {
	case !filepath.IsAbs(o.RunDir) || !filepath.IsAbs(o.Stage) || !filepath.IsAbs(o.Aether):
		return o, fmt.Errorf("container driver: run directory %q, stage %q and aether %q must be absolute paths", o.RunDir, o.Stage, o.Aether)
	case o.IDCapacity < 1 || o.IDBase < idsPerRange || uint64(o.IDBase)+uint64(o.IDCapacity)*idsPerRange > maxID:
		return o, sandbox.Errorf(sandbox.InvalidArgument, "invalid_id_ranges",
			"%d ranges of %d ids from %d on do not fit between %d and %d; choose another base or fewer", o.IDCapacity, idsPerRange, o.IDBase, idsPerRange, uint32(maxID))
	}
	return o, nil
}

// lentSlots are the ranges that sandboxes have, by their records.
func (d *Driver) lentSlots() (map[int]sandbox.ID, error) {
	ids, err := d.records.list()
	if err != nil {
		return nil, err
	}
	lent := map[int]sandbox.ID{}
	for _, id := range ids {
		rec, err := d.records.read(id)
		if err != nil {
			return nil, fmt.Errorf("sandbox %s: %w", id, err)
		}
		if rec.Slot != noSlot {
			lent[rec.Slot] = id
		}
	}
	return lent, nil
}

// Name implements driver.Driver.
func (d *Driver) Name() string { return Name }

// Detach forgets everything and leaves sandboxes running: the next Open finds them.
func (d *Driver) Detach() {
	d.mu.Lock()
	d.closed = true
	boxes := d.boxes
	d.boxes = map[sandbox.ID]*box{}
	d.mu.Unlock()
	for _, b := range boxes {
		b.detach()
	}
	d.watchers.Wait()
	if d.ranges != nil {
		d.ranges.close()
	}
	d.closeFiles()
}

func (b *box) detach() {
	if b.built != nil {
		b.built.abandon()
	}
	if b.process != nil {
		b.process.Close()
	}
}

func (d *Driver) closeFiles() {
	if d.host != nil {
		d.host.close()
	}
	if d.sockets != nil {
		d.sockets.Close()
	}
	if d.stage != nil {
		linux.Close(d.stage.null)
	}
}

// Close ends every sandbox and removes all that the driver made on the host.
func (d *Driver) Close(ctx context.Context) error {
	if _, err := d.Sweep(ctx, nil); err != nil {
		return err
	}
	d.Detach()
	errs := []error{d.ranges.removeAll(), os.Remove(d.dirs.aether)}
	for _, dir := range []string{d.dirs.users, d.dirs.sockets, d.dirs.records, d.dirs.places} {
		errs = append(errs, os.Remove(dir))
	}
	if err := errors.Join(append(errs, os.RemoveAll(d.dirs.skeleton), os.RemoveAll(d.dirs.skeletons))...); err != nil {
		return fmt.Errorf("remove what the container driver made: %w", err)
	}
	return nil
}
