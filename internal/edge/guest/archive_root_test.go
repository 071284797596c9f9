//go:build rootful

package guest

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/internal/image/treetest"
)

// TestArchivesUnderAttack: somebody exchanges a directory for a link that leads out, all the while.
func TestArchivesUnderAttack(t *testing.T) {
	w := newWorld(t)
	c := w.connect()
	top := t.TempDir()
	outside, to := filepath.Join(top, "outside"), filepath.Join(top, "to")
	noError(t, os.MkdirAll(outside+"/sub", 0o755), os.WriteFile(outside+"/sub/victim", []byte("whole"), 0o644), os.MkdirAll(to+"/d/sub", 0o755),
		os.Symlink("../outside", to+"/relative"), os.Symlink(outside, to+"/absolute"), os.Symlink("d", to+"/link"))
	before := scan(t, outside)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, to+"/d", unix.AT_FDCWD, to+[]string{"/relative", "/absolute"}[i%2], unix.RENAME_EXCHANGE)
			}
		}
	}()
	var list []tar.Header
	for range 50 {
		list = append(list, tar.Header{Name: "d/sub/victim"}, tar.Header{Name: "link/sub/new"}, tar.Header{Name: "d/sub", Typeflag: tar.TypeDir, Mode: 0o777},
			tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "d/sub/victim"}, tar.Header{Name: "other"})
	}
	packed, whole := tarOf(t, list...), 0
	for range 200 {
		if _, err := c.WriteArchive(testContext(t), ArchiveWrite{Path: to, User: me()}, bytes.NewReader(packed)); err == nil {
			whole++
		}
	}
	close(stop)
	<-stopped
	if diff := treetest.Diff(before, scan(t, outside)); diff != "" {
		t.Error(diff)
	}
	t.Logf("%d of 200 were unpacked whole", whole)
}
