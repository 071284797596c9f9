//go:build rootful && linux

package convert

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/archive"
	"dsec/internal/image/store"
	"dsec/internal/image/treetest"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// workDir is on a file system that the kernel mounts images from.
func workDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-convert-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func posix(t testing.TB) *store.Posix {
	t.Helper()
	st, err := store.OpenPosix(filepath.Join(workDir(t), "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
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

func mount(t *testing.T, st *store.Posix, m image.Manifest) string {
	t.Helper()
	src := Sources(st, m)[0]
	var blobs []string
	for _, f := range src.Data {
		blobs = append(blobs, f.Path)
	}
	dir := t.TempDir()
	if err := mountErofs(src.Metadata.Path, dir, blobs); err != nil {
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// sourceTree makes a directory with everything that a layer can hold.
func sourceTree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(workDir(t), "tree")
	p := func(rel string) string { return filepath.Join(dir, rel) }
	r := rand.New(rand.NewPCG(3, 4))
	random := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	deep := strings.Repeat("deep/", 300)
	long := strings.Repeat("n", 255)
	check := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	check(os.MkdirAll(p(deep), 0o755), os.WriteFile(p(deep+long), random(10), 0o600), os.Mkdir(p("many"), 0o1777))
	for i := range 3000 {
		check(os.WriteFile(p(fmt.Sprintf("many/%d", i)), random(i%5*1500), 0o644))
	}
	check(os.WriteFile(p("big"), random(3<<20+17), 0o4755), os.Chmod(p("big"), 0o755|os.ModeSetuid|os.ModeSetgid), os.Link(p("big"), p("many/big2")),
		os.Chown(p("many/1"), 1000, 4_000_000_000), os.Symlink(strings.Repeat("t", 4095), p("longlink")), os.Symlink("/etc/passwd", p("abs")),
		os.Lchown(p("abs"), 5, 6), syscall.Mkfifo(p("fifo"), 0o640), syscall.Mknod(p("whiteout"), syscall.S_IFCHR, 0),
		os.WriteFile(p("bad\xff\nname\t'\""), nil, 0), os.Mkdir(p("opaque"), 0o700))
	sparse, err := os.Create(p("sparse"))
	check(err)
	for _, off := range []int64{0, 1 << 20, 5<<20 + 8192, 40 << 20} {
		_, err := sparse.WriteAt(random(5000), off)
		check(err)
	}
	check(sparse.Truncate(50<<20), sparse.Close())
	hole, err := os.Create(p("hole"))
	check(err)
	check(hole.Truncate(7<<20+1), hole.Close())
	caps := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x04\x00\xe8\x03\x00\x00\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x06\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff"
	check(linux.Lsetxattr(p("big"), "security.capability", caps), linux.Lsetxattr(p("many/2"), "user.empty", ""),
		linux.Lsetxattr(p("many/2"), "user.bin", "\x00\xff=\n"), linux.Lsetxattr(p("opaque"), "trusted.overlay.opaque", "y"),
		linux.Lsetxattr(p("many"), "system.posix_acl_default", acl), linux.Lsetxattr(p("many/3"), "system.posix_acl_access", acl),
		os.Chtimes(p("many/4"), time.Time{}, time.Unix(-86400*365*3, 0)), os.Chtimes(p("many/5"), time.Time{}, time.Unix(4e9, 999999999)))
	return dir
}

func TestPackedDirectoryIsWhatTheKernelShows(t *testing.T) {
	dir := sourceTree(t)
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	skipped := ""
	if err := archive.WriteTar(t.Context(), &packed, dir, archive.Options{Skipped: func(path, _ string) { skipped += path + " " }}); err != nil {
		t.Fatal(err)
	}
	l.Close() // removes the socket
	if skipped != "socket " {
		t.Errorf("skipped %q", skipped)
	}
	if packed.Len() > 20<<20 {
		t.Errorf("archive of %d bytes: holes are spelt out", packed.Len())
	}
	st := posix(t)
	m, _ := mustImport(t, st, packed.Bytes(), Options{})
	compare(t, dir, mount(t, st, m))
	if size := m.Layers[0].Data[0].Size; size > 20<<20 {
		t.Errorf("blob of %d bytes: holes are spelt out", size)
	}
	if len(m.Dropped) > 0 {
		t.Errorf("dropped %q", m.Dropped)
	}
}

func TestGNUTarIsWhatTheKernelShows(t *testing.T) {
	dir := sourceTree(t)
	for name, args := range map[string][]string{
		"posix": {"--format=posix", "--sparse"}, "gzip": {"--format=posix", "--gzip"}, "sparse 0.0": {"--format=posix", "--sparse", "--sparse-version=0.0"},
	} {
		t.Run(name, func(t *testing.T) {
			tar := exec.Command("tar", append(args, "--xattrs", "--xattrs-include=*", "-C", dir, "-cf", "-", ".")...)
			out, err := tar.Output()
			if err != nil {
				t.Fatal(err)
			}
			st := posix(t)
			m, _ := mustImport(t, st, out, Options{})
			compare(t, dir, mount(t, st, m))
		})
	}
}

func compare(t *testing.T, want, got string) {
	t.Helper()
	w, err := treetest.Scan(want)
	if err != nil {
		t.Fatal(err)
	}
	g, err := treetest.Scan(got)
	if err != nil {
		t.Fatal(err)
	}
	// The root's times are touched by making and removing the socket.
	if d := treetest.Diff(withoutMtime(w, "."), withoutMtime(g, ".")); d != "" {
		t.Error(d)
	}
}

func withoutMtime(tree map[string]treetest.Entry, path string) map[string]treetest.Entry {
	e := tree[path]
	e.Mtime = syscall.Timespec{}
	tree[path] = e
	return tree
}

// TestOverlayHonoursConvertedWhiteouts stacks an imported OCI layer on a base.
func TestOverlayHonoursConvertedWhiteouts(t *testing.T) {
	st := posix(t)
	base, _ := mustImport(t, st, archiveOf(t, "gone", "kept", "d/old", "e/old", "f"), Options{})
	top, _ := mustImport(t, st, archiveOf(t, ".wh.gone", "d/.wh..wh..opq", "d/new", "e/new", ".wh.f", "f/g"), Options{Whiteouts: true})
	lower, upper, dir := mount(t, st, base), mount(t, st, top), t.TempDir()
	if err := syscall.Mount("overlay", dir, "overlay", syscall.MS_RDONLY, "lowerdir="+upper+":"+lower); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(dir, 0)
	tree, err := treetest.Scan(dir)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{"gone": false, "kept": true, "d/old": false, "d/new": true, "e/old": true, "e/new": true, "f/g": true} {
		if _, got := tree[path]; got != want {
			t.Errorf("%s: there is %v", path, got)
		}
	}
}

func archiveOf(t *testing.T, names ...string) []byte {
	var items []item
	for _, n := range names {
		items = append(items, item{name: n})
	}
	return tarOf(t, items...)
}

// BenchmarkImport converts a directory (DSEC_BENCH_TREE, or 400 MB of made-up files) and, for comparison, runs tar and
// mkfs.erofs on it.
func BenchmarkImport(b *testing.B) {
	dir := os.Getenv("DSEC_BENCH_TREE")
	if dir == "" {
		dir = benchTree(b)
	}
	work := workDir(b)
	path := filepath.Join(work, "tree.tar")
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := archive.WriteTar(b.Context(), f, dir, archive.Options{}); err != nil {
		b.Fatal(err)
	}
	size, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("import", func(b *testing.B) {
		b.SetBytes(size)
		for range b.N {
			if _, err := f.Seek(0, io.SeekStart); err != nil {
				b.Fatal(err)
			}
			st := posix(b)
			m, _, err := Import(b.Context(), st, f, Options{Kind: image.KindBase})
			if err != nil {
				b.Fatal(err)
			}
			for _, blob := range m.Layers[0].Data { // gives the page cache back: memory touched first costs most of the time here
				if err := st.Remove(b.Context(), blob.Digest); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
	b.Run("pack", func(b *testing.B) {
		b.SetBytes(size)
		for range b.N {
			if err := archive.WriteTar(b.Context(), io.Discard, dir, archive.Options{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("tar+mkfs.erofs", func(b *testing.B) {
		b.SetBytes(size)
		for i := range b.N {
			out := filepath.Join(work, fmt.Sprint(i))
			script := `tar -C "$1" -cf "$2.tar" . && mkfs.erofs --quiet --chunksize=4096 --blobdev="$2.blob" "$2.meta" "$1" && sync "$2.blob" "$2.meta"; rm -f "$2".*`
			if msg, err := exec.Command("sh", "-ec", script, "sh", dir, out).CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, msg)
			}
		}
	})
}

func benchTree(b *testing.B) string {
	dir := filepath.Join(workDir(b), "tree")
	r := rand.New(rand.NewPCG(1, 1))
	buf := make([]byte, 2<<20)
	for i := range buf {
		buf[i] = byte(r.Uint32())
	}
	for i := range 16000 {
		sub := filepath.Join(dir, fmt.Sprint(i%500))
		size := 1 << r.IntN(16) // mean 4 KiB…
		if i%100 == 0 {
			size = len(buf)
		}
		if err := errors.Join(os.MkdirAll(sub, 0o755), os.WriteFile(filepath.Join(sub, fmt.Sprint(i)), buf[:size], 0o644)); err != nil {
			b.Fatal(err)
		}
	}
	return dir
}

// TestStoreFull imports into a store without room: a typed error, and nothing is left.
func TestStoreFull(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=3m,mode=755"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	st, err := store.OpenPosix(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	_, _, err = Import(t.Context(), st, bytes.NewReader(tarOf(t, item{name: "a", body: strings.Repeat("x", 8<<20)})), Options{Kind: image.KindBase})
	if sandbox.ClassOf(err) != sandbox.ResourceExhausted || sandbox.ReasonOf(err) != "store_full" {
		t.Errorf("got %v", err)
	}
	if left := blobs(t, st); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	mustImport(t, st, tarOf(t, item{name: "a", body: "small"}), Options{})
}
