//go:build rootful

package layers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux/mountinfo"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

const edge = sandbox.EdgeCode("lyttt")

// churnEnv makes the test binary a process that mounts and unmounts until it is killed: "<run directory>:<image directory>".
const churnEnv = "DSEC_TEST_LAYERS_CHURN"

func TestMain(m *testing.M) {
	if v := os.Getenv(churnEnv); v != "" {
		run, images, _ := strings.Cut(v, ":")
		churn(run, images)
	}
	os.Exit(m.Run())
}

func churn(run, images string) {
	m, err := Open(context.Background(), Options{RunDir: run})
	for err == nil {
		holder := sandbox.NewID(edge)
		if _, err = m.Acquire(context.Background(), holder, []rootfs.Source{describe(images)}); err == nil {
			err = m.Release(context.Background(), holder)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// privateDir is a directory on a private tmpfs, as <run> is.
func privateDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size=64m"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("", dir, "", syscall.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("something was left mounted or in use below the run directory: %v", err)
		}
	})
	return filepath.Join(dir, "layers")
}

// makeImage makes a layer in dir whose file "name" holds the name, as metadata and one blob.
func makeImage(t testing.TB, dir, name string) rootfs.Source {
	t.Helper()
	tree := t.TempDir()
	content := bytes.Repeat([]byte(name+"\n"), 4096)
	if err := os.WriteFile(filepath.Join(tree, "name"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	setuid := filepath.Join(tree, "setuid")
	if err := os.WriteFile(setuid, content, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(setuid, os.ModeSetuid|0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mknod(filepath.Join(tree, "null"), syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("mkfs.erofs", "--chunksize=4096", "--blobdev="+filepath.Join(dir, "blob"), filepath.Join(dir, "meta"), tree)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
	return describe(dir)
}

func describe(dir string) rootfs.Source {
	file := func(path string) rootfs.File {
		b, err := os.ReadFile(path)
		if err != nil {
			panic(err)
		}
		sum := sha256.Sum256(b)
		return rootfs.File{Path: path, Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(b))}
	}
	return rootfs.Source{Metadata: file(filepath.Join(dir, "meta")), Data: []rootfs.File{file(filepath.Join(dir, "blob"))}}
}

func open(t testing.TB, dir string, keep int) *Mounts {
	t.Helper()
	m, err := Open(t.Context(), Options{RunDir: dir, KeepIdle: keep})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func closeMounts(t testing.TB, m *Mounts) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := m.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if left := mounted(t, m.dir); len(left) > 0 {
		t.Errorf("left mounted: %+v", left)
	}
	if _, err := os.Stat(m.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
}

func mounted(t testing.TB, dir string) []mountinfo.Mount {
	t.Helper()
	mounts, err := mountinfo.Self()
	if err != nil {
		t.Fatal(err)
	}
	return mountinfo.Under(mounts, dir)
}

func acquire(t testing.TB, m *Mounts, holder sandbox.ID, sources ...rootfs.Source) []string {
	t.Helper()
	lowers, err := m.Acquire(t.Context(), holder, sources)
	if err != nil {
		t.Fatal(err)
	}
	return lowers
}

func release(t testing.TB, m *Mounts, holder sandbox.ID) {
	t.Helper()
	if err := m.Release(context.Background(), holder); err != nil {
		t.Error(err)
	}
}

func firstLine(t testing.TB, dir string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "name"))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}

// readsFiles reports whether this kernel must be able to mount EROFS from a file: since Linux 6.12.
func readsFiles(t testing.TB) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(string(b), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 12
}
