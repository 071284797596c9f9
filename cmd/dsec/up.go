package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
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
		"  dsec up --listen 127.0.0.1:8080  on another port",
	setup: setupUp,
}

// upOptions are the flags of `dsec up`.
type upOptions struct {
	platform
	listen       string
	contextName  string
	detach       bool
	maxSandboxes int
	keepEnded    time.Duration
	poolBytes    byteCount
	logLevel     string
	readyFD      int
}

func setupUp(f *flagSet) action {
	var o upOptions
	o.platform.register(f)
	f.StringVar(&o.listen, "listen", defaultListen, "`address` of the API; anything but loopback shows it to the network, without TLS")
	f.StringVar(&o.contextName, "context", "local", "`name` under which URL and key are written to the user's config file")
	f.BoolVar(&o.detach, "detach", false, "run in the background and return when the platform is ready")
	f.letter("d", "detach")
	f.IntVar(&o.maxSandboxes, "max-sandboxes", 4000, "most sandboxes on this machine")
	f.DurationVar(&o.keepEnded, "keep-ended", 0, "how long a sandbox that has ended is remembered, with its output (default 10m)")
	f.Var(&o.poolBytes, "pool-size", "`size` of the pool of writable layers, e.g. 200g (default: half of the free disk)")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.IntVar(&o.readyFD, "ready-fd", 0, "file descriptor that is told when the platform is ready (used by --detach)")
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

// readiness is the one line that a detached `dsec up` writes to its starter.
type readiness struct {
	URL   string `json:"url,omitempty"`
	Error string `json:"error,omitempty"`
}

// upDetached starts `dsec up` as a process of its own session and waits until it is ready or has failed.
func upDetached(ctx context.Context, c *console, o *upOptions) error {
	if s, err := o.running(); err != nil {
		return err
	} else if s != nil && s.URL != "" {
		fmt.Fprintf(c.stdout, "dsec is running at %s\n", s.URL)
		return nil
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
	cmd := exec.Command("/proc/self/exe", "up", "--listen", o.listen, "--context", o.contextName, "--data-dir", o.dataDir, "--run-dir", o.runDir,
		"--max-sandboxes", strconv.Itoa(o.maxSandboxes), "--keep-ended", o.keepEnded.String(), "--log-level", o.logLevel, "--ready-fd", "3")
	if o.poolBytes > 0 {
		cmd.Args = append(cmd.Args, "--pool-size", o.poolBytes.String())
	}
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
	fmt.Fprintf(c.stdout, "dsec is running at %s\n", answer.URL)
	return nil
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

// upForeground runs the platform until ctx ends.
func upForeground(ctx context.Context, c *console, o *upOptions) (err error) {
	report := func(readiness) {}
	if o.readyFD > 0 {
		pipe := os.NewFile(uintptr(o.readyFD), "ready")
		report = func(r readiness) {
			json.NewEncoder(pipe).Encode(r)
			pipe.Close()
			report = func(readiness) {}
		}
		defer func() {
			if err != nil {
				report(readiness{Error: err.Error()})
			}
		}()
	}
	release, err := o.lock()
	if errors.Is(err, errLocked) {
		return sandbox.Errorf(sandbox.FailedPrecondition, "already_running", "another dsec up runs on %s; stop it with `dsec down`, or give --data-dir and --run-dir", o.dataDir)
	} else if err != nil {
		return err
	}
	defer release()
	log, err := newLogger(c.stderr, o.logLevel)
	if err != nil {
		return err
	}
	relaxTimers(log)
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "cannot_listen", "cannot listen on %s: %v; choose another with --listen", o.listen, err)
	}
	defer listener.Close()
	p, err := openControl(ctx, o, log)
	if err != nil {
		return err
	}
	defer p.close()

	args := append(p.edgeArgs(), "--max-sandboxes", strconv.Itoa(o.maxSandboxes), "--keep-ended", o.keepEnded.String())
	if o.poolBytes > 0 {
		args = append(args, "--pool-size", o.poolBytes.String())
	}
	edge, err := startEdge(ctx, o, args, log)
	if err != nil {
		return err
	}
	defer edge.stop()
	stopServing := p.serve(listener)
	defer p.close() // undoing creates needs an edge
	defer stopServing()

	address := (&url.URL{Scheme: "http", Host: listener.Addr().String()}).String()
	if err := p.writeContext(ctx, c, o.contextName, address); err != nil {
		return err
	}
	if err := o.writeState(upState{PID: os.Getpid(), URL: address, RunDir: o.runDir, Code: p.code, Key: o.contextName}); err != nil {
		return err
	}
	defer os.Remove(o.stateFile())
	log.InfoContext(ctx, "platform is ready", "url", address)
	if o.readyFD == 0 {
		fmt.Fprintf(c.stdout, "dsec is running at %s; interrupt to stop\n", address)
	}
	report(readiness{URL: address})

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

func relaxTimers(log *slog.Logger) {
	if err := linux.SetTimerSlack(timerSlack); err != nil {
		log.Warn("the timer slack cannot be set; requests will cost more CPU time", "error", err)
	}
}

func newLogger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usagef("--log-level %q: it is debug, info, warn or error", level)
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l})), nil
}

// ---- the edge as a child ------------------------------------------------------------------------------------------------

// An edgeChild is the supervised edge. It is started again whenever it dies; sandboxes do not notice.
type edgeChild struct {
	failed      chan error   // it does not start any more
	pid         atomic.Int64 // of the present process
	stopReaping func()
	cancel      context.CancelFunc
	done        chan struct{}
}

const (
	edgeStartTimeout = 2 * time.Minute // a recovery of thousands of sandboxes, a pool to make
	edgeStopTimeout  = 3 * time.Minute
	edgeRestartDelay = 200 * time.Millisecond
	edgeMaxFailures  = 5 // starts in a row that failed
)

// startEdge starts the edge and returns once it serves.
func startEdge(ctx context.Context, o *upOptions, args []string, log *slog.Logger) (*edgeChild, error) {
	supervised, cancel := context.WithCancel(context.Background())
	e := &edgeChild{failed: make(chan error, 1), cancel: cancel, done: make(chan struct{})}
	// Sandboxes of an edge that died are our children until the next edge ends them.
	stopReaping, err := linux.AdoptOrphans(func(pid int) bool {
		edge := e.pid.Load()
		return edge == 0 || int64(pid) == edge // 0: one is being started
	})
	if err != nil {
		cancel()
		return nil, err
	}
	e.stopReaping = stopReaping
	spawn := func(ctx context.Context) (*edgeProcess, error) { return spawnEdge(ctx, o, args, &e.pid) }
	first, err := spawn(ctx)
	if err != nil {
		cancel()
		stopReaping()
		return nil, err
	}
	go e.supervise(supervised, first, spawn, log)
	return e, nil
}

func (e *edgeChild) supervise(ctx context.Context, p *edgeProcess, spawn func(context.Context) (*edgeProcess, error), log *slog.Logger) {
	defer close(e.done)
	failures := 0
	for {
		if p != nil {
			select {
			case err := <-p.ended:
				log.Error("edge ended; starting it again", "error", err)
			case <-ctx.Done():
				p.shutdown(log)
				return
			}
		}
		select {
		case <-time.After(edgeRestartDelay << failures):
		case <-ctx.Done():
			endWithoutEdge(spawn, log)
			return
		}
		next, err := spawn(ctx)
		if p = next; err == nil {
			failures = 0
			continue
		}
		if ctx.Err() != nil {
			endWithoutEdge(spawn, log)
			return
		}
		log.Error("edge did not start", "error", err)
		if failures++; failures == edgeMaxFailures {
			e.failed <- fmt.Errorf("starting the edge again: %w", err)
			return
		}
	}
}

// endWithoutEdge ends in order where the edge has died and what it made has not: one more edge finds it and ends it.
func endWithoutEdge(spawn func(context.Context) (*edgeProcess, error), log *slog.Logger) {
	p, err := spawn(context.Background())
	if err != nil {
		log.Error("edge did not start to end what the last one left; `dsec down` does it", "error", err)
		return
	}
	p.shutdown(log)
}

// stop ends the edge in order: with all sandboxes, and everything it made on this host.
func (e *edgeChild) stop() {
	e.cancel()
	<-e.done
	e.stopReaping()
}

type edgeProcess struct {
	cmd    *exec.Cmd
	parent *os.File // while it is open, the edge has a parent
	ended  chan error
}

// spawnEdge starts one edge process and waits until it serves.
func spawnEdge(ctx context.Context, o *upOptions, args []string, pid *atomic.Int64) (*edgeProcess, error) {
	parentRead, parentWrite, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making the parent pipe: %w", err)
	}
	defer parentRead.Close()
	readyRead, readyWrite, err := os.Pipe()
	if err != nil {
		parentWrite.Close()
		return nil, fmt.Errorf("making the readiness pipe: %w", err)
	}
	defer readyRead.Close()
	cmd := exec.Command("/proc/self/exe", append([]string{"edge", "--data-dir", o.dataDir, "--run-dir", o.runDir, "--log-level", o.logLevel, "--ready-fd", "3"}, args...)...)
	cmd.Args[0] = "dsec"
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = parentRead, os.Stderr, os.Stderr, []*os.File{readyWrite}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is ours to handle
	pid.Store(0)
	err = cmd.Start()
	readyWrite.Close()
	if err != nil {
		parentWrite.Close()
		return nil, fmt.Errorf("starting the edge: %w", err)
	}
	pid.Store(int64(cmd.Process.Pid))
	p := &edgeProcess{cmd: cmd, parent: parentWrite, ended: make(chan error, 1)}
	go func() { p.ended <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, edgeStartTimeout)
	defer cancel()
	answer, err := awaitReady(ctx, readyRead)
	if err == nil && answer.Error == "" {
		return p, nil
	}
	parentWrite.Close() // it detaches and ends
	select {
	case <-p.ended:
	case <-time.After(10 * time.Second):
		cmd.Process.Kill()
		<-p.ended
	}
	if err != nil {
		return nil, err
	}
	return nil, sandbox.Errorf(sandbox.Unavailable, "edge_failed", "the edge did not start: %s", answer.Error)
}

func (p *edgeProcess) shutdown(log *slog.Logger) {
	defer p.parent.Close()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-p.ended:
		if err != nil {
			log.Error("edge ended with an error", "error", err)
		}
	case <-time.After(edgeStopTimeout):
		log.Error("edge does not end; killing it", "timeout", edgeStopTimeout)
		p.cmd.Process.Kill()
		<-p.ended
	}
}
