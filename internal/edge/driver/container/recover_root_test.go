//go:build rootful

package container

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// An errand is what a process that stands for the edge does before it is killed.
type errand struct {
	Run, Stage, Aether string
	Spec               driver.Spec
	StopAt             string // a point of the driver, "created" or "running"
}

// edgeMain makes a sandbox up to a point, prints the last handle and waits to be killed.
func edgeMain() {
	var e errand
	if err := json.NewDecoder(os.Stdin).Decode(&e); err != nil {
		panic(err)
	}
	var h driver.Handle
	stop := func(point string) {
		if point == e.StopAt {
			line, _ := json.Marshal(h)
			fmt.Println(string(line))
			time.Sleep(time.Hour) // select{} would be a deadlock, which ends the process
		}
	}
	ctx := context.Background()
	d, err := Open(ctx, Options{RunDir: e.Run, Stage: e.Stage, Aether: e.Aether, IDBase: 0x30000000, IDCapacity: 512})
	if err != nil {
		panic(err)
	}
	d.reached = stop
	if h, err = d.Create(ctx, e.Spec); err != nil {
		panic(err)
	}
	stop("created")
	if h, err = d.Start(ctx, h); err != nil {
		panic(err)
	}
	stop("running")
}

// killedEdge lets another process make a sandbox up to a point, and kills it there.
func (b *bench) killedEdge(spec driver.Spec, point string) driver.Handle {
	b.t.Helper()
	b.driver.Detach()
	input, err := json.Marshal(errand{b.opts.RunDir, b.opts.Stage, b.opts.Aether, spec, point})
	must(b.t, err)
	cmd := exec.Command(b.opts.Aether)
	cmd.Args = []string{"edge"}
	cmd.Stdin = strings.NewReader(string(input))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(b.t, err)
	must(b.t, cmd.Start())
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		b.t.Fatalf("edge up to %s: %v", point, err)
	}
	var h driver.Handle
	must(b.t, json.Unmarshal(line, &h))
	must(b.t, cmd.Process.Kill())
	_ = cmd.Wait()
	h.ID = spec.ID
	return h
}

// Wherever the edge is killed: before aether's pid is recorded nothing lives on, and afterwards it is found.
func TestRootKilledEdge(t *testing.T) {
	b := newBench(t)
	for _, point := range []string{"intended", "created", "cloned", "recorded"} {
		spec := b.spec()
		h := b.killedEdge(spec, point)
		b.expectEmptySoon(spec.ID, point)
		b.open()
		status, err := b.driver.Recover(context.Background(), h)
		must(t, err)
		if status.Running {
			t.Errorf("killed at %s: recovered as running", point)
		}
		found, err := b.driver.Sweep(context.Background(), nil)
		must(t, err)
		if !slices.Equal(found, []sandbox.ID{spec.ID}) {
			t.Errorf("killed at %s: sweep found %v", point, found)
		}
		if left := b.footprint().files; len(left) > 0 {
			t.Errorf("killed at %s: left %v", point, left)
		}
		b.cleanup(spec.ID)
	}
	for _, point := range []string{"started", "running"} {
		spec := b.spec()
		h := b.killedEdge(spec, point)
		b.open()
		b.checkRecovered(h, point)
		b.destroy(h)
	}
}

func (b *bench) checkRecovered(h driver.Handle, point string) {
	b.t.Helper()
	ctx := context.Background()
	status, err := b.driver.Recover(ctx, h)
	must(b.t, err)
	if !status.Running {
		b.t.Fatalf("killed at %s: not recovered", point)
	}
	if again, err := b.driver.Recover(ctx, h); err != nil || !again.Running {
		b.t.Errorf("killed at %s: second recover: %+v, %v", point, again, err)
	}
	if got := b.ask(h, request{Probe: "write tmp"}); got != "ok" {
		b.t.Errorf("killed at %s: %s", point, got)
	}
	found, err := b.driver.Sweep(ctx, map[sandbox.ID]bool{h.ID: true})
	if err != nil || len(found) > 0 {
		b.t.Errorf("killed at %s: sweep took %v, %v", point, found, err)
	}
	_, _ = b.tryAsk(h, request{Probe: "exit"})
	exit, err := b.driver.Wait(ctx, h)
	want := driver.Exit{Code: 7}
	if !linux.KeepsExitStatus() && exit.Code == -1 {
		want.Code = -1 // its new parent was faster
	}
	if err != nil || exit != want {
		b.t.Errorf("killed at %s: exit %+v, %v; want %+v, also from another process's child", point, exit, err, want)
	}
}

func (b *bench) expectEmptySoon(id sandbox.ID, point string) {
	b.t.Helper()
	var pids []int
	for range 6000 {
		var err error
		pids, err = b.tree.Pids(id)
		must(b.t, err)
		if len(pids) == 0 {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.t.Errorf("killed at %s: processes %v live on", point, pids)
}

// A number that another process has now is never taken over.
func TestRootRecoverOfAnotherProcess(t *testing.T) {
	b := newBench(t)
	h := b.start()
	rec, err := parseHandle(h)
	must(t, err)
	foreign := rec
	foreign.Pid = os.Getpid()
	later := rec
	later.Start++
	elsewhere := rec
	elsewhere.Aether = filepath.Join(elsewhere.Group, "user")
	for name, r := range map[string]record{"foreign pid": foreign, "other start time": later, "other group": elsewhere} {
		if p, err := findAether(r); err == nil {
			p.Close()
			t.Errorf("%s: taken over", name)
		}
	}
	p, err := findAether(rec)
	must(t, err)
	p.Close()
}

// Everybody who waits gets the answer, also later.
func TestRootWait(t *testing.T) {
	b := newBench(t)
	h := b.start()
	ctx := context.Background()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if exit, err := b.driver.Wait(ctx, h); err != nil || exit.Code != 7 {
				t.Errorf("wait: %+v, %v", exit, err)
			}
		})
	}
	_, _ = b.tryAsk(h, request{Probe: "exit"})
	wg.Wait()
	if exit, err := b.driver.Wait(ctx, h); err != nil || exit.Code != 7 {
		t.Errorf("wait afterwards: %+v, %v", exit, err)
	}
	if _, err := b.tryAsk(h, request{Probe: "exit"}); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("dial of a dead one: %v", err)
	}
	status, err := b.driver.Recover(ctx, h)
	if err != nil || status.Running || status.Exit.Code != 7 {
		t.Errorf("recover of a dead one: %+v, %v", status, err)
	}
}

// Stop ends what has left its session, its parent and its group.
func TestRootStopKillsAll(t *testing.T) {
	b := newBench(t)
	h := b.start()
	b.ask(h, request{Probe: "sh:for i in 1 2 3; do setsid sh -c 'trap \"\" TERM HUP; sleep 1000 & sleep 1000' >/dev/null 2>&1 & done", Command: true})
	if pids, err := b.tree.Pids(h.ID); err != nil || len(pids) < 4 {
		t.Fatalf("processes before: %v, %v", pids, err)
	}
	ctx := context.Background()
	must(t, b.driver.Stop(ctx, h))
	if pids, err := b.tree.Pids(h.ID); err != nil || len(pids) != 0 {
		t.Errorf("processes after: %v, %v", pids, err)
	}
	if exit, err := b.driver.Wait(ctx, h); err != nil || exit.Signal != 9 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	b.settle() // no child is left, once namespaces are made ahead
	must(t, b.driver.Stop(ctx, h))
}

// A live sandbox costs at most two descriptors here: its process and its log.
func TestRootDescriptorsOfALiveSandbox(t *testing.T) {
	b := newBench(t)
	b.settle()
	before := b.footprint().fds
	const sandboxes = 20
	for range sandboxes {
		b.start()
	}
	b.driver.ranges.close()                               // nothing is made ahead while we count
	if n := b.footprint().fds - before; n/sandboxes > 2 { // the runtime may have opened one or two of its own
		t.Errorf("%d descriptors for %d sandboxes", n, sandboxes)
	}
}
