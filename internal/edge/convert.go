package edge

import (
	"context"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/journal"
	"dsec/internal/image"
	"dsec/internal/rootfs"
	"dsec/internal/startspec"
	"dsec/sandbox"
)

// Bounds of what an apiserver sends.
const (
	maxSpecBytes = 1 << 20
	maxLayers    = 400 // overlayfs takes 500
	maxKeyBytes  = 256
)

// specOf converts a spec from the wire. Numbers that no Duration can hold become such that Validate refuses them.
func specOf(p *dsecv1.SandboxSpec) (sandbox.Spec, error) {
	s := sandbox.Spec{
		Backend: p.GetBackend(), Image: p.GetImage(), Workspace: p.GetWorkspace(), Toolkits: p.GetToolkits(),
		IdleTimeout: seconds(p.GetIdleTimeoutSeconds()), Lifetime: seconds(p.GetLifetimeSeconds()),
		Labels: p.GetLabels(), Env: p.GetEnv(), User: p.GetUser(), Workdir: p.GetWorkdir(), Network: p.GetNetworkRules(),
		Hostname: p.GetHostname(), Name: p.GetName(),
	}
	err := startspec.FromWire(p, &s)
	return s, err
}

func seconds(n int64) time.Duration {
	const most = int64(math.MaxInt64 / time.Second)
	return time.Duration(max(min(n, most), -most)) * time.Second
}

func specTo(s *sandbox.Spec) *dsecv1.SandboxSpec {
	p := &dsecv1.SandboxSpec{
		Backend: s.Backend, Image: s.Image, Workspace: s.Workspace, Toolkits: s.Toolkits,
		IdleTimeoutSeconds: int64(s.IdleTimeout / time.Second), LifetimeSeconds: int64(s.Lifetime / time.Second),
		Labels: s.Labels, Env: s.Env, User: s.User, Workdir: s.Workdir, NetworkRules: s.Network, Hostname: s.Hostname, Name: s.Name,
	}
	startspec.ToWire(s, p)
	return p
}

// orderOf checks one create. It is the one validator at this boundary: an apiserver is trusted to authenticate, not to be
// free of faults.
func (e *Edge) orderOf(c *edgev1.CreateSandbox, project, principal string) (order, error) {
	bad := func(format string, args ...any) (order, error) {
		return order{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_create", format, args...)
	}
	id, err := sandbox.ParseID(c.GetId())
	if err != nil {
		return order{}, err
	}
	switch {
	case id.Edge() != e.o.Code:
		return bad("sandbox id %s belongs to another node", id)
	case proto.Size(c.GetSpec()) > maxSpecBytes:
		return bad("a specification of %d bytes; at most %d", proto.Size(c.GetSpec()), maxSpecBytes)
	case len(c.GetIdempotencyKey()) > maxKeyBytes || len(c.GetSpecDigest()) > maxKeyBytes:
		return bad("the idempotency key or digest is longer than %d bytes", maxKeyBytes)
	}
	spec, err := specOf(c.GetSpec())
	if err != nil {
		return order{}, err
	}
	spec = spec.WithDefaults()
	if err := spec.Validate(); err != nil {
		return order{}, err
	}
	if _, counts := e.o.Uppers.(InodeCounter); spec.Limits.Inodes > 0 && !counts {
		return order{}, errInodes
	}
	sources, err := e.sourcesOf(c.GetLayers())
	if err != nil {
		return order{}, err
	}
	rules, err := rulesOf(spec.Network, c.GetNetwork())
	if err == nil {
		err = checkNode(rules.Rules, e.denied())
	}
	if err != nil {
		return order{}, err
	}
	o := order{id: id, intent: &journal.Intent{
		Project: project, Principal: principal, Spec: spec, Network: rules, Sources: sources, Key: c.GetIdempotencyKey(), Digest: c.GetSpecDigest(),
		OwnerEpoch: c.GetOwnerEpoch(),
	}}
	if d := c.GetDeadline(); d != nil {
		if d.CheckValid() != nil {
			return bad("the deadline is not a time")
		}
		o.deadline = d.AsTime()
	}
	return o, nil
}

// sourcesOf finds the files of layers. A digest becomes a path only if it has the form of one.
func (e *Edge) sourcesOf(layers []*dsecv1.Layer) ([]rootfs.Source, error) {
	if len(layers) == 0 || len(layers) > maxLayers {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_layers", "%d layers; there must be 1 to %d", len(layers), maxLayers)
	}
	out := make([]rootfs.Source, 0, len(layers))
	for _, l := range layers {
		if len(l.GetData()) > image.MaxBlobs {
			return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_layers", "a layer with %d data blobs; at most %d", len(l.GetData()), image.MaxBlobs)
		}
		meta, err := e.fileOf(l.GetMetadata())
		if err != nil {
			return nil, err
		}
		src := rootfs.Source{Metadata: meta}
		for _, b := range l.GetData() {
			f, err := e.fileOf(b)
			if err != nil {
				return nil, err
			}
			src.Data = append(src.Data, f)
		}
		out = append(out, src)
	}
	return out, nil
}

func (e *Edge) fileOf(b *dsecv1.Blob) (rootfs.File, error) {
	if !image.ValidDigest(b.GetDigest()) || b.GetSize() < 0 {
		return rootfs.File{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_layers", "%q is not the digest of a blob", clip(b.GetDigest()))
	}
	path, err := e.o.BlobPath(b.GetDigest())
	if err != nil {
		return rootfs.File{}, err
	}
	return rootfs.File{Path: path, Digest: b.GetDigest(), Size: b.GetSize()}, nil
}

var stateTo = map[sandbox.State]dsecv1.State{
	sandbox.Creating: dsecv1.State_STATE_CREATING, sandbox.Ready: dsecv1.State_STATE_READY, sandbox.Stopping: dsecv1.State_STATE_STOPPING,
	sandbox.Stopped: dsecv1.State_STATE_STOPPED, sandbox.Failed: dsecv1.State_STATE_FAILED,
}

func timeTo(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// viewOf is the sandbox as its project sees it.
func (e *Edge) viewOf(in *instance) *dsecv1.Sandbox {
	u, s := in.use(), in.snapshot()
	spec := in.intent.Spec
	spec.Network = s.network.Asked
	reason := s.life.shownReason()
	v := &dsecv1.Sandbox{
		Id: string(in.id), State: stateTo[s.life.state], Generation: 1, Spec: specTo(&spec), Project: in.intent.Project,
		Principal: in.intent.Principal, Node: e.o.Node, CreatedAt: timeTo(s.life.createdAt), ReadyAt: timeTo(s.life.readyAt),
		EndedAt: timeTo(s.life.endedAt), ExpiresAt: timeTo(s.life.expiresAt), StepSeconds: make(map[string]float64),
	}
	if reason.Code != "" {
		v.Reason = &dsecv1.Reason{Code: reason.Code, Message: reason.Message, At: timeTo(reason.At)}
	}
	if s.life.state == sandbox.Ready {
		if s.guest != nil {
			v.RunningCommands = int64(s.guest.Running())
		}
		if !u.busy {
			v.IdleExpiresAt = timeTo(u.last.Add(in.intent.Spec.IdleTimeout))
		}
	}
	took := s.made.took
	if took == nil {
		took = sandboxSteps.Took(&in.progress)
	}
	for name, d := range took {
		v.StepSeconds[name] = d.Seconds()
	}
	return v
}

func (e *Edge) recordOf(in *instance) *edgev1.Record {
	s := in.snapshot()
	return &edgev1.Record{
		Sandbox: e.viewOf(in), IdempotencyKey: in.intent.Key, SpecDigest: in.intent.Digest, HoldsQuota: s.life.holdsQuota(),
	}
}

// Bounds of the output inside a result, in bytes of each stream.
const (
	defaultInline = 64 << 10
	maxInline     = 1 << 20
)

// resultOf is a command's result; with limit < 0 without output data.
func resultOf(c GuestCommand, limit int) *dsecv1.CommandResult {
	r := c.Result()
	out := &dsecv1.CommandResult{
		CommandId: c.ID(), Running: r.Running, ExitCode: int32(r.ExitCode), Signal: int32(r.Signal), SignalName: signalName(r.Signal),
		TimedOut: r.TimedOut, OomKilled: r.OOMKilled, Killed: r.Killed, StdinBroken: r.StdinBroken, StartedAt: timeTo(r.StartedAt),
		EndedAt: timeTo(r.EndedAt), Description: r.Description, Tag: r.Tag, Session: r.Session, Terminal: r.Terminal, NoOutput: r.NoOutput,
		StdinSize: r.StdinSize,
		Stdout:    &dsecv1.Output{Size: r.Stdout.Size, HeadSize: r.Stdout.Head, TailSize: r.Stdout.Tail},
		Stderr:    &dsecv1.Output{Size: r.Stderr.Size, HeadSize: r.Stderr.Head, TailSize: r.Stderr.Tail},
	}
	if limit >= 0 {
		out.Stdout.Data, out.Stderr.Data = c.Head(1, limit), c.Head(2, limit)
	}
	return out
}

func inlineOf(n int32) int {
	if n <= 0 {
		return defaultInline
	}
	return min(int(n), maxInline)
}

var signalNames = [...]string{
	1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
	10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 16: "SIGSTKFLT", 17: "SIGCHLD",
	18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU", 23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ",
	26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO", 30: "SIGPWR", 31: "SIGSYS",
}

const maxSignal = 64

func signalName(n int) string {
	switch {
	case n <= 0 || n > maxSignal:
		return ""
	case n < len(signalNames):
		return signalNames[n]
	}
	return fmt.Sprintf("SIG%d", n)
}

// statusOf is what the watcher polls.
func (e *Edge) statusOf(_ context.Context) *edgev1.Status {
	a := e.admission
	a.mu.Lock()
	full := a.fullLocked()
	st := &edgev1.Status{
		Edge: string(e.o.Code), Version: e.o.Version, At: timestamppb.Now(), BootId: e.o.BootID,
		Sandboxes: a.sandboxes, Capacity: a.limits.MaxSandboxes,
		MemoryBytes: a.sample.MemoryTotal, MemoryAvailableBytes: a.sample.MemoryAvailable, DiskBytes: a.diskTotal, DiskAvailableBytes: a.diskFree,
		Cpus: a.sample.CPUs, Load1: a.sample.Load1, CpuBusy: a.sample.CPUBusy,
		SandboxesByProject: make(map[string]int64, len(a.byProject)),
		Warnings:           a.warningsLocked(), Braking: a.brake.why != "",
		CpuPressure: a.sample.Pressure.CPU, MemoryPressure: a.sample.Pressure.Memory, IoPressure: a.sample.Pressure.IO,
	}
	for p, n := range a.byProject {
		st.SandboxesByProject[p] = n
	}
	crowded := a.crowded
	a.mu.Unlock()
	if w, ok := e.o.Cgroups.(interface{ Waiting() int }); ok {
		st.Removing = int64(w.Waiting())
	}
	st.Creating = e.creating.Load()
	st.Accepting = full == nil && e.phase.Load() == phaseServing
	switch {
	case full != nil:
		st.RefusingReason = full.Message
	case !st.Accepting:
		st.RefusingReason = "the node is stopping"
	case crowded != "": // it is not refusing yet, and whoever looks at nodes should know
		st.RefusingReason = crowded
	}
	for _, d := range e.o.Drivers {
		st.Backends = append(st.Backends, d.Name())
	}
	return st
}
