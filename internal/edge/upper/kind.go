package upper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"dsec/internal/linux"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// Kinds of quota, the best first. A new pool takes the first one that this host can make.
const (
	KindSimple  = "btrfs-squota" // Linux 6.7: O(1) to charge and to remove
	KindProject = "ext4-project" // needs quota_v2 in the kernel; counts inodes as well; removing takes as long as there are files
	KindQgroup  = "btrfs-qgroup" // any btrfs; charging costs a walk of references at every commit
)

// Cost says what a kind costs more than the best one.
func Cost(kind string) string {
	switch kind {
	case KindProject:
		return "the files of a removed sandbox are deleted one by one, in the background; snapshots share no data with it"
	case KindQgroup:
		return "each commit of the pool walks what was written since, the more the more snapshots there are"
	}
	return ""
}

// A Counted is a pool whose quotas count inodes as well as bytes.
type Counted struct{ *Pool }

// Counted is p, if its kind counts inodes.
func (p *Pool) Counted() (_ Counted, ok bool) { return Counted{p}, p.kind == KindProject }

// CreateCounted is Create with a limit of inodes: of files, directories and links, what the platform puts there (some 4)
// included.
func (c Counted) CreateCounted(ctx context.Context, id sandbox.ID, bytes, inodes int64) (rootfs.Upper, error) {
	return c.create(ctx, id, bytes, max(inodes, minInodes))
}

// Kinds lists all of them in that order.
func Kinds() []string { return []string{KindSimple, KindProject, KindQgroup} }

// A keeper is how a mounted pool keeps its directories and their limits. Those of the same sandbox are not called at once.
type keeper interface {
	// adopt makes sure that quotas are on, and finds out about the directories that are there.
	adopt(ids []sandbox.ID) error
	// make makes the directory of id, limited before anything is in it. If it fails, remove is called.
	// inodes is 0 for as many as come with the bytes; more than 0 only if the kind counts them.
	make(id sandbox.ID, bytes, inodes int64) error
	// remove takes the directory of id out of sight. Its contents may go later.
	remove(id sandbox.ID) error
	// tidy removes what is left of removed directories, as far as it is time for that.
	tidy()
	usage(id sandbox.ID) (used, limit int64, err error)
	// close ends what goes on in the background.
	close()
}

// A disk is the file system of a kind's pool.
type disk struct {
	fstype  string
	options string   // of its mount
	mkfs    []string // without the file
	debian  string   // the package that has mkfs
}

// Freed space goes back to the pool's file. A write that the disk below refuses must not be lost in silence.
var disks = map[string]disk{
	KindSimple: {"btrfs", "discard=async,nodatasum",
		[]string{"mkfs.btrfs", "--quiet", "--force", "--nodiscard", "--data", "single", "--metadata", "single"}, "btrfs-progs"},
	KindQgroup: {"btrfs", "discard=async,nodatasum",
		[]string{"mkfs.btrfs", "--quiet", "--force", "--nodiscard", "--data", "single", "--metadata", "single"}, "btrfs-progs"},
	KindProject: {"ext4", "prjquota,discard,errors=remount-ro,data_err=abort,noinit_itable",
		[]string{"mkfs.ext4", "-q", "-F", "-b", fmt.Sprint(sectorSize), "-m", "0", "-O", "quota,project", "-i", fmt.Sprint(bytesPerInode),
			"-E", "quotatype=prjquota,lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"}, "e2fsprogs"},
}

func (d disk) make(ctx context.Context, file string) error {
	path, err := exec.LookPath(d.mkfs[0])
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_"+strings.ReplaceAll(d.mkfs[0], ".", "_"), "%s is missing; install the package %s", d.mkfs[0], d.debian)
	}
	cmd := exec.CommandContext(ctx, path, append(slices.Clone(d.mkfs[1:]), file)...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w: %.500s", d.mkfs[0], file, err, output.String())
	}
	return nil
}

// keeperOf makes the keeper of a kind for a mounted pool.
func (p *Pool) keeperOf(kind string) keeper {
	if kind == KindProject {
		return newProjects(p)
	}
	return newSubvols(p, kind == KindSimple)
}

// mountedKind is the kind of a pool that is mounted already.
func (p *Pool) mountedKind(fstype string) (string, error) {
	switch fstype {
	case "ext4":
		return KindProject, nil
	case "btrfs":
		simple, err := p.isSimple()
		if err == nil && !simple {
			return KindQgroup, nil
		}
		return KindSimple, err
	}
	return "", sandbox.Errorf(sandbox.FailedPrecondition, "uppers_taken", "a %s file system is mounted at %s; unmount it", fstype, p.dir)
}

// firstThatWorks makes a new pool of the first kind that this host can make.
func (p *Pool) firstThatWorks(ctx context.Context, kinds []string, bytes int64) error {
	var refused []error
	for _, kind := range kinds {
		err := p.makePool(ctx, kind, bytes)
		if err == nil {
			if len(refused) > 0 {
				p.log.Warn("disk quotas are of a kind that costs more", "kind", kind, "refused", errors.Join(refused...))
			}
			p.refused = errors.Join(refused...)
			return nil
		}
		if c := sandbox.ClassOf(err); c == sandbox.ResourceExhausted || ctx.Err() != nil {
			return err
		}
		refused = append(refused, fmt.Errorf("%s: %w", kind, err))
	}
	return sandbox.Errorf(sandbox.Unsupported, "no_disk_quota",
		"this host can limit the disk space of a sandbox in none of the known ways: %v", errors.Join(refused...)).WithCause(errors.Join(refused...))
}

// unmount undoes a mount of the pool and removes its file.
func (p *Pool) unmount() error {
	if p.root != nil {
		_ = p.root.Close()
		p.root = nil
	}
	return errors.Join(linux.UnmountPath(p.dir, false), linux.RemoveFile(p.file))
}
