package mountinfo

import (
	"reflect"
	"strings"
	"testing"
)

const table = `22 27 0:21 / /proc rw,relatime - proc proc rw
36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 propagate_from:3 - ext3 /dev/root rw,errors=continue
37 36 0:4 net:[4026532170] /run/dsec/net/3 rw shared:7 - nsfs nsfs rw
38 22 0:50 / /proc rw - tmpfs a\134b rw,size=4k
`

func TestParse(t *testing.T) {
	mounts, err := Parse(strings.NewReader(table))
	if err != nil {
		t.Fatal(err)
	}
	if len(mounts) != 4 {
		t.Fatalf("%d mounts, want 4", len(mounts))
	}
	want := Mount{ID: 36, Parent: 35, Device: "98:0", Root: "/mnt1", Point: "/mnt 2", Options: []string{"rw", "noatime"},
		Optional: []string{"master:1", "propagate_from:3"}, Type: "ext3", Source: "/dev/root", Super: []string{"rw", "errors=continue"}}
	if !reflect.DeepEqual(mounts[1], want) {
		t.Errorf("got  %+v\nwant %+v", mounts[1], want)
	}
	if len(mounts[0].Optional) != 0 || mounts[2].Root != "net:[4026532170]" || mounts[3].Source != `a\b` {
		t.Errorf("got %+v", mounts)
	}
	if m, ok := At(mounts, "/proc"); !ok || m.Type != "tmpfs" {
		t.Errorf("At gives %+v, want the last mount, which is the visible one", m)
	}
	if _, ok := At(mounts, "/run"); ok {
		t.Error("At found a mount where none is")
	}
	if u := Under(mounts, "/run/dsec"); len(u) != 1 || u[0].ID != 37 {
		t.Errorf("Under gives %+v", u)
	}
	if u := Under(mounts, "/pro"); len(u) != 0 {
		t.Errorf("Under takes a prefix of a name for a directory: %+v", u)
	}
}

func TestParseRefusesWhatItDoesNotUnderstand(t *testing.T) {
	for _, line := range []string{"x", "22 27 0:21 / /proc rw", "22 27 0:21 / /proc rw - proc", "a 27 0:21 / /p rw - proc proc rw", "22 b 0:21 / /p rw - proc proc rw"} {
		if m, err := Parse(strings.NewReader(line + "\n")); err == nil {
			t.Errorf("%q parsed as %+v", line, m)
		}
	}
}

func TestSelf(t *testing.T) {
	mounts, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := At(mounts, "/proc"); !ok || m.Type != "proc" {
		t.Fatalf("no /proc in %d mounts", len(mounts))
	}
}

func FuzzParse(f *testing.F) {
	f.Add(table)
	f.Add("1 2 3:4 / /a\\04 rw - x y z\n")
	f.Add("- - - - - - - - - -\n")
	f.Fuzz(func(t *testing.T, s string) {
		mounts, err := Parse(strings.NewReader(s))
		if err == nil && len(mounts) > strings.Count(s, "\n")+1 {
			t.Fatalf("%d mounts from %d lines", len(mounts), strings.Count(s, "\n")+1)
		}
	})
}
