package launchbench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// programStatus is how the program ends: stage's answer to a wrong use.
const programStatus = 2

// Crun measures crun, which must be installed.
func Crun(ctx context.Context, o Options) (_ Result, err error) {
	bin, err := exec.LookPath("crun")
	if err != nil {
		return Result{}, sandbox.Errorf(sandbox.FailedPrecondition, "no_crun", "crun is not installed: apt-get install crun").WithCause(err)
	}
	r, err := newRig(ctx, o)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	layer := filepath.Join(o.Dir, "program")
	if err := os.MkdirAll(layer, 0o755); err != nil {
		return Result{}, fmt.Errorf("make layer: %w", err)
	}
	program, err := os.ReadFile(o.Stage)
	if err == nil {
		err = os.WriteFile(filepath.Join(layer, "program"), program, 0o755)
	}
	if err != nil {
		return Result{}, fmt.Errorf("copy program: %w", err)
	}
	r.o.Lowers = append([]string{layer}, o.Lowers...)
	// What a worker's thread starts inherits its mount namespace, which has no v2 hierarchy beside v1.
	withoutV2 := func() error { return linux.UnshareMounts("/sys/fs/cgroup/unified") }
	return r.measure(ctx, withoutV2, func(ctx context.Context, net driver.Network) error { return r.crun(ctx, bin, net) })
}

func (r *rig) crun(ctx context.Context, bin string, net driver.Network) error {
	id, clock := sandbox.NewID(edge), r.clock()
	upper, err := r.upper(ctx, id)
	if err != nil {
		return err
	}
	dir := upper.Dir
	bundle := filepath.Join(dir, "etc") // any directory of this operation
	root := filepath.Join(bundle, "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		return fmt.Errorf("make bundle: %w", err)
	}
	spec, err := json.Marshal(ociSpec(root, net, limits(), "/dsec-crun-"+string(id)))
	if err == nil {
		err = os.WriteFile(filepath.Join(bundle, "config.json"), spec, 0o644)
	}
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	r.lap("upper", &clock)
	if err := r.mountRoot(dir, root); err != nil {
		return err
	}
	r.lap("mount", &clock)
	cmd := exec.CommandContext(ctx, bin, "--root", filepath.Join(r.o.RunDir, "crun"), "--cgroup-manager=cgroupfs", "run", "-b", bundle, string(id))
	var stderr strings.Builder
	cmd.Stderr = &stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == programStatus {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("crun: %w: %s", err, stderr.String())
	}
	r.lap("run", &clock)
	err = errors.Join(err, linux.UnmountPath(root, true), r.removeUpper(ctx, id))
	r.lap("remove", &clock)
	return err
}

func (r *rig) mountRoot(dir, root string) error {
	var options []linux.FSOption
	for _, l := range r.o.Lowers {
		options = append(options, linux.FSOption{Key: "lowerdir+", Value: l})
	}
	options = append(options, linux.FSOption{Key: "upperdir", Value: filepath.Join(dir, "u")},
		linux.FSOption{Key: "workdir", Value: filepath.Join(dir, "w")}, linux.FSOption{Key: "volatile", Flag: true})
	fd, err := linux.FSMount("overlay", options, linux.MountNoDev)
	if err != nil {
		return err
	}
	defer linux.Close(fd)
	return linux.AttachMount(fd, root)
}

var idMapping = []map[string]int{{"containerID": 0, "hostID": 0x20000000, "size": 1 << 16}}

// ociSpec writes the driver's hardening as an OCI runtime specification, as far as it can be said there.
func ociSpec(root string, net driver.Network, l sandbox.Limits, group string) map[string]any {
	caps := capabilities()
	return map[string]any{
		"ociVersion": "1.0.2",
		"root":       map[string]any{"path": root},
		"hostname":   "bench",
		"process": map[string]any{
			"user": map[string]int{"uid": 0, "gid": 0}, "args": []string{"/program"}, "cwd": "/", "env": []string{"PATH=/usr/bin:/bin"},
			"capabilities": map[string]any{"bounding": caps, "effective": caps, "permitted": caps},
			"rlimits":      []map[string]any{{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}},
		},
		"mounts": ociMounts(net),
		"linux": map[string]any{
			"namespaces": []map[string]string{{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "cgroup"},
				{"type": "user"}, {"type": "network", "path": net.Namespace}},
			"uidMappings": idMapping, "gidMappings": idMapping,
			"cgroupsPath": group,
			"resources": map[string]any{
				"memory": map[string]int64{"limit": l.Memory}, "pids": map[string]int64{"limit": l.PIDs}, "cpu": map[string]int64{"shares": 1024},
			},
			"maskedPaths": masked(), "readonlyPaths": readOnly(), "seccomp": seccomp(),
		},
	}
}

func ociMounts(net driver.Network) []map[string]any {
	m := func(dst, kind, src string, options ...string) map[string]any {
		return map[string]any{"destination": dst, "type": kind, "source": src, "options": options}
	}
	return []map[string]any{
		m("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
		m("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size="+strconv.Itoa(64<<10)),
		m("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
		m("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "nodev", "mode=1777", "size=268435456"),
		m("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
		m("/sys", "bind", net.Sysfs, "rbind", "ro"),
	}
}
