package main

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// A test is one test of one package. Each is a job of its own.
type test struct {
	pkg, name string // "internal/edge/cgroup"
}

func (t test) String() string { return t.pkg + " " + t.name }

// notHere lists the root tests that the lab leaves out: "package Test # reason", or * for a whole package.
//
//go:embed not.txt
var notHere string

var testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(t \*testing\.T\)`)

// plan is the tests of the root tier, without those that have no place here.
func plan(o options) ([]test, error) {
	left, err := readList(notHere)
	if err != nil {
		return nil, err
	}
	var tests []test
	used := map[string]bool{}
	look := func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_root_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range testFunc.FindAllSubmatch(b, -1) {
			t := test{filepath.ToSlash(filepath.Dir(path)), string(m[1])}
			whole := test{t.pkg, "*"}
			if left[t.String()] || left[whole.String()] {
				used[t.String()], used[whole.String()] = true, true
				continue
			}
			if o.run.MatchString(t.name) && o.packages.MatchString(t.pkg) {
				tests = append(tests, t)
			}
		}
		return err
	}
	err = errors.Join(filepath.WalkDir("cmd", look), filepath.WalkDir("internal", look))
	for entry := range left {
		if !used[entry] {
			return nil, fmt.Errorf("test/lab/not.txt: there is no %s", entry)
		}
	}
	if err == nil && len(tests) == 0 {
		err = fmt.Errorf("no such test")
	}
	return tests, err
}

// packagesOf is the packages of tests, sorted.
func packagesOf(tests []test) []string {
	var all []string
	for _, t := range tests {
		all = append(all, t.pkg)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// readList reads lines "package Test # reason".
func readList(text string) (map[string]bool, error) {
	list := map[string]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		entry, reason, ok := strings.Cut(line, " # ")
		if !ok || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%q has no reason", line)
		}
		list[strings.TrimSpace(entry)] = true
	}
	return list, nil
}
