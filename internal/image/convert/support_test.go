package convert

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/erofs"
	"dsec/internal/image/store"
)

func open(t testing.TB) *store.Posix {
	t.Helper()
	st, err := store.OpenPosix(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return st
}

// An item is an entry of an archive in short.
type item struct {
	name string
	typ  byte // 0 = file, or directory if the name ends with "/"
	body string
	link string
	edit func(*tar.Header)
}

func tarOf(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, i := range items {
		h := &tar.Header{Name: i.name, Typeflag: i.typ, Size: int64(len(i.body)), Linkname: i.link, Mode: 0o644,
			ModTime: time.Unix(1e9, 5), Format: tar.FormatPAX}
		if i.typ == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(i.name, "/") {
				h.Typeflag, h.Mode = tar.TypeDir, 0o755
			}
		}
		if i.edit != nil {
			i.edit(h)
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, i.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func xattr(kv ...string) func(*tar.Header) {
	return func(h *tar.Header) {
		h.PAXRecords = map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			h.PAXRecords[paxXattr+kv[i]] = kv[i+1]
		}
	}
}

func compressed(t testing.TB, b []byte) []byte {
	t.Helper()
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(b)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}

// describe lists a layer as "path type perm uid:gid nlink=…", with content, target and attributes.
func describe(t testing.TB, st store.Store, m image.Manifest) []string {
	t.Helper()
	layer := m.Layers[0]
	o, err := st.Open(t.Context(), layer.Metadata.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	im, err := erofs.Open(o, o.Size())
	if err != nil {
		t.Fatal(err)
	}
	if err := im.Verify(); err != nil {
		t.Fatal(err)
	}
	var lines []string
	err = Walk(t.Context(), st, layer, func(e Entry) error {
		line := fmt.Sprintf("%s %o %d:%d", e.Path, e.Mode, e.UID, e.GID)
		if e.Target != "" {
			line += " -> " + e.Target
		}
		if e.Nlink > 1 && !e.IsDir() {
			line += fmt.Sprintf(" n%d", e.Nlink)
		}
		if e.Size > 0 && e.Type() == erofs.TypeRegular {
			line += " " + content(t, st, im, layer, e.Info)
		}
		xs, err := im.Xattrs(e.Info)
		for _, x := range xs {
			line += fmt.Sprintf(" %s=%q", x.Name, x.Value)
		}
		lines = append(lines, line)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func content(t testing.TB, st store.Store, im *erofs.Image, l image.Layer, i erofs.Info) string {
	b := make([]byte, i.Size)
	err := im.Extents(i, func(e erofs.Extent) error {
		o, err := st.Open(t.Context(), l.Data[e.Device-1].Digest)
		if err != nil {
			return err
		}
		defer o.Close()
		_, err = o.ReadAt(b[e.Off:e.Off+e.Len], int64(e.Block)*erofs.BlockSize)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(b) > 100 {
		return fmt.Sprintf("%x", sha256.Sum256(b))
	}
	return string(b)
}

func mustImport(t testing.TB, st store.Store, b []byte, o Options) (image.Manifest, image.Blob) {
	t.Helper()
	if o.Kind == "" {
		o.Kind = image.KindBase
	}
	m, blob, err := Import(t.Context(), st, bytes.NewReader(b), o)
	if err != nil {
		t.Fatal(err)
	}
	return m, blob
}

func blobs(t testing.TB, st store.Store) []string {
	t.Helper()
	var all []string
	if err := st.List(t.Context(), func(b image.Blob) error { all = append(all, b.Digest); return nil }); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}
