package main

import (
	"path"
	"strings"

	"dsec/sandbox"
)

// The rules of docker cp: where what is copied ends up.

// A cpSource is what is to be copied.
type cpSource struct {
	path string // as it was given
	name string // of its own: the last part of the path
	dir  bool
}

// A cpTarget is where it goes.
type cpTarget struct {
	path        string // as it was given
	exists, dir bool   // links followed
}

// contentOnly reports whether a directory's content is meant, and not the directory.
func contentOnly(p string) bool {
	return p == "." || strings.HasSuffix(p, "/.") || path.Clean("/"+p) == "/"
}

// place is the new path of the source itself. Of a directory whose content alone is copied, it is the directory into which
// that goes.
func place(from cpSource, to cpTarget) (string, error) {
	switch {
	case to.exists && to.dir && from.dir && contentOnly(from.path):
		return to.path, nil
	case to.exists && to.dir && from.name == "":
		return "", usagef("%q has no file name", from.path)
	case to.exists && to.dir:
		return strings.TrimRight(to.path, "/") + "/" + from.name, nil
	case to.exists && from.dir:
		return "", sandbox.Errorf(sandbox.FailedPrecondition, "not_a_directory", "%s is a file, and cannot become the directory %s", clipText(to.path), clipText(from.path))
	case strings.HasSuffix(to.path, "/") && to.exists:
		return "", sandbox.Errorf(sandbox.FailedPrecondition, "not_a_directory", "%s is no directory", clipText(to.path))
	case strings.HasSuffix(to.path, "/") && !from.dir:
		return "", sandbox.Errorf(sandbox.NotFound, "no_directory", "there is no directory %s to copy into", clipText(to.path))
	}
	return to.path, nil
}

// lastPart is the name that a path ends with; "" of one that ends with none.
func lastPart(p string) string {
	if p = path.Base(path.Clean("/" + p)); p == "/" {
		return ""
	}
	return p
}
