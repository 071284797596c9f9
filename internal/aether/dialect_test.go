package aether

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestParseOutcome(t *testing.T) {
	for line, want := range map[string]outcome{
		"1 0 hmB": {1, 0, "hmB"}, "18446744073709551615 255 ": {1<<64 - 1, 255, ""}, "7 3": {7, 3, ""},
	} {
		if got, ok := parseOutcome(line); !ok || got != want {
			t.Errorf("%q: %+v %v", line, got, ok)
		}
	}
	for _, line := range []string{"", "1", "1 ", "1 256 h", "1 -1 h", "-1 1 h", "+1 1 h", "a 1 h", "1 b h", "1 1 h x", "1 1 ;", "1 1 h\x00", "1 1 " + strings.Repeat("h", 65), "99999999999999999999 0 h"} {
		if got, ok := parseOutcome(line); ok {
			t.Errorf("%q: %+v", line, got)
		}
	}
}

// Whatever the shell says must come out as what it can say, and stay out of its lines.
func FuzzParseOutcome(f *testing.F) {
	f.Add("1 0 hmB")
	f.Add("18446744073709551615 255 ")
	f.Add("1 1 x;$(reboot)")
	f.Fuzz(func(t *testing.T, line string) {
		o, ok := parseOutcome(line)
		if !ok {
			return
		}
		if o.status < 0 || o.status > 255 {
			t.Errorf("status %d", o.status)
		}
		for i := range dialects {
			s := dialects[i].drive(o.seq, true, o) + dialects[i].prelude(o)
			if !utf8.ValidString(s) || strings.ContainsAny(s, ";'$`") && strings.Contains(o.flags, ";") {
				t.Errorf("%q", s)
			}
			if strings.Count(s, "\n") > 3 || len(s) > 600 {
				t.Errorf("%d lines, %d bytes", strings.Count(s, "\n"), len(s))
			}
		}
	})
}

func TestParseMember(t *testing.T) {
	stat := "17 (a) b (c) R 3 17 16 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 123456 1 2"
	if p, err := parseMember(17, []byte(stat)); err != nil || p != (member{17, 3, 16, 123456}) {
		t.Errorf("%+v %v", p, err)
	}
	for _, bad := range []string{"", ")", "1 (a) R 1", strings.Replace(stat, "123456", "x", 1)} {
		if p, err := parseMember(17, []byte(bad)); err == nil {
			t.Errorf("%q: %+v", bad, p)
		}
	}
	m := moment{ticks: 10, pid: 100}
	for p, want := range map[member]bool{
		{pid: 5, started: 11}: true, {pid: 200, started: 9}: false, {pid: 101, started: 10}: true, {pid: 100, started: 10}: false,
	} {
		if p.after(m) != want {
			t.Errorf("%+v: %v", p, !want)
		}
	}
	if now := now(); now.ticks == 0 || now.pid == 0 {
		t.Errorf("%+v", now)
	}
}

func FuzzParseMember(f *testing.F) {
	f.Add([]byte("17 (a) b (c) R 3 17 16 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 123456 1 2"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parseMember(1, b) })
}

func FuzzParseTracer(f *testing.F) {
	f.Add([]byte("Name:\ta\nPPid:\t7\nTracerPid:\t12\nUid:\t0"))
	f.Add([]byte("Name:\ta\nTracerPid:\t-1\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if parseTracer(b) < 0 {
			t.Errorf("%q", b)
		}
	})
}

func TestParseTracer(t *testing.T) {
	for status, want := range map[string]int{"Name:\ta\nPPid:\t7\nTracerPid:\t12\nUid:\t0": 12, "Name:\tTracerPid:\\n9\nTracerPid:\t0\n": 0, "": 0, "\nTracerPid:\tx\n": 0} {
		if got := parseTracer([]byte(status)); got != want {
			t.Errorf("%q: %d", status, got)
		}
	}
}
