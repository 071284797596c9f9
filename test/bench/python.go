package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
)

// pythonBoxes is how many sandboxes one Python process has.
const pythonBoxes = 100

// pythonRound is what sdk/python/bench/execs.py says of a round.
type pythonRound struct {
	Begin     string
	Program   string
	Execs     int     // with those under way at its end
	PerSecond float64 `json:"per_second"`
	CPU       float64 `json:"cpu_us"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
}

// benchPython measures one process with libdsec and many sandboxes. A program of glibc takes 0.5 ms of CPU only to start
// where the processor is virtual, since each CPUID instruction traps; so a static program that does nothing is measured as
// well, by which the platform's own share shows. The baseline is the same program started by fork and exec on this host by as
// many workers, in turn with the rounds of ours.
func benchPython(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	static, err := s.staticProgram(ctx)
	if err != nil {
		return err
	}
	found, err := p.pythonRounds(ctx, static)
	if err != nil {
		return err
	}
	for _, c := range []struct{ name, program, target string }{{"execs", "/bin/true", ">= 2000/s"}, {"execs_static", uploaded, ""}} {
		var rates, cpu, p50 samples
		for _, round := range found.rounds {
			if round.Program == c.program {
				rates, cpu, p50 = append(rates, round.PerSecond), append(cpu, round.CPU), append(p50, round.P50)
			}
		}
		bare, parts := found.bare[c.program], found.parts[c.program]
		parts[cpuClient] = cpu.median() / 1e3
		r.add(figure{Name: c.name, Value: rates.median(), Unit: "1/s", Against: "fork and exec on the host", Baseline: bare.median(), Others: bare.spread(),
			Samples: len(rates), Spread: rates.spread(), Target: c.target, Parts: parts, PartUnit: "ms of CPU per exec"}, false)
		r.add(figure{Name: c.name + "_p50", Value: p50.median(), Unit: "ms", Samples: len(p50), Spread: p50.spread()}, true)
	}
	return nil
}

// uploaded is where execs.py puts the static program.
const uploaded = "/opt/uploaded"

// pythonFound is what the rounds of the Python program found, and those of the host between them.
type pythonFound struct {
	rounds []pythonRound
	parts  map[string]map[string]float64 // CPU time by program and part, of the last round
	bare   map[string]samples            // starts a second on the host, by program
}

// pythonRounds runs the Python program, and before each of its rounds one of the same program on the host.
func (p *platform) pythonRounds(ctx context.Context, static string) (*pythonFound, error) {
	seconds := p.s.roundTime().Seconds()
	cmd := exec.CommandContext(ctx, python(), "sdk/python/bench/execs.py", "--image", image, "--sandboxes", strconv.Itoa(pythonBoxes),
		"--in-flight", strconv.Itoa(pythonBoxes), "--rounds", strconv.Itoa(p.s.rounds), "--seconds", fmt.Sprint(seconds), "--upload", static, "--paced")
	cmd.Env = p.env()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	onHost := map[string]string{"/bin/true": "/bin/true", uploaded: static}
	found, err := p.follow(ctx, bufio.NewScanner(out), in, onHost)
	_ = in.Close() // after an error it waits for a line
	if werr := cmd.Wait(); werr != nil {
		err = errors.Join(err, fmt.Errorf("%w: %s", werr, stderr.Bytes()))
	}
	return found, err
}

func (p *platform) follow(ctx context.Context, lines *bufio.Scanner, pace io.Writer, onHost map[string]string) (*pythonFound, error) {
	found := &pythonFound{parts: map[string]map[string]float64{}, bare: map[string]samples{}}
	var m *cpuMeter
	for lines.Scan() {
		var round pythonRound
		if err := json.Unmarshal(lines.Bytes(), &round); err != nil {
			return nil, err
		}
		var err error
		switch {
		case round.Begin != "":
			bare, berr := p.s.bareRate(ctx, onHost[round.Begin])
			if berr != nil {
				return nil, berr
			}
			found.bare[round.Begin] = append(found.bare[round.Begin], bare)
			if m, err = p.meter(); err == nil {
				_, err = io.WriteString(pace, "\n")
			}
		case m == nil:
			err = errors.New("a round without a beginning")
		default:
			found.rounds = append(found.rounds, round)
			found.parts[round.Program], err = m.perOp(round.Execs)
		}
		if err != nil {
			return nil, err
		}
	}
	return found, lines.Err()
}

// python is the interpreter: that of the tests where there is one.
func python() string {
	if venv := filepath.Join(".venv", "bin", "python"); exec.Command(venv, "-V").Run() == nil {
		return venv
	}
	return "python3"
}

// script runs a program of sdk/python/bench with this platform, and gives what it prints.
func (p *platform) script(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, python(), append([]string{filepath.Join("sdk/python/bench", name)}, args...)...)
	cmd.Env = p.env()
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%s: %w: %s", name, err, exit.Stderr)
	}
	return out, err
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

// bareRate is how often a second this process starts a program and waits for it, as many at a time as commands of the Python
// process are under way.
func (s *session) bareRate(ctx context.Context, program string) (float64, error) {
	r, err := sustain(ctx, pythonBoxes, s.roundTime(), func(context.Context, int) error { return exec.Command(program).Run() })
	return r.PerSecond, err
}
