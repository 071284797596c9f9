package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

// streamBytes is how much one round moves.
const streamBytes = 1 << 30

// benchStreams measures long streams through the whole platform, with the memory of every hop.
func benchStreams(ctx context.Context, s *session, r *report) error {
	b, err := s.startStreams(ctx, r)
	if err != nil {
		return err
	}
	if err := b.startContainer(ctx); err != nil {
		return err
	}
	return s.runParts(ctx, part{"stdout", b.stdout}, part{"stdin", b.stdin}, part{"python", b.python})
}

// streams is a sandbox, and a container to compare it with.
type streams struct {
	p         *platform
	r         *report
	box       *client.Sandbox
	docker    *docker // nil = nothing is compared
	container string
}

// startStreams starts a platform with a sandbox, which ends with it.
func (s *session) startStreams(ctx context.Context, r *report) (*streams, error) {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return nil, err
	}
	id, err := p.create(ctx)
	if err != nil {
		return nil, err
	}
	return &streams{p: p, r: r, box: p.client.Sandbox(id)}, nil
}

// startContainer starts what it is compared with, if it is.
func (b *streams) startContainer(ctx context.Context) (err error) {
	if !b.p.s.docker {
		return nil
	}
	if b.docker, err = b.p.s.startDocker(ctx); err != nil {
		return err
	}
	b.container, err = b.docker.createCLI(ctx)
	return err
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
	return b.compare("stdout", "docker exec", func() error {
		k, err := b.box.Start(ctx, &dsecv1.Command{Argv: writer()})
		if err != nil {
			return err
		}
		out := k.Output(ctx, client.Stdout, client.OutputOptions{Follow: true})
		defer out.Close()
		return b.all(out.WriteTo(io.Discard))
	}, func() error {
		cmd := b.docker.command(ctx, append([]string{"exec", b.container}, writer()...)...)
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
	return b.compare("stdin", "docker exec", func() error {
		k, err := b.box.Start(ctx, &dsecv1.Command{Argv: reader(), StdinFollows: true})
		if err != nil {
			return err
		}
		in := k.Stdin(ctx, 0)
		if err := b.all(io.CopyBuffer(in, io.LimitReader(zeros{}, streamBytes), make([]byte, client.StdinChunk))); err != nil {
			return err
		}
		return in.Close()
	}, func() error {
		cmd := b.docker.command(ctx, append([]string{"exec", "-i", b.container}, reader()...)...)
		cmd.Stdin = io.LimitReader(zeros{}, streamBytes)
		return cmd.Run()
	})
}

// compare measures both sides in turn, and the memory of our hops.
func (b *streams) compare(name, against string, ours, theirs func() error) error {
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
		f.Against, f.Baseline, f.Others = against, base.median(), base.spread()
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
		out, err := b.p.script(ctx, "streams.py", append([]string{b.box.ID, fmt.Sprint(streamBytes)}, writer()...)...)
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
