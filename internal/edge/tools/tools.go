// Package tools provides the shell and tools of trusted commands: a static busybox, in a directory of the platform's own
// that sandboxes can execute from and not read.
//
// What surprises:
//
//   - The copy differs from the host's file in two places. The C library linked into it would load what the sandbox's
//     /etc/nsswitch.conf names, as code, whenever a tool looks up a host or a service; and system(3), as awk has it, would
//     run the sandbox's /bin/sh. Both names are replaced by ones that nobody can make in a sandbox, where /dev is
//     read-only: names are looked up by the built-in files and dns, and awk's system() fails.
//   - Each version has a directory of its own, by digest, and stays as long as the run directory: sandboxes have it mounted.
package tools

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	program     = "busybox"
	listTimeout = 30 * time.Second
	maxProgram  = 64 << 20
)

// missing is why there are no trusted commands. What it says is also `dsec doctor`'s word.
func missing(format string, args ...any) error {
	return sandbox.Errorf(sandbox.Unsupported, "no_trusted_tools", "this node has no tools for trusted commands: "+format+"; install Debian's busybox-static, or put a static busybox beside dsec, and restart the edge", args...)
}

// Find looks for a static busybox in dirs, the first of which is where it would be put on purpose.
func Find(dirs ...string) (string, error) {
	dynamic := ""
	for _, dir := range dirs {
		path := filepath.Join(dir, program)
		static, err := isStatic(path)
		switch {
		case err == nil && static:
			return path, nil
		case err == nil:
			dynamic = path
		case !errors.Is(err, os.ErrNotExist):
			return "", missing("%s cannot be used: %v", path, err)
		}
	}
	if dynamic != "" {
		return "", missing("%s would load libraries of the sandbox", dynamic)
	}
	return "", missing("no busybox in %s", strings.Join(dirs, ", "))
}

// isStatic reports whether the kernel runs a program without any interpreter.
func isStatic(path string) (bool, error) {
	f, err := elf.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return false, nil
		}
	}
	return true, nil
}

// Tools is the installed directory, as a mount that is attached nowhere.
type Tools struct{ mount int }

// Install copies the busybox at from into dir, with a name for each of its tools. What is there already is left.
func Install(ctx context.Context, from, dir string) (*Tools, error) {
	content, err := os.ReadFile(from)
	if err != nil {
		return nil, fmt.Errorf("install tools: %w", err)
	}
	if len(content) > maxProgram {
		return nil, fmt.Errorf("install tools: %s has %d bytes", from, len(content))
	}
	sum := sha256.Sum256(content)
	place := filepath.Join(dir, hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(place); errors.Is(err, os.ErrNotExist) {
		err = install(ctx, from, place, closed(content))
		if err != nil {
			return nil, fmt.Errorf("install tools: %w", err)
		}
	} else if err != nil {
		return nil, fmt.Errorf("install tools: %w", err)
	}
	fd, err := linux.CloneMountWith(place, linux.MountAttr{Set: linux.MountReadOnly | linux.MountNoSUID | linux.MountNoDev})
	if err != nil {
		return nil, fmt.Errorf("install tools: %w", err)
	}
	return &Tools{mount: fd}, nil
}

// closed is the program without the ways by which it would run code of the sandbox. See the package's doc.
func closed(content []byte) []byte {
	for old, name := range map[string]string{"/etc/nsswitch.conf\x00": "/dev/-/-", "/bin/sh\x00": "/dev/-"} {
		content = bytes.ReplaceAll(content, []byte(old), append([]byte(name), make([]byte, len(old)-len(name))...))
	}
	return content
}

func install(ctx context.Context, from, place string, content []byte) error {
	names, err := list(ctx, from)
	if err != nil {
		return err
	}
	tmp := place + ".new"
	if err := errors.Join(os.RemoveAll(tmp), os.MkdirAll(tmp, 0o700)); err != nil {
		return err
	}
	first := filepath.Join(tmp, program)
	if err := os.WriteFile(first, content, 0o700); err != nil {
		return err
	}
	for _, name := range names {
		if name == program {
			continue
		}
		if err := os.Link(first, filepath.Join(tmp, name)); err != nil {
			return err
		}
	}
	// Executed and entered by all, read by nobody inside: its owner is host root, who has no id there.
	if err := errors.Join(os.Chmod(first, 0o111), os.Chmod(tmp, 0o711)); err != nil {
		return err
	}
	return os.Rename(tmp, place)
}

// list asks a busybox for the names of its tools.
func list(ctx context.Context, path string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--list")
	cmd.Env = []string{"PATH=/nonexistent"}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list: %w", path, err)
	}
	names := strings.Fields(string(out))
	has := false
	for _, name := range names {
		if strings.ContainsRune(name, '/') || name == "." || name == ".." {
			return nil, fmt.Errorf("%s --list names %q", path, name)
		}
		has = has || name == "sh"
	}
	if !has {
		return nil, missing("%s has no shell", path)
	}
	return names, nil
}

// Mount is a descriptor of the directory; it is t's.
func (t *Tools) Mount() int { return t.mount }

// Close gives the descriptor back; who was handed it keeps it.
func (t *Tools) Close() {
	linux.Close(t.mount)
	t.mount = -1
}
