package convert

import (
	"archive/tar"
	"bytes"
	"testing"

	"dsec/internal/image"
	"dsec/internal/image/store/storetest"
	"dsec/sandbox"
)

func FuzzImport(f *testing.F) {
	f.Add(tarOf(f, item{name: "a/b", body: "x", edit: xattr("user.x", "y")}, item{name: "l", typ: tar.TypeLink, link: "a/b"}), false)
	f.Add(tarOf(f, item{name: "d/.wh..wh..opq"}, item{name: "d/.wh.x"}, item{name: "s", typ: tar.TypeSymlink, link: "d"}), true)
	f.Add(compressed(f, tarOf(f, item{name: "f", typ: tar.TypeFifo}, item{name: "c", typ: tar.TypeChar})), true)
	f.Fuzz(func(t *testing.T, b []byte, whiteouts bool) {
		st := storetest.NewMemory()
		m, _, err := Import(t.Context(), st, bytes.NewReader(b),
			Options{Kind: image.KindBase, Whiteouts: whiteouts, MaxBytes: 1 << 20, MaxEntries: 1000})
		if err != nil {
			if sandbox.ClassOf(err) != sandbox.InvalidArgument {
				t.Fatalf("%v has class %v", err, sandbox.ClassOf(err))
			}
			if left := blobs(t, st); len(left) > 0 {
				t.Fatalf("a refused archive left %v", left)
			}
			return
		}
		describe(t, st, m)
	})
}
