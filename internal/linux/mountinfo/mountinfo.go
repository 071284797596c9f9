// Package mountinfo reads the kernel's table of mounts (/proc/<pid>/mountinfo). The table is the one truth about what is
// mounted: a state file would be wrong after a crash. Two things surprise: paths in it are escaped (\040 is a space), and
// a point may occur several times, of which only the last is visible.
package mountinfo

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// A Mount is one line of the table.
type Mount struct {
	ID       int
	Parent   int
	Device   string   // "major:minor"
	Root     string   // of the mount within its file system; "net:[4026531840]" for a namespace
	Point    string   // where it is mounted, as the reader's root sees it
	Options  []string // of the mount
	Optional []string // propagation: "shared:N", "master:N", …; empty means private
	Type     string
	Source   string
	Super    []string // options of the file system
}

// maxLine bounds one line: an overlay with 500 lower directories stays below it.
const maxLine = 1 << 20

// Self is the table of the calling process.
func Self() ([]Mount, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Parse(f)
}

// Parse reads a table. A line that it does not understand is an error: skipping one would hide a mount.
func Parse(r io.Reader) ([]Mount, error) {
	var mounts []Mount
	scanner := bufio.NewScanner(r)
	scanner.Buffer(make([]byte, 0, 64<<10), maxLine)
	for scanner.Scan() {
		m, err := parseLine(scanner.Text())
		if err != nil {
			return nil, err
		}
		mounts = append(mounts, m)
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("reading mountinfo: %w", err)
	}
	return mounts, nil
}

// parseLine parses
//
//	36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//
// where the optional fields before the lone dash may be missing or many.
func parseLine(line string) (Mount, error) {
	bad := func(what string) (Mount, error) { return Mount{}, fmt.Errorf("mountinfo line %.200q: %s", line, what) }
	fields := strings.Split(line, " ")
	dash := -1
	for i := 6; i < len(fields); i++ {
		if fields[i] == "-" {
			dash = i
			break
		}
	}
	if dash < 0 || len(fields) < dash+4 {
		return bad("too few fields")
	}
	id, err := strconv.Atoi(fields[0])
	if err != nil {
		return bad("bad mount id")
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return bad("bad parent id")
	}
	return Mount{
		ID: id, Parent: parent, Device: fields[2],
		Root: unescape(fields[3]), Point: unescape(fields[4]),
		Options: strings.Split(fields[5], ","), Optional: fields[6:dash],
		Type: unescape(fields[dash+1]), Source: unescape(fields[dash+2]), Super: strings.Split(fields[dash+3], ","),
	}, nil
}

// unescape undoes the kernel's octal escapes of space, tab, newline, backslash and hash.
func unescape(s string) string {
	if !strings.ContainsRune(s, '\\') {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// At finds the visible mount at exactly that point.
func At(mounts []Mount, point string) (Mount, bool) {
	for i := len(mounts) - 1; i >= 0; i-- {
		if mounts[i].Point == point {
			return mounts[i], true
		}
	}
	return Mount{}, false
}

// Under lists the mounts strictly below dir, in the order of the table.
func Under(mounts []Mount, dir string) []Mount {
	prefix := strings.TrimSuffix(dir, "/") + "/"
	var out []Mount
	for _, m := range mounts {
		if strings.HasPrefix(m.Point, prefix) {
			out = append(out, m)
		}
	}
	return out
}

// ReadOnly reports whether the mount is read-only.
func (m Mount) ReadOnly() bool { return len(m.Options) > 0 && m.Options[0] == "ro" }
