package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
)

// streamBytes is how much one round moves.
const streamBytes = 1 << 30

// benchStreams measures long streams through the whole platform, with the memory of every hop.
func benchStreams(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	b := &streams{p: p, r: r, http: &http.Client{Transport: &bearer{p.key, &http.Transport{DisableCompression: true, ReadBufferSize: 256 << 10, WriteBufferSize: 256 << 10}}}}
	if b.box, err = p.create(ctx); err != nil {
		return err
	}
	defer func() { _ = p.destroy(context.WithoutCancel(ctx), b.box) }() // the platform ends with everything in it
	if s.docker {
		if b.docker, err = s.startDocker(ctx); err != nil {
			return err
		}
		if b.container, err = b.docker.createCLI(ctx); err != nil {
			return err
		}
	}
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{{"stdout", b.stdout}, {"stdin", b.stdin}, {"python", b.python}} {
		if s.wants(part.name) {
			if err := part.run(ctx); err != nil {
				return fmt.Errorf("%s: %w", part.name, err)
			}
		}
	}
	return nil
}

// streams is a sandbox, and a container to compare it with.
type streams struct {
	p         *platform
	r         *report
	http      *http.Client
	box       string
	docker    *docker
	container string
}

// writer and reader are the programs inside: they cost as little as a program can.
func writer() []string {
	return []string{"dd", "if=/dev/zero", "bs=1M", fmt.Sprintf("count=%d", streamBytes>>20), "status=none"}
}

func reader() []string {
	return []string{"dd", "of=/dev/null", "bs=1M", "iflag=fullblock", "status=none"}
}

// stdout reads what a command writes.
func (b *streams) stdout(ctx context.Context) error {
	return b.compare(ctx, "stdout", func() error {
		id, err := b.start(ctx, writer(), false)
		if err != nil {
			return err
		}
		res, err := b.request(ctx, http.MethodGet, id, "stdout?follow=1", nil)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		return b.all(io.CopyBuffer(onlyWriter{io.Discard}, res.Body, make([]byte, 256<<10)))
	}, func() error {
		cmd := exec.CommandContext(ctx, b.docker.cli, append([]string{"-H", "unix://" + b.docker.socket, "exec", b.container}, writer()...)...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		err = b.all(io.CopyBuffer(onlyWriter{io.Discard}, out, make([]byte, 256<<10)))
		return errors.Join(err, cmd.Wait())
	})
}

// stdin writes what a command reads.
func (b *streams) stdin(ctx context.Context) error {
	return b.compare(ctx, "stdin", func() error {
		id, err := b.start(ctx, reader(), true)
		if err != nil {
			return err
		}
		res, err := b.request(ctx, http.MethodPut, id, "stdin?close=1", io.LimitReader(zeros{}, streamBytes))
		if err != nil {
			return err
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return err
	}, func() error {
		cmd := exec.CommandContext(ctx, b.docker.cli, append([]string{"-H", "unix://" + b.docker.socket, "exec", "-i", b.container}, reader()...)...)
		cmd.Stdin = io.LimitReader(zeros{}, streamBytes)
		return cmd.Run()
	})
}

// compare measures both sides in turn, and the memory of our hops.
func (b *streams) compare(ctx context.Context, name string, ours, theirs func() error) error {
	var speed, base samples
	var parts map[string]float64
	memory := map[string]samples{}
	for range b.p.s.rounds {
		m, err := b.p.meter()
		if err != nil {
			return err
		}
		hops, err := b.p.watchMemory()
		if err != nil {
			return err
		}
		took, err := timed(ours)
		if err != nil {
			return err
		}
		speed = append(speed, took)
		if parts, err = m.perOp(1); err != nil {
			return err
		}
		for hop, mib := range hops.grown() {
			memory[hop] = append(memory[hop], mib)
		}
		if b.docker == nil {
			continue
		}
		if took, err = timed(theirs); err != nil {
			return fmt.Errorf("docker: %w", err)
		}
		base = append(base, took)
	}
	f := figure{Name: name, Value: speed.median(), Unit: "MB/s", Samples: len(speed), Spread: speed.spread(), Target: ">= 400 MB/s",
		Parts: parts, PartUnit: "ms of CPU per GiB"}
	if b.docker != nil {
		f.Against, f.Baseline, f.Others = "docker exec", base.median(), base.spread()
	}
	b.r.add(f, false)
	for _, hop := range []string{cpuUp, cpuEdge, cpuAether} {
		b.r.add(figure{Name: name + "_memory_" + hop, Value: memory[hop].quantile(1), Unit: "MiB", Samples: len(memory[hop]), Spread: memory[hop].spread(), Target: "<= 32 MiB"}, true)
	}
	return nil
}

// python has libdsec read the same stream.
func (b *streams) python(ctx context.Context) error {
	var speed samples
	for range b.p.s.rounds {
		cmd := exec.CommandContext(ctx, python(), append([]string{"sdk/python/bench/streams.py", b.box, fmt.Sprint(streamBytes)}, writer()...)...)
		cmd.Env = b.p.env()
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		var mbs float64
		if _, err := fmt.Sscan(string(out), &mbs); err != nil {
			return err
		}
		speed = append(speed, mbs)
	}
	b.r.add(figure{Name: "python_stdout", Value: speed.median(), Unit: "MB/s", Samples: len(speed), Spread: speed.spread()}, false)
	return nil
}

// timed is the speed of one round, in MB/s.
func timed(f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return streamBytes / 1e6 / time.Since(start).Seconds(), err
}

func (b *streams) start(ctx context.Context, argv []string, stdin bool) (string, error) {
	res, err := b.p.sandboxes.Exec(ctx, connect.NewRequest(&dsecv1.ExecRequest{SandboxId: b.box, Command: &dsecv1.Command{Argv: argv, StdinFollows: stdin}}))
	if err != nil {
		return "", fmt.Errorf("exec: %w", err)
	}
	return res.Msg.GetResult().GetCommandId(), nil
}

func (b *streams) request(ctx context.Context, method, command, what string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, b.p.url+"/v1/sandboxes/"+b.box+"/commands/"+url.PathEscape(command)+"/"+what, body)
	if err != nil {
		return nil, err
	}
	res, err := b.http.Do(r)
	if err == nil && res.StatusCode != http.StatusOK {
		content, _ := io.ReadAll(res.Body)
		res.Body.Close()
		err = fmt.Errorf("%s %s: %s: %s", method, what, res.Status, content)
	}
	return res, err
}

func (b *streams) all(n int64, err error) error {
	if err == nil && n != streamBytes {
		err = fmt.Errorf("%d bytes of %d", n, streamBytes)
	}
	return err
}

// onlyWriter hides that io.Discard reads for itself, in small pieces.
type onlyWriter struct{ io.Writer }

type zeros struct{}

// Read gives zeros.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// hopMemory is what the processes on the way held before.
type hopMemory struct {
	pids   map[string]int
	before map[string]int64
}

// watchMemory begins to look for the highest resident memory of every hop.
func (p *platform) watchMemory() (*hopMemory, error) {
	h := &hopMemory{pids: map[string]int{cpuUp: p.up, cpuEdge: p.edge}, before: map[string]int64{}}
	children, err := childrenOf(p.edge)
	if err != nil {
		return nil, err
	}
	for _, pid := range children {
		if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); strings.TrimSpace(string(name)) == "aether" {
			h.pids[cpuAether] = pid
		}
	}
	for hop, pid := range h.pids {
		const resetPeak = "5"
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte(resetPeak), 0); err != nil {
			return nil, err
		}
		h.before[hop] = residentPeak(pid)
	}
	return h, nil
}

// grown is by how many MiB each hop's memory grew at most.
func (h *hopMemory) grown() map[string]float64 {
	out := map[string]float64{}
	for hop, pid := range h.pids {
		out[hop] = float64(residentPeak(pid)-h.before[hop]) / mib
	}
	return out
}

func residentPeak(pid int) int64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // a process that is gone has no memory
	return kilobytes(b, "VmHWM")
}
