package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/container"
	"dsec/internal/edge/layers"
	"dsec/internal/edge/network"
	"dsec/internal/edge/policy"
	"dsec/internal/edge/upper"
	"dsec/internal/image"
	"dsec/internal/image/convert"
	"dsec/internal/image/store"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Bounds of the trials.
const (
	trialTime = time.Minute
	trialPool = 512 << 20
)

// checkHost tries, in scratch directories, everything that an edge makes for a sandbox, and removes it again. A trial is
// the only answer that counts: a kernel's version says little about what it was built with and what is forbidden.
func checkHost(ctx context.Context) []finding {
	if os.Geteuid() != 0 {
		return []finding{{Verdict: verdictWarn, Subject: "host", Detail: "not tried", Advice: "run `dsec doctor` as root to try what sandboxes need"}}
	}
	ctx, cancel := context.WithTimeout(ctx, trialTime)
	defer cancel()
	t := &trial{log: slog.New(slog.DiscardHandler), code: sandbox.NewEdgeCode()}
	if err := t.prepare(); err != nil {
		_ = os.RemoveAll(t.dir)
		_ = os.Remove(t.runDir) // nothing is mounted there
		return []finding{tried("host", "", err)}
	}
	findings := slices.Concat(checkLimits(), t.groups(ctx), []finding{t.upper(ctx), t.network(ctx), t.links(ctx), t.layers(ctx)}, t.container(ctx), t.rules(ctx))
	return append(findings, tried("clean-up", "nothing of the trials is left", t.remove()))
}

// A limit of the host is one that a full node meets, and how much of it such a node needs.
type limit struct {
	subject, detail, advice string
	have, want              int64
}

// What a node with the default of 4000 sandboxes needs at most in the middle of ordinary work.
const (
	wantTasks  = 1 << 17
	wantFiles  = 1 << 16
	wantMounts = 1 << 15
)

// checkLimits says what bounds the number of sandboxes on this host, although each of them fits.
func checkLimits() []finding {
	tasks, err := linux.MaxTasks()
	if err != nil {
		return []finding{tried("threads", "", err)}
	}
	_, files, err := linux.OpenFiles()
	if err != nil {
		return []finding{tried("open files", "", err)}
	}
	mounts, err := linux.ReadSysctl("fs/mount-max")
	if err != nil {
		return []finding{tried("mounts", "", err)}
	}
	inUse, err := linux.CountMounts()
	if err != nil {
		return []finding{tried("mounts", "", err)}
	}
	return limitFindings(
		limit{"threads", fmt.Sprintf("at most %d of this host (kernel.pid_max, kernel.threads-max), nine tenths of them for all sandboxes", tasks),
			"raise the sysctl kernel.pid_max for nodes with many sandboxes, as `dsec host prepare` does", tasks, wantTasks},
		limit{"open files", fmt.Sprintf("at most %d of this process (RLIMIT_NOFILE)", files), "raise the hard limit of open files, e.g. LimitNOFILE= of its unit", files, wantFiles},
		limit{"mounts", fmt.Sprintf("at most %d in a mount namespace (fs.mount-max), %d in use", mounts, inUse), "raise the sysctl fs.mount-max, as `dsec host prepare` does", mounts - inUse, wantMounts},
	)
}

func limitFindings(limits ...limit) []finding {
	var out []finding
	for _, l := range limits {
		f := finding{Verdict: verdictOK, Subject: l.subject, Detail: l.detail}
		if l.have < l.want {
			f.Verdict, f.Advice = verdictWarn, l.advice
		}
		out = append(out, f)
	}
	return out
}

// A trial makes things of an edge that never serves.
type trial struct {
	log           *slog.Logger
	code          sandbox.EdgeCode
	runDir, dir   string
	slot          driver.Network
	closeNetworks func(context.Context) error
}

func (t *trial) prepare() (err error) {
	if t.runDir, err = os.MkdirTemp("/run", "dsec-doctor-"); err != nil {
		return fmt.Errorf("making a scratch directory: %w", err)
	}
	parent := "/var/lib"
	if t.dir, err = os.MkdirTemp(parent, "dsec-doctor-"); err != nil {
		return fmt.Errorf("making a scratch directory: %w", err)
	}
	return linux.MountRunDir(t.runDir)
}

func (t *trial) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), trialTime)
	defer cancel()
	var errs []error
	if t.closeNetworks != nil {
		errs = append(errs, t.closeNetworks(ctx))
	}
	return errors.Join(append(errs, linux.UnmountRunDir(t.runDir), os.RemoveAll(t.dir))...)
}

// tried makes a finding of what a trial returned.
func tried(subject, detail string, err error) finding {
	if err == nil {
		return finding{Verdict: verdictOK, Subject: subject, Detail: detail}
	}
	e := sandbox.AsError(err)
	if e.Class == sandbox.Internal {
		return finding{Verdict: verdictFail, Subject: subject, Detail: err.Error(), Advice: "see the requirements in README.md"}
	}
	return finding{Verdict: verdictFail, Subject: subject, Detail: e.Message}
}

func (t *trial) groups(ctx context.Context) []finding {
	tree, err := cgroup.Open(ctx, cgroup.Options{Name: "dsec-" + string(t.code), Log: t.log})
	if err != nil {
		return []finding{tried("control groups", "", err)}
	}
	id := sandbox.NewID(t.code)
	cg, err := tree.Create(ctx, id, sandbox.Spec{}.WithDefaults().Limits)
	has, hasNot := cgroup.Controls(cg)
	controls := finding{Verdict: verdictOK, Subject: "  more controls", Detail: "with " + strings.Join(has, ", ")}
	if len(hasNot) > 0 {
		controls.Detail += "; without " + strings.Join(hasNot, ", ")
	}
	err = errors.Join(err, tree.Remove(ctx, id))
	devices := policy.AttachDevices(tree.Root())
	groups := tried("control groups", fmt.Sprintf("memory, cpu and pids in %s", tree.Mode()), err)
	if tree.Mode() != cgroup.V2 && groups.Verdict == verdictOK {
		groups.Instead, groups.Why = "cgroup v2 alone", "this host has its controllers in v1"
		groups.Cost = "four more groups a sandbox; no memory.high, memory.reclaim, io.max"
	}
	return []finding{groups, controls, tried("device policy", "a BPF device program on the sandboxes' group", errors.Join(devices, tree.Close(ctx)))}
}

func (t *trial) upper(ctx context.Context) finding {
	const subject = "disk quota"
	pool, err := upper.Open(ctx, upper.Options{DataDir: t.dir, RunDir: t.runDir, Bytes: trialPool, Log: t.log})
	if err != nil {
		return tried(subject, "", err)
	}
	id := sandbox.NewID(t.code)
	u, err := pool.Create(ctx, id, 64<<20)
	f := tried(subject, "hard, by "+u.Kind, errors.Join(err, pool.Remove(ctx, id), pool.Close(ctx)))
	if why := pool.Refused(); why != nil && f.Verdict == verdictOK {
		f.Instead, f.Why, f.Cost = upper.Kinds()[0], strings.ReplaceAll(why.Error(), "\n", "; "), upper.Cost(u.Kind)
	}
	return f
}

// network keeps its slot: the container trial uses it.
func (t *trial) network(ctx context.Context) finding {
	const subject = "network"
	slots, err := network.Open(ctx, network.Options{RunDir: filepath.Join(t.runDir, "net"), Log: t.log})
	if err != nil {
		return tried(subject, "", err)
	}
	t.closeNetworks = slots.Close
	t.slot, err = slots.Acquire(ctx, sandbox.NewID(t.code), network.Policy{})
	return tried(subject, "namespaces of the host's own, with loopback", err)
}

// links makes what a rule that allows something needs: router, packet filter, relay and a link. Sandboxes without work without.
func (t *trial) links(ctx context.Context) finding {
	const subject = "network rules"
	self, err := os.Executable()
	if err != nil {
		return tried(subject, "", err)
	}
	dsec := filepath.Join(filepath.Dir(self), "dsec") // and nothing else that this may be: a test would begin itself again
	if _, err := os.Stat(dsec); err != nil {
		return finding{Verdict: verdictWarn, Subject: subject, Detail: "not tried: there is no dsec beside this program"}
	}
	slots, err := network.Open(ctx, network.Options{
		RunDir: filepath.Join(t.runDir, "links"), Log: t.log, Relay: []string{dsec, "relay"}, RelayUID: trialRelayUser,
	})
	if err != nil {
		return tried(subject, "", err)
	}
	open := network.Destination{Prefix: netip.MustParsePrefix("192.0.2.0/24"), FirstPort: 443, LastPort: 443, Protocol: network.TCP}
	n, err := slots.Acquire(ctx, sandbox.NewID(t.code), network.Policy{Open: []network.Destination{open}})
	detail := "a packet filter on each link, and a relay; IPv4"
	if len(n.Addresses) > 1 {
		detail += " and IPv6"
	}
	return tried(subject, detail, errors.Join(err, slots.Close(ctx)))
}

// layers imports an archive of one file, mounts what came of it, and reads the file back.
func (t *trial) layers(ctx context.Context) finding {
	const subject, text = "layers", "hello"
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err := errors.Join(w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(text))}), second(io.WriteString(w, text)), w.Close())
	if err != nil {
		return tried(subject, "", err)
	}
	blobs, err := store.OpenPosix(filepath.Join(t.dir, "store"))
	if err != nil {
		return tried(subject, "", err)
	}
	defer blobs.Close()
	m, _, err := convert.Import(ctx, blobs, &archive, convert.Options{Kind: image.KindBase})
	if err != nil {
		return tried(subject, "", err)
	}
	mounts, err := layers.Open(ctx, layers.Options{RunDir: filepath.Join(t.runDir, "layers"), Log: t.log})
	if err != nil {
		return tried(subject, "", err)
	}
	detail := "EROFS from files, without loop devices"
	lowers, err := mounts.Acquire(ctx, sandbox.NewID(t.code), convert.Sources(blobs, m))
	if err == nil {
		var got []byte
		if got, err = os.ReadFile(filepath.Join(lowers[0], "file")); err == nil && string(got) != text {
			err = fmt.Errorf("a mounted layer holds %q instead of %q", got, text)
		}
		if mounts.Fallbacks() > 0 {
			detail = "EROFS through loop devices"
		}
	}
	f := tried(subject, detail, errors.Join(err, mounts.Close(ctx)))
	if mounts.Fallbacks() > 0 && f.Verdict == verdictOK {
		f.Instead, f.Why = "EROFS from files", "this kernel does not mount a file of that file system (Linux 6.12 does, of most)"
		f.Cost = "a loop device for each file of a layer, and its pages in memory twice"
	}
	return f
}

// container asks the driver, which tries what it needs.
func (t *trial) container(ctx context.Context) []finding {
	const subject = "containers"
	stage, aether, err := companions()
	if err != nil {
		return []finding{tried(subject, "", err)}
	}
	d, err := container.Open(ctx, container.Options{RunDir: t.runDir, Stage: stage, Aether: aether, Log: t.log})
	if err != nil {
		return []finding{tried(subject, "", err)}
	}
	caps, err := d.Probe(ctx)
	findings := []finding{tried(subject, "the backend can run", errors.Join(err, d.Close(ctx)))}
	for _, name := range slices.Sorted(maps.Keys(caps.Features)) {
		fb := caps.Fallbacks[name]
		findings = append(findings, finding{Verdict: verdictOK, Subject: "  " + strings.ReplaceAll(name, "_", " "), Detail: caps.Features[name],
			Instead: fb.Instead, Why: fb.Why, Cost: fb.Cost})
	}
	return append(findings, trustedTools())
}

// rules says which mechanisms this host has that enforce rules against what runs inside, beside those that every sandbox has.
// Nothing needs them yet.
func (t *trial) rules(ctx context.Context) []finding {
	look := func(subject, detail string, err error) finding {
		f := tried(subject, detail, err)
		if sandbox.ClassOf(err) == sandbox.Unsupported {
			f.Verdict, f.Detail = verdictOK, "none: "+sandbox.AsError(err).Message
		}
		return f
	}
	return []finding{
		look("BPF LSM", "enforced: a program that denies was loaded, and did", policy.ProbeBPFLSM(t.dir)),
		look("AppArmor", "enforced: a profile that denies was loaded, and did", policy.ProbeAppArmor(ctx, t.dir)),
	}
}

// trustedTools says whether there will be trusted commands. Everything else works without.
func trustedTools() finding {
	const subject = "trusted commands"
	path, err := findTools()
	if err != nil {
		return finding{Verdict: verdictWarn, Subject: subject, Detail: sandbox.AsError(err).Message}
	}
	return finding{Verdict: verdictOK, Subject: subject, Detail: "shell and tools of " + path}
}

func second[T any](_ T, err error) error { return err }
