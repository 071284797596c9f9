//go:build rootful

package aether

import (
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// In a devpts of its own, as a sandbox has: the slave belongs to the command's user, and who finds none left is told so.
func TestRootTerminalsOfASandbox(t *testing.T) {
	done := make(chan struct{})
	go func() { // the thread ends with its mount namespace
		defer close(done)
		runtime.LockOSThread()
		ownTerminals(t, t.TempDir())
	}()
	<-done
}

func ownTerminals(t *testing.T, dir string) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Error(err)
		return
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Error(err)
		return
	}
	if err := unix.Mount("devpts", dir, "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5,max=2"); err != nil {
		t.Error(err)
		return
	}
	device := filepath.Join(dir, "ptmx")
	user := account{uid: 1234, gid: 1234}
	var open []*terminal
	for range 2 {
		term, err := openTerminal(device, window{24, 80}, user)
		if err != nil {
			t.Error(err)
			return
		}
		open = append(open, term)
		var st unix.Stat_t
		if err := unix.Fstat(term.slave, &st); err != nil || st.Uid != 1234 || st.Gid != 5 || st.Mode&0o777 != 0o620 {
			t.Errorf("owner %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
		}
	}
	_, err := openTerminal(device, window{24, 80}, user)
	if f := asFailure("", err); f.code != aetherv1.Code_CODE_NO_TERMINALS {
		t.Errorf("a third of two: %v", err)
	}
	open[0].close()
	again, err := openTerminal(device, window{24, 80}, user)
	if err != nil {
		t.Errorf("after one was given back: %v", err)
	} else {
		again.close()
	}
	open[1].close()
	if err := unix.Unmount(dir, 0); err != nil {
		t.Errorf("something of it is still open: %v", err)
	}
}
