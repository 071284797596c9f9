package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// smallFiles of a KiB go up in one call.
const smallFiles = 10_000

// benchFiles measures a large file up and down, and many small ones, against docker cp.
func benchFiles(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	b := &files{streams{p: p, r: r, http: &http.Client{Transport: &bearer{p.key, &http.Transport{DisableCompression: true, ReadBufferSize: 256 << 10, WriteBufferSize: 256 << 10}}}}}
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
	}{{"up", b.up}, {"down", b.down}, {"small", b.small}} {
		if s.wants(part.name) {
			if err := part.run(ctx); err != nil {
				return fmt.Errorf("%s: %w", part.name, err)
			}
		}
	}
	return nil
}

type files struct{ streams }

const largeFile = "/large"

func (b *files) file(ctx context.Context, method string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, b.p.url+"/v1/sandboxes/"+b.box+"/files?path="+largeFile, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		r.ContentLength = streamBytes
	}
	res, err := b.http.Do(r)
	if err == nil && res.StatusCode != http.StatusOK {
		content, _ := io.ReadAll(res.Body)
		res.Body.Close()
		err = fmt.Errorf("%s: %s: %s", method, res.Status, content)
	}
	return res, err
}

func (b *files) put(ctx context.Context) error {
	res, err := b.file(ctx, http.MethodPut, io.LimitReader(zeros{}, streamBytes))
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return err
}

// up sends a file, which is hashed and on the sandbox's disk by then.
func (b *files) up(ctx context.Context) error {
	local := filepath.Join(b.p.s.dir, "large")
	f, err := os.Create(local)
	if err != nil {
		return err
	}
	defer os.Remove(local)
	_, err = io.CopyN(f, zeros{}, streamBytes)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return b.compare(ctx, "up", func() error { return b.put(ctx) }, func() error { return b.cp(ctx, nil, local, b.container+":"+largeFile) })
}

// down reads it.
func (b *files) down(ctx context.Context) error {
	if err := b.put(ctx); err != nil {
		return err
	}
	if b.docker != nil { // the same there, also where only this part runs
		cmd := exec.CommandContext(ctx, b.docker.cli, "-H", "unix://"+b.docker.socket, "exec", b.container, "dd", "if=/dev/zero", "of="+largeFile, "bs=1M", fmt.Sprintf("count=%d", streamBytes>>20), "status=none")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return b.compare(ctx, "down", func() error {
		res, err := b.file(ctx, http.MethodGet, nil)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		return b.all(io.CopyBuffer(onlyWriter{io.Discard}, res.Body, make([]byte, 256<<10)))
	}, func() error { return b.cp(ctx, io.Discard, b.container+":"+largeFile, "-") })
}

func (b *files) cp(ctx context.Context, out io.Writer, from, to string) error {
	cmd := exec.CommandContext(ctx, b.docker.cli, "-H", "unix://"+b.docker.socket, "cp", "-q", from, to)
	var errs strings.Builder
	cmd.Stdout, cmd.Stderr = out, &errs
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("docker cp: %w: %s", err, errs.String())
	}
	return nil
}

// small has libdsec write many files in one call.
func (b *files) small(ctx context.Context) error {
	dir := filepath.Join(b.p.s.dir, "small")
	for i := range smallFiles {
		name := filepath.Join(dir, fmt.Sprint(i%100), fmt.Sprint(i))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, make([]byte, 1024), 0o644); err != nil {
			return err
		}
	}
	defer os.RemoveAll(dir)
	var ours, theirs samples
	var parts map[string]float64
	for i := range b.p.s.rounds {
		m, err := b.p.meter()
		if err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, python(), "sdk/python/bench/files.py", b.box, fmt.Sprint(smallFiles), fmt.Sprint("/small", i))
		cmd.Env = b.p.env()
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		var took float64
		if _, err := fmt.Sscan(string(out), &took); err != nil {
			return err
		}
		ours = append(ours, took)
		if parts, err = m.perOp(1); err != nil {
			return err
		}
		if b.docker == nil {
			continue
		}
		start := time.Now()
		if err := b.cp(ctx, nil, dir, fmt.Sprint(b.container, ":/small", i)); err != nil {
			return err
		}
		theirs = append(theirs, time.Since(start).Seconds())
	}
	f := figure{Name: "small", Value: ours.median(), Unit: "s", Samples: len(ours), Spread: ours.spread(), Target: "<= 2 s", Parts: parts, PartUnit: "ms of CPU per call"}
	if b.docker != nil {
		f.Against, f.Baseline, f.Others = "docker cp", theirs.median(), theirs.spread()
	}
	b.r.add(f, true)
	return nil
}
