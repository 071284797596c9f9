package aether

import (
	"context"
	"errors"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	maxChanges = 10_000 // in one request
	maxTrees   = 8      // requests at once, and listings: each may hold some MiB of names of a hostile tree
)

// A changer makes changes to files with the rights of one user.
type changer struct {
	ctx     context.Context
	accts   *accounts
	acc     account
	charged bool // what is made in memory would be charged to this process
	names   *names
}

// changeFiles makes the changes of req in order, up to the first that fails.
func (s *Server) changeFiles(ctx context.Context, req *aetherv1.ChangeFiles) (*aetherv1.ChangeResult, error) {
	if len(req.Changes) > maxChanges {
		return nil, failf(aetherv1.Code_CODE_INVALID, "more than %d changes", maxChanges)
	}
	acc, err := s.accts.lookup(req.User)
	if err != nil {
		return nil, err
	}
	if err := take(ctx, s.trees); err != nil {
		return nil, err
	}
	defer func() { <-s.trees }()
	c := &changer{ctx: ctx, accts: s.accts, acc: acc, charged: s.pool != nil, names: &s.names}
	result := new(aetherv1.ChangeResult)
	err = asUser(acc, func() error {
		for _, ch := range req.Changes {
			if ctx.Err() != nil {
				return errCanceled
			}
			if err := c.change(ch); err != nil {
				p := string(ch.Path)
				if len(ch.To) != 0 && ch.Kind != aetherv1.ChangeKind_CHANGE_KIND_MAKE_LINK {
					p = string(ch.To)
				}
				result.Error = asDiskFailure(doing(ch), err, p).proto()
				return nil
			}
			result.Done++
		}
		return nil
	})
	return result, err
}

// take waits until less than maxTrees are under way. Who has taken a slot receives from slots when it is done.
func take(ctx context.Context, slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return errCanceled
	}
}

var verbs = map[aetherv1.ChangeKind]string{
	aetherv1.ChangeKind_CHANGE_KIND_MAKE_DIRECTORY: "make directory ", aetherv1.ChangeKind_CHANGE_KIND_MOVE: "move ",
	aetherv1.ChangeKind_CHANGE_KIND_COPY: "copy ", aetherv1.ChangeKind_CHANGE_KIND_REMOVE: "remove ",
	aetherv1.ChangeKind_CHANGE_KIND_SET_MODE: "set the mode of ", aetherv1.ChangeKind_CHANGE_KIND_SET_OWNER: "set the owner of ",
	aetherv1.ChangeKind_CHANGE_KIND_MAKE_LINK: "make link ",
}

func doing(ch *aetherv1.Change) string { return verbs[ch.Kind] + clip(string(ch.Path), 256) }

func (c *changer) change(ch *aetherv1.Change) error {
	switch ch.Kind {
	case aetherv1.ChangeKind_CHANGE_KIND_MAKE_DIRECTORY:
		return c.makeDirectory(ch)
	case aetherv1.ChangeKind_CHANGE_KIND_MOVE:
		return c.move(ch)
	case aetherv1.ChangeKind_CHANGE_KIND_COPY:
		return c.copy(ch)
	case aetherv1.ChangeKind_CHANGE_KIND_REMOVE:
		return c.remove(ch)
	case aetherv1.ChangeKind_CHANGE_KIND_SET_MODE:
		return c.setMode(ch)
	case aetherv1.ChangeKind_CHANGE_KIND_SET_OWNER:
		return c.setOwner(ch)
	case aetherv1.ChangeKind_CHANGE_KIND_MAKE_LINK:
		return c.makeLink(ch)
	}
	return failf(aetherv1.Code_CODE_INVALID, "this aether does not know the change")
}

// A place is a name in an open directory: what is there, or could be.
type place struct {
	dir  int
	name string
}

// openPlace opens the directory of p's last name. A link there is not followed by what uses the place.
func openPlace(p string) (place, error) {
	p, err := checkPath(p)
	if err != nil {
		return place{}, err
	}
	p = strings.TrimRight(p, "/")
	i := strings.LastIndexByte(p, '/')
	name := p[i+1:]
	if name == "" || name == "." || name == ".." {
		return place{}, failf(aetherv1.Code_CODE_INVALID, "the path must end in a name of a file, not in /, . or ..")
	}
	dir, err := openRef(p[:i+1], unix.O_DIRECTORY)
	return place{dir, name}, err
}

func (p place) close() { _ = unix.Close(p.dir) }

// beside is a place in the same directory under a name that nobody has, for what will be here.
func (p place) beside() place {
	_, err := p.stat()
	return place{p.dir, temporaryName(err == nil)}
}

func (p place) stat() (st unix.Stat_t, err error) {
	err = unix.Fstatat(p.dir, p.name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

// ref refers to what is there, be it a link.
func (p place) ref() (int, error) { return refAt(p.dir, p.name) }

func refAt(dir int, name string) (int, error) {
	for {
		fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// refTo refers to p, following a link at its end unless it is the top of a tree.
func refTo(p string, tree bool) (int, error) {
	p, err := checkPath(p)
	if err != nil {
		return -1, err
	}
	if !tree {
		return openRef(p, 0)
	}
	if p = strings.TrimRight(p, "/"); p == "" {
		p = "/"
	}
	return openRef(p, unix.O_NOFOLLOW)
}

// checkPlace refuses to make things in memory: see checkDisk.
func (c *changer) checkPlace(dir int) error {
	if !c.charged {
		return nil
	}
	return checkDiskFD(dir)
}

func (c *changer) makeDirectory(ch *aetherv1.Change) error {
	if ch.Recursive {
		p, err := checkPath(string(ch.Path))
		if err != nil {
			return err
		}
		if fd, err := openRef(p, unix.O_DIRECTORY); err == nil {
			return unix.Close(fd)
		}
		if err := makeParents(path.Dir(path.Clean(p))); err != nil {
			return err
		}
	}
	to, err := openPlace(string(ch.Path))
	if err != nil {
		return err
	}
	defer to.close()
	if err := c.checkPlace(to.dir); err != nil {
		return err
	}
	mode := ch.Mode & 0o7777
	if mode == 0 {
		mode = 0o755
	}
	if err := unix.Mkdirat(to.dir, to.name, mode); err != nil {
		if ch.Recursive && errors.Is(err, unix.EEXIST) { // made meanwhile, or not a directory
			fd, err := openDirAt(to.dir, to.name)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}
		return err
	}
	if ch.Mode == 0 {
		return nil
	}
	return changeMode(to, mode) // the umask took some of it
}

// changeMode follows no link, as fchmodat would: the mode of one cannot be changed.
func changeMode(p place, mode uint32) error {
	fd, err := p.ref()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Chmod(refPath(fd), mode)
}

func (c *changer) makeLink(ch *aetherv1.Change) error {
	to, err := openPlace(string(ch.Path))
	if err != nil {
		return err
	}
	defer to.close()
	if err := c.checkPlace(to.dir); err != nil {
		return err
	}
	if !ch.Hard {
		if len(ch.To) == 0 || len(ch.To) >= maxPath || strings.ContainsRune(string(ch.To), 0) {
			return failf(aetherv1.Code_CODE_INVALID, "the target of a link has 1 to %d bytes without NUL", maxPath-1)
		}
		return unix.Symlinkat(string(ch.To), to.dir, to.name)
	}
	from, err := openPlace(string(ch.To))
	if err != nil {
		return err
	}
	defer from.close()
	return unix.Linkat(from.dir, from.name, to.dir, to.name, 0)
}

func (c *changer) move(ch *aetherv1.Change) error {
	from, err := openPlace(string(ch.Path))
	if err != nil {
		return err
	}
	defer from.close()
	to, err := openPlace(string(ch.To))
	if err != nil {
		return asFailure("move to "+clip(string(ch.To), 256), err)
	}
	defer to.close()
	var flags uint
	if ch.Exclusive {
		flags = unix.RENAME_NOREPLACE
	}
	err = unix.Renameat2(from.dir, from.name, to.dir, to.name, flags)
	switch {
	case errors.Is(err, unix.EXDEV): // also a directory of the image, which cannot be renamed in its layer
		return c.moveAcross(from, to, flags)
	case errors.Is(err, unix.EINVAL):
		return failf(aetherv1.Code_CODE_INVALID, "a directory cannot be moved into itself")
	case errors.Is(err, unix.EEXIST) && !ch.Exclusive:
		return unix.ENOTEMPTY
	}
	return err
}

// moveAcross copies under a name of its own, renames that, and removes what was: the new thing is there as a whole or not at
// all, and nothing is removed before.
func (c *changer) moveAcross(from, to place, flags uint) error {
	if st, err := to.stat(); err == nil && flags != 0 {
		return unix.EEXIST
	} else if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := emptyDir(to); err != nil { // else it would be known only after the copy
			return err
		}
	}
	temp := to.beside()
	if err := c.copyTo(from, temp, false); err != nil {
		c.discard(temp)
		return err
	}
	if err := unix.Renameat2(temp.dir, temp.name, to.dir, to.name, flags); err != nil {
		c.discard(temp)
		return err
	}
	return c.removeTree(c.ctx, from)
}

// discardTime is how long that may take: others may fill what is being removed.
const discardTime = 10 * time.Minute

// discard removes what was made in vain, also where the caller has left.
func (c *changer) discard(p place) {
	ctx, cancel := context.WithTimeout(context.Background(), discardTime)
	defer cancel()
	_ = c.removeTree(ctx, p)
}

// emptyDir says ENOTEMPTY of a directory with entries.
func emptyDir(p place) error {
	fd, err := openDirAt(p.dir, p.name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	buf := make([]byte, 4096)
	n, err := readDents(fd, buf)
	if err != nil {
		return err
	}
	if _, entries, _ := unix.ParseDirent(buf[:n], 1, nil); entries > 0 {
		return unix.ENOTEMPTY
	}
	return nil
}
