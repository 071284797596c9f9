package main

import (
	"errors"
	"flag"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

type parsed struct {
	memory  byteCount
	ttl     period
	env     list
	all, q  bool
	user    string
	rest    []string
	failure error
}

func parseLine(commandAfter int, args ...string) parsed {
	var p parsed
	f := newFlagSet("test")
	f.commandAfter = commandAfter
	f.Var(&p.memory, "memory", "")
	f.letter("m", "memory")
	f.Var(&p.ttl, "ttl", "")
	f.Var(&p.env, "env", "")
	f.letter("e", "env")
	f.BoolVar(&p.all, "all", false, "")
	f.letter("a", "all")
	f.BoolVar(&p.q, "quiet", false, "")
	f.letter("q", "quiet")
	f.StringVar(&p.user, "user", "", "")
	f.letter("u", "user")
	p.rest, p.failure = f.parse(args)
	return p
}

func TestFlagForms(t *testing.T) {
	for _, args := range [][]string{
		{"-aq", "-m", "1k", "-e", "A=1", "-e", "B=-2", "x", "y"},
		{"-a", "-q=true", "-m1k", "-eA=1", "-e=B=-2", "x", "y"},
		{"x", "--all", "y", "--quiet=true", "--memory=1k", "--env", "A=1", "--env=B=-2"},
		{"-aqm1k", "x", "-eA=1", "--env", "B=-2", "--", "y"},
		{"-aqm=1k", "x", "y", "-eA=1", "--env", "B=-2", "--"},
	} {
		p := parseLine(-1, args...)
		if p.failure != nil || !p.all || !p.q || p.memory != 1024 || !slices.Equal(p.env, list{"A=1", "B=-2"}) || !slices.Equal(p.rest, []string{"x", "y"}) {
			t.Errorf("%q: %+v", args, p)
		}
	}
}

func TestFlagsEndWhereTheCommandBegins(t *testing.T) {
	for _, c := range []struct{ args, rest []string }{
		{[]string{"-a", "image", "-q", "ls", "-l", "--", "x"}, []string{"image", "ls", "-l", "--", "x"}},
		{[]string{"-a", "image", "-q", "--", "ls", "-l"}, []string{"image", "ls", "-l"}},
		{[]string{"-aq", "--", "image", "-l"}, []string{"image", "-l"}},
		{[]string{"-a", "-q", "image"}, []string{"image"}},
		{[]string{"-a", "-q", "image", "-", "--all"}, []string{"image", "-", "--all"}},
		{[]string{"-aq", "image", "", "-x"}, []string{"image", "", "-x"}},
	} {
		p := parseLine(1, c.args...)
		if p.failure != nil || !p.all || !p.q || !slices.Equal(p.rest, c.rest) {
			t.Errorf("%q: %+v", c.args, p)
		}
	}
}

func TestFlagErrors(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--nonesuch"}, "--nonesuch"},
		{[]string{"-x"}, "-x"},
		{[]string{"-ax"}, "-x"},
		{[]string{"--memory"}, "--memory needs a value"},
		{[]string{"-am"}, "-m needs a value"},
		{[]string{"--memory", "lots"}, `--memory: "lots"`},
		{[]string{"--all=perhaps"}, "--all"},
		{[]string{"--ttl=0"}, "greater than 0"},
	} {
		p := parseLine(-1, c.args...)
		var usage *usageError
		if !errors.As(p.failure, &usage) || !strings.Contains(p.failure.Error(), c.says) {
			t.Errorf("%q: %v; want a usage error that says %q", c.args, p.failure, c.says)
		}
	}
	for _, help := range []string{"-h", "--help", "-help"} {
		if p := parseLine(1, "image", help); !errors.Is(p.failure, flag.ErrHelp) {
			t.Errorf("%s: %v", help, p.failure)
		}
	}
	if p := parseLine(1, "image", "ls", "--help"); p.failure != nil || len(p.rest) != 3 {
		t.Errorf("the command's own --help: %+v", p)
	}
}

func FuzzFlags(f *testing.F) {
	f.Add(1, "-aq\x00-m\x001k\x00image\x00ls\x00-l")
	f.Add(-1, "x\x00--env=A=1\x00--\x00--all")
	f.Add(0, "-m=\x00-")
	f.Fuzz(func(t *testing.T, commandAfter int, line string) {
		args := strings.Split(line, "\x00")
		commandAfter = max(-1, commandAfter%4)
		p := parseLine(commandAfter, args...)
		if p.failure != nil {
			var usage *usageError
			if !errors.As(p.failure, &usage) && !errors.Is(p.failure, flag.ErrHelp) {
				t.Fatalf("%q: %v is no usage error", args, p.failure)
			}
			return
		}
		// What follows the beginning of the command is passed on untouched.
		if n := len(p.rest); commandAfter >= 0 && n > commandAfter {
			command := p.rest[commandAfter:]
			if tail := args[len(args)-len(command):]; !slices.Equal(tail, command) && !slices.Contains(args, "--") {
				t.Fatalf("%q: the command became %q", args, command)
			}
		}
	})
}

func TestParseBytes(t *testing.T) {
	for s, want := range map[string]int64{
		"1": 1, "512m": 512 << 20, "512M": 512 << 20, "512MB": 512 << 20, "512MiB": 512 << 20, "1.5g": 3 << 29, "2k": 2048, "1t": 1 << 40, "7b": 7, "0.5k": 512,
	} {
		if got, err := parseBytes(s); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "0", "-1", "m", "1x", "1mm", "1bm", "1ibi", "1i", "1mi", "1e3", "inf", "nan", "0x10", "1_0", "9223372036854775808", "99999999999t", "1.2.3", " 1", "b"} {
		if got, err := parseBytes(s); err == nil {
			t.Errorf("%q: %d, want an error", s, got)
		}
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"512m", "1.5GiB", "9223372036854775807", "0.0000001k", "."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseBytes(s)
		if err == nil && n < 1 {
			t.Fatalf("%q became %d", s, n)
		}
	})
}

func TestParsePeriod(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "5m": 5 * time.Minute, "1h30m": 90 * time.Minute, "2d": 48 * time.Hour, "1.5d": 36 * time.Hour, "300": 5 * time.Minute, "0.5": time.Second / 2, "1ms": time.Millisecond,
	} {
		if got, err := parsePeriod(s); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "0", "-1s", "d", "1x", "106751991d", "1d2h", "inf"} {
		if got, err := parsePeriod(s); err == nil {
			t.Errorf("%q: %v, want an error", s, got)
		}
	}
	if got := wholeSeconds(period(1500 * time.Millisecond)); got != 2 {
		t.Errorf("1.5 s became %d s", got)
	}
	if got := wholeSeconds(0); got != 0 {
		t.Errorf("0 became %d s", got)
	}
}

func FuzzParsePeriod(f *testing.F) {
	for _, s := range []string{"90s", "2d", "300", "106751991167300d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := parsePeriod(s)
		if err == nil && (d <= 0 || wholeSeconds(period(d)) < 1) {
			t.Fatalf("%q became %v", s, d)
		}
	})
}

func TestByteSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1023 << 10: "0.999 MiB", 3 << 20: "3 MiB", 10 << 30: "10 GiB", math.MaxInt64: "8 EiB",
	} {
		if got := byteSize(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
