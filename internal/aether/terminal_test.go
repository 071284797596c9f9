package aether

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

func ownAccount() account {
	return account{uid: uint32(os.Geteuid()), gid: uint32(os.Getegid())}
}

// What stands where the terminals should be is not taken for one.
func TestTerminalDevice(t *testing.T) {
	dir := t.TempDir()
	plain, fifo := filepath.Join(dir, "plain"), filepath.Join(dir, "fifo")
	if err := os.WriteFile(plain, []byte("x"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	for _, device := range []string{"/dev/null", "/dev/zero", plain, fifo, dir, filepath.Join(dir, "missing")} {
		_, err := openTerminal(device, window{24, 80}, ownAccount())
		if f := asFailure("", err); f.code != aetherv1.Code_CODE_NO_TERMINALS {
			t.Errorf("%s: %v", device, err)
		}
	}
	term, err := openTerminal("/dev/ptmx", window{24, 80}, ownAccount())
	if err != nil {
		t.Fatal(err)
	}
	if size, err := unix.IoctlGetWinsize(term.slave, unix.TIOCGWINSZ); err != nil || size.Row != 24 || size.Col != 80 {
		t.Errorf("%+v, %v", size, err)
	}
	term.close()
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors became %d", before, after)
	}
}

func descriptors(t *testing.T) int {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

func TestLoginShells(t *testing.T) {
	for shell, want := range map[string]string{
		"/bin/zsh": "/bin/zsh -zsh", "/usr/sbin/nologin": "/bin/bash -bash", "/bin/false": "/bin/bash -bash", "": "/bin/bash -bash", "zsh": "/bin/bash -bash",
	} {
		got := loginShells(account{shell: shell})
		if first := got[0].path + " " + got[0].argv[0]; first != want || got[len(got)-1].path != "/bin/sh" {
			t.Errorf("%q: %v", shell, got)
		}
	}
}

func TestStartIsCheckedForTerminals(t *testing.T) {
	start := func(rows, cols uint32) *aetherv1.Start {
		return &aetherv1.Start{CommandId: "c", Cwd: "/", Terminal: &aetherv1.Terminal{Rows: rows, Cols: cols}}
	}
	for _, ok := range []*aetherv1.Start{start(1, 1), start(65535, 65535)} {
		if f := checkStart(ok); f != nil {
			t.Errorf("%v: %v", ok, f)
		}
	}
	for _, bad := range []*aetherv1.Start{start(0, 1), start(1, 0), start(65536, 1), start(1, 1<<31), {CommandId: "c", Cwd: "/"}} {
		if f := checkStart(bad); f == nil || f.code != aetherv1.Code_CODE_INVALID {
			t.Errorf("%v: %v", bad, f)
		}
	}
}
