package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/internal/config"
)

// image is what every sandbox and every container of a comparison is made of.
const image = "debian-python:12"

// A platform is a `dsec up` of the benchmark's own.
type platform struct {
	s        *session
	up, edge int // pids
	config   string
	client   *client.Client
}

// startPlatform starts one and gives it the image. extra are more of its flags.
func (s *session) startPlatform(ctx context.Context, extra ...string) (*platform, error) {
	p := &platform{s: s, config: filepath.Join(s.dir, "config.json")}
	ready, told, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	log, err := os.Create(filepath.Join(s.dir, "dsec.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	runDir := filepath.Join(s.runDir, "r")
	args := []string{"up", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(s.dir, "data"), "--run-dir", runDir,
		"--pool-size", "8g", "--log-level", "warn", "--ready-fd", "3"}
	cmd := exec.Command(filepath.Join(s.bin, "dsec"), append(args, extra...)...)
	cmd.Env = p.env()
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{told}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is ours to handle
	err = cmd.Start()
	told.Close()
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	s.later(func() error { return endProcess(cmd.Process, "dsec up", done) })
	var answer struct{ URL, Error string }
	if err := json.NewDecoder(ready).Decode(&answer); err != nil || answer.URL == "" {
		content, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("dsec up did not start: %w %s\n%s", err, answer.Error, content)
	}
	p.up = cmd.Process.Pid
	children, err := childrenOf(p.up)
	if err != nil || len(children) != 1 {
		return nil, fmt.Errorf("dsec up has children %v, wanted the edge alone: %w", children, err)
	}
	p.edge = children[0]
	if err := p.connect(answer.URL); err != nil {
		return nil, err
	}
	return p, p.makeImage(ctx)
}

// env is the environment of what shall use this platform, and no other that the caller may have chosen.
func (p *platform) env() []string {
	env := slices.DeleteFunc(os.Environ(), func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return slices.Contains([]string{config.EnvPath, config.EnvURL, config.EnvAPIKey, config.EnvContext}, name)
	})
	return append(env, config.EnvPath+"="+p.config)
}

// connect prepares a client that sits no outage out: it would be in the figures.
func (p *platform) connect(url string) error {
	file, err := config.Load(p.config)
	if err != nil {
		return err
	}
	key := file.Contexts[file.Current].APIKey
	if key == "" {
		return errors.New("dsec up wrote no key")
	}
	p.client, err = client.New(client.Options{URL: url, Key: key, Patience: -1})
	return err
}

// baseTar is the archive that the image is made of.
var baseTar = filepath.Join("build", "base.tar")

func (p *platform) makeImage(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "scripts/demo-envs.sh")
	cmd.Env = append(p.env(), "DSEC_BIN="+p.s.bin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("making the image: %w\n%s", err, bytes.TrimSpace(out))
	}
	return nil
}

// Limits of every sandbox and container of a comparison.
const (
	limitMemory = 512 << 20
	limitPIDs   = 256
	limitCPU    = 1
)

func (p *platform) spec() *dsecv1.SandboxSpec {
	return &dsecv1.SandboxSpec{Image: image, Limits: &dsecv1.Limits{MemoryBytes: limitMemory, CpuCores: limitCPU, Pids: limitPIDs}}
}

func (p *platform) create(ctx context.Context) (string, error) {
	sb, err := p.client.Create(ctx, p.spec())
	if err != nil {
		return "", fmt.Errorf("create: %w", err)
	}
	return sb.GetId(), nil
}

func (p *platform) exec(ctx context.Context, id string) error {
	return p.execProgram(ctx, id, "/bin/true")
}

func (p *platform) execProgram(ctx context.Context, id, program string) error {
	r, err := p.client.Sandbox(id).Run(ctx, &dsecv1.Command{Argv: []string{program}})
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	if r.GetExitCode() != 0 {
		return fmt.Errorf("exec: %v", r)
	}
	return nil
}

func (p *platform) destroy(ctx context.Context, id string) error {
	if _, err := p.client.Sandbox(id).Delete(ctx); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}

// createMany makes n sandboxes.
func (p *platform) createMany(ctx context.Context, n int) ([]string, error) {
	ids := make([]string, n)
	err := spread(ctx, 8, n, func(ctx context.Context, i int) (err error) {
		ids[i], err = p.create(ctx)
		return err
	})
	return ids, err
}

func (p *platform) destroyMany(ctx context.Context, ids []string) error {
	return spread(ctx, 8, len(ids), func(ctx context.Context, i int) error { return p.destroy(ctx, ids[i]) })
}
