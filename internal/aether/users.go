package aether

import (
	"bytes"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	maxAccountFile = 1 << 20 // bytes of /etc/passwd or /etc/group that are read
	maxGroups      = 1024    // supplementary groups of one user
)

// An account is with whose rights something happens.
type account struct {
	uid, gid uint32
	groups   []uint32
	name     string // "" if the number has no entry
	home     string
	shell    string
}

type passwdEntry struct {
	name, home, shell string
	uid, gid          uint32
}

type groupEntry struct {
	name    string
	gid     uint32
	members []string
}

// parsePasswd reads what it can of passwd(5); lines that make no sense are skipped, as libc does.
func parsePasswd(b []byte) []passwdEntry {
	var out []passwdEntry
	for line := range bytes.Lines(b) {
		f := strings.Split(strings.TrimSuffix(string(line), "\n"), ":")
		if len(f) < 7 || !plainName(f[0]) {
			continue
		}
		uid, okU := parseID(f[2])
		gid, okG := parseID(f[3])
		if okU && okG {
			out = append(out, passwdEntry{name: f[0], uid: uid, gid: gid, home: plainPath(f[5]), shell: plainPath(f[6])})
		}
	}
	return out
}

// parseGroup reads what it can of group(5).
func parseGroup(b []byte) []groupEntry {
	var out []groupEntry
	for line := range bytes.Lines(b) {
		f := strings.Split(strings.TrimSuffix(string(line), "\n"), ":")
		if len(f) < 4 || !plainName(f[0]) {
			continue
		}
		if gid, ok := parseID(f[2]); ok {
			out = append(out, groupEntry{name: f[0], gid: gid, members: strings.Split(f[3], ",")})
		}
	}
	return out
}

// plainName refuses comments, NIS lines and what would be a number.
func plainName(s string) bool {
	return s != "" && s[0] != '#' && s[0] != '+' && s[0] != '-' && !strings.ContainsRune(s, 0)
}

// plainPath makes a field safe to become an environment variable.
func plainPath(s string) string {
	if strings.ContainsRune(s, 0) {
		return ""
	}
	return s
}

// parseID accepts the ids that a process can have: 2^32-1 means "unchanged" to the kernel.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != math.MaxUint32
}

// accounts looks users up in the sandbox's own files, which anyone inside may have replaced by anything.
type accounts struct {
	passwdPath, groupPath string

	mu     sync.Mutex
	passwd cachedFile[[]passwdEntry]
	group  cachedFile[[]groupEntry]
	known  map[string]account // by user spec, for this state of the files
}

func newAccounts() *accounts {
	return &accounts{passwdPath: "/etc/passwd", groupPath: "/etc/group"}
}

// cachedFile is a parsed file, good while its inode and times are the same.
type cachedFile[T any] struct {
	stamp fileStamp
	value T
}

type fileStamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

// refresh reads the file again if it changed, and reports whether it did. A missing or strange file is an empty one.
func (f *cachedFile[T]) refresh(path string, parse func([]byte) T) bool {
	var st unix.Stat_t
	var stamp fileStamp
	if unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		stamp = fileStamp{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
	}
	if stamp == f.stamp {
		return false
	}
	f.stamp = stamp
	var content []byte
	if stamp.ino != 0 {
		content = readAccountFile(path)
	}
	f.value = parse(content)
	return true
}

func readAccountFile(path string) []byte {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil
	}
	b, _ := io.ReadAll(io.LimitReader(f, maxAccountFile)) // what can be read of it is as good as it gets
	return b
}

const maxKnown = 64

// lookup resolves "", "name", "uid", "name:group" and "uid:gid". "" is root.
func (a *accounts) lookup(spec string) (account, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.passwd.refresh(a.passwdPath, parsePasswd)
	g := a.group.refresh(a.groupPath, parseGroup)
	if p || g || a.known == nil || len(a.known) >= maxKnown {
		a.known = make(map[string]account)
	}
	if acc, ok := a.known[spec]; ok {
		return acc, nil
	}
	acc, err := a.resolve(spec)
	if err == nil {
		a.known[spec] = acc
	}
	return acc, err
}

func (a *accounts) resolve(spec string) (account, error) {
	user, group, hasGroup := strings.Cut(spec, ":")
	if user == "" && !hasGroup {
		user = "0"
	}
	acc, err := a.user(user)
	if err != nil {
		return acc, err
	}
	if !hasGroup {
		return a.withGroups(acc), nil
	}
	for _, g := range a.group.value {
		if g.name == group {
			acc.gid = g.gid
			return acc, nil
		}
	}
	gid, ok := parseID(group)
	if !ok {
		return acc, failf(aetherv1.Code_CODE_NO_USER, "group %q is not in the image's /etc/group", clip(group, 64))
	}
	acc.gid = gid
	return acc, nil
}

func (a *accounts) user(user string) (account, error) {
	id, numeric := parseID(user)
	for _, e := range a.passwd.value {
		if e.name == user || (numeric && e.uid == id) {
			return account{uid: e.uid, gid: e.gid, name: e.name, home: e.home, shell: e.shell}, nil
		}
	}
	switch {
	case numeric && id == 0, user == "root": // an image without /etc/passwd still has a root
		return account{name: "root", home: "/root"}, nil
	case numeric:
		return account{uid: id}, nil
	}
	return account{}, failf(aetherv1.Code_CODE_NO_USER, "user %q is not in the image's /etc/passwd; use a numeric uid or add the user", clip(user, 64))
}

// withGroups adds the supplementary groups that name acc's user.
func (a *accounts) withGroups(acc account) account {
	for _, g := range a.group.value {
		if acc.name != "" && g.gid != acc.gid && slices.Contains(g.members, acc.name) && len(acc.groups) < maxGroups && !slices.Contains(acc.groups, g.gid) {
			acc.groups = append(acc.groups, g.gid)
		}
	}
	return acc
}
