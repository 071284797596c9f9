package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dsec/client"
)

// smallFiles of a KiB go up in one call.
const smallFiles = 10_000

// benchFiles measures a large file up and down, and many small ones, against docker cp.
func benchFiles(ctx context.Context, s *session, r *report) error {
	under, err := s.startStreams(ctx, r)
	if err != nil {
		return err
	}
	if err := under.startContainer(ctx); err != nil {
		return err
	}
	b := &files{under}
	return s.runParts(ctx, part{"up", b.up}, part{"down", b.down}, part{"small", b.small})
}

type files struct{ *streams }

const largeFile = "/large"

func (b *files) put(ctx context.Context) error {
	return b.all(b.box.Files("").WriteStream(ctx, largeFile, io.LimitReader(zeros{}, streamBytes), client.WriteOptions{}))
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
	return b.compare("up", "docker cp", func() error { return b.put(ctx) }, func() error { return b.cp(ctx, nil, local, b.container+":"+largeFile) })
}

// down reads it.
func (b *files) down(ctx context.Context) error {
	if err := b.put(ctx); err != nil {
		return err
	}
	if b.docker != nil { // the same there, also where only this part runs
		if _, err := b.docker.run(ctx, append([]string{"exec", b.container}, append(writer(), "of="+largeFile)...)...); err != nil {
			return err
		}
	}
	return b.compare("down", "docker cp", func() error {
		f, err := b.box.Files("").Read(ctx, largeFile, client.ReadOptions{})
		if err != nil {
			return err
		}
		defer f.Close()
		return b.all(f.WriteTo(io.Discard))
	}, func() error { return b.cp(ctx, io.Discard, b.container+":"+largeFile, "-") })
}

func (b *files) cp(ctx context.Context, out io.Writer, from, to string) error {
	cmd := b.docker.command(ctx, "cp", from, to)
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
		out, err := b.p.script(ctx, "files.py", b.box.ID, fmt.Sprint(smallFiles), fmt.Sprint("/small", i))
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
