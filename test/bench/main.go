// Command bench measures dsec against the alternatives on this machine and prints lines
//
//	figure value unit baseline ratio
//
// A ratio over 1 says that dsec is better than the baseline, whatever the unit. Both sides of a ratio run in turn, in rounds,
// in the same minutes, with the same limits and the same image; the value is the median of the rounds. Everything that
// is known of a run goes to bench/out/NAME.json.
//
// What surprises:
//
//   - It starts a platform and, where it is compared with docker, a dockerd of its own, and leaves neither. It needs root.
//   - A figure that misses its target is printed like any other; nothing fails. Only what could not be measured is an error.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// A benchmark adds its figures to a report.
type benchmark struct {
	name string
	run  func(ctx context.Context, s *session, r *report) error
}

var benchmarks = []benchmark{
	{"api", benchAPI},
	{"density", benchDensity},
	{"exec", benchExec},
	{"files", benchFiles},
	{"launcher", benchLauncher},
	{"limits", benchLimits},
	{"memory", benchMemory},
	{"network", benchNetwork},
	{"python", benchPython},
	{"soak", benchSoak},
	{"streams", benchStreams},
	{"terminal", benchTerminal},
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	var o options
	flag.StringVar(&o.bin, "bin", os.Getenv("DSEC_BIN"), "directory of dsec, aether and stage")
	flag.StringVar(&o.out, "out", filepath.Join("bench", "out"), "directory of the JSON files")
	flag.StringVar(&o.only, "only", "", "comma-separated parts of the benchmark to run, as its figures begin; empty is all")
	flag.BoolVar(&o.docker, "docker", true, "compare the benchmark api with docker")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds of each comparison")
	flag.IntVar(&o.many, "many", 2000, "live sandboxes of the benchmark density")
	flag.DurationVar(&o.hold, "hold", 0, "how long each load goes on at least, for a profiler")
	names := flag.String("run", "all", "comma-separated benchmarks: api, density, exec, files, launcher, limits, memory, network, python, soak, streams, terminal")
	flag.Parse()
	if err := o.check(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	chosen, err := choose(*names)
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range chosen {
		if err := runOne(ctx, o, b); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", b.name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func choose(names string) ([]benchmark, error) {
	if names == "all" {
		return benchmarks, nil
	}
	var chosen []benchmark
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(benchmarks, func(b benchmark) bool { return b.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no benchmark %q", name)
		}
		chosen = append(chosen, benchmarks[i])
	}
	return chosen, nil
}

// runOne gives a benchmark a session of its own and writes what it found.
func runOne(ctx context.Context, o options, b benchmark) (err error) {
	s, err := newSession(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	r := newReport(b.name)
	if err := b.run(ctx, s, r); err != nil {
		return err
	}
	return r.write(o.out)
}
