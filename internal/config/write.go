package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// replace writes data beside path and renames it there, so that a reader sees the old file or the new one and a crash
// leaves one of them.
func replace(path string, data []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".config-*") // with mode 0600
	if err != nil {
		return fmt.Errorf("making a temporary file: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err := keepOwner(f, path); err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("writing: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("syncing: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("closing: %w", err)
	}
	return os.Rename(f.Name(), path)
}

// makeDir makes the missing directories with mode 0700 and gives them the owner of the one that was there.
func makeDir(dir string) error {
	info, err := os.Stat(dir)
	if err == nil {
		if !info.IsDir() {
			return fmt.Errorf("%s is not a directory", dir)
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if parent == dir {
		return err
	}
	if err := makeDir(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return err
	}
	return giveToOwnerOf(parent, func(uid, gid int) error {
		return os.Lchown(dir, uid, gid) // never through a link that took its place
	})
}

// keepOwner gives f the owner of the file that it will replace, else of the directory that it is in.
func keepOwner(f *os.File, path string) error {
	err := giveToOwnerOf(path, f.Chown)
	if errors.Is(err, fs.ErrNotExist) {
		err = giveToOwnerOf(filepath.Dir(path), f.Chown)
	}
	return err
}
