package erofs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// A sample is a tree with its blobs, and what should be found when it is read.
type sample struct {
	root    *Inode
	blobs   []*bytes.Buffer
	data    []*Data
	content map[*Inode][]byte
	paths   map[string]*Inode
}

func newSample(blobs int) *sample {
	s := &sample{root: NewDir(0o755), content: map[*Inode][]byte{}, paths: map[string]*Inode{}}
	s.paths["/"] = s.root
	for i := range blobs {
		b := new(bytes.Buffer)
		s.blobs = append(s.blobs, b)
		s.data = append(s.data, NewData(b, i+1))
	}
	return s
}

func (s *sample) add(dir, name string, n *Inode) *Inode {
	s.paths[dir].Set(name, n)
	s.paths[strings.TrimSuffix(dir, "/")+"/"+name] = n
	return n
}

// file adds content that is spread over the blobs in pieces of 4 to 64 KiB, or in one piece if r is nil.
func (s *sample) file(t testing.TB, dir, name string, content []byte, sparse bool, r *rand.Rand) *Inode {
	t.Helper()
	n := &Inode{Mode: TypeRegular | 0o644, Size: int64(len(content))}
	var last *Data
	for off := 0; off < len(content); {
		d, size := s.data[0], len(content)
		if r != nil {
			d, size = s.data[r.IntN(len(s.data))], BlockSize*(1+r.IntN(16))
			if k := len(n.Extents); k > 0 && d != last && misread(n.Extents[k-1], Extent{Device: 0, Block: d.Blocks()}) {
				d = last
			}
			last = d
		}
		size = min(size, len(content)-off)
		xs, err := d.Append(bytes.NewReader(content[off:off+size]), int64(size), sparse)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range xs {
			x.Off += int64(off)
			n.Extents = append(n.Extents, x)
		}
		off += size
	}
	s.content[n] = content
	return s.add(dir, name, n)
}

func (s *sample) devices() []Device {
	var ds []Device
	for i, b := range s.blobs {
		sum := sha256.Sum256(b.Bytes())
		ds = append(ds, Device{Digest: hex.EncodeToString(sum[:]), Blocks: s.data[i].Blocks()})
	}
	return ds
}

func (s *sample) metadata(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Write(&b, s.root, s.devices()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func randomName(r *rand.Rand) string {
	n := 1 + r.IntN(12)
	if r.IntN(20) == 0 {
		n = 1 + r.IntN(255)
	}
	b := make([]byte, n)
	for i := range b {
		for b[i] == 0 || b[i] == '/' {
			b[i] = byte(r.IntN(256))
		}
	}
	if s := string(b); s != "." && s != ".." {
		return s
	}
	return "dots"
}

func randomContent(r *rand.Rand) []byte {
	b := make([]byte, []int{0, 1, r.IntN(100), 4096, 4095, 4097, r.IntN(300 << 10)}[r.IntN(7)])
	for off := 0; off < len(b); off += BlockSize {
		if r.IntN(3) > 0 { // else a hole
			for i := off; i < min(off+BlockSize, len(b)); i++ {
				b[i] = byte(r.Uint32())
			}
		}
	}
	return b
}

var xattrNames = []string{"user.a", "user." + strings.Repeat("n", 250), "trusted.overlay.opaque", "trusted.x", "security.capability"}

// randomXattrs gives any attributes to files and directories, and to others those that the kernel allows them.
func randomXattrs(r *rand.Rand, n *Inode) []Xattr {
	if r.IntN(3) > 0 {
		return nil
	}
	var xs []Xattr
	for _, name := range xattrNames[:r.IntN(len(xattrNames))] {
		if strings.HasPrefix(name, "user.") && !n.IsDir() && n.Type() != TypeRegular {
			continue
		}
		b := make([]byte, []int{0, 1, r.IntN(100), r.IntN(3000)}[r.IntN(4)])
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		xs = append(xs, Xattr{Name: name, Value: string(b)})
	}
	return xs
}

// randomSample makes a tree of everything that the form can hold.
func randomSample(t testing.TB, seed uint64, entries, blobs int) *sample {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 7))
	s := newSample(blobs)
	dirs := []string{"/"}
	var linkable []*Inode
	for range entries {
		dir, name := dirs[r.IntN(len(dirs))], randomName(r)
		path := strings.TrimSuffix(dir, "/") + "/" + name
		if s.paths[path] != nil || len(path) > 3000 {
			continue
		}
		var n *Inode
		switch r.IntN(10) {
		case 0, 1:
			n = s.add(dir, name, NewDir(uint16(r.IntN(0o10000))))
			dirs = append(dirs, path)
		case 2:
			n = s.add(dir, name, &Inode{Mode: TypeSymlink | 0o777, Target: strings.Repeat("t", 1+r.IntN([]int{10, 300, MaxTarget}[r.IntN(3)]))})
		case 3:
			n = s.add(dir, name, &Inode{Mode: TypeChar})
		case 4:
			n = s.add(dir, name, &Inode{Mode: []uint16{TypeFIFO, TypeSocket, TypeBlock}[r.IntN(3)] | 0o640})
		case 5:
			if len(linkable) > 0 {
				s.add(dir, name, linkable[r.IntN(len(linkable))])
				continue
			}
			fallthrough
		default:
			n = s.file(t, dir, name, randomContent(r), r.IntN(2) == 0, r)
			n.Mode = TypeRegular | uint16(r.IntN(0o10000))
		}
		n.UID, n.GID, n.Mtime, n.Nsec = r.Uint32()>>1, r.Uint32()>>1, r.Int64N(1<<33)-(1<<31), r.Uint32N(1e9)
		if n.Type() == TypeBlock {
			n.Rdev = Rdev(r.Uint32N(4096), r.Uint32N(1<<20))
		}
		n.Xattrs = randomXattrs(r, n)
		if !n.IsDir() {
			linkable = append(linkable, n)
		}
	}
	return s
}

// check reads an image with our reader and compares it with the sample.
func (s *sample) check(t testing.TB, meta []byte) {
	t.Helper()
	im, err := Open(bytes.NewReader(meta), int64(len(meta)))
	if err != nil {
		t.Fatal(err)
	}
	if err := im.Verify(); err != nil {
		t.Fatal(err)
	}
	var got []string
	err = im.Walk(func(path string, i Info) error {
		got = append(got, path)
		return s.same(im, path, i)
	})
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Sorted(maps.Keys(s.paths))
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Fatalf("walk found %d names, want %d", len(got), len(want))
	}
}

func (s *sample) same(im *Image, path string, i Info) error {
	n := s.paths[path]
	if n == nil {
		return fmt.Errorf("unexpected %q", path)
	}
	if i.Mode != n.Mode || i.UID != n.UID || i.GID != n.GID || i.Mtime != n.Mtime || i.Nsec != n.Nsec || i.Rdev != n.Rdev {
		return fmt.Errorf("%q: got %+v", path, i)
	}
	xs, err := im.Xattrs(i)
	if err != nil || !slices.Equal(xs, n.Xattrs) {
		return fmt.Errorf("%q: attributes %v, %v, want %v", path, xs, err, n.Xattrs)
	}
	switch n.Type() {
	case TypeSymlink:
		target, err := im.Readlink(i)
		if err != nil || target != n.Target {
			return fmt.Errorf("%q: target %q, %v", path, target, err)
		}
	case TypeRegular:
		b := make([]byte, i.Size)
		err := im.Extents(i, func(e Extent) error {
			copy(b[e.Off:e.Off+e.Len], s.blobs[e.Device-1].Bytes()[int64(e.Block)*BlockSize:])
			return nil
		})
		if err != nil || !bytes.Equal(b, s.content[n]) {
			return fmt.Errorf("%q: content of %d bytes differs, %v", path, len(b), err)
		}
	}
	return nil
}
