package aether

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	maxFollowed = 40      // links on one way, as in the kernel
	maxMade     = 100_000 // links of one archive that are remembered
	madeCost    = 48      // of each, in memory
)

// made remembers a symbolic link that the archive has brought: it is never followed. What cannot be remembered ends the
// following of all.
func (u *unpacker) made(name string) error {
	st, err := place{u.dir(), name}.stat()
	if errors.Is(err, unix.ENOENT) { // it was taken away already
		return nil
	}
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK || u.forgot {
		return err
	}
	if len(u.links) >= maxMade || !u.held.take(madeCost) {
		u.held.give(madeCost * len(u.links))
		u.links, u.forgot = nil, true
		return nil
	}
	if u.links == nil {
		u.links = make(map[fileID]struct{})
	}
	u.links[idOf(&st)] = struct{}{}
	return nil
}

// real is the way to the last directory, from the first, without links.
func (u *unpacker) real() []string {
	var names []string
	for _, d := range u.dirs[1:] {
		if d.real != nil {
			names = slices.Clone(d.real)
		} else {
			names = append(names, d.name)
		}
	}
	return names
}

// follow opens the directory to which parts lead from the first directory, which is their root: nothing above it can be reached.
// Links that were there before are followed, as to a program that is confined to it. Every step is made by itself, from an open
// directory: whatever the sandbox exchanges meanwhile, each is below the one before.
func (u *unpacker) follow(parts []string) (fd int, real []string, err error) {
	root := u.dirs[0].fd
	at := []int{root}
	defer func() {
		for _, d := range at[1:] {
			if d != fd {
				unix.Close(d)
			}
		}
	}()
	followed := 0
	for len(parts) > 0 {
		name := parts[0]
		parts = parts[1:]
		if name == ".." {
			if last := len(at) - 1; last > 0 {
				unix.Close(at[last])
				at, real = at[:last], real[:last-1]
			}
			continue
		}
		above := at[len(at)-1]
		next, err := openStep(above, name)
		switch {
		case err == nil && len(at) > maxDepth:
			unix.Close(next)
			return -1, nil, failf(aetherv1.Code_CODE_INVALID, "its way is more than %d directories deep", maxDepth)
		case err == nil:
			at, real = append(at, next), append(real, name)
			continue
		case followed > 0 && errors.Is(err, unix.ENOENT): // a link leads to nothing, or would lead out
			return -1, nil, unix.ENOTDIR
		case !errors.Is(err, unix.ELOOP) && !errors.Is(err, unix.ENOTDIR):
			return -1, nil, err
		}
		target, err := u.target(above, name)
		if err != nil {
			return -1, nil, err
		}
		if followed++; followed > maxFollowed {
			return -1, nil, unix.ELOOP
		}
		if target[0] == '/' {
			for _, d := range at[1:] {
				unix.Close(d)
			}
			at, real = at[:1], nil
		}
		parts = append(named(target), parts...)
	}
	if fd = at[len(at)-1]; fd == root {
		fd, err = unix.FcntlInt(uintptr(root), unix.F_DUPFD_CLOEXEC, 0)
	}
	return fd, real, err
}

// target is what a link holds that may be followed.
func (u *unpacker) target(dir int, name string) (string, error) {
	ref, err := refAt(dir, name)
	if err != nil {
		return "", err
	}
	defer unix.Close(ref)
	var st unix.Stat_t
	if err := unix.Fstat(ref, &st); err != nil {
		return "", err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", unix.ENOTDIR
	}
	if _, ours := u.links[idOf(&st)]; ours || u.forgot {
		return "", errMade
	}
	target, err := readLink(ref, "")
	if err == nil && target == "" {
		err = unix.ENOENT
	}
	return target, err
}

var errMade = unsafef("it leads through a link that is in the archive, too, or may be")

// leadsNowhere is of errors that say that a link leads to no directory.
func leadsNowhere(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR)
}

// named cuts the target of a link into names, ".." among them.
func named(target string) []string {
	return slices.DeleteFunc(strings.Split(target, "/"), func(p string) bool { return p == "" || p == "." })
}

// followed is what follow found of name in the last directory: a directory in its place, if it is a link that leads to one.
func (u *unpacker) followed(name string) (openDir, error) {
	fd, real, err := u.follow(append(u.real(), name))
	return openDir{name: name, fd: fd, real: append([]string{}, real...)}, err
}
