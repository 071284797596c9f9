package upper

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	// bytesPerInode is the share of a pool's inodes that comes with its space, in the pool as in each directory: so inodes
	// are given away as often as bytes are.
	bytesPerInode = 8192

	// trash is where removed directories go until their files are gone. Its name is no sandbox's.
	trash = ".trash"

	firstProject = 1 << 20 // below are what an administrator may use
)

// projects keeps each directory as a plain one that is a project of ext4's quotas. Removing one takes as long as it has
// files, so it is moved out of sight, and its files go in the background; until then they count as the pool's.
type projects struct {
	p *Pool

	mu   sync.Mutex
	ids  map[sandbox.ID]uint32
	next uint32

	work chan struct{} // there is something in the trash
	stop chan struct{}
	done sync.WaitGroup
}

func newProjects(p *Pool) *projects {
	return &projects{p: p, ids: make(map[sandbox.ID]uint32), next: firstProject, work: make(chan struct{}, 1), stop: make(chan struct{})}
}

func (j *projects) adopt(ids []sandbox.ID) error {
	if err := os.Mkdir(filepath.Join(j.p.dir, trash), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// A trial: some kernels mount it and have no quotas.
	if err := linux.LimitProject(j.p.root, firstProject-1, sandbox.MinDisk, 0); err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_project_quota", "this kernel has no project quotas of ext4").WithCause(err)
	}
	if u, err := linux.UsageOfProject(j.p.root, firstProject-1); err != nil || u.MaxBytes != sandbox.MinDisk {
		return fmt.Errorf("a limit of %d bytes is %d: %w", sandbox.MinDisk, u.MaxBytes, errors.Join(err, errors.ErrUnsupported))
	}
	for _, id := range ids {
		project, err := projectAt(j.p.path(id))
		if err != nil {
			return err
		}
		j.ids[id] = project
		j.next = max(j.next, project+1)
	}
	left, err := os.ReadDir(filepath.Join(j.p.dir, trash))
	if err != nil {
		return err
	}
	for _, e := range left {
		if n, err := strconv.ParseUint(e.Name(), 10, 32); err == nil {
			j.next = max(j.next, uint32(n)+1)
		}
	}
	j.done.Go(j.sweepTrash)
	j.tidy()
	return nil
}

func projectAt(path string) (uint32, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return linux.ProjectOf(f)
}

func (j *projects) make(id sandbox.ID, bytes, inodes int64) error {
	if inodes == 0 {
		inodes = max(bytes/bytesPerInode, minInodes)
	}
	j.mu.Lock()
	project := j.next
	j.next++
	j.mu.Unlock()
	if err := linux.LimitProject(j.p.root, project, bytes, inodes); err != nil {
		return err
	}
	if err := os.Mkdir(j.p.path(id), 0o755); err != nil {
		return errors.Join(err, linux.LimitProject(j.p.root, project, 0, 0))
	}
	dir, err := os.Open(j.p.path(id))
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := linux.SetProject(dir, project); err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ids[id] = project
	return nil
}

// minInodes is what the smallest sandbox may have, to start at all.
const minInodes = 256

func (j *projects) remove(id sandbox.ID) error {
	project, err := projectAt(j.p.path(id))
	if err != nil {
		return err
	}
	name := strconv.FormatUint(uint64(project), 10)
	if project == 0 { // one that was never given a project: killed in the middle of make
		return linux.RemoveDir(j.p.path(id))
	}
	if err := os.Rename(j.p.path(id), filepath.Join(j.p.dir, trash, name)); err != nil {
		return err
	}
	j.mu.Lock()
	delete(j.ids, id)
	j.mu.Unlock()
	j.tidy()
	return nil
}

func (j *projects) usage(id sandbox.ID) (used, limit int64, err error) {
	j.mu.Lock()
	project, ok := j.ids[id]
	j.mu.Unlock()
	if !ok {
		return 0, 0, fs.ErrNotExist
	}
	u, err := linux.UsageOfProject(j.p.root, project)
	return u.Bytes, u.MaxBytes, err
}

func (j *projects) tidy() {
	select {
	case j.work <- struct{}{}:
	default:
	}
}

func (j *projects) close() {
	close(j.stop)
	j.done.Wait()
}

// sweepTrash empties the trash whenever there is something in it.
func (j *projects) sweepTrash() {
	for {
		select {
		case <-j.stop:
			return
		case <-j.work:
		}
		entries, err := os.ReadDir(filepath.Join(j.p.dir, trash))
		for _, e := range entries {
			if err == nil {
				err = j.empty(e.Name())
			}
		}
		if err != nil && !errors.Is(err, errStopped) && !j.p.readOnly() {
			j.p.log.Warn("cannot remove what removed sandboxes left; it is tried again with the next", "error", err)
		}
	}
}

var errStopped = errors.New("stopped")

// empty removes one directory of the trash, and the limits of its project.
func (j *projects) empty(name string) error {
	path := filepath.Join(j.p.dir, trash, name)
	err := linux.RemoveAllFlat(path, func() bool {
		select {
		case <-j.stop:
			return true
		default:
			return false
		}
	})
	if errors.Is(err, linux.ErrStopped) {
		return errStopped
	}
	if err != nil {
		return err
	}
	if project, err := strconv.ParseUint(name, 10, 32); err == nil {
		return linux.LimitProject(j.p.root, uint32(project), 0, 0)
	}
	return nil
}
