//go:build linux

package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"syscall"
)

// A segment is a run of a file that is no hole.
type segment struct{ off, length int64 }

const (
	seekData = 3 // SEEK_DATA, SEEK_HOLE of lseek(2)
	seekHole = 4

	tarBlock    = 512
	maxSegments = 100_000 // beyond it holes are sent as zeros: the reader bounds its map
	maxOctal7   = 1<<21 - 1
	maxOctal11  = 1<<33 - 1
)

// dataSegments finds a file's data if it has holes worth keeping; nil means: take it as it is.
func dataSegments(f *os.File, st fs.FileInfo) []segment {
	if s := st.Sys().(*syscall.Stat_t); s.Blocks*512 >= st.Size() {
		return nil
	}
	segments := []segment{}
	for off := int64(0); off < st.Size(); {
		start, err := f.Seek(off, seekData)
		if errors.Is(err, syscall.ENXIO) { // only a hole is left
			break
		}
		if err != nil || len(segments) == maxSegments {
			return nil
		}
		end, err := f.Seek(start, seekHole)
		if err != nil || end <= start {
			return nil
		}
		if start >= st.Size() { // the file grew
			break
		}
		end = min(end, st.Size())
		segments = append(segments, segment{start, end - start})
		off = end
	}
	if len(segments) == 1 && segments[0] == (segment{0, st.Size()}) {
		return nil
	}
	return segments
}

// sparse writes a file with holes: an extended header, and the map before the data.
func (p *packer) sparse(hdr *tar.Header, f *os.File, segments []segment) error {
	table := strconv.AppendInt(nil, int64(len(segments))+1, 10)
	data := int64(0)
	for _, s := range append(segments, segment{hdr.Size, 0}) {
		table = fmt.Appendf(table, "\n%d\n%d", s.off, s.length)
		data += s.length
	}
	table = append(table, '\n')
	table = append(table, make([]byte, padding(int64(len(table))))...)
	stored := int64(len(table)) + data

	records := maps.Clone(hdr.PAXRecords)
	if records == nil {
		records = map[string]string{}
	}
	records["GNU.sparse.major"], records["GNU.sparse.minor"] = "1", "0"
	records["GNU.sparse.name"] = hdr.Name
	records["GNU.sparse.realsize"] = strconv.FormatInt(hdr.Size, 10)
	records["mtime"] = fmt.Sprintf("%d.%09d", hdr.ModTime.Unix(), hdr.ModTime.Nanosecond())
	if hdr.ModTime.Unix() < 0 {
		records["mtime"] = strconv.FormatInt(hdr.ModTime.Unix(), 10) // readers disagree on negative fractions
	}
	large := func(key string, v, limit int64) int64 {
		if v <= limit {
			return v
		}
		records[key] = strconv.FormatInt(v, 10)
		return 0
	}
	b := ustar{name: "GNUSparseFile.0/" + path.Base(hdr.Name), typeflag: tar.TypeReg, mode: hdr.Mode,
		uid: large("uid", int64(hdr.Uid), maxOctal7), gid: large("gid", int64(hdr.Gid), maxOctal7),
		size: large("size", stored, maxOctal11), mtime: min(max(hdr.ModTime.Unix(), 0), maxOctal11)}

	if err := p.tw.Flush(); err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	pax := paxRecords(records)
	head := ustar{name: "PaxHeaders.0/" + path.Base(hdr.Name), typeflag: tar.TypeXHeader, mode: 0o644, size: int64(len(pax))}.encode(nil)
	head = append(head, pax...)
	head = append(head, make([]byte, padding(int64(len(pax))))...)
	head = append(b.encode(head), table...)
	if _, err := p.out.Write(head); err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	for _, s := range segments {
		if err := p.copy(p.out, f, hdr.Name, s.off, s.length); err != nil {
			return err
		}
	}
	_, err := p.out.Write(make([]byte, padding(data)))
	return err
}

func padding(n int64) int64 { return (tarBlock - n%tarBlock) % tarBlock }

// paxRecords encodes extended header records in the order of their keys. A record's length counts its own digits.
func paxRecords(records map[string]string) []byte {
	var b []byte
	for _, k := range slices.Sorted(maps.Keys(records)) {
		rest := len(k) + len(records[k]) + 3
		n := rest + 1
		for n != rest+len(strconv.Itoa(n)) {
			n = rest + len(strconv.Itoa(n))
		}
		b = fmt.Appendf(b, "%d %s=%s\n", n, k, records[k])
	}
	return b
}

// ustar is a header block.
type ustar struct {
	name                        string // cut to what fits; the extended header has the real one
	typeflag                    byte
	mode, uid, gid, size, mtime int64
}

func (u ustar) encode(b []byte) []byte {
	var h [tarBlock]byte
	copy(h[0:100], u.name)
	octal := func(at, width int, v int64) { copy(h[at:at+width], fmt.Sprintf("%0*o\x00", width-1, v)) }
	octal(100, 8, u.mode)
	octal(108, 8, u.uid)
	octal(116, 8, u.gid)
	octal(124, 12, u.size)
	octal(136, 12, u.mtime)
	h[156] = u.typeflag
	copy(h[257:265], "ustar\x0000")
	copy(h[148:156], "        ")
	sum := int64(0)
	for _, c := range h {
		sum += int64(c)
	}
	octal(148, 7, sum) // six digits, NUL, and the space that is there
	return append(b, h[:]...)
}
