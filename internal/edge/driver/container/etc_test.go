package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/internal/edge/driver"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

func TestNamesInHosts(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "etc", "hosts")
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	put := func(content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := &Driver{}
	write := func(lines string) string {
		t.Helper()
		if err := d.WriteHosts(t.Context(), driver.Handle{}, rootfs.Container{Upper: rootfs.Upper{Dir: dir}}, lines); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	put("127.0.0.1 localhost") // somebody inside has cut the newline
	inode, _ := os.Stat(path)
	got := write("10.0.0.1\ta.example\n")
	if want := "127.0.0.1 localhost\n" + namesBegin + "10.0.0.1\ta.example\n" + namesEnd; got != want {
		t.Errorf("%q", got)
	}
	put(got + "10.0.0.9 mine\n")
	if got = write(""); got != "127.0.0.1 localhost\n"+namesBegin+namesEnd+"10.0.0.9 mine\n" {
		t.Errorf("what stands behind the names is lost, or they are not gone: %q", got)
	}
	put("x\n" + namesBegin + "10.0.0.1 a.example\n") // and the last mark
	if got = write("10.0.0.2\ta.example\n"); strings.Count(got, namesBegin) != 1 || !strings.Contains(got, "10.0.0.2") {
		t.Errorf("%q", got)
	}
	if now, _ := os.Stat(path); !os.SameFile(inode, now) {
		t.Error("the file is another one, which the sandbox does not see")
	}
	put(strings.Repeat("x", maxHosts+1))
	err := d.WriteHosts(t.Context(), driver.Handle{}, rootfs.Container{Upper: rootfs.Upper{Dir: dir}}, "")
	if sandbox.ReasonOf(err) != "hosts_too_large" {
		t.Errorf("%v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/hostname", path); err != nil {
		t.Fatal(err)
	}
	if d.WriteHosts(t.Context(), driver.Handle{}, rootfs.Container{Upper: rootfs.Upper{Dir: dir}}, "") == nil {
		t.Error("a link was followed")
	}
}

func FuzzNamesInHosts(f *testing.F) {
	f.Add("127.0.0.1 localhost\n", "10.0.0.1\ta\n")
	f.Add(namesEnd+namesBegin, "x\n")
	f.Fuzz(func(t *testing.T, file, lines string) {
		if strings.Contains(lines, "#") || lines != "" && !strings.HasSuffix(lines, "\n") {
			return // as names are never
		}
		once := withNames(file, lines)
		if twice := withNames(once, lines); twice != once {
			t.Errorf("%q becomes %q", once, twice)
		}
		if !strings.Contains(once, lines) {
			t.Errorf("%q has no %q", once, lines)
		}
	})
}
