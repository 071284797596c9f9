//go:build rootful

package upper

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"dsec/sandbox"
)

// fill writes random bytes, which no file system makes smaller, until the kernel refuses. It returns how many fitted.
func fill(t testing.TB, path string) (written int64, refused error) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	block := make([]byte, 4096)
	for i := range block {
		block[i] = byte(rand.Uint32())
	}
	asSandbox(t, func() {
		for refused == nil {
			var n int
			n, refused = f.Write(block)
			written += int64(n)
		}
	})
	return written, refused
}

func TestQuotaIsHardForData(t *testing.T) { eachKind(t, testQuotaIsHardForData) }

func testQuotaIsHardForData(t *testing.T, kind string) {
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	const limit = 16 * mib
	id, dir := create(t, p, limit)
	written, refused := fill(t, filepath.Join(dir, "u", "big"))
	if !errors.Is(refused, syscall.EDQUOT) {
		t.Errorf("refused with %v, want EDQUOT", refused)
	}
	if written > limit || written < limit-256<<10 {
		t.Errorf("%d bytes fitted into a quota of %d", written, limit)
	}
	settle(t, p)
	used, got, err := p.Usage(id)
	if err != nil || got != limit || used > limit || used < written {
		t.Errorf("usage %d of %d, %v; %d were written", used, got, err, written)
	}
	_, other := create(t, p, limit)
	if err := os.WriteFile(filepath.Join(other, "u", "x"), make([]byte, mib), 0o600); err != nil {
		t.Errorf("another sandbox cannot write: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "u", "big")); err != nil {
		t.Errorf("nothing can be deleted from a full directory: %v", err)
	}
}

func TestQuotaIsHardForSmallFilesAndForMetadata(t *testing.T) {
	eachKind(t, testQuotaIsHardForSmallFilesAndForMetadata)
}

func testQuotaIsHardForSmallFilesAndForMetadata(t *testing.T, kind string) {
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	limit := int64(8 * mib)
	if kind == KindQgroup {
		limit = 2 * mib // it takes minutes to fill more where a commit costs so much
	}
	for name, content := range map[string]int{"empty files": 0, "inline files": 1000, "files of a block": 4096} {
		t.Run(name, func(t *testing.T) {
			id, dir := create(t, p, limit)
			var refused error
			n := 0
			asSandbox(t, func() {
				for ; n < 500_000 && refused == nil; n++ {
					refused = os.WriteFile(filepath.Join(dir, "u", fmt.Sprintf("file-%07d", n)), make([]byte, content), 0o600)
				}
			})
			if !errors.Is(refused, syscall.EDQUOT) {
				t.Fatalf("%d files of %d bytes, then %v", n, content, refused)
			}
			settle(t, p)
			used, _, err := p.Usage(id)
			if err != nil || used > limit {
				t.Errorf("usage %d, %v; the limit is %d", used, err, limit)
			}
			t.Logf("%d files of %d bytes in %d bytes, usage %d", n, content, limit, used)
		})
	}
}

// numQgroups counts the quota groups after the kernel has had time to free what was removed.
func numQgroups(t testing.TB, p *Pool) int {
	t.Helper()
	keep, ok := p.keep.(*subvols)
	if !ok {
		return 0 // a project without files and limits is none
	}
	groups, err := filepath.Glob(filepath.Join(keep.qgroups, "0_*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(groups)
}

func TestRemoveFreesSpaceAndQuotaGroups(t *testing.T) {
	eachKind(t, testRemoveFreesSpaceAndQuotaGroups)
}

func testRemoveFreesSpaceAndQuotaGroups(t *testing.T, kind string) {
	t.Parallel() // it waits for the kernel, which discards freed space after some 10 s
	p := open(t, t.TempDir(), kind)
	defer closePool(t, p)
	groups := numQgroups(t, p)
	free, total, err := p.Free()
	if err != nil || total > size || total < size*9/10 || free <= 0 || free > total {
		t.Errorf("free %d of %d, %v", free, total, err)
	}
	var ids []sandbox.ID
	for range 20 {
		id, dir := create(t, p, 64*mib)
		if err := os.WriteFile(filepath.Join(dir, "u", "x"), make([]byte, 4*mib), 0o600); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	settle(t, p)
	full := diskUse(t, p.file)
	for _, id := range ids {
		for range 2 {
			if err := p.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.Stat(p.path(id)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", id, err)
		}
	}
	waitFor(t, func() bool {
		settle(t, p)
		p.keep.tidy()
		now, _, err := p.Free()
		return err == nil && numQgroups(t, p) == groups && now > free-8*mib
	})
	if _, _, err := p.Usage(ids[0]); sandbox.ClassOf(err) != sandbox.NotFound {
		t.Errorf("usage of a removed directory: %v", err)
	}
	waitFor(t, func() bool { return diskUse(t, p.file) < full-60*mib })
}

func diskUse(t testing.TB, path string) int64 {
	t.Helper()
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return st.Sys().(*syscall.Stat_t).Blocks * 512
}
