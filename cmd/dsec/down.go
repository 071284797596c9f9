package main

import (
	"cmp"
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
	details: "It also cleans up after a platform that was killed. Images and keys stay unless --purge is given. --data-dir says which platform;\n" +
		"its run directory and context are those that it was started with.\n\n" +
		"  dsec down\n" +
		"  dsec down --purge --json  {\"url\",\"context\",\"config\",\"data_dir\"} of what was ended; url is \"\" if nothing ran",
	setup: setupDown,
}

// downOptions are the flags of `dsec down`.
type downOptions struct {
	platform
	contextName string
	purge       bool
	asJSON      bool
	flags       *flagSet
}

func setupDown(f *flagSet) action {
	o := downOptions{flags: f}
	o.platform.register(f)
	f.BoolVar(&o.purge, "purge", false, "also remove the data directory, and the platform's context in the user's config file")
	f.StringVar(&o.contextName, "context", defaultContext, "`NAME` of the context that --purge removes if it is this platform's")
	jsonFlag(f, &o.asJSON, jsonHelp)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		if err := o.check(); err != nil {
			return err
		}
		return down(ctx, c, &o)
	}
}

func down(ctx context.Context, c *console, o *downOptions) error {
	last, err := o.readState() // also of one that was killed
	if err != nil {
		return err
	}
	if last == nil {
		last = &upState{}
	} else if err := o.agree(last); err != nil {
		return err
	}
	state, err := o.running()
	if err != nil {
		return err
	}
	was := "" // what there was
	if exists(o.dataDir) {
		was = "no platform ran"
	}
	if state != nil {
		if err := endRunning(ctx, c, &o.platform, state); err != nil {
			return err
		}
		was = "dsec is down"
	}
	if o.left() {
		if err := teardownEdge(ctx, &o.platform); err != nil {
			return err
		}
		was = "dsec is down"
	}
	mine, err := o.ownContext(ctx, c, last)
	if err != nil {
		c.say("the contexts are left as they are: %s", userMessage(err))
	}
	report := platformReport{URL: last.URL, Context: mine.name, Config: mine.path, DataDir: o.dataDir}
	if last.URL != "" && was == "dsec is down" {
		was += " at " + last.URL
	}
	if o.purge {
		if err := purgeData(&o.platform); err != nil {
			return err
		}
		if mine.name != "" {
			if err := config.RemoveContext(mine.path, mine.name); err != nil {
				return err
			}
		}
	}
	if mine.other != "" {
		c.say("%s", mine.other)
	}
	switch {
	case o.asJSON:
		return c.printJSON(report)
	case was == "":
		return c.print("there is no platform in %s\n", o.dataDir)
	case o.purge:
		return c.print("%s; %s is removed\n", was, o.dataDir)
	}
	return c.print("%s; images and keys are kept in %s\n", was, o.dataDir)
}

// agree takes run directory and context as `dsec up` had them.
func (o *downOptions) agree(last *upState) error {
	for _, x := range []struct {
		flag string
		have *string
		was  string
	}{{"run-dir", &o.runDir, last.RunDir}, {"context", &o.contextName, last.Context}} {
		if o.flags.given(x.flag) && x.was != "" && *x.have != x.was {
			return usagef("the platform in %s was started with --%s %s, not %s; leave the flag out", o.dataDir, x.flag, x.was, *x.have)
		}
		*x.have = cmp.Or(x.was, *x.have)
	}
	return nil
}

// An ownContext is what the user's config file says of the platform that was ended.
type ownContext struct {
	path, name string // its context, "" if it has none
	other      string // what to tell of the current context, if that is another platform
}

// ownContext looks the platform up in the file that it wrote to, or else the user's. A context is its own if the URL is the one
// at which it served, or if its key opens it.
func (o *downOptions) ownContext(ctx context.Context, c *console, last *upState) (own ownContext, err error) {
	if own.path = last.Config; own.path == "" {
		if own.path, err = configPath(c); err != nil {
			return own, err
		}
	}
	file, err := config.Load(own.path)
	if err != nil {
		return own, err
	}
	isOurs := func(name string) (bool, error) {
		known := file.Contexts[name]
		if known.URL != "" && known.URL == last.URL {
			return true, nil
		}
		return opensWith(ctx, &o.platform, known.APIKey)
	}
	ours, err := isOurs(o.contextName)
	if err != nil {
		return own, err
	}
	if ours {
		own.name = o.contextName
	}
	if file.Current == "" || file.Current == own.name {
		return own, nil
	}
	if ours, err = isOurs(file.Current); err == nil && !ours {
		own.other = fmt.Sprintf("the current context %s is another platform, at %s, which goes on as it was", file.Current, file.Contexts[file.Current].URL)
	}
	return own, err
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
