//go:build linux

// Package treetest records directory trees by plain system calls, for tests that compare what went into an image with
// what the kernel shows of it. It shares no code with the writer.
package treetest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"dsec/internal/linux"
)

// An Entry is all that can be seen of one name.
type Entry struct {
	Mode   uint32
	UID    uint32
	GID    uint32
	Rdev   uint64
	Size   int64
	Mtime  syscall.Timespec
	Nlink  uint64
	Target string
	Digest string            // of a regular file's content
	Xattrs map[string]string // without those that the host sets by itself
	Twin   string            // the first name in order of bytes with the same inode
}

// Scan walks dir. Keys are relative paths, "." is the root.
func Scan(dir string) (map[string]Entry, error) {
	tree := map[string]Entry{}
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		e, ino, err := stat(path)
		if err != nil {
			return err
		}
		if e.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			if _, ok := first[ino]; !ok {
				first[ino] = rel
			}
			e.Twin = first[ino]
		}
		tree[rel] = e
		return nil
	})
	return tree, err
}

func stat(path string) (Entry, uint64, error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return Entry{}, 0, fmt.Errorf("lstat %s: %w", path, err)
	}
	e := Entry{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Mtime: st.Mtim, Nlink: st.Nlink}
	var err error
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		e.Size = st.Size
		e.Digest, err = digest(path)
	case syscall.S_IFLNK:
		e.Target, err = os.Readlink(path)
	case syscall.S_IFCHR, syscall.S_IFBLK:
		e.Rdev = st.Rdev
	}
	if err != nil {
		return Entry{}, 0, err
	}
	e.Xattrs, err = linux.Lxattrs(path)
	maps.DeleteFunc(e.Xattrs, func(k, _ string) bool { return k == "security.selinux" })
	return e, st.Ino, err
}

func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Diff describes how two trees differ, at most 20 lines, and "" if they do not. Link counts of directories are a matter
// of the file system and left out.
func Diff(want, got map[string]Entry) string {
	var lines []string
	for _, path := range slices.Sorted(maps.Keys(want)) {
		w, g := want[path], got[path]
		if _, ok := got[path]; !ok {
			lines = append(lines, fmt.Sprintf("%q is missing", path))
			continue
		}
		if w.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			w.Nlink, g.Nlink = 0, 0
		}
		ws, gs := fmt.Sprintf("%#v", w), fmt.Sprintf("%#v", g)
		if ws != gs {
			lines = append(lines, fmt.Sprintf("%q:\n  want %s\n  got  %s", path, ws, gs))
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			lines = append(lines, fmt.Sprintf("%q should not be there", path))
		}
	}
	if len(lines) > 20 {
		lines = append(lines[:20], fmt.Sprintf("… %d more", len(lines)-20))
	}
	return strings.Join(lines, "\n")
}
