package main

import (
	"io"
	"log/slog"
	"strconv"
	"time"

	"dsec/internal/inflight"
	"dsec/internal/linux"
)

// nodeFlags are the flags of `dsec up` that it hands on: to itself in the background, and to its edge.
type nodeFlags struct {
	platform
	maxSandboxes int
	keepEnded    time.Duration
	poolBytes    byteCount
	networkRange string
	logLevel     string
	requests     inflight.Limits
	resolvers    list
}

func (o *nodeFlags) register(f *flagSet) {
	o.platform.register(f)
	f.IntVar(&o.maxSandboxes, "max-sandboxes", 4000, "most sandboxes on this machine, a `NUMBER`")
	f.DurationVar(&o.keepEnded, "keep-ended", 0, "a sandbox that has ended is remembered for this `DURATION`, with its output (default 10m)")
	f.Var(&o.poolBytes, "pool-size", "`SIZE` of the pool of writable layers, e.g. 200g (default: half of the free disk)")
	f.IntVar(&o.requests.Streams, "project-streams", inflight.DefaultStreams, "most streams of one project at a time, a `NUMBER`: files, output, ports, watches")
	f.IntVar(&o.requests.Calls, "project-calls", inflight.DefaultCalls, "most other requests of one project at a time, a `NUMBER`")
	f.Var(&o.resolvers, "resolver", "`ADDRESS` of a name server for network rules, instead of the machine's; may be repeated")
	f.StringVar(&o.networkRange, "network-range", "198.18.0.0/15", "`PREFIX` of IPv4 for sandboxes' links, which nothing in this host's networks has")
	f.StringVar(&o.logLevel, "log-level", "info", "`LEVEL`: debug, info, warn or error")
}

// check refuses what cannot work, before anything is made.
func (o *nodeFlags) check() error {
	if o.maxSandboxes < 1 {
		return usagef("--max-sandboxes %d: it is a number from 1 on", o.maxSandboxes)
	}
	if o.keepEnded < 0 {
		return usagef("--keep-ended %v: it is a duration like 10m", o.keepEnded)
	}
	if o.requests.Streams < 1 || o.requests.Calls < 1 {
		return usagef("--project-streams %d --project-calls %d: they are numbers from 1 on", o.requests.Streams, o.requests.Calls)
	}
	if err := checkResolvers(o.resolvers); err != nil {
		return usagef("--resolver: %v", err)
	}
	if _, err := newLogger(io.Discard, o.logLevel); err != nil {
		return err
	}
	return o.platform.check()
}

// args are the same flags for another process.
func (o *nodeFlags) args() []string {
	args := []string{"--data-dir", o.dataDir, "--run-dir", o.runDir,
		"--max-sandboxes", strconv.Itoa(o.maxSandboxes), "--keep-ended", o.keepEnded.String(),
		"--network-range", o.networkRange, "--log-level", o.logLevel,
		"--project-streams", strconv.Itoa(o.requests.Streams), "--project-calls", strconv.Itoa(o.requests.Calls)}
	if o.poolBytes > 0 {
		args = append(args, "--pool-size", o.poolBytes.String())
	}
	for _, r := range o.resolvers {
		args = append(args, "--resolver", r)
	}
	return args
}

func newLogger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usagef("--log-level %q: it is debug, info, warn or error", level)
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l})), nil
}

// bounds are what a server of this process may have under way, by its flags and its descriptors, and how many connections it may
// keep open.
func (o *nodeFlags) bounds() (l inflight.Limits, connections int, err error) {
	_, most, err := linux.OpenFiles()
	if err != nil {
		return l, 0, err
	}
	l = o.requests
	connections, l.AllStreams = inflight.ForDescriptors(most)
	return l, connections, nil
}
