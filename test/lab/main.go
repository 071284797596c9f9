// Command lab boots Debian's kernel under QEMU and runs tests of the root tier in it: on a host with cgroup v2, AppArmor and
// BPF LSM, and without what newer kernels have. See `make lab`.
//
// What surprises:
//
//   - The guests are emulated (TCG): about four times slower than this machine, and a stall of the machine is one of theirs.
//   - Each test is a job of its own, so that several guests share them, the one that hangs is known, and a panic of the kernel
//     costs one test. It starts in a guest where others ran before, as in the root tier.
//   - What is downloaded and built once is kept in the user's cache (dsec/lab), by kernel and by what made it.
//   - Guests have no compiler: stand-ins give tests the programs that were built here.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
	"time"
)

type options struct {
	kernel   string
	run      *regexp.Regexp
	packages *regexp.Regexp
	guests   int
	cpus     int
	memory   int
	verbose  bool
	shell    string
	limit    time.Duration
}

func main() {
	var o options
	var run, packages string
	flag.StringVar(&o.kernel, "kernel", "6.1", "series of Debian's cloud kernel: 6.1 or 6.12")
	flag.StringVar(&run, "run", "", "pattern of tests (default: all of the lab)")
	flag.StringVar(&packages, "packages", "", "pattern of packages (default: all of the lab)")
	flag.IntVar(&o.guests, "guests", 2, "guests that share the tests")
	flag.IntVar(&o.cpus, "cpus", 2, "CPUs of a guest")
	flag.IntVar(&o.memory, "memory", 2560, "memory of a guest in MiB")
	flag.BoolVar(&o.verbose, "v", false, "print the output of tests that pass")
	flag.StringVar(&o.shell, "shell", "", "run this script in one guest instead of tests")
	flag.DurationVar(&o.limit, "limit", 20*time.Minute, "longest run")
	flag.Parse()
	o.run, o.packages = regexp.MustCompile(run), regexp.MustCompile(packages)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, fmt.Errorf("it took longer than %s", o.limit))
	defer cancel()
	if err := lab(ctx, o); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = errors.Join(cause, err)
		}
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

var began = time.Now()

// say prints a line of progress.
func say(format string, args ...any) {
	fmt.Printf("lab %4.0fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
}

func lab(ctx context.Context, o options) error {
	if os.Geteuid() != 0 {
		return errors.New("it needs root, for the root file system of the guests")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	c := store{filepath.Join(cache, "dsec", "lab")}
	k, err := c.kernel(ctx, o.kernel)
	if err != nil {
		return fmt.Errorf("kernel %s: %w", o.kernel, err)
	}
	root, err := c.root(ctx)
	if err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	dir, err := os.MkdirTemp("/var/tmp", "dsec-lab-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	jobs, err := plan(o)
	if err != nil {
		return err
	}
	payload, err := makePayload(ctx, dir, jobs)
	if err != nil {
		return fmt.Errorf("programs and tests: %w", err)
	}
	m := machine{kernel: k, root: root, payload: payload, dir: dir, cpus: o.cpus, memory: o.memory}
	if o.shell != "" {
		return m.script(ctx, o.shell)
	}
	times := c.times(o.kernel)
	return newRun(o, jobs, times).all(ctx, m, o.guests)
}
