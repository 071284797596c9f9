package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

var upCommand = command{
	name: "up", group: groupPlatform,
	summary: "run the whole platform on this machine",
	details: "The control plane runs in this process, the node agent (edge) as its child. An interrupt ends the platform in order and\n" +
		"leaves nothing. If it is killed, sandboxes go on, and the next `dsec up` finds them.\n\n" +
		"  dsec up --detach                 in the background, returns when it is ready\n" +
		"  dsec up --listen 127.0.0.1:8080  on another port\n" +
		"  dsec up --detach --json          {\"url\",\"context\",\"config\",\"data_dir\"}; in the foreground when it is ready",
	setup: setupUp,
}

// upOptions are the flags of `dsec up`.
type upOptions struct {
	nodeFlags
	listen      string
	contextName string
	portsDomain string
	detach      bool
	asJSON      bool
	readyFD     int
}

func setupUp(f *flagSet) action {
	var o upOptions
	o.nodeFlags.register(f)
	f.StringVar(&o.listen, "listen", defaultListen, "`ADDRESS` of the API; anything but loopback shows it to the network, without TLS")
	f.StringVar(&o.contextName, "context", defaultContext, "`NAME` under which URL and key are written to the user's config file")
	f.StringVar(&o.portsDomain, "ports-domain", "localhost", "`DOMAIN` of the URLs of ports inside; behind a proxy with TLS, https://DOMAIN")
	f.BoolVar(&o.detach, "detach", false, "run in the background and return when the platform is ready")
	f.letter("d", "detach")
	jsonFlag(f, &o.asJSON, jsonHelp)
	f.IntVar(&o.readyFD, "ready-fd", 0, "`NUMBER` of a file descriptor that is told when the platform is ready (used by --detach)")
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		if err := o.check(); err != nil {
			return err
		}
		if o.detach {
			return upDetached(ctx, c, &o)
		}
		return upForeground(ctx, c, &o)
	}
}

// readiness is the one line that a process writes to its starter.
type readiness struct {
	URL   string `json:"url,omitempty"`
	Error string `json:"error,omitempty"`
}

// readinessTo makes the function that tells the starter on descriptor fd, once; 0 = there is none. Nothing else may own the
// descriptor: what was finalised later would close whatever has its number by then.
func readinessTo(fd int) func(readiness) {
	if fd <= 0 {
		return func(readiness) {}
	}
	syscall.CloseOnExec(fd)
	pipe := os.NewFile(uintptr(fd), "ready")
	var once sync.Once
	return func(r readiness) {
		once.Do(func() {
			json.NewEncoder(pipe).Encode(r)
			pipe.Close()
		})
	}
}

// reportUp says which platform runs.
func (c *console) reportUp(s *upState, dataDir, text string, asJSON bool) error {
	if asJSON {
		return c.printJSON(platformReport{s.URL, s.Context, s.Config, dataDir})
	}
	return c.print(text, s.URL)
}

// platformReport is what `dsec up --json` and `dsec down --json` print.
type platformReport struct {
	URL     string `json:"url"`
	Context string `json:"context"`
	Config  string `json:"config"`
	DataDir string `json:"data_dir"`
}

// upDetached starts `dsec up` as a process of its own session and waits until it is ready or has failed.
func upDetached(ctx context.Context, c *console, o *upOptions) error {
	if s, err := o.awaitRunning(ctx); err != nil {
		return err
	} else if s != nil {
		return c.reportUp(s, o.dataDir, "dsec is running at %s\n", o.asJSON)
	}
	if err := os.MkdirAll(filepath.Dir(o.logFile()), 0o700); err != nil {
		return fmt.Errorf("making the log directory: %w", err)
	}
	log, err := os.OpenFile(o.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("opening the log: %w", err)
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("making the readiness pipe: %w", err)
	}
	defer r.Close()
	cmd := exec.Command("/proc/self/exe", append([]string{"up", "--listen", o.listen, "--context", o.contextName, "--ports-domain", o.portsDomain, "--ready-fd", "3"}, o.args()...)...)
	cmd.Args[0] = "dsec"
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return fmt.Errorf("starting dsec up: %w", err)
	}
	answer, err := awaitReady(ctx, r)
	if err != nil {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		return err
	}
	if answer.Error != "" {
		cmd.Wait()
		return sandbox.Errorf(sandbox.Unavailable, "start_failed", "dsec did not start: %s (log: %s)", answer.Error, o.logFile())
	}
	path, err := configPath(c)
	if err != nil {
		return err
	}
	return c.reportUp(&upState{URL: answer.URL, Context: o.contextName, Config: path}, o.dataDir, "dsec is running at %s\n", o.asJSON)
}

// awaitRunning is the `dsec up` that runs, nil if none does. One that starts or stops right now is waited for.
func (p *platform) awaitRunning(ctx context.Context) (*upState, error) {
	for {
		s, err := p.running()
		if err != nil || s == nil || s.URL != "" {
			return s, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitReady reads the readiness line; a process that ends without one has failed.
func awaitReady(ctx context.Context, r *os.File) (readiness, error) {
	lines := make(chan readiness, 1)
	go func() {
		var a readiness
		if err := json.NewDecoder(bufio.NewReader(r)).Decode(&a); err != nil {
			a = readiness{Error: "it ended before it was ready"}
		}
		lines <- a
	}()
	select {
	case a := <-lines:
		return a, nil
	case <-ctx.Done():
		r.Close()
		return readiness{}, context.Cause(ctx)
	}
}

// listenConfig has the kernel notice within a minute that a client's host is gone, which an answer in silence would not.
var listenConfig = net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}}

// upForeground runs the platform until ctx ends.
func upForeground(ctx context.Context, c *console, o *upOptions) (err error) {
	report := readinessTo(o.readyFD)
	defer func() {
		if err != nil {
			report(readiness{Error: err.Error()})
		}
	}()
	release, err := o.lock()
	if errors.Is(err, errLocked) {
		return sandbox.Errorf(sandbox.FailedPrecondition, "already_running", "another dsec up runs on %s; stop it with `dsec down`, or give --data-dir and --run-dir", o.dataDir)
	} else if err != nil {
		return err
	}
	defer release()
	if err := os.Remove(o.stateFile()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing what the last dsec up said of itself: %w", err)
	}
	log, err := newLogger(c.stderr, o.logLevel)
	if err != nil {
		return err
	}
	tuneDaemon(log)
	listener, err := listenConfig.Listen(ctx, "tcp", o.listen)
	if err != nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "cannot_listen", "cannot listen on %s: %v; choose another with --listen", o.listen, err)
	}
	defer listener.Close()
	p, err := openControl(ctx, o, listener.Addr(), log)
	if err != nil {
		return err
	}
	defer p.close()

	// Before there is an edge: what can go wrong here must not be a reason to end sandboxes.
	state := &upState{PID: os.Getpid(), RunDir: o.runDir, Code: p.code, Context: o.contextName}
	state.URL = (&url.URL{Scheme: "http", Host: listener.Addr().String()}).String()
	if state.Config, err = p.writeContext(ctx, c, o.contextName, state.URL); err != nil {
		return err
	}
	kept := exists(o.journal()) // by an edge that did not end in order: its sandboxes live
	edge, err := startEdge(ctx, append(p.edgeArgs(), o.args()...), log)
	if err != nil {
		return err
	}
	ready := false
	defer func() {
		if kept && !ready && ctx.Err() == nil {
			edge.detach()
		} else {
			edge.stop()
		}
	}()
	stopServing := p.serve(listener)
	defer p.close() // undoing creates needs an edge
	defer stopServing()

	if err := o.writeState(state); err != nil {
		return err
	}
	defer os.Remove(o.stateFile())
	ready = true
	log.InfoContext(ctx, "platform is ready", "url", state.URL)
	if o.readyFD == 0 {
		if err := c.reportUp(state, o.dataDir, "dsec is running at %s; interrupt to stop\n", o.asJSON); err != nil {
			log.WarnContext(ctx, "nobody reads where the platform runs", "error", err)
		}
	}
	report(readiness{URL: state.URL})

	select {
	case <-ctx.Done():
		log.Info("stopping")
		return nil
	case err := <-edge.failed:
		return err
	}
}

// timerSlack is by how much a daemon's timers may be late. The runtime's monitor sleeps for 20 µs again and again while
// anything runs: with the usual slack of 50 µs that is a fifth of an idle daemon's CPU time for each request.
const timerSlack = 500 * time.Microsecond

// tuneDaemon sets what the kernel does for this process: late timers, and the last place in the list of the OOM killer.
func tuneDaemon(log *slog.Logger) {
	if err := linux.SetTimerSlack(timerSlack); err != nil {
		log.Warn("the timer slack cannot be set; requests will cost more CPU time", "error", err)
	}
	if err := linux.SpareFromOOM(); err != nil {
		log.Warn("the OOM killer may choose this process before a sandbox's", "error", err)
	}
}
