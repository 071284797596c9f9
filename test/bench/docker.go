package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// A docker is a dockerd of the benchmark's own, with an image of the same files as the platform's. Debian's docker.io.
type docker struct {
	s      *session
	socket string
	cli    string
	bridge bool // its containers have its default network; the daemon is in a network namespace of its own
	http   *http.Client
}

const (
	dockerImage = "bench:1"
	dockerStart = 60 * time.Second
)

// startDocker starts it and imports the image. Its containers have no network.
func (s *session) startDocker(ctx context.Context) (*docker, error) { return s.dockerWith(ctx, false) }

// startBridgedDocker starts one whose containers have the network that docker gives them by default.
func (s *session) startBridgedDocker(ctx context.Context) (*docker, error) {
	return s.dockerWith(ctx, true)
}

func (s *session) dockerWith(ctx context.Context, bridge bool) (*docker, error) {
	if err := s.installed(ctx); err != nil {
		return nil, err
	}
	d := &docker{s: s, socket: filepath.Join(s.runDir, "docker.sock"), cli: "/usr/bin/docker", bridge: bridge}
	d.http = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", d.socket)
		},
	}}
	if err := d.daemon(ctx); err != nil {
		return nil, err
	}
	if _, err := d.run(ctx, "import", baseTar, dockerImage); err != nil {
		return nil, err
	}
	return d, nil
}

// installed installs docker.io and crun where they are missing.
func (s *session) installed(ctx context.Context) error {
	if out, err := exec.CommandContext(ctx, "scripts/deps.sh", "bench").CombinedOutput(); err != nil {
		return fmt.Errorf("install docker.io and crun: %w\n%s", err, out)
	}
	return nil
}

func (d *docker) daemon(ctx context.Context) error {
	log, err := os.Create(filepath.Join(d.s.dir, "dockerd.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	root, state := filepath.Join(d.s.dir, "docker"), filepath.Join(d.s.runDir, "docker")
	cmd := exec.Command("/usr/sbin/dockerd", "--data-root", root, "--exec-root", state, "--pidfile", filepath.Join(d.s.runDir, "docker.pid"),
		"-H", "unix://"+d.socket, "--storage-driver", "overlay2", "--log-level", "error", "--cgroup-parent", "/dsec-bench-docker")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if d.bridge {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET // bridge, rules and forwarding are there, and go with it
	} else {
		cmd.Args = append(cmd.Args, "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none")
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start dockerd: %w", err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	d.s.later(func() error { return d.stop(cmd.Process, done) })
	err = poll(ctx, dockerStart, "dockerd does not answer", func() bool { return d.call(ctx, http.MethodGet, "/_ping", nil, nil) == nil })
	if err != nil {
		content, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%w\n%s", err, content)
	}
	return nil
}

// stop ends the daemon, and what it leaves: its containerd ends with it.
func (d *docker) stop(p *os.Process, done <-chan struct{}) error {
	d.http.CloseIdleConnections()
	if err := endProcess(p, "dockerd", done); err != nil {
		return err
	}
	removeCgroups("dsec-bench-docker")
	return nil
}

// removeCgroups removes empty v1 and v2 groups of that name.
func removeCgroups(name string) {
	found, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", "*", name)) // the pattern is valid
	for _, dir := range append(found, filepath.Join("/sys/fs/cgroup", name)) {
		_ = os.Remove(dir) // it is not there, or in use
	}
}

// command is a call of the command line.
func (d *docker) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, d.cli, append([]string{"-H", "unix://" + d.socket}, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DOCKER_CONFIG=" + d.s.dir}
	return cmd
}

// run calls the command line.
func (d *docker) run(ctx context.Context, args ...string) (string, error) {
	out, err := d.command(ctx, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", args[0], err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// mode is docker's name for the network of a container.
func (d *docker) mode() string {
	if d.bridge {
		return "bridge"
	}
	return "none"
}

// createCLI makes and starts a container that idles.
func (d *docker) createCLI(ctx context.Context) (string, error) {
	return d.run(ctx, "run", "-d", "--init", "--network", d.mode(), "--memory", fmt.Sprint(limitMemory), "--pids-limit", fmt.Sprint(limitPIDs),
		"--cpu-shares", "1024", dockerImage, "/bin/sleep", "infinity")
}

func (d *docker) execCLI(ctx context.Context, id string) error {
	_, err := d.run(ctx, "exec", id, "/bin/true")
	return err
}

func (d *docker) destroyCLI(ctx context.Context, id string) error {
	_, err := d.run(ctx, "rm", "-f", id)
	return err
}

// call makes one request of docker's HTTP API.
func (d *docker) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := d.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	content, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode >= 300 {
		return fmt.Errorf("docker: %s %s: %s: %s", method, path, res.Status, content)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(content, out)
}

func (d *docker) createAPI(ctx context.Context) (string, error) {
	yes := true
	spec := map[string]any{
		"Image": dockerImage, "Cmd": []string{"/bin/sleep", "infinity"}, "NetworkDisabled": !d.bridge,
		"HostConfig": map[string]any{"NetworkMode": d.mode(), "Memory": limitMemory, "PidsLimit": limitPIDs, "CpuShares": 1024, "Init": &yes},
	}
	var made struct{ ID string }
	if err := d.call(ctx, http.MethodPost, "/v1.41/containers/create", spec, &made); err != nil {
		return "", err
	}
	return made.ID, d.call(ctx, http.MethodPost, "/v1.41/containers/"+made.ID+"/start", nil, nil)
}

// execAPI is create, start (whose answer ends with the command) and inspect, as every client of docker does.
func (d *docker) execAPI(ctx context.Context, id string) error {
	var made struct{ ID string }
	err := d.call(ctx, http.MethodPost, "/v1.41/containers/"+id+"/exec",
		map[string]any{"Cmd": []string{"/bin/true"}, "AttachStdout": true, "AttachStderr": true}, &made)
	if err != nil {
		return err
	}
	if err := d.call(ctx, http.MethodPost, "/v1.41/exec/"+made.ID+"/start", map[string]any{"Detach": false, "Tty": false}, nil); err != nil {
		return err
	}
	var state struct {
		Running  bool
		ExitCode int
	}
	if err := d.call(ctx, http.MethodGet, "/v1.41/exec/"+made.ID+"/json", nil, &state); err != nil {
		return err
	}
	if state.Running || state.ExitCode != 0 {
		return fmt.Errorf("docker exec: %+v", state)
	}
	return nil
}

func (d *docker) destroyAPI(ctx context.Context, id string) error {
	return d.call(ctx, http.MethodDelete, "/v1.41/containers/"+id+"?force=true&v=true", nil, nil)
}
