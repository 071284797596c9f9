package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// Where a platform on this machine keeps its things, unless told otherwise.
const (
	defaultDataDir = "/var/lib/dsec"
	defaultRunDir  = "/run/dsec"
	defaultListen  = "127.0.0.1:7070"
	defaultContext = "local"
)

// A platform is one `dsec up` on this machine: its directories are its identity.
type platform struct {
	dataDir string // what outlives a reboot: rows, blobs, identity; and the pool of writable layers
	runDir  string // what does not: sockets and mounts
}

// register adds the flags that every command for a local platform has.
func (p *platform) register(f *flagSet) {
	f.StringVar(&p.dataDir, "data-dir", defaultDataDir, "`DIR` of rows, images and writable layers")
	f.StringVar(&p.runDir, "run-dir", defaultRunDir, "`DIR` of sockets and mounts; a tmpfs is mounted there")
}

// check makes the directories absolute and refuses what cannot work, before anything is made.
func (p *platform) check() error {
	if os.Geteuid() != 0 {
		return sandbox.Errorf(sandbox.PermissionDenied, "not_root", "running sandboxes on this machine needs root: run it as root or with sudo")
	}
	for _, dir := range []*string{&p.dataDir, &p.runDir} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return fmt.Errorf("resolving %s: %w", *dir, err)
		}
		*dir = abs
	}
	if p.dataDir == p.runDir {
		return usagef("--data-dir and --run-dir must differ: the run directory is a tmpfs")
	}
	return nil
}

func (p *platform) database() string    { return filepath.Join(p.dataDir, "dsec.db") }
func (p *platform) storeDir() string    { return filepath.Join(p.dataDir, "store") }
func (p *platform) edgeDir() string     { return filepath.Join(p.dataDir, "edge") }
func (p *platform) journal() string     { return filepath.Join(p.edgeDir(), "journal") }
func (p *platform) logFile() string     { return filepath.Join(p.dataDir, "log", "dsec.log") }
func (p *platform) lockFile() string    { return filepath.Join(p.dataDir, "lock") }
func (p *platform) stateFile() string   { return filepath.Join(p.dataDir, "up.json") }
func (p *platform) runLock() string     { return filepath.Join(p.runDir, "lock") }
func (p *platform) edgeSocket() string  { return filepath.Join(p.runDir, "edge.sock") }
func (p *platform) bytesSocket() string { return filepath.Join(p.runDir, "bytes.sock") }

// upState is what a running `dsec up` says of itself. It counts only while the lock is held.
type upState struct {
	PID     int              `json:"pid"`
	Started uint64           `json:"started"` // when the process did, as linux.StartTime has it: numbers are used again
	URL     string           `json:"url"`
	RunDir  string           `json:"run_dir"`
	Code    sandbox.EdgeCode `json:"code"`
	Context string           `json:"context"` // of the user's config file: it holds the key
	Config  string           `json:"config"`  // that file
}

// lock makes this process the only one that runs the platform. The kernel gives the lock back when the process ends,
// however it ends.
func (p *platform) lock() (release func(), err error) {
	if err := os.MkdirAll(p.dataDir, 0o711); err != nil {
		return nil, fmt.Errorf("making the data directory: %w", err)
	}
	return lockFile(p.lockFile())
}

// running says which `dsec up` runs the platform, if one does.
func (p *platform) running() (*upState, error) {
	if _, err := os.Stat(p.lockFile()); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	release, err := lockFile(p.lockFile())
	if err == nil {
		release()
		return nil, nil
	}
	if !errors.Is(err, errLocked) {
		return nil, err
	}
	s, err := p.readState()
	if err != nil || s == nil {
		return &upState{}, err // it starts or stops right now
	}
	if started, err := linux.StartTime(s.PID); err != nil || (started != s.Started && s.Started != 0) { // 0: an older dsec does not say
		return &upState{}, nil // what one that was killed said of itself: the next one starts right now
	}
	return s, nil
}

// readState reads what a `dsec up` said of itself, which may have been killed since. nil if there is nothing.
func (p *platform) readState() (*upState, error) {
	b, err := os.ReadFile(p.stateFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the state of the platform: %w", err)
	}
	var s upState
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("reading %s: %w", p.stateFile(), err)
	}
	return &s, nil
}

// writeState says that this process runs the platform.
func (p *platform) writeState(s *upState) (err error) {
	if s.Started, err = linux.StartTime(s.PID); err != nil {
		return fmt.Errorf("reading when this process started: %w", err)
	}
	b, err := json.Marshal(s)
	if err == nil {
		err = os.WriteFile(p.stateFile()+".new", b, 0o600)
	}
	if err == nil {
		err = os.Rename(p.stateFile()+".new", p.stateFile())
	}
	if err != nil {
		return fmt.Errorf("writing the state of the platform: %w", err)
	}
	return nil
}
