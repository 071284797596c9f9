package main

import (
	"errors"
	"math"
	"strconv"
	"strings"
	"time"
)

// A list is a flag that may be given more than once.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// A byteCount is a flag of a size: 512m, 1.5g, 64MiB or plain bytes. Units are powers of 1024, as docker has them.
type byteCount int64

func (b *byteCount) String() string { return strconv.FormatInt(int64(*b), 10) }

func (b *byteCount) Set(s string) error {
	n, err := parseBytes(s)
	*b = byteCount(n)
	return err
}

var errSize = errors.New("want a size like 512m, 1.5g or a number of bytes")

func parseBytes(s string) (int64, error) {
	digits := strings.TrimRight(strings.ToLower(s), "bi")
	shift := 0
	if n := len(digits); n > 0 {
		if i := strings.IndexByte("kmgtp", digits[n-1]); i >= 0 {
			shift, digits = 10*(i+1), digits[:n-1]
		}
	}
	if unit := strings.ToLower(s)[len(digits):]; len(unit) > 1 && shift > 0 && unit[1:] != "b" && unit[1:] != "ib" {
		return 0, errSize
	} else if shift == 0 && unit != "" && unit != "b" {
		return 0, errSize
	}
	if digits == "" || strings.Trim(digits, "0123456789.") != "" {
		return 0, errSize
	}
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil {
		return 0, errSize
	}
	v *= math.Exp2(float64(shift))
	if v < 1 || v >= math.MaxInt64 {
		return 0, errors.New("the size is out of range")
	}
	return int64(v), nil
}

// A period is a flag of a duration: 90s, 5m, 1h30m, 2d or a plain number of seconds. It is greater than 0.
type period time.Duration

func (p *period) String() string {
	if *p == 0 {
		return ""
	}
	return time.Duration(*p).String()
}

func (p *period) Set(s string) error {
	d, err := parsePeriod(s)
	*p = period(d)
	return err
}

func parsePeriod(s string) (time.Duration, error) {
	errPeriod := errors.New("want a duration like 90s, 5m, 1h30m, 2d or a number of seconds, greater than 0")
	text, factor := s, time.Duration(1)
	if days, ok := strings.CutSuffix(s, "d"); ok {
		text, factor = days+"h", 24
	} else if s != "" && strings.Trim(s, "0123456789.") == "" {
		text = s + "s"
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 || d > math.MaxInt64/factor {
		return 0, errPeriod
	}
	return d * factor, nil
}

// wholeSeconds is d in seconds, rounded up: a limit is never shorter than asked for.
func wholeSeconds(d period) int64 {
	return int64(math.Ceil(time.Duration(d).Seconds()))
}

// pairs parses KEY=VALUE flags; what names them in errors.
func pairs(l list, what string) (map[string]string, error) {
	if len(l) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(l))
	for _, s := range l {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, usagef("%s %q must be KEY=VALUE", what, s)
		}
		m[k] = v
	}
	return m, nil
}

// environment parses -e flags; KEY alone takes our own value of it, and is left out where we have none.
func environment(l list, getenv func(string) string) (map[string]string, error) {
	var full list
	for _, s := range l {
		if !strings.Contains(s, "=") {
			v := getenv(s)
			if v == "" {
				continue
			}
			s += "=" + v
		}
		full = append(full, s)
	}
	return pairs(full, "environment variable")
}
