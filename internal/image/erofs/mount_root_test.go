//go:build rootful && linux

package erofs

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"dsec/internal/image/treetest"
	"dsec/internal/linux"
)

// files writes an image to a file system that the kernel mounts from.
func (s *sample) files(t *testing.T) (meta string, blobs []string) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-erofs-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	write := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o400); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for i, b := range s.blobs {
		blobs = append(blobs, write(fmt.Sprintf("blob%d", i), b.Bytes()))
	}
	return write("meta", s.metadata(t)), blobs
}

// mountErofs mounts by the system call: file-backed, or through loop devices where the kernel is older than 6.12.
func mountErofs(meta, dir string, blobs []string) error {
	var options []string
	for _, b := range blobs {
		options = append(options, "device="+b)
	}
	err := syscall.Mount(meta, dir, "erofs", syscall.MS_RDONLY, strings.Join(options, ","))
	if !errors.Is(err, syscall.ENOTBLK) {
		return err
	}
	var files []*os.File
	for _, path := range append([]string{meta}, blobs...) {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		files = append(files, f)
	}
	return linux.MountErofsLoop(dir, files[0], files[1:])
}

func mount(t *testing.T, meta string, blobs []string) string {
	t.Helper()
	dir := t.TempDir()
	if err := mountErofs(meta, dir, blobs); err != nil {
		t.Fatalf("mount %s with %v: %v", meta, blobs, err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// expected is the sample as treetest would find it.
func (s *sample) expected() map[string]treetest.Entry {
	first, links := map[*Inode]string{}, map[*Inode]uint64{}
	order := func(p string) string { return strings.ReplaceAll(p, "/", "\x00") } // as a walk goes
	for path, n := range s.paths {
		rel := strings.TrimPrefix(path, "/")
		links[n]++
		if f, ok := first[n]; !ok || order(rel) < order(f) {
			first[n] = rel
		}
	}
	tree := map[string]treetest.Entry{}
	for path, n := range s.paths {
		rel := strings.TrimPrefix(path, "/")
		e := treetest.Entry{
			Mode: uint32(n.Mode), UID: n.UID, GID: n.GID, Target: n.Target, Nlink: links[n],
			Mtime: syscall.Timespec{Sec: n.Mtime, Nsec: int64(n.Nsec)}, Xattrs: map[string]string{},
		}
		switch n.Type() {
		case TypeRegular:
			sum := sha256.Sum256(s.content[n])
			e.Size, e.Digest = n.Size, hex.EncodeToString(sum[:])
		case TypeBlock, TypeChar:
			minor := uint64(n.Rdev&0xff | n.Rdev>>12&0xfff00)
			major := uint64(n.Rdev >> 8 & 0xfff)
			e.Rdev = minor&0xff | major<<8 | minor&^0xff<<12
		}
		if !n.IsDir() {
			e.Twin = first[n]
		}
		for _, x := range n.Xattrs {
			e.Xattrs[x.Name] = x.Value
		}
		if path == "/" {
			rel = "."
		}
		tree[rel] = e
	}
	return tree
}

func (s *sample) mountAndCompare(t *testing.T) {
	t.Helper()
	meta, blobs := s.files(t)
	got, err := treetest.Scan(mount(t, meta, blobs))
	if err != nil {
		t.Fatal(err)
	}
	if d := treetest.Diff(s.expected(), got); d != "" {
		t.Fatal(d)
	}
}

func TestKernelReadsRandomTrees(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			randomSample(t, seed, 60<<(seed%4), 1+int(seed)%3).mountAndCompare(t)
		})
	}
}

func TestKernelReadsSixteenBlobs(t *testing.T) {
	s := newSample(MaxDevices)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 20 {
		content := make([]byte, 1<<20+i*1000)
		for k := range content {
			content[k] = byte(r.Uint32())
		}
		s.file(t, "/", fmt.Sprintf("f%02d", i), content, false, r)
	}
	s.mountAndCompare(t)
}

func TestKernelReadsNoBlobAtAll(t *testing.T) {
	s := newSample(0)
	s.add("/", "dir", NewDir(0o700))
	s.add("/dir", "empty", &Inode{Mode: TypeRegular | 0o600})
	s.content[s.paths["/dir/empty"]] = nil
	s.mountAndCompare(t)
}

func TestKernelFindsEachOfManyNames(t *testing.T) {
	const entries = 200_000
	s := newSample(0)
	for i := range entries {
		s.add("/", fmt.Sprintf("%x-%d", i*2654435761%(1<<32), i), &Inode{Mode: TypeRegular | 0o644, Mtime: int64(i)})
	}
	meta, blobs := s.files(t)
	dir := mount(t, meta, blobs)
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != entries {
		t.Fatalf("%d names, %v", len(list), err)
	}
	for path, n := range s.paths {
		st, err := os.Lstat(dir + path)
		if err != nil || path != "/" && st.ModTime().Unix() != n.Mtime {
			t.Fatalf("%s: %v", path, err)
		}
	}
	for _, name := range []string{"0", "zzz", "!", "8000000-1", strings.Repeat("x", 255)} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil && s.paths["/"+name] == nil {
			t.Fatalf("%s should not exist", name)
		}
	}
}

func TestKernelReadsDeepTreesAndLongNames(t *testing.T) {
	s := newSample(1)
	path := "/"
	for i := 0; len(path) < 3500; i++ {
		name := strings.Repeat("d", 1+i%255)
		s.add(path, name, NewDir(0o755))
		path = strings.TrimSuffix(path, "/") + "/" + name
	}
	s.file(t, path, strings.Repeat("f", 255), []byte("deep"), false, nil)
	for n := 4000; n <= MaxTarget; n++ { // around the border of what stays behind the inode
		s.add("/", "l"+strconv.Itoa(n), &Inode{Mode: TypeSymlink | 0o777, Target: strings.Repeat("x", n)})
	}
	s.mountAndCompare(t)
}

func TestKernelReadsDirectoriesOfEverySize(t *testing.T) {
	s := newSample(0)
	for i := range 400 {
		dir := fmt.Sprintf("/d%03d", i)
		n := s.add("/", dir[1:], NewDir(0o755))
		n.Xattrs = []Xattr{{Name: "user.pad", Value: strings.Repeat("v", i%97)}}
		for k := range i {
			s.add(dir, fmt.Sprintf("%d", k), &Inode{Mode: TypeFIFO | 0o600})
		}
	}
	s.mountAndCompare(t)
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestKernelKeepsHoles looks at a sparse file that has to cost next to nothing.
func TestKernelKeepsHoles(t *testing.T) {
	s := newSample(1)
	const size, at = int64(4) << 30, int64(3)<<30 + 5*BlockSize
	content := io.MultiReader(io.LimitReader(zeroReader{}, at), strings.NewReader(strings.Repeat("x", BlockSize)), zeroReader{})
	xs, err := s.data[0].Append(content, size, true)
	if err != nil {
		t.Fatal(err)
	}
	s.root.Set("huge", &Inode{Mode: TypeRegular | 0o644, Size: size, Extents: xs})
	meta, blobs := s.files(t)
	if st, err := os.Stat(meta); err != nil || st.Size() > 1<<20 || s.data[0].Blocks() > 64 {
		t.Errorf("metadata of %d bytes, data of %d blocks, %v", st.Size(), s.data[0].Blocks(), err)
	}
	f, err := os.Open(filepath.Join(mount(t, meta, blobs), "huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 3*BlockSize)
	if _, err := f.ReadAt(b, at-BlockSize); err != nil {
		t.Fatal(err)
	}
	if !isZero(b[:BlockSize]) || !isZero(b[2*BlockSize:]) || string(b[BlockSize:BlockSize+2]) != "xx" {
		t.Fatal("wrong bytes around the data")
	}
}

func TestFsckAgrees(t *testing.T) {
	if _, err := exec.LookPath("fsck.erofs"); err != nil {
		t.Fatalf("erofs-utils are missing: %v", err)
	}
	for seed := range uint64(4) {
		meta, blobs := randomSample(t, seed, 300, 1).files(t)
		args := []string{"--extract"}
		for _, b := range blobs {
			args = append(args, "--device="+b)
		}
		if out, err := exec.Command("fsck.erofs", append(args, meta)...).CombinedOutput(); err != nil {
			t.Errorf("fsck.erofs: %v\n%s", err, out)
		}
	}
}
