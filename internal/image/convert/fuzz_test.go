package convert

import (
	"archive/tar"
	"bytes"
	"slices"
	"testing"

	"dsec/internal/image"
	"dsec/sandbox"
)

func FuzzImport(f *testing.F) {
	f.Add(tarOf(f, item{name: "a/b", body: "x", edit: xattr("user.x", "y")}, item{name: "l", typ: tar.TypeLink, link: "a/b"}), false)
	f.Add(tarOf(f, item{name: "d/.wh..wh..opq"}, item{name: "d/.wh.x"}, item{name: "s", typ: tar.TypeSymlink, link: "d"}), true)
	f.Add(compressed(f, tarOf(f, item{name: "f", typ: tar.TypeFifo}, item{name: "c", typ: tar.TypeChar})), true)
	st := open(f)
	f.Fuzz(func(t *testing.T, b []byte, whiteouts bool) {
		before := blobs(t, st)
		m, _, err := Import(t.Context(), st, bytes.NewReader(b),
			Options{Kind: image.KindBase, Whiteouts: whiteouts, MaxBytes: 1 << 20, MaxEntries: 1000})
		if err != nil {
			if sandbox.ClassOf(err) != sandbox.InvalidArgument {
				t.Fatalf("%v has class %v", err, sandbox.ClassOf(err))
			}
			if !slices.Equal(before, blobs(t, st)) {
				t.Fatal("a refused archive left blobs")
			}
			return
		}
		describe(t, st, m)
		for _, b := range blobs(t, st) {
			if !slices.Contains(before, b) {
				if err := st.Remove(t.Context(), b); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
