package main

import (
	"io"
	"log/slog"
	"strconv"
	"time"
)

// nodeFlags are the flags of `dsec up` that it hands on: to itself in the background, and to its edge.
type nodeFlags struct {
	platform
	maxSandboxes int
	keepEnded    time.Duration
	poolBytes    byteCount
	logLevel     string
}

func (o *nodeFlags) register(f *flagSet) {
	o.platform.register(f)
	f.IntVar(&o.maxSandboxes, "max-sandboxes", 4000, "most sandboxes on this machine")
	f.DurationVar(&o.keepEnded, "keep-ended", 0, "how long a sandbox that has ended is remembered, with its output (default 10m)")
	f.Var(&o.poolBytes, "pool-size", "`size` of the pool of writable layers, e.g. 200g (default: half of the free disk)")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
}

// check refuses what cannot work, before anything is made.
func (o *nodeFlags) check() error {
	if o.maxSandboxes < 1 {
		return usagef("--max-sandboxes %d: it is a number from 1 on", o.maxSandboxes)
	}
	if o.keepEnded < 0 {
		return usagef("--keep-ended %v: it is a duration like 10m", o.keepEnded)
	}
	if _, err := newLogger(io.Discard, o.logLevel); err != nil {
		return err
	}
	return o.platform.check()
}

// args are the same flags for another process.
func (o *nodeFlags) args() []string {
	args := []string{"--data-dir", o.dataDir, "--run-dir", o.runDir,
		"--max-sandboxes", strconv.Itoa(o.maxSandboxes), "--keep-ended", o.keepEnded.String(), "--log-level", o.logLevel}
	if o.poolBytes > 0 {
		args = append(args, "--pool-size", o.poolBytes.String())
	}
	return args
}

func newLogger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usagef("--log-level %q: it is debug, info, warn or error", level)
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l})), nil
}
