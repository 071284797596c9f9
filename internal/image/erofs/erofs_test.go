package erofs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
)

func TestReaderFindsWhatWasWritten(t *testing.T) {
	for seed := range uint64(30) {
		s := randomSample(t, seed, 20<<(seed%5), 1+int(seed)%MaxDevices)
		s.check(t, s.metadata(t))
	}
}

func TestEqualTreesGiveEqualBytes(t *testing.T) {
	for seed := range uint64(5) {
		a, b := randomSample(t, seed, 200, 2).metadata(t), randomSample(t, seed, 200, 2).metadata(t)
		if !bytes.Equal(a, b) {
			t.Fatalf("seed %d: bytes differ", seed)
		}
	}
	// The order in which names were added does not matter.
	build := func(names ...string) []byte {
		s := newSample(0)
		for _, n := range names {
			s.add("/", n, &Inode{Mode: TypeFIFO, Xattrs: []Xattr{{"user.b", n}, {"user.a", n}}})
		}
		return s.metadata(t)
	}
	if !bytes.Equal(build("a", "b", "c"), build("c", "a", "b")) {
		t.Error("the order of names shows")
	}
	if bytes.Equal(build("a")[superOffset+48:][:16], build("b")[superOffset+48:][:16]) {
		t.Error("different trees have the same UUID")
	}
}

func TestNamesAreInTheKernelsOrder(t *testing.T) {
	s := newSample(0)
	for _, n := range []string{"!", "-", "...", "..a", ".a", "/"[:0] + "0", "Z", "a", "\x01", "\xff", "é"} {
		s.add("/", n, &Inode{Mode: TypeFIFO})
	}
	s.check(t, s.metadata(t))
}

func TestWriteRefuses(t *testing.T) {
	file := func(n Inode) func(*Inode) { return func(root *Inode) { root.Set("f", &n) } }
	loop := func(root *Inode) {
		d := NewDir(0)
		d.Set("d", root)
		root.Set("d", d)
	}
	twice := func(root *Inode) {
		d := NewDir(0)
		root.Set("a", d)
		root.Set("b", d)
	}
	name := func(n string) func(*Inode) { return func(root *Inode) { root.Set(n, &Inode{Mode: TypeFIFO}) } }
	reg := func(size int64, xs ...Extent) func(*Inode) {
		return file(Inode{Mode: TypeRegular, Size: size, Extents: xs})
	}
	for what, change := range map[string]func(*Inode){
		"loop": loop, "two names": twice, "dot": name("."), "dots": name(".."), "slash": name("a/b"), "NUL": name("a\x00"),
		"empty name": name(""), "long name": name(strings.Repeat("n", 256)),
		"no type":        file(Inode{Mode: 0o644}),
		"foreign dir":    file(Inode{Mode: TypeDir}),
		"empty target":   file(Inode{Mode: TypeSymlink}),
		"long target":    file(Inode{Mode: TypeSymlink, Target: strings.Repeat("t", MaxTarget+1)}),
		"NUL in target":  file(Inode{Mode: TypeSymlink, Target: "a\x00"}),
		"nanoseconds":    file(Inode{Mode: TypeFIFO, Nsec: 1e9}),
		"xattr prefix":   file(Inode{Mode: TypeFIFO, Xattrs: []Xattr{{"system.nfs4_acl", ""}}}),
		"xattr no name":  file(Inode{Mode: TypeFIFO, Xattrs: []Xattr{{"user.", ""}}}),
		"xattr value":    file(Inode{Mode: TypeFIFO, Xattrs: []Xattr{{"user.a", strings.Repeat("v", 1<<16)}}}),
		"xattr twice":    file(Inode{Mode: TypeFIFO, Xattrs: []Xattr{{"user.a", ""}, {"user.a", ""}}}),
		"xattrs too big": file(Inode{Mode: TypeFIFO, Xattrs: []Xattr{{"user.a", strings.Repeat("v", 65535)}, {"user.b", strings.Repeat("v", 65535)}, {"user.c", strings.Repeat("v", 65535)}, {"user.d", strings.Repeat("v", 65535)}}}),
		"negative size":  reg(-1),
		"device 0":       reg(1, Extent{0, 1, 0, 0}),
		"device 3":       reg(1, Extent{0, 1, 0, 3}),
		"unaligned":      reg(9000, Extent{1, 4096, 0, 1}),
		"overlap":        reg(9000, Extent{0, 8192, 0, 1}, Extent{4096, 4096, 9, 1}),
		"beyond the end": reg(9000, Extent{8192, 4096, 0, 1}),
		"short extent":   reg(9000, Extent{0, 100, 0, 1}),
		"beyond 16 TiB":  reg(9000, Extent{0, 9000, nullBlock - 2, 1}),
		"misread":        reg(8192, Extent{0, 4096, 0, 1}, Extent{4096, 4096, 1, 2}),
		"fragments":      reg(1<<40, Extent{4096, 4096, 0, 1}),
	} {
		root := NewDir(0o755)
		change(root)
		devices := []Device{{strings.Repeat("a", 64), 1}, {strings.Repeat("b", 64), 1}}
		if err := Write(io.Discard, root, devices); err == nil {
			t.Errorf("%s: written", what)
		}
	}
	root := NewDir(0)
	if err := Write(io.Discard, root, make([]Device, 17)); err == nil {
		t.Error("17 devices: written")
	}
	if err := errors.Join(Write(io.Discard, root, nil)); err != nil {
		t.Fatal(err)
	}
	if err := Write(io.Discard, root, nil); err == nil {
		t.Error("a tree is written twice")
	}
}

func TestChunksAreAsLargeAsExtentsAllow(t *testing.T) {
	const m = 1 << 20
	for _, c := range []struct {
		size int64
		xs   []Extent
		bits uint
	}{
		{1, []Extent{{0, 1, 7, 1}}, 0},
		{4097, []Extent{{0, 4097, 7, 1}}, 1},
		{100 * m, []Extent{{0, 100 * m, 7, 1}}, 15},
		{100 * m, []Extent{{0, m, 7, 1}, {m, 99 * m, 7 + 256, 1}}, 15}, // contiguous after all
		{100 * m, []Extent{{0, m, 7, 1}, {m, 99 * m, 9 + 256, 1}}, 8},
		{100 * m, []Extent{{0, m, 7, 1}, {m, 99 * m, 8 + 256, 2}}, 8},
		{100 * m, []Extent{{64 * m, 36 * m, 0, 1}}, 14},
		{100 * m, nil, 15},
		{1 << 62, nil, 31},
		{100 * m, []Extent{{0, 4096, 0, 1}}, 0},
	} {
		n := &Inode{Mode: TypeRegular, Size: c.size, Extents: c.xs}
		if err := checkExtents(n, 2); err != nil {
			t.Fatal(err)
		}
		if got := chunkBits(n); got != c.bits {
			t.Errorf("%d bytes in %v: shift %d, want %d", c.size, c.xs, got, c.bits)
		}
	}
}

func TestDataKeepsHolesAndBytes(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		content, sparse := randomContent(r), r.IntN(2) == 0
		s := newSample(1)
		s.file(t, "/", "f", content, sparse, nil)
		s.check(t, s.metadata(t))
		if s.blobs[0].Len()%BlockSize != 0 || s.blobs[0].Len() != int(s.data[0].Blocks())*BlockSize {
			t.Fatalf("blob of %d bytes, %d blocks", s.blobs[0].Len(), s.data[0].Blocks())
		}
	}
	for _, c := range []struct {
		size   int64
		sparse bool
		grain  int64
	}{{1, true, 4096}, {1 << 28, true, 4096}, {1<<28 + 1, true, 8192}, {1 << 40, true, 16 << 20}, {1 << 40, false, 16 << 20}, {1, false, 64 << 10}, {1 << 62, false, 1 << 46}} {
		if got := grainFor(c.size, c.sparse); got != c.grain {
			t.Errorf("grain of %d bytes: %d, want %d", c.size, got, c.grain)
		}
	}
}

func TestDataErrors(t *testing.T) {
	var out bytes.Buffer
	if _, err := NewData(&out, 1).Append(strings.NewReader("short"), 6, false); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("short source: %v", err)
	}
	full := errors.New("full")
	_, err := NewData(writerFunc(func([]byte) (int, error) { return 0, full }), 1).Append(strings.NewReader("x"), 1, false)
	var write *WriteError
	if !errors.As(err, &write) || !errors.Is(err, full) {
		t.Errorf("full blob: %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestDamageIsSeen flips bytes of an image everywhere: reading may fail or differ, and never panics or runs on.
func TestDamageIsSeen(t *testing.T) {
	meta := randomSample(t, 3, 25, 2).metadata(t)
	for i := BlockSize; i < len(meta); i += 1 + i%5 {
		b := bytes.Clone(meta)
		b[i] ^= []byte{1, 0x80, 0xff}[i%3]
		read(t, b)
	}
	for i := superOffset; i < slotOffset+2*slotSize; i++ { // the checksum covers all of it
		b := bytes.Clone(meta)
		b[i] ^= 1
		if _, err := Open(bytes.NewReader(b), int64(len(b))); !errors.Is(err, ErrFormat) {
			t.Fatalf("damage at %d: %v", i, err)
		}
	}
}

// read does everything with an image that a reader can.
func read(t *testing.T, b []byte) {
	im, err := Open(bytes.NewReader(b), int64(len(b)))
	if err == nil {
		err = im.Verify()
	}
	if err != nil && !errors.Is(err, ErrFormat) {
		t.Fatalf("error is not ErrFormat: %v", err)
	}
}

// reseal makes a fuzzer's bytes an image with a right superblock checksum and size.
func reseal(b []byte) []byte {
	if len(b) < 2*BlockSize {
		return b
	}
	b = bytes.Clone(b[:len(b)/BlockSize*BlockSize])
	le.PutUint32(b[superOffset+36:], uint32(len(b)/BlockSize))
	le.PutUint32(b[superOffset+4:], superChecksum(b))
	return b
}

func FuzzImage(f *testing.F) {
	f.Add([]byte{}, uint(0), uint64(0))
	for seed := range uint64(4) {
		f.Add(randomSample(f, seed, 30, 2).metadata(f), uint(BlockSize), uint64(1))
	}
	f.Fuzz(func(t *testing.T, b []byte, at uint, value uint64) {
		read(t, b)
		b = reseal(b)
		if len(b) > 8 {
			le.PutUint64(b[at%uint(len(b)-8):], value)
			b = reseal(b)
		}
		read(t, b)
	})
}

func TestMemoryPerEntry(t *testing.T) {
	const entries = 200_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	root := NewDir(0o755)
	for i := range entries {
		dir := fmt.Sprintf("directory-%d", i/50)
		d := root.Lookup(dir)
		if d == nil {
			d = NewDir(0o755)
			root.Set(dir, d)
		}
		d.Set(fmt.Sprintf("a-file-with-a-name-%d", i), &Inode{Mode: TypeRegular | 0o644, Size: 5, Extents: []Extent{{0, 5, uint32(i), 1}}})
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	per := float64(after.HeapAlloc-before.HeapAlloc) / entries
	t.Logf("%.0f bytes per entry", per)
	if per > 400 {
		t.Errorf("%.0f bytes per entry, want less than 400 before layout", per)
	}
	if err := Write(io.Discard, root, []Device{{strings.Repeat("a", 64), entries}}); err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(root)
}
