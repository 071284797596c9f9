package convert

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/erofs"
	"dsec/internal/image/store/storetest"
	"dsec/sandbox"
)

func TestImport(t *testing.T) {
	owner := func(h *tar.Header) { h.Uid, h.Gid, h.Mode = 70000, 1<<31, 0o6755 }
	st := open(t)
	m, blob := mustImport(t, st, tarOf(t,
		item{name: "./"},
		item{name: "bin/"},
		item{name: "/bin/su", body: "setuid", edit: owner},
		item{name: "bin/link", typ: tar.TypeLink, link: "./bin/su"},
		item{name: "sh", typ: tar.TypeSymlink, link: "../../bin/dash"},
		item{name: "a/./b//c/", edit: func(h *tar.Header) { h.Mode = 0o1777 }},
		item{name: "a/b/c/" + strings.Repeat("n", 255), body: "long"},
		item{name: "run/fifo", typ: tar.TypeFifo},
		item{name: "dev/null", typ: tar.TypeChar, edit: func(h *tar.Header) { h.Devmajor, h.Devminor = 1, 3 }},
		item{name: "dev/sda", typ: tar.TypeBlock, edit: func(h *tar.Header) { h.Devmajor = 8 }},
		item{name: "gone", typ: tar.TypeChar},
		item{name: "empty"},
		item{name: ".wh.plain", body: "a file"},
	), Options{Config: image.Config{User: "app", Env: map[string]string{"A": "b"}}})
	want := []string{
		"/ 40755 0:0",
		"/.wh.plain 100644 0:0 a file",
		"/a 40755 0:0", "/a/b 40755 0:0", "/a/b/c 41777 0:0",
		"/a/b/c/" + strings.Repeat("n", 255) + " 100644 0:0 long",
		"/bin 40755 0:0",
		"/bin/link 106755 70000:2147483648 n2 setuid",
		"/bin/su 106755 70000:2147483648 n2 setuid",
		"/dev 40755 0:0",
		"/empty 100644 0:0",
		"/gone 20644 0:0",
		"/run 40755 0:0", "/run/fifo 10644 0:0",
		"/sh 120644 0:0 -> ../../bin/dash",
	}
	if got := describe(t, st, m); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if m.Entries != int64(len(want)-1) || m.FileBytes != 6+4+6 {
		t.Errorf("%d entries, %d bytes", m.Entries, m.FileBytes)
	}
	if want := []string{"dev/null: character device 1:3", "dev/sda: block device 8:0"}; !slices.Equal(m.Dropped, want) {
		t.Errorf("dropped %q", m.Dropped)
	}
	again, err := LoadManifest(t.Context(), st, blob.Digest)
	if err != nil || fmt.Sprint(again) != fmt.Sprint(m) {
		t.Errorf("loaded %v, %v", again, err)
	}
	for _, s := range Sources(st, m) {
		for _, f := range append(s.Data, s.Metadata) {
			if fi, err := os.Stat(f.Path); err != nil || fi.Size() != f.Size || fi.Mode().Perm() != 0o444 {
				t.Errorf("source %v: %v %v", f, fi, err)
			}
		}
	}
}

func TestLaterEntriesReplace(t *testing.T) {
	st := open(t)
	m, _ := mustImport(t, st, tarOf(t,
		item{name: "f", body: "old"}, item{name: "l", typ: tar.TypeLink, link: "f"}, item{name: "f", body: "new"},
		item{name: "d/x"}, item{name: "d/", edit: func(h *tar.Header) { h.Mode = 0o700 }},
		item{name: "e/x"}, item{name: "e", body: "no directory any more"},
		item{name: "s", typ: tar.TypeSymlink, link: "d"}, item{name: "s/"}, item{name: "s/y"},
		item{name: "h"}, item{name: "h", typ: tar.TypeLink, link: "h"},
	), Options{})
	want := []string{"/ 40755 0:0", "/d 40700 0:0", "/d/x 100644 0:0", "/e 100644 0:0 no directory any more", "/f 100644 0:0 new",
		"/h 100644 0:0", "/l 100644 0:0 old", "/s 40755 0:0", "/s/y 100644 0:0"}
	if got := describe(t, st, m); !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}

func TestWhiteouts(t *testing.T) {
	st := open(t)
	m, _ := mustImport(t, st, tarOf(t,
		item{name: ".wh.gone"}, item{name: "d/"}, item{name: "d/.wh..wh..opq"}, item{name: "d/", edit: func(h *tar.Header) { h.Mode = 0o711 }},
		item{name: ".wh.back"}, item{name: "back/"}, item{name: "kept"}, item{name: ".wh.kept"},
		item{name: ".wh.implied"}, item{name: "implied/x"}, item{name: "late/"}, item{name: ".wh.late"}, item{name: ".wh..wh.plnk"},
	), Options{Whiteouts: true})
	opaque := ` trusted.overlay.opaque="y"`
	want := []string{"/ 40755 0:0", "/back 40755 0:0" + opaque, "/d 40711 0:0" + opaque, "/gone 20000 0:0",
		"/implied 40755 0:0" + opaque, "/implied/x 100644 0:0", "/kept 100644 0:0", "/late 40755 0:0" + opaque}
	if got := describe(t, st, m); !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if len(m.Dropped) != 1 {
		t.Errorf("dropped %q", m.Dropped)
	}
}

func TestAttributes(t *testing.T) {
	acl := "\x02\x00\x00\x00" + strings.Repeat("\x01\x00\x07\x00\xff\xff\xff\xff", 3)
	st := open(t)
	m, _ := mustImport(t, st, tarOf(t,
		item{name: "d/", edit: xattr("trusted.overlay.opaque", "y", "trusted.overlay.redirect", "/etc", "trusted.overlay.origin", "x",
			"system.posix_acl_default", acl, "trusted.overlay.metacopy", "", "trusted.overlay.impure", "y", "user.x", "\x00\xff")},
		item{name: "f", edit: xattr("trusted.overlay.opaque", "y", "security.capability", "caps", "security.ima", "i", "security.selinux", "s",
			"system.posix_acl_access", "bogus", "user.", "no name", "system.x", "1", "trusted.x", "1", "user."+strings.Repeat("n", 255), "1")},
		item{name: "l", typ: tar.TypeSymlink, link: "f", edit: xattr("user.x", "1")},
	), Options{})
	want := []string{"/ 40755 0:0",
		fmt.Sprintf(`/d 40755 0:0 system.posix_acl_default=%q trusted.overlay.opaque="y" user.x="\x00\xff"`, acl),
		`/f 100644 0:0 security.capability="caps"`, "/l 120644 0:0 -> f"}
	if got := describe(t, st, m); !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if len(m.Dropped) != 2+7+1 {
		t.Errorf("dropped %d: %q", len(m.Dropped), m.Dropped)
	}
}

func TestRefused(t *testing.T) {
	whole := tarOf(t, item{name: "a", body: strings.Repeat("content", 1000)}, item{name: "b"})
	var huge bytes.Buffer
	hw := tar.NewWriter(&huge)
	if err := hw.WriteHeader(&tar.Header{Name: "huge", Size: 1 << 60, Format: tar.FormatGNU}); err != nil {
		t.Fatal(err)
	}
	flipped := compressed(t, whole)
	flipped[len(flipped)-6] ^= 1
	negative := slices.Clone(whole)
	copy(negative[108:], "\xff\xff\xff\xff\xff\xff\xff\xfe") // uid -2 in base 256; the checksum is wrong as well
	cases := map[string]struct {
		in     []byte
		o      Options
		reason string
	}{
		"dots":                  {tarOf(t, item{name: "a/../../b"}), Options{}, "bad_entry"},
		"dots in link":          {tarOf(t, item{name: "a"}, item{name: "b", typ: tar.TypeLink, link: "../a"}), Options{}, "bad_entry"},
		"below a file":          {tarOf(t, item{name: "a"}, item{name: "a/b"}), Options{}, "bad_entry"},
		"below a link":          {tarOf(t, item{name: "a", typ: tar.TypeSymlink, link: "/etc"}, item{name: "a/b"}), Options{}, "bad_entry"},
		"below a whiteout":      {tarOf(t, item{name: "a", typ: tar.TypeChar}, item{name: "a/b"}), Options{}, "bad_entry"},
		"link to nothing":       {tarOf(t, item{name: "b", typ: tar.TypeLink, link: "a"}), Options{}, "bad_entry"},
		"link to later":         {tarOf(t, item{name: "b", typ: tar.TypeLink, link: "a"}, item{name: "a"}), Options{}, "bad_entry"},
		"link to a directory":   {tarOf(t, item{name: "a/"}, item{name: "b", typ: tar.TypeLink, link: "a"}), Options{}, "bad_entry"},
		"link to the root":      {tarOf(t, item{name: "b", typ: tar.TypeLink, link: "/"}), Options{}, "bad_entry"},
		"link through a link":   {tarOf(t, item{name: "a/x"}, item{name: "l", typ: tar.TypeSymlink, link: "a"}, item{name: "b", typ: tar.TypeLink, link: "l/x"}), Options{}, "bad_entry"},
		"root is a file":        {tarOf(t, item{name: ".", typ: tar.TypeFifo}), Options{}, "bad_entry"},
		"long name":             {tarOf(t, item{name: strings.Repeat("n", 256)}), Options{}, "bad_entry"},
		"long path":             {tarOf(t, item{name: strings.Repeat("n/", erofs.MaxPath/2) + "x"}), Options{}, "bad_entry"},
		"long target":           {tarOf(t, item{name: "l", typ: tar.TypeSymlink, link: strings.Repeat("t", 4096)}), Options{}, "bad_entry"},
		"uid -1":                {tarOf(t, item{name: "a", edit: func(h *tar.Header) { h.Uid = 1<<32 - 1 }}), Options{}, "bad_entry"},
		"whiteout of nothing":   {tarOf(t, item{name: ".wh.", body: ""}), Options{Whiteouts: true}, "bad_entry"},
		"whiteout of dots":      {tarOf(t, item{name: "d/.wh..."}, item{name: ".wh..."}, item{name: ".wh.."}), Options{Whiteouts: true}, "bad_entry"},
		"too many entries":      {whole, Options{MaxEntries: 1}, "too_many_entries"},
		"too many parents":      {tarOf(t, item{name: "a/b/c/d"}), Options{MaxEntries: 3}, "too_many_entries"},
		"too many bytes":        {whole, Options{MaxBytes: 6999}, "too_many_bytes"},
		"a size beyond all":     {huge.Bytes(), Options{}, "too_many_bytes"},
		"too much memory":       {whole, Options{MaxMemory: 300}, "archive_too_large"},
		"bomb of trailing":      {compressed(t, append(slices.Clone(whole), make([]byte, 17<<20)...)), Options{}, "archive_too_large"},
		"large attributes":      {tarOf(t, item{name: "a", edit: xattr("user.a", strings.Repeat("v", 65535), "user.b", strings.Repeat("v", 65535), "user.c", strings.Repeat("v", 65535), "user.d", strings.Repeat("v", 65535))}), Options{}, "bad_entry"},
		"nothing":               {nil, Options{}, "bad_archive"},
		"text":                  {[]byte(strings.Repeat("no tar", 1000)), Options{}, "bad_archive"},
		"short text":            {[]byte("no tar"), Options{}, "bad_archive"},
		"wrong checksum":        {negative, Options{}, "bad_archive"},
		"gzip of text":          {compressed(t, []byte(strings.Repeat("no tar", 1000))), Options{}, "bad_archive"},
		"gzip magic only":       {[]byte{0x1f, 0x8b}, Options{}, "bad_archive"},
		"gzip checksum":         {flipped, Options{}, "bad_archive"},
		"no such kind":          {whole, Options{Kind: "disk"}, "invalid_kind"},
		"relative working dir.": {whole, Options{Config: image.Config{Workdir: "x"}}, "invalid_command"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			st := open(t)
			if c.o.Kind == "" {
				c.o.Kind = image.KindBase
			}
			_, _, err := Import(t.Context(), st, bytes.NewReader(c.in), c.o)
			if sandbox.ClassOf(err) != sandbox.InvalidArgument || sandbox.ReasonOf(err) != c.reason {
				t.Errorf("got %v (%v %s), want %s", err, sandbox.ClassOf(err), sandbox.ReasonOf(err), c.reason)
			}
			if left := blobs(t, st); len(left) > 0 {
				t.Errorf("%v is left", left)
			}
		})
	}
}

// TestCutAnywhere cuts an archive at every offset around its structure: nothing of it may appear.
func TestCutAnywhere(t *testing.T) {
	plain := tarOf(t, item{name: "a", body: strings.Repeat("\x00", 1024)}, item{name: "d/"}, item{name: "z", edit: xattr("user.x", "y")})
	for name, whole := range map[string][]byte{"plain": plain, "gzip": compressed(t, plain)} {
		st := storetest.NewMemory()
		for cut := 0; cut < len(whole); cut += 1 + cut%2*12 { // 0, 1, 14, 15, 28…: all residues of a block
			_, _, err := Import(t.Context(), st, bytes.NewReader(whole[:cut]), Options{Kind: image.KindBase})
			if name == "plain" && cut == len(whole)-tarBlock { // one block of zeros is an end, too
				if err != nil {
					t.Fatal(err)
				}
				continue
			}
			if sandbox.ReasonOf(err) != "bad_archive" {
				t.Fatalf("%s cut at %d of %d: %v", name, cut, len(whole), err)
			}
		}
	}
}

func TestSourceFails(t *testing.T) {
	whole := tarOf(t, item{name: "a", body: strings.Repeat("x", 100000)})
	st := open(t)
	broken := io.MultiReader(bytes.NewReader(whole[:50000]), iotest.ErrReader(errors.New("connection reset")))
	_, _, err := Import(t.Context(), st, broken, Options{Kind: image.KindBase})
	if sandbox.ReasonOf(err) != "upload_cut" {
		t.Errorf("got %v", err)
	}
	typed := iotest.ErrReader(sandbox.Errorf(sandbox.ResourceExhausted, "body_too_large", "too large"))
	if _, _, err = Import(t.Context(), st, typed, Options{Kind: image.KindBase}); sandbox.ReasonOf(err) != "body_too_large" {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := io.MultiReader(bytes.NewReader(whole[:50000]), readerFunc(func(p []byte) (int, error) { cancel(); return copy(p, whole[50000:60000]), nil }), bytes.NewReader(whole[60000:]))
	if _, _, err = Import(ctx, st, r, Options{Kind: image.KindBase}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if left := blobs(t, st); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestSameInputSameBytes(t *testing.T) {
	items := []item{{name: "d/", edit: xattr("user.b", "2", "user.a", "1", "user.c", "3")}}
	for i := range 100 {
		items = append(items, item{name: fmt.Sprintf("d/%d", i*7919%100), body: strings.Repeat("x", i*100)})
	}
	b := tarOf(t, items...)
	var digests []string
	for _, in := range [][]byte{b, b, compressed(t, b)} {
		m, blob := mustImport(t, open(t), in, Options{})
		digests = append(digests, blob.Digest+m.Layers[0].Metadata.Digest+m.Layers[0].Data[0].Digest)
	}
	if digests[0] != digests[1] || digests[0] != digests[2] {
		t.Errorf("digests differ: %v", digests)
	}
	// Another order of the same entries changes where contents are, but not what is found.
	slices.Reverse(items[1:])
	st := open(t)
	m1, _ := mustImport(t, st, b, Options{})
	m2, _ := mustImport(t, st, tarOf(t, items...), Options{})
	if !slices.Equal(describe(t, st, m1), describe(t, st, m2)) {
		t.Error("trees differ")
	}
}

func TestZerosBecomeHoles(t *testing.T) {
	st := open(t)
	body := strings.Repeat("\x00", 1<<20) + "data" + strings.Repeat("\x00", 1<<20)
	m, _ := mustImport(t, st, tarOf(t, item{name: "sparse", body: body}), Options{})
	if size := m.Layers[0].Data[0].Size; size != defaultHole {
		t.Errorf("blob of %d bytes", size)
	}
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(body)))
	if got := describe(t, st, m); !strings.Contains(got[1], sum) {
		t.Errorf("got %v", got)
	}
	m, _ = mustImport(t, st, tarOf(t, item{name: "zeros", body: body[:1<<20]}), Options{})
	if len(m.Layers[0].Data) != 0 {
		t.Errorf("a file of zeros has blobs %v", m.Layers[0].Data)
	}
}

const defaultHole = 64 << 10 // erofs.Data looks for holes of this size in ordinary files

func TestProgress(t *testing.T) {
	var calls []int64
	mustImport(t, open(t), tarOf(t, item{name: "a", body: strings.Repeat("x", 20<<20)}, item{name: "b", body: "x"}),
		Options{Progress: func(_, bytes int64) { calls = append(calls, bytes) }})
	if len(calls) < 2 || calls[len(calls)-1] != 20<<20+1 || !slices.IsSorted(calls) {
		t.Errorf("calls %v", calls)
	}
}

func TestDamagedLayerIsSeen(t *testing.T) {
	st := open(t)
	m, blob := mustImport(t, st, tarOf(t, item{name: "a", body: "x"}), Options{})
	for _, digest := range []string{m.Layers[0].Metadata.Digest, blob.Digest} {
		path := st.Path(digest)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	err := Walk(t.Context(), st, m.Layers[0], func(Entry) error { return nil })
	if sandbox.ReasonOf(err) != "blob_corrupt" {
		t.Errorf("walk: %v", err)
	}
	if _, err := LoadManifest(t.Context(), st, blob.Digest); sandbox.ReasonOf(err) != "blob_corrupt" {
		t.Errorf("load: %v", err)
	}
}

func TestConcurrentImportsOfOneArchive(t *testing.T) {
	st := open(t)
	b := tarOf(t, item{name: "a", body: strings.Repeat("x", 300_000)}, item{name: "d/"})
	digests := make([]string, 6)
	var wg sync.WaitGroup
	for i := range digests {
		wg.Go(func() {
			_, blob, err := Import(t.Context(), st, bytes.NewReader(b), Options{Kind: image.KindToolkit})
			if err != nil {
				t.Error(err)
			}
			digests[i] = blob.Digest
		})
	}
	wg.Wait()
	if slices.Sort(digests); digests[0] != digests[len(digests)-1] {
		t.Errorf("digests differ: %v", digests)
	}
	if all := blobs(t, st); len(all) != 3 {
		t.Errorf("%d blobs, want data, metadata and manifest", len(all))
	}
}

// TestMemoryPerEntry reads a long archive up to its end marker and looks at what is held.
func TestMemoryPerEntry(t *testing.T) {
	const entries = 100_000
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range entries {
		h := &tar.Header{Name: fmt.Sprintf("usr/share/package-%d/some/file-with-a-name-%d.py", i/100, i), Typeflag: tar.TypeReg, Size: 1, Mode: 0o644, ModTime: time.Unix(1e9, 0)}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		w.Write([]byte{'x'})
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	im := &importer{o: Options{}.withDefaults(), in: newInput(t.Context(), &b), root: erofs.NewDir(0o755), data: erofs.NewData(io.Discard, 1)}
	runtime.GC()
	runtime.ReadMemStats(&before)
	if err := im.readArchive(); err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	held := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	if per := held / entries; per > 500 {
		t.Errorf("%d bytes of memory per entry", per)
	} else {
		t.Logf("%d bytes of memory per entry, estimated %d", per, im.memory/entries)
	}
	if held > im.memory {
		t.Errorf("%d bytes are held, the estimate says %d", held, im.memory)
	}
	runtime.KeepAlive(im)
}
