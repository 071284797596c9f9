package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

// specFlags are the flags of `dsec run` that describe the sandbox.
type specFlags struct {
	env, labels, toolkits, network list
	user, workdir, workspace       string
	name, hostname                 string
	memory, disk                   byteCount
	cpus                           float64
	pids, inodes, connections      int64
	bandwidth                      byteCount
	idle, lifetime, timeout        period
	interactive, asJSON, trusted   bool
	shell, tag                     string
	quiet                          period
	ttyFlags
	start     string
	readiness probeFlags
}

// probeFlags say when a sandbox is ready.
type probeFlags struct{ http, tcp, exec string }

func (o *probeFlags) register(f *flagSet) {
	f.StringVar(&o.http, "ready-http", "", "the sandbox is ready when `PORT[/PATH]` inside answers with a status from 200 to 399")
	f.StringVar(&o.tcp, "ready-tcp", "", "the sandbox is ready when `PORT` inside takes a connection")
	f.StringVar(&o.exec, "ready-exec", "", "the sandbox is ready when this `SCRIPT` exits with 0")
}

// probe is the one of them that is given; nil if none is.
func (o *probeFlags) probe() (*dsecv1.Probe, error) {
	given := 0
	for _, s := range []string{o.http, o.tcp, o.exec} {
		if s != "" {
			given++
		}
	}
	switch {
	case given > 1:
		return nil, usagef("give one of --ready-http, --ready-tcp and --ready-exec")
	case o.exec != "":
		return &dsecv1.Probe{Exec: &dsecv1.Command{Shell: o.exec}}, nil
	case o.tcp != "":
		port, err := parsePort(o.tcp)
		return &dsecv1.Probe{TcpPort: int32(port)}, err
	case o.http == "":
		return nil, nil
	}
	text, path, _ := strings.Cut(o.http, "/")
	port, err := parsePort(text)
	if err != nil {
		return nil, usagef("--ready-http %q is not PORT or PORT/PATH", clipText(o.http))
	}
	return &dsecv1.Probe{Http: &dsecv1.HttpProbe{Port: int32(port), Path: "/" + path}}, nil
}

// registerSpec adds what describes the sandbox.
func (o *specFlags) registerSpec(f *flagSet) {
	f.Var(&o.labels, "label", "`KEY=VALUE` for `dsec ps -l`; may be repeated")
	f.letter("l", "label")
	f.StringVar(&o.workspace, "workspace", "", "workspace `NAME[:TAG]` above the image")
	f.Var(&o.toolkits, "toolkit", "toolkit `NAME[:TAG]` above image and workspace; may be repeated, later ones on top")
	f.Var(&o.network, "network", "`RULE`: a service, host:port or prefix that the sandbox may reach, or with =false not; may be repeated")
	f.StringVar(&o.name, "name", "", "`NAME` for people")
	f.StringVar(&o.hostname, "hostname", "", "host `NAME` inside, instead of the sandbox's id")
	f.Var(&o.memory, "memory", "memory limit, a `SIZE` like 512m (default 2g)")
	f.letter("m", "memory")
	f.Var(&o.disk, "disk", "limit of the writable layer, a `SIZE` like 1g (default 10g)")
	f.Float64Var(&o.cpus, "cpus", 0, "`CORES`: a weight, and a cap below the node's CPUs (default 1)")
	f.Int64Var(&o.pids, "pids", 0, "limit of processes and threads, a `NUMBER` (default 4096)")
	f.Int64Var(&o.inodes, "inodes", 0, "limit of files in the writable layer, a `NUMBER` (default: as many as --disk has room for)")
	f.Var(&o.bandwidth, "network-bandwidth", "bytes per second to the outside and from there, a `SIZE` like 10m (default: no cap)")
	f.Int64Var(&o.connections, "network-connections", 0, "connections to the outside at a time, a `NUMBER` (default 1024)")
	f.Var(&o.idle, "ttl", "the sandbox ends after this `DURATION` without a command or request (default 1h)")
	f.StringVar(&o.start, "start", "", "run this `SCRIPT` from the sandbox's start on, beside all else; its command id is start")
	o.readiness.register(f)
	f.Var(&o.lifetime, "lifetime", "the sandbox ends after this `DURATION` in any case (default 24h)")
}

// registerCommand adds what describes a command and how we are attached to it.
func (o *specFlags) registerCommand(f *flagSet) {
	f.Var(&o.env, "env", "environment variable `KEY=VALUE`, or KEY for its value here; may be repeated")
	f.letter("e", "env")
	f.StringVar(&o.user, "user", "", "`USER`: name, uid, name:group or uid:gid")
	f.letter("u", "user")
	f.StringVar(&o.workdir, "workdir", "", "working directory `DIR`")
	f.letter("w", "workdir")
	f.Var(&o.timeout, "timeout", "kill the command and all that it started after this `DURATION`")
	f.BoolVar(&o.interactive, "interactive", false, "pass our standard input to the command")
	f.letter("i", "interactive")
	o.ttyFlags.register(f)
	f.Var(&o.quiet, "no-output-timeout", "kill the command and all that it started after this `DURATION` without output")
	f.StringVar(&o.tag, "tag", "", "`TAG` to find the command again by, with attach, logs and kill")
	f.BoolVar(&o.trusted, "trusted", false, "stop all else in the sandbox meanwhile; shell and tools are the platform's, not the sandbox's")
	f.StringVar(&o.shell, "shell", "", "run this `SCRIPT` with bash, or sh where there is none, instead of a command")
	jsonFlag(f, &o.asJSON, "print the result as JSON at the end, output included up to 1 MiB a stream")
}

// spec is the sandbox that the flags describe.
func (o *specFlags) spec(image string, getenv func(string) string) (*dsecv1.SandboxSpec, error) {
	env, envErr := environment(o.env, getenv)
	labels, labelErr := pairs(o.labels, "label")
	network, networkErr := networkRules(o.network)
	probe, probeErr := o.readiness.probe()
	if err := errors.Join(envErr, labelErr, networkErr, probeErr); err != nil {
		return nil, err
	}
	var start *dsecv1.Command
	if o.start != "" {
		start = &dsecv1.Command{Shell: o.start}
	}
	return &dsecv1.SandboxSpec{
		Start:     start,
		ReadyWhen: probe,
		Image:     image,
		Workspace: o.workspace,
		Toolkits:  o.toolkits,
		Limits: &dsecv1.Limits{
			MemoryBytes: int64(o.memory),
			CpuCores:    o.cpus,
			Pids:        o.pids,
			DiskBytes:   int64(o.disk),
			Inodes:      o.inodes,

			NetworkBytesPerSecond: int64(o.bandwidth),
			NetworkConnections:    o.connections,
		},
		IdleTimeoutSeconds: wholeSeconds(o.idle),
		LifetimeSeconds:    wholeSeconds(o.lifetime),
		Labels:             labels,
		Env:                env,
		User:               o.user,
		Workdir:            o.workdir,
		NetworkRules:       network,
		Hostname:           o.hostname,
		Name:               o.name,
	}, nil
}

// command is the command of argv or --shell; nil where neither is given.
func (o *specFlags) command(f *flagSet, argv []string) (*dsecv1.Command, error) {
	script := f.given("shell")
	switch {
	case script && len(argv) > 0:
		return nil, usagef("both --shell and the command %q are given", argv[0])
	case script && o.shell == "":
		return nil, usagef("the script of --shell is empty")
	case !script && len(argv) == 0:
		return nil, nil
	}
	return o.complete(&dsecv1.Command{Argv: slices.Clone(argv), Shell: o.shell}), nil
}

// complete adds what is the same of all commands.
func (o *specFlags) complete(cmd *dsecv1.Command) *dsecv1.Command {
	cmd.TimeoutSeconds = time.Duration(o.timeout).Seconds()
	cmd.NoOutputTimeoutSeconds = time.Duration(o.quiet).Seconds()
	cmd.Tag, cmd.Trusted = o.tag, o.trusted
	cmd.StdinFollows = o.interactive
	return cmd
}

// shellArgv is a shell for a person: bash, or sh where there is none.
func shellArgv() []string {
	return []string{"sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh"}
}

// asPlatformFailure gives a failure of the platform the exit code that docker users expect from run and exec, which tells
// it from the command's own. An interrupt, a broken pipe and a wrong command line keep theirs.
func asPlatformFailure(ctx context.Context, err error) error {
	var exit *exitError
	var usage *usageError
	var output *client.WriteError
	if err == nil || ctx.Err() != nil || errors.As(err, &exit) || errors.As(err, &usage) || errors.As(err, &output) {
		return err
	}
	return &exitError{code: exitPlatform, err: err}
}

// startCodes are the exit codes for commands that could not be started, by the platform's reasons.
var startCodes = map[string]int{
	"program_not_found": exitNotFound,
	"no_shell":          exitNotFound,
	"not_executable":    exitNotExecutable,
}

// asStartFailure gives the failure to start a command its exit code.
func asStartFailure(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) {
		if code, ok := startCodes[e.Reason]; ok {
			return &exitError{code: code, err: err}
		}
	}
	return err
}
