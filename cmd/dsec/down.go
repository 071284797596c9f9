package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"dsec/internal/config"
)

var downCommand = command{
	name: "down", group: groupPlatform,
	summary: "end the platform on this machine, with all its sandboxes",
	details: "It also cleans up after a platform that was killed. Images and keys stay unless --purge is given.",
	setup:   setupDown,
}

func setupDown(f *flagSet) action {
	var p platform
	p.register(f)
	purge := f.Bool("purge", false, "also remove the data directory and the context in the user's config file")
	contextName := f.String("context", "local", "`name` of the context that --purge removes")
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		if err := p.check(); err != nil {
			return err
		}
		return down(ctx, c, &p, *purge, *contextName)
	}
}

func down(ctx context.Context, c *console, p *platform, purge bool, contextName string) error {
	state, err := p.running()
	if err != nil {
		return err
	}
	if state != nil {
		if err := endRunning(ctx, c, p, state); err != nil {
			return err
		}
	}
	if p.left() {
		if err := teardownEdge(ctx, p); err != nil {
			return err
		}
	}
	if !purge {
		fmt.Fprintln(c.stdout, "dsec is down; images and keys are kept in", p.dataDir)
		return nil
	}
	if err := purgeData(p); err != nil {
		return err
	}
	path, err := config.Path(c.getenv)
	if err == nil {
		err = config.RemoveContext(path, contextName)
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(c.stdout, "dsec is down and removed")
	return nil
}

// left reports whether an edge may have left something on this host: ending in order removes both the journal and the run
// directory.
func (p *platform) left() bool { return exists(p.journal()) || p.ownsRunDir() }

// endRunning asks the running `dsec up` to end and waits until its lock is free.
func endRunning(ctx context.Context, c *console, p *platform, state *upState) error {
	asked, start, said := 0, time.Now(), time.Now()
	for {
		if state.PID != 0 && state.PID != asked {
			if err := syscall.Kill(state.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("asking dsec up (pid %d) to end: %w", state.PID, err)
			}
			asked = state.PID
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
		var err error
		if state, err = p.running(); err != nil || state == nil {
			return err
		}
		if time.Since(said) > 2*time.Second {
			fmt.Fprintf(c.stderr, "waiting for sandboxes to end (%.0f s)\n", time.Since(start).Seconds())
			said = time.Now()
		}
	}
}

// purgeData removes the data directory, which must be one of ours.
func purgeData(p *platform) error {
	entries, err := os.ReadDir(p.dataDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading the data directory: %w", err)
	}
	ours := map[string]bool{"dsec.db": true, "dsec.db-wal": true, "dsec.db-shm": true, "store": true, "edge": true, "log": true, "lock": true, "up.json": true, "up.json.new": true}
	for _, e := range entries {
		if !ours[e.Name()] {
			return usagef("%s holds %q, which is not dsec's; nothing was removed: look at it and remove the directory by hand", p.dataDir, e.Name())
		}
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(p.dataDir, e.Name())); err != nil {
			return fmt.Errorf("removing the data directory: %w", err)
		}
	}
	return os.Remove(p.dataDir)
}
