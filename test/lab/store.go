package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// unused is how long something stays in the store after its last use.
const unused = 14 * 24 * time.Hour

// A store keeps what was made once. An entry is a directory; it is there whole or not at all.
type store struct{ dir string }

// get finds the entry of that name, or has it made. Entries of the same kind that nobody used for long are removed then.
func (s store) get(kind, name string, make func(dir string) error) (string, error) {
	entry := filepath.Join(s.dir, kind+"-"+name)
	if _, err := os.Stat(entry); err == nil {
		now := time.Now()
		return entry, os.Chtimes(entry, now, now)
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return "", err
	}
	s.tidy(kind)
	tmp, err := os.MkdirTemp(s.dir, "making-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := make(tmp); err != nil {
		return "", err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, entry); err != nil && !errors.Is(err, fs.ErrExist) { // somebody else may have been faster
		return "", err
	}
	return entry, nil
}

func (s store) tidy(kind string) {
	old, _ := filepath.Glob(filepath.Join(s.dir, kind+"-*"))
	left, _ := filepath.Glob(filepath.Join(s.dir, "making-*"))
	for _, path := range append(old, left...) {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > unused {
			_ = os.RemoveAll(path)
		}
	}
}

func keyOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:8])
}

// times are how long tests took in the last run, so that the longest can go first.
func (s store) times(kernel string) *times {
	t := &times{path: filepath.Join(s.dir, "times-"+kernel+".json"), Seconds: map[string]float64{}}
	if b, err := os.ReadFile(t.path); err == nil {
		_ = json.Unmarshal(b, &t.Seconds) // a bad file is a slow run
	}
	return t
}

type times struct {
	path    string
	Seconds map[string]float64
}

func (t *times) save() error {
	b, err := json.Marshal(t.Seconds)
	if err != nil {
		return err
	}
	if err := os.WriteFile(t.path+".new", b, 0o644); err != nil {
		return err
	}
	return os.Rename(t.path+".new", t.path)
}

// command runs a program; what it printed is in the error.
func command(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %.2000s", name, err, out)
	}
	return string(out), nil
}
