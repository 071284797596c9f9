package aether

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const passwdText = `root:x:0:0:root:/root:/bin/bash
# comment:x:1:1::/:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin

short:x:5
alice:x:1000:1000:Alice,,,:/home/alice:/bin/zsh
dup:x:1000:7::/dup:/bin/false
negative:x:-1:0::/:/bin/sh
huge:x:4294967295:0::/:/bin/sh
+nis::::::
crlf:x:1002:1002::/home/crlf:/bin/sh`

const groupText = `root:x:0:
users:x:100:alice,bob
docker:x:999:alice
docker2:x:999:alice
alice:x:1000:alice
bad:x:x:alice
`

func testAccounts(t testing.TB, passwd, group string) *accounts {
	t.Helper()
	dir := t.TempDir()
	a := newAccounts()
	a.passwdPath, a.groupPath = filepath.Join(dir, "passwd"), filepath.Join(dir, "group")
	for p, content := range map[string]string{a.passwdPath: passwd, a.groupPath: group} {
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

func TestLookup(t *testing.T) {
	a := testAccounts(t, passwdText, groupText)
	for spec, want := range map[string]account{
		"":             {name: "root", home: "/root", shell: "/bin/bash"},
		"root":         {name: "root", home: "/root", shell: "/bin/bash"},
		"0":            {name: "root", home: "/root", shell: "/bin/bash"},
		"alice":        {uid: 1000, gid: 1000, groups: []uint32{100, 999}, name: "alice", home: "/home/alice", shell: "/bin/zsh"},
		"1000":         {uid: 1000, gid: 1000, groups: []uint32{100, 999}, name: "alice", home: "/home/alice", shell: "/bin/zsh"},
		"alice:docker": {uid: 1000, gid: 999, name: "alice", home: "/home/alice", shell: "/bin/zsh"},
		"alice:5":      {uid: 1000, gid: 5, name: "alice", home: "/home/alice", shell: "/bin/zsh"},
		"4000":         {uid: 4000},
		"4000:4001":    {uid: 4000, gid: 4001},
		"crlf":         {uid: 1002, gid: 1002, name: "crlf", home: "/home/crlf", shell: "/bin/sh"},
	} {
		got, err := a.lookup(spec)
		if err != nil || got.uid != want.uid || got.gid != want.gid || !slices.Equal(got.groups, want.groups) || got.name != want.name || got.home != want.home || got.shell != want.shell {
			t.Errorf("%q: %+v, %v; want %+v", spec, got, err, want)
		}
	}
	for _, spec := range []string{"nobody", "short", "negative", "huge", "4294967295", "-1", "alice:nogroup", ":", "#comment", "+nis"} {
		if got, err := a.lookup(spec); err == nil {
			t.Errorf("%q: %+v", spec, got)
		}
	}
}

func TestLookupSeesChanges(t *testing.T) {
	a := testAccounts(t, passwdText, groupText)
	if _, err := a.lookup("carol"); err == nil {
		t.Fatal("carol exists")
	}
	if err := os.WriteFile(a.passwdPath, []byte(passwdText+"\ncarol:x:7:7::/c:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := a.lookup("carol"); err != nil || got.uid != 7 {
		t.Errorf("%+v, %v", got, err)
	}
	if err := os.Remove(a.passwdPath); err != nil {
		t.Fatal(err)
	}
	if _, err := a.lookup("carol"); err == nil {
		t.Error("carol outlives /etc/passwd")
	}
	if got, err := a.lookup("root"); err != nil || got.uid != 0 || got.home != "/root" {
		t.Errorf("root without /etc/passwd: %+v, %v", got, err)
	}
}

func TestStrangeAccountFiles(t *testing.T) {
	a := testAccounts(t, "", "")
	for _, p := range []string{"/dev/zero", t.TempDir(), "/proc/self/mem"} {
		if err := os.Remove(a.passwdPath); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(p, a.passwdPath); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { _, err := a.lookup("alice"); done <- err }()
		select {
		case err := <-done:
			if err == nil {
				t.Errorf("alice is in %s", p)
			}
		case <-time.After(time.Minute):
			t.Fatalf("reading %s does not end", p)
		}
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add([]byte(passwdText), []byte(groupText), "alice")
	f.Add([]byte("a:b:1:2:c:d:e"), []byte("g:x:1:a,a,a"), "1:g")
	f.Fuzz(func(t *testing.T, passwd, group []byte, spec string) {
		for _, e := range parsePasswd(passwd) {
			if e.name == "" || e.uid == math.MaxUint32 || e.gid == math.MaxUint32 || strings.ContainsRune(e.name+e.home+e.shell, 0) || strings.Contains(e.name, ":") {
				t.Errorf("%+v", e)
			}
		}
		a := newAccounts()
		a.passwd.value, a.group.value = parsePasswd(passwd), parseGroup(group)
		if acc, err := a.resolve(spec); err == nil && (len(acc.groups) > maxGroups || acc.uid == math.MaxUint32 || acc.gid == math.MaxUint32) {
			t.Errorf("%+v", acc)
		}
	})
}

func TestEnvironment(t *testing.T) {
	acc := account{name: "alice", home: "/home/alice", shell: "/bin/zsh"}
	got := environment([]string{"A=1", "PATH=/x", "USER="}, map[string]string{"A": "2", "HOSTNAME": "h"}, acc)
	slices.Sort(got)
	want := []string{"A=1", "HOME=/home/alice", "HOSTNAME=h", "LOGNAME=alice", "PATH=/x", "SHELL=/bin/zsh", "USER="}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	got = environment(nil, nil, account{uid: 5})
	slices.Sort(got)
	if want := []string{"HOME=/", "PATH=" + defaultPath, "SHELL=/bin/sh"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestOpenNull(t *testing.T) {
	if fd := openNull("/dev/null"); fd < 0 {
		t.Error("/dev/null is not the null device")
	}
	for _, name := range []string{"/dev/zero", "/etc/passwd", "/no/such"} {
		if fd := openNull(name); fd >= 0 {
			t.Errorf("%s passes for the null device", name)
		}
	}
}
