package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dsec/internal/linux"
)

// maxDepth bounds every walk. Commands have one level below "user"; deeper trees are not ours.
const maxDepth = 16

// removeTree removes a group and the groups below it. The tree is usually a known, shallow one, so it tries the directory
// itself before it looks for children.
func removeTree(dir string) error { return removeTreeTo(dir, maxDepth) }

func removeTreeTo(dir string, depth int) error {
	err := linux.RemoveDir(dir)
	if !linux.IsBusy(err) || depth == 0 {
		return err
	}
	children, listErr := subgroups(dir)
	if listErr != nil {
		return listErr
	}
	if len(children) == 0 {
		return err
	}
	for _, c := range children {
		if err := removeTreeTo(c, depth-1); err != nil {
			return err
		}
	}
	return linux.RemoveDir(dir)
}

func subgroups(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if linux.IsGone(err) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, filepath.Join(dir, e.Name()))
		}
	}
	return dirs, nil
}

// walk calls fn for a group and all groups below it. Groups that vanish meanwhile are skipped.
func walk(dir string, fn func(dir string) error) error { return walkTo(dir, maxDepth, fn) }

func walkTo(dir string, depth int, fn func(dir string) error) error {
	if err := fn(dir); linux.IsGone(err) {
		return nil
	} else if err != nil {
		return err
	}
	if depth == 0 {
		return fmt.Errorf("control groups below %s are nested too deep", dir)
	}
	children, err := subgroups(dir)
	if err != nil {
		return err
	}
	for _, c := range children {
		if err := walkTo(c, depth-1, fn); err != nil {
			return err
		}
	}
	return nil
}

// retry calls try with growing pauses until it reports done, fails, or ctx ends. Notifications of cgroup.events would come
// up to 10 ms late: the kernel limits their rate.
func retry(ctx context.Context, try func() (done bool, err error)) error {
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		done, err := try()
		if done || err != nil {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("processes are still dying: %w", ctx.Err())
		case <-timer.C:
		}
	}
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// flatValue reads one value of a flat-keyed control file.
func flatValue(path, key string) (int64, error) {
	var buf [1024]byte
	b, err := linux.ReadControl(path, buf[:])
	if err != nil {
		return 0, err
	}
	n, err := parseFlat(b, key)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

// parseFlat finds key in lines of "key value".
func parseFlat(b []byte, key string) (int64, error) {
	for line := range strings.Lines(string(b)) {
		k, v, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if !ok || k != key {
			continue
		}
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < 0 {
			return 0, fmt.Errorf("%s is %.40q, no count", key, v)
		}
		return n, nil
	}
	return 0, fmt.Errorf("no %s", key)
}

func readPids(path string) ([]int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parsePids(b)
}

// parsePids parses cgroup.procs. A 0 is a process that this pid namespace does not see; it cannot be acted on from here.
func parsePids(b []byte) ([]int, error) {
	var pids []int
	for field := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.ParseInt(field, 10, 32)
		if err != nil || pid < 0 {
			return nil, fmt.Errorf("%.40q is not a pid", field)
		}
		if pid > 0 {
			pids = append(pids, int(pid))
		}
	}
	return pids, nil
}
