// Package hostprep changes what a host has too little of for many sandboxes, and takes it back exactly.
//
// What surprises:
//
//   - What was before is in a record on disk, durably, before it is changed, and leaves it only after it was restored: whenever
//     this process is killed, Restore finds all that was changed. A second Prepare adds to the record and never overwrites a
//     value that is in it.
//   - Settings and modules end with a reset of the machine, a swap file does not. The record knows the boot it was made in; after
//     another one Restore forgets what is gone by itself, and removes the file.
//   - What somebody else has changed since is left as it is, and said.
package hostprep

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// DefaultRecord is where the command keeps what was before.
const DefaultRecord = "/var/lib/dsec-host.json"

// A Host is what is changed. Tests have one of their own.
type Host struct {
	Sysctls string // /proc/sys
	Record  string // the file with what was before
	BootID  string
	Run     func(ctx context.Context, name string, args ...string) error // a program of the host
	Modules func() (map[string]bool, error)                              // that are loaded

	reached func() // tests: called where a kill of this process is interesting
}

func (h *Host) at() {
	if h.reached != nil {
		h.reached()
	}
}

// Options say what is wanted beside the settings.
type Options struct {
	SwapFile  string // "" for none
	SwapBytes int64
}

// A Change is one thing that Prepare does, or Restore undoes.
type Change struct {
	Kind   string `json:"kind"` // sysctl, module or swap
	Name   string `json:"name"`
	Before string `json:"before"`
	After  string `json:"after"`
	Why    string `json:"why,omitempty"`
	Left   string `json:"left,omitempty"` // of Restore: why it was not undone

	Earlier []string `json:"earlier,omitempty"` // what Prepare has set before After
}

func (c Change) String() string {
	switch c.Kind {
	case kindModule:
		return "module " + c.Name
	case kindSwap:
		return "swap file " + c.Name
	}
	return fmt.Sprintf("%s: %s -> %s", c.Name, c.Before, c.After)
}

const (
	kindSysctl = "sysctl"
	kindModule = "module"
	kindSwap   = "swap"
)

// A need is the least that a setting should be on a node with some thousand sandboxes.
type need struct {
	name  string // as sysctl has it
	least int64
	why   string
}

var needs = []need{
	{"fs.inotify.max_user_instances", 1024, "programs that watch files, in sandboxes that share an id with others of the host"},
	{"fs.mount-max", 1_000_000, "mounts of 4,000 sandboxes and their layers in one namespace"},
	{"kernel.pid_max", 4_194_304, "threads of all sandboxes together"},
	{"kernel.pty.max", 65_536, "terminals of all sandboxes together"},
}

// modules that sandboxes need on some kernels; a module that is built in, or that this kernel has not, is passed over.
var modules = []string{"overlay", "erofs", "loop", "btrfs", "veth", "quota_v2"}

func (h *Host) path(sysctl string) string {
	return filepath.Join(h.Sysctls, strings.ReplaceAll(sysctl, ".", "/"))
}

func (h *Host) read(sysctl string) (string, error) {
	b, err := os.ReadFile(h.path(sysctl))
	return strings.TrimSpace(string(b)), err
}

func (h *Host) write(sysctl, value string) error {
	return os.WriteFile(h.path(sysctl), []byte(value+"\n"), 0o644)
}

// Plan is what Prepare would change, in order.
func (h *Host) Plan(ctx context.Context, o Options) ([]Change, error) {
	rec, err := h.load()
	if err != nil {
		return nil, err
	}
	var plan []Change
	loaded, err := h.Modules()
	if err != nil {
		return nil, err
	}
	for _, m := range modules {
		if !loaded[m] && h.Run(ctx, "modprobe", "--dry-run", "--quiet", m) == nil && !h.builtIn(ctx, m) {
			plan = append(plan, Change{Kind: kindModule, Name: m, Before: "not loaded", After: "loaded", Why: "so that it is there when the first sandbox needs it"})
		}
	}
	for _, n := range needs {
		now, err := h.read(n.name)
		if os.IsNotExist(err) {
			continue // this kernel does not have it
		} else if err != nil {
			return nil, err
		}
		if v, err := strconv.ParseInt(now, 10, 64); err != nil || v >= n.least {
			continue
		}
		plan = append(plan, Change{Kind: kindSysctl, Name: n.name, Before: now, After: strconv.FormatInt(n.least, 10), Why: n.why})
	}
	if o.SwapFile != "" && !rec.has(kindSwap, o.SwapFile) {
		if _, err := os.Lstat(o.SwapFile); err == nil {
			return nil, fmt.Errorf("there is something at %s: name a file that is not there", o.SwapFile)
		}
		plan = append(plan, Change{Kind: kindSwap, Name: o.SwapFile, Before: "not there", After: strconv.FormatInt(o.SwapBytes, 10) + " bytes",
			Why: "memory of paused sandboxes"})
	}
	return plan, nil
}

// builtIn reports whether a module is a part of the kernel: modprobe then has nothing to insert.
func (h *Host) builtIn(ctx context.Context, module string) bool {
	return h.Run(ctx, "sh", "-c", `test -n "$(modprobe --show-depends "$1" 2>/dev/null)" && ! modprobe --show-depends "$1" | grep -q ^insmod`, "sh", module) == nil
}

// Prepare carries out the plan and returns what it changed, also if it fails in the middle.
func (h *Host) Prepare(ctx context.Context, o Options) (done []Change, err error) {
	unlock, err := h.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	plan, err := h.Plan(ctx, o)
	if err != nil {
		return nil, err
	}
	rec, err := h.load()
	if err != nil {
		return nil, err
	}
	for _, c := range plan {
		if err := ctx.Err(); err != nil {
			return done, err
		}
		if rec.note(c) {
			if err := h.save(rec); err != nil {
				return done, err
			}
		}
		h.at()
		if err := h.do(ctx, c, o); err != nil {
			return done, fmt.Errorf("%s: %w", c, err)
		}
		h.at()
		done = append(done, c)
	}
	return done, nil
}

func (h *Host) do(ctx context.Context, c Change, o Options) error {
	switch c.Kind {
	case kindModule:
		return h.Run(ctx, "modprobe", c.Name)
	case kindSwap:
		return h.makeSwap(ctx, c.Name, o.SwapBytes)
	}
	return h.write(c.Name, c.After)
}

func (h *Host) makeSwap(ctx context.Context, path string, bytes int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"fallocate", "--length", strconv.FormatInt(bytes, 10), path}, {"mkswap", path}, {"swapon", path},
	} {
		h.at()
		if err := h.Run(ctx, args[0], args[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// Restore undoes all that Prepare changed, the last first, and returns what it did. What it could not undo has a reason and stays
// in the record, unless somebody else has changed it since: that is theirs.
func (h *Host) Restore(ctx context.Context) (done []Change, err error) {
	unlock, err := h.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	rec, err := h.load()
	if err != nil {
		return nil, err
	}
	for _, c := range slices.Backward(slices.Clone(rec.Changes)) {
		if err := ctx.Err(); err != nil {
			return done, err
		}
		if c.Left, err = h.undo(ctx, c); err != nil {
			return done, fmt.Errorf("undo %s: %w", c, err)
		}
		h.at()
		done = append(done, c)
		rec.forget(c)
		if err := h.save(rec); err != nil {
			return done, err
		}
	}
	return done, h.removeRecord()
}

// undo gives the reason why a change stays.
func (h *Host) undo(ctx context.Context, c Change) (left string, err error) {
	switch c.Kind {
	case kindModule:
		if loaded, err := h.Modules(); err != nil || !loaded[c.Name] {
			return "", err
		}
		if err := h.Run(ctx, "modprobe", "--remove", c.Name); err != nil {
			return "it is in use; it goes with the next reset of the machine", nil
		}
		return "", nil
	case kindSwap:
		if _, err := os.Lstat(c.Name); os.IsNotExist(err) {
			return "", nil
		}
		// A file that never became swap is no swap: the error is what removing says.
		_ = h.Run(ctx, "swapoff", c.Name)
		if used, err := inUse(c.Name); err != nil || used {
			return "", fmt.Errorf("swapoff failed, is there enough memory? (%v)", err)
		}
		return "", os.Remove(c.Name)
	}
	now, err := h.read(c.Name)
	switch {
	case err != nil:
		return "", err
	case now == c.Before:
		return "", nil
	case now != c.After && !slices.Contains(c.Earlier, now):
		return "somebody has set it to " + now + " since", nil
	}
	return "", h.write(c.Name, c.Before)
}

// inUse reports whether a file is swap.
func inUse(path string) (bool, error) {
	b, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(b)) {
		if name, _, _ := strings.Cut(line, " "); name == path {
			return true, nil
		}
	}
	return false, nil
}
