package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"dsec/internal/config"
)

// pythonBoxes is how many sandboxes one Python process has.
const pythonBoxes = 100

// pythonRound is what sdk/python/bench/execs.py says of a round.
type pythonRound struct {
	Begin     string
	Program   string
	Execs     int
	PerSecond float64 `json:"per_second"`
	CPU       float64 `json:"cpu_us"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
}

// benchPython measures one process with libdsec and many sandboxes. A program of glibc takes 0.5 ms of CPU only to start
// where the processor is virtual, since each CPUID instruction traps; so a static program that does nothing is measured as
// well, by which the platform's own share shows. The baseline is the same program started by fork and exec on this host, one by one on all CPUs.
func benchPython(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	static, err := s.staticProgram(ctx)
	if err != nil {
		return err
	}
	rounds, parts, err := p.pythonRounds(ctx, static)
	if err != nil {
		return err
	}
	for _, c := range []struct{ name, program, host, target string }{
		{"execs", "/bin/true", "/bin/true", ">= 2000/s"}, {"execs_static", "/opt/uploaded", static, ""},
	} {
		var rates, cpu, p50 samples
		for _, round := range rounds {
			if round.Program == c.program {
				rates, cpu, p50 = append(rates, round.PerSecond), append(cpu, round.CPU), append(p50, round.P50)
			}
		}
		bare, err := bareRate(ctx, s.rounds, c.host)
		if err != nil {
			return err
		}
		parts[c.program]["client"] = cpu.median() / 1e3
		r.add(figure{Name: c.name, Value: rates.median(), Unit: "1/s", Against: "fork and exec on the host", Baseline: bare.median(), Others: bare.spread(),
			Samples: len(rates), Spread: rates.spread(), Target: c.target, Parts: parts[c.program], PartUnit: "ms of CPU per exec"}, false)
		r.add(figure{Name: c.name + "_p50", Value: p50.median(), Unit: "ms", Samples: len(p50), Spread: p50.spread()}, true)
	}
	return nil
}

// pythonRounds runs the Python program and says, beside what it found, the CPU time by program and part of the last round.
func (p *platform) pythonRounds(ctx context.Context, static string) ([]pythonRound, map[string]map[string]float64, error) {
	seconds := p.s.roundTime().Seconds()
	cmd := exec.CommandContext(ctx, python(), "sdk/python/bench/execs.py", "--image", image, "--sandboxes", strconv.Itoa(pythonBoxes),
		"--rounds", strconv.Itoa(p.s.rounds), "--seconds", fmt.Sprint(seconds), "--upload", static)
	cmd.Env = append(os.Environ(), config.EnvPath+"="+p.config)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	rounds, parts, err := p.follow(bufio.NewScanner(out))
	if werr := cmd.Wait(); werr != nil {
		err = fmt.Errorf("%w: %s", werr, stderr.Bytes())
	}
	return rounds, parts, err
}

func (p *platform) follow(lines *bufio.Scanner) (rounds []pythonRound, parts map[string]map[string]float64, err error) {
	parts = map[string]map[string]float64{}
	var m *cpuMeter
	for lines.Scan() {
		var round pythonRound
		if err := json.Unmarshal(lines.Bytes(), &round); err != nil {
			return nil, nil, err
		}
		if round.Begin != "" {
			if m, err = p.meter(); err != nil {
				return nil, nil, err
			}
			continue
		}
		if m == nil {
			return nil, nil, errors.New("a round without a beginning")
		}
		rounds = append(rounds, round)
		if parts[round.Program], err = m.perOp(round.Execs); err != nil {
			return nil, nil, err
		}
	}
	return rounds, parts, lines.Err()
}

// python is the interpreter: that of the tests where there is one.
func python() string {
	if venv := filepath.Join(".venv", "bin", "python"); exec.Command(venv, "-V").Run() == nil {
		return venv
	}
	return "python3"
}

// staticProgram compiles a program that does nothing, without glibc.
func (s *session) staticProgram(ctx context.Context) (string, error) {
	source, program := filepath.Join(s.dir, "nothing.c"), filepath.Join(s.dir, "nothing")
	if err := os.WriteFile(source, []byte("int main(void) { return 0; }\n"), 0o644); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "musl-gcc", "-static", "-Os", "-o", program, source).CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile a static program: %w\n%s", err, out)
	}
	return program, nil
}

// bareRate is how often a second this process starts a program and waits for it, on all CPUs.
func bareRate(ctx context.Context, rounds int, program string) (samples, error) {
	var out samples
	for range rounds {
		r, err := sustain(ctx, bareWorkers, bareTime, func(context.Context, int) error { return exec.Command(program).Run() })
		if err != nil {
			return nil, err
		}
		out = append(out, r.PerSecond)
	}
	return out, nil
}
