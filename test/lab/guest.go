package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"dsec/test/lab/job"
)

const (
	bootTime  = 2 * time.Minute
	bootTries = 3 // the emulator fails some boots of newer kernels
	scratch   = "12G"

	cmdline = "console=ttyS0 quiet panic=-1 oops=panic lsm=landlock,lockdown,yama,integrity,apparmor,bpf apparmor=1 tsc=reliable"
)

// A machine says what all guests are made of.
type machine struct {
	kernel        kernel
	root, payload string
	dir           string
	cpus, memory  int
}

// A guest is one running machine.
type guest struct {
	cmd     *exec.Cmd
	ended   chan struct{} // closed when the emulator has
	console string        // file
	scratch string        // file
	socket  string        // file
	conn    net.Conn
	in      *json.Encoder
	out     *json.Decoder
	release string
}

// boot starts a guest and waits for its agent, with a few tries.
func (m machine) boot(ctx context.Context, name string) (g *guest, err error) {
	for n := range bootTries {
		if g, err = m.tryBoot(ctx, fmt.Sprintf("%s.%d", name, n)); err == nil || ctx.Err() != nil {
			return g, err
		}
		say("%s did not boot: %v", name, err)
	}
	return nil, err
}

func (m machine) tryBoot(ctx context.Context, name string) (*guest, error) {
	path := filepath.Join(m.dir, name)
	g := &guest{console: path + ".console", scratch: path + ".scratch", socket: path + ".socket", ended: make(chan struct{})}
	if _, err := command(ctx, "", "mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", g.scratch, scratch); err != nil {
		return nil, err
	}
	g.cmd = exec.Command("qemu-system-x86_64", m.arguments(g)...)
	if err := g.start(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	if err := g.greet(ctx); err != nil {
		g.stop()
		return nil, fmt.Errorf("%w; the end of its console:\n%s", err, g.consoleEnd())
	}
	return g, nil
}

func (m machine) arguments(g *guest) []string {
	args := []string{"-accel", "tcg,thread=multi", "-M", "q35", "-cpu", "max", "-smp", strconv.Itoa(m.cpus), "-m", strconv.Itoa(m.memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "file:" + g.console,
		"-kernel", m.kernel.image, "-initrd", m.kernel.initrd, "-append", cmdline,
		"-device", "virtio-serial-pci", "-chardev", "socket,id=lab,server=on,wait=off,path=" + g.socket, "-device", "virtserialport,chardev=lab,name=lab",
		"-device", "virtio-rng-pci", "-sandbox", "on"}
	for i, disk := range []string{m.root, m.kernel.modules, m.payload, g.scratch} {
		options := fmt.Sprintf("if=none,id=d%d,format=raw,file=%s", i, disk)
		switch disk {
		case g.scratch:
			options += ",cache=unsafe,discard=unmap"
		case m.root: // what is written to it ends with the guest
			options += ",snapshot=on,file.locking=off"
		default:
			options += ",readonly=on,file.locking=off"
		}
		args = append(args, "-drive", options, "-device", fmt.Sprintf("virtio-blk-pci,drive=d%d", i))
	}
	return args
}

// start runs the emulator, which ends with this process, however that ends: the kernel watches the thread that started it.
func (g *guest) start() error {
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	g.cmd.Stderr = os.Stderr
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := g.cmd.Start()
		started <- err
		if err == nil {
			_ = g.cmd.Wait()
			close(g.ended)
		}
	}()
	return <-started
}

// greet connects to the agent and waits for its first word.
func (g *guest) greet(ctx context.Context) (err error) {
	for g.conn == nil {
		if g.conn, err = net.Dial("unix", g.socket); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-g.ended:
			return errors.New("the emulator ended")
		case <-time.After(20 * time.Millisecond):
		}
	}
	g.in, g.out = json.NewEncoder(g.conn), json.NewDecoder(g.conn)
	var e job.Event
	if err := g.next(ctx, &e); err != nil {
		return fmt.Errorf("the guest does not answer: %w", err)
	}
	g.release = e.Ready
	return nil
}

// next reads an event, until the context ends or the guest does.
func (g *guest) next(ctx context.Context, e *job.Event) error {
	stop := context.AfterFunc(ctx, func() { _ = g.conn.SetReadDeadline(time.Now()) })
	defer stop()
	err := g.out.Decode(e)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// run runs a job and writes what it prints. An errJob says that the job failed, any other error that the guest did.
func (g *guest) run(ctx context.Context, j job.Job, out io.Writer) error {
	if err := g.in.Encode(j); err != nil {
		return err
	}
	for {
		var e job.Event
		if err := g.next(ctx, &e); err != nil {
			return err
		}
		if _, err := out.Write(e.Output); err != nil {
			return err
		}
		switch {
		case e.Error != "":
			return errJob(e.Error)
		case e.Done:
			return nil
		}
	}
}

type errJob string

func (e errJob) Error() string { return string(e) }

// stop ends the guest without asking it: nothing of it is kept but the console.
func (g *guest) stop() {
	_ = g.cmd.Process.Kill()
	<-g.ended
	if g.conn != nil {
		g.conn.Close()
	}
	_ = os.Remove(g.scratch)
	_ = os.Remove(g.socket)
}

// consoleEnd is the last lines that the guest's kernel wrote.
func (g *guest) consoleEnd() string {
	b, err := os.ReadFile(g.console)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-6000):])
}

// script runs a shell script in a guest of its own, for looking around.
func (m machine) script(ctx context.Context, text string) error {
	g, err := m.boot(ctx, "shell")
	if err != nil {
		return err
	}
	defer g.stop()
	say("%s is up", g.release)
	if err := g.run(ctx, job.Job{Args: []string{"/bin/bash", "-c", text}, Dir: "/root"}, os.Stdout); err != nil {
		return fmt.Errorf("%w; the end of its console:\n%s", err, g.consoleEnd())
	}
	return nil
}
