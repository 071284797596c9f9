package pax

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

// entries are headers with their stored content.
type entry struct {
	h       Header
	content string
}

func write(t testing.TB, list []entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := NewWriter(&out)
	for _, e := range list {
		if err := w.Header(&e.h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func read(src io.Reader) (list []entry, err error) {
	r := NewReader(src)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list, r.Drain()
		}
		if err != nil {
			return list, err
		}
		var content []byte
		if h.Type == File {
			if content, err = io.ReadAll(r); err != nil {
				return list, err
			}
		}
		list = append(list, entry{*h, string(content)})
	}
}

func samples() []entry {
	long := strings.Repeat("long/", 60) + "name"
	many := Header{Name: "many", Type: File, Size: 1 << 30}
	for i := range 1000 {
		many.Data = append(many.Data, Segment{int64(i) << 20, 1})
	}
	return []entry{
		{Header{Name: "a", Type: File, Mode: 0o644, UID: 1, GID: 2, Size: 5, Sec: 1234567890, Nsec: 123456789}, "hello"},
		{Header{Name: "empty", Type: File, Mode: 0o4755}, ""},
		{Header{Name: "d/", Type: Dir, Mode: 0o1777, Sec: -1, Nsec: 500_000_000}, ""},
		{Header{Name: "old", Type: Dir, Mode: 0o755, Sec: -5}, ""},
		{Header{Name: "older", Type: Dir, Mode: 0o755, Sec: -5, Nsec: 1}, ""},
		{Header{Name: long, Type: File, Size: 600, Mode: 0o600}, strings.Repeat("x", 600)},
		{Header{Name: strings.Repeat("n", 100), Link: strings.Repeat("t", 100), Type: Symlink, Mode: 0o777}, ""},
		{Header{Name: "s", Link: long, Type: Symlink, Mode: 0o777}, ""},
		{Header{Name: "h", Link: "a", Type: Link, Mode: 0o644}, ""},
		{Header{Name: "new\nline \xff\xfe", Type: FIFO, Mode: 0o600}, ""},
		{Header{Name: "owned", Type: File, UID: 4_000_000_000, GID: 3_000_000, Mode: 0o644}, ""},
		{Header{Name: "attributes", Type: File, Xattrs: []Xattr{{"user.a", "b\n\x00=c"}, {"user.empty", ""}}}, ""},
		{Header{Name: "holes", Type: File, Size: 1 << 40, Data: []Segment{{4096, 3}, {1 << 39, 5}}}, "abcdefgh"},
		{Header{Name: "hole", Type: File, Size: 1 << 20, Data: []Segment{}}, ""},
		{many, strings.Repeat("y", 1000)},
	}
}

func TestRoundTrip(t *testing.T) {
	want := samples()
	got, err := read(bytes.NewReader(write(t, want)))
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range want {
		if i >= len(got) {
			t.Fatalf("%d entries", len(got))
		}
		if !reflect.DeepEqual(got[i], w) {
			t.Errorf("wrote %+v\nread  %+v", w, got[i])
		}
	}
}

// What is written is what Go's own reader reads.
func TestStandardLibraryReadsIt(t *testing.T) {
	r := tar.NewReader(bytes.NewReader(write(t, samples())))
	for _, e := range samples() {
		if strings.HasPrefix(e.h.Name, "old") {
			// It reads fractions of times before 1970 in its own way.
			if _, err := r.Next(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		h, err := r.Next()
		if err != nil {
			t.Fatalf("%s: %v", e.h.Name, err)
		}
		if h.Name != e.h.Name || h.Linkname != e.h.Link || h.Mode != int64(e.h.Mode) || h.Uid != int(e.h.UID) || h.Gid != int(e.h.GID) || h.Size != e.h.Size {
			t.Errorf("wrote %+v, read %+v", e.h, h)
		}
		if !h.ModTime.Equal(time.Unix(e.h.Sec, int64(e.h.Nsec))) {
			t.Errorf("%s: time %v", e.h.Name, h.ModTime)
		}
		for _, x := range e.h.Xattrs {
			if v, ok := h.PAXRecords["SCHILY.xattr."+x.Name]; (!ok || v != x.Value) && !strings.Contains(x.Value, "\x00") {
				t.Errorf("attribute %q is %q", x.Name, v)
			}
		}
		if e.h.Type == File && e.h.Data == nil {
			if b, err := io.ReadAll(r); err != nil || string(b) != e.content {
				t.Errorf("%s: %d bytes, %v", e.h.Name, len(b), err)
			}
		}
	}
	if _, err := r.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

// sparse makes a file of 1 MiB with data here and there.
func sparse(t *testing.T, name string, pieces int) []byte {
	t.Helper()
	want := make([]byte, 4<<20)
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(len(want))); err != nil {
		t.Fatal(err)
	}
	for i := range pieces {
		at := i * len(want) / pieces
		copy(want[at:], fmt.Sprintf("piece %d", i))
		if _, err := f.WriteAt(want[at:at+4096], int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	return want
}

// Archives of GNU tar, in each of its formats.
func TestGNUTarIsRead(t *testing.T) {
	dir := t.TempDir()
	long := strings.Repeat("directory/", 15)
	if err := os.MkdirAll(filepath.Join(dir, long), 0o755); err != nil {
		t.Fatal(err)
	}
	few, many := sparse(t, filepath.Join(dir, "few"), 3), sparse(t, filepath.Join(dir, long, "many"), 100)
	if err := os.WriteFile(filepath.Join(dir, "plain"), []byte("content"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("plain", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(dir, "plain"), filepath.Join(dir, "plain2")); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"--format=v7", "--format=oldgnu -S", "--format=gnu -S", "--format=ustar", "--format=posix -S --sparse-version=0.0",
		"--format=posix -S --sparse-version=0.1", "--format=posix -S --sparse-version=1.0", "--format=posix"} {
		args := append(strings.Fields(format), "--sort=name", "-c", "-C", dir, "few", "plain", "plain2")
		if !strings.Contains(format, "v7") {
			args = append(args, "link", "directory")
		}
		out, err := exec.Command("tar", args...).Output()
		if err != nil {
			t.Fatalf("tar %v: %v", args, err)
		}
		list, err := read(bytes.NewReader(out))
		if err != nil {
			t.Errorf("%s: %v", format, err)
			continue
		}
		seen := map[string]bool{}
		for _, e := range list {
			seen[e.h.Name] = true
			switch e.h.Name {
			case "few":
				checkContent(t, format, e, few)
			case long + "many":
				checkContent(t, format, e, many)
			case "plain":
				if e.content != "content" || e.h.Mode != 0o640 {
					t.Errorf("%s: %+v", format, e)
				}
			case "plain2":
				if e.h.Type != Link || e.h.Link != "plain" {
					t.Errorf("%s: %+v", format, e.h)
				}
			case "link":
				if e.h.Type != Symlink || e.h.Link != "plain" {
					t.Errorf("%s: %+v", format, e.h)
				}
			}
			if strings.Contains(format, "-S") && strings.HasSuffix(e.h.Name, "many") && len(e.h.Data) < 90 {
				t.Errorf("%s: %d pieces", format, len(e.h.Data))
			}
		}
		if !seen["few"] || !seen["plain"] || !seen["plain2"] || (!strings.Contains(format, "v7") && !seen[long+"many"]) {
			t.Errorf("%s: %v", format, seen)
		}
	}
}

func checkContent(t *testing.T, format string, e entry, want []byte) {
	t.Helper()
	if e.h.Size != int64(len(want)) {
		t.Errorf("%s: %s has %d bytes", format, e.h.Name, e.h.Size)
		return
	}
	got := make([]byte, len(want))
	if e.h.Data == nil {
		copy(got, e.content)
	}
	rest := e.content
	for _, s := range e.h.Data {
		copy(got[s.Off:s.Off+s.Len], rest)
		rest = rest[s.Len:]
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: the content of %s differs", format, e.h.Name)
	}
}

func TestTruncatedAtEveryBlock(t *testing.T) {
	whole := write(t, samples())
	for n := 0; n < len(whole)-2*blockLen; n += 100 {
		if _, err := read(bytes.NewReader(whole[:n])); !errors.Is(err, ErrTruncated) && !errors.Is(err, ErrFormat) {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
}

func TestRefused(t *testing.T) {
	header := func(change func(*fields)) []byte {
		f := fields{name: "f", kind: '0', mode: 0o644}
		change(&f)
		return append(f.append(nil), make([]byte, 1024)...)
	}
	extended := func(records string) []byte {
		x := fields{name: "x", kind: 'x', size: int64(len(records))}
		b := append(x.append(nil), records...)
		b = append(b, make([]byte, padding(int64(len(records))))...)
		return append(b, header(func(f *fields) { f.size = 512 })...)
	}
	sparse := func(size, list string) []byte {
		return extended(string(appendRecord(appendRecord(nil, "GNU.sparse.size", size), "GNU.sparse.map", list)))
	}
	for name, b := range map[string][]byte{
		"text":                   []byte(strings.Repeat("no archive at all\n", 100)),
		"unknown type":           header(func(f *fields) { f.kind = 'M' }),
		"exabytes of holes":      sparse("9000000000000000000", "0,512"),
		"a map out of order":     sparse("100000", "4096,256,0,256"),
		"a map beyond the end":   sparse("100", "0,512"),
		"a map of too little":    sparse("100000", "0,256"),
		"a map that wraps":       sparse("100000", "9223372036854775807,512"),
		"negative size":          extended("12 size=-1\n"),
		"larger than any file":   extended("28 size=9000000000000000000\n"),
		"record without length":  extended("x path=y\n"),
		"record too long":        extended("99 path=y\n"),
		"record without newline": extended("9 path=yy"),
		"name with NUL":          extended("10 path=\x00\n"),
		"impossible owner":       extended("18 uid=4294967295\n"),
		"header without entry":   append(extended("")[:512], make([]byte, 1024)...),
		"long extended headers":  fields{name: "x", kind: 'x', size: MaxExtended + 1}.block(),
	} {
		if list, err := read(bytes.NewReader(b)); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v, %v", name, list, err)
		}
	}
}

func (f fields) block() []byte { return f.append(nil) }

// The reader never fails in another way than by an error, holds what it promises, and its headers can be written again.
func FuzzRead(f *testing.F) {
	f.Add(write(f, samples()[:3])) // small ones: large ones take long to be made smaller
	f.Add(write(f, samples()[11:14]))
	for _, format := range []string{"gnu", "posix"} {
		if out, err := exec.Command("tar", "--format="+format, "-S", "-c", "doc.go").Output(); err == nil {
			f.Add(out)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b))
		w := NewWriter(io.Discard)
		for {
			h, err := r.Next()
			if err != nil {
				return
			}
			if len(h.Data) > MaxSegments || h.Size < 0 || h.Size > MaxSize || h.Stored() > MaxSize {
				t.Fatalf("%+v", h)
			}
			if err := w.Header(h); err != nil {
				continue
			}
			n, err := io.Copy(w, r)
			if h.Type == File && err == nil && n != h.Stored() {
				t.Fatalf("%d of %d bytes without an error", n, h.Stored())
			}
			if err != nil {
				return
			}
		}
	})
}

func BenchmarkHeaders(b *testing.B) {
	h := &Header{Name: "some/directory/file", Type: File, Mode: 0o644, Sec: time.Now().Unix(), Nsec: rand.Uint32N(1e9)}
	w := NewWriter(io.Discard)
	b.ReportAllocs()
	for b.Loop() {
		if err := w.Header(h); err != nil {
			b.Fatal(err)
		}
	}
}

func TestRecordsCountTheirOwnDigits(t *testing.T) {
	for n := range 2000 {
		b := appendRecord(nil, "k", strings.Repeat("v", n))
		var length int
		if _, err := fmt.Sscanf(string(b), "%d ", &length); err != nil || length != len(b) {
			t.Fatalf("record of %d bytes says %d, %v", len(b), length, err)
		}
	}
}

func TestDeviceNumbers(t *testing.T) {
	b := write(t, []entry{{h: Header{Name: "d", Type: Char, Major: 4095, Minor: 1<<20 - 1}}, {h: Header{Name: "b", Type: Block, Major: 8}}})
	r := tar.NewReader(bytes.NewReader(b))
	for _, want := range [][2]int64{{4095, 1<<20 - 1}, {8, 0}} {
		if h, err := r.Next(); err != nil || [2]int64{h.Devmajor, h.Devminor} != want {
			t.Errorf("%+v, %v", h, err)
		}
	}
}

// TestRunsOfVeryManyHoles is of a file that no reader would take with all of its holes.
func TestRunsOfVeryManyHoles(t *testing.T) {
	const runs, each, length = 100_000, 64 << 10, 4 << 10
	const size = runs * each
	seek := func(off int64, whence int) (int64, error) { // data at the start of each
		at, in := off-off%each, off%each
		switch {
		case whence == seekData && in < length, whence == seekHole && in >= length:
			return off, nil
		case whence == seekHole:
			return at + length, nil
		}
		if at += each; at >= size {
			return 0, syscall.ENXIO
		}
		return at, nil
	}
	list := Runs(size, seek)
	end := int64(0)
	for _, s := range list {
		if s.Off%each != 0 || s.Off < end {
			t.Fatalf("a run at %d after %d", s.Off, end)
		}
		end = s.Off + s.Len
	}
	if len(list) == 0 || len(list) > MaxSegments/2 || end != size-each+length {
		t.Errorf("%d runs up to %d", len(list), end)
	}
}
