package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// An edgeChild is the supervised edge. It is started again whenever it dies; sandboxes do not notice.
type edgeChild struct {
	failed      chan error   // it does not start any more
	pid         atomic.Int64 // of the present process
	keep        atomic.Bool  // leave the sandboxes to the next edge
	stopReaping func()
	cancel      context.CancelFunc
	done        chan struct{}
}

const (
	edgeStartTimeout = 2 * time.Minute // a recovery of thousands of sandboxes, a pool to make
	edgeStopTimeout  = 3 * time.Minute
	edgeLeaveTimeout = 10 * time.Second // it detaches
	edgeRestartDelay = 200 * time.Millisecond
	edgeMaxFailures  = 5 // starts in a row that failed
)

// startEdge starts the edge and returns once it serves. If ctx ends before, nothing is left of it, nor of an earlier one.
func startEdge(ctx context.Context, args []string, log *slog.Logger) (*edgeChild, error) {
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
	spawn := func(ctx context.Context) (*edgeProcess, error) { return spawnEdge(ctx, args, &e.pid) }
	first, err := spawn(ctx)
	if err != nil {
		if ctx.Err() != nil {
			endWithoutEdge(spawn, log)
		}
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
				if e.keep.Load() {
					p.leave()
				} else {
					p.shutdown(log)
				}
				return
			}
		}
		select {
		case <-time.After(edgeRestartDelay << failures):
		case <-ctx.Done():
			if !e.keep.Load() {
				endWithoutEdge(spawn, log)
			}
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

// detach ends the edge and leaves its sandboxes to the next one.
func (e *edgeChild) detach() {
	e.keep.Store(true)
	e.stop()
}

type edgeProcess struct {
	cmd    *exec.Cmd
	parent *os.File // while it is open, the edge has a parent
	ended  chan error
}

// spawnEdge starts one edge process and waits until it serves.
func spawnEdge(ctx context.Context, args []string, pid *atomic.Int64) (*edgeProcess, error) {
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
	cmd := exec.Command("/proc/self/exe", append([]string{"edge", "--ready-fd", "3"}, args...)...)
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
	p.leave()
	if err != nil {
		return nil, err
	}
	return nil, sandbox.Errorf(sandbox.Unavailable, "edge_failed", "the edge did not start: %s", answer.Error)
}

// leave closes the edge's parent: it detaches and ends.
func (p *edgeProcess) leave() {
	p.parent.Close()
	select {
	case <-p.ended:
	case <-time.After(edgeLeaveTimeout):
		p.cmd.Process.Kill()
		<-p.ended
	}
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
