package network

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"dsec/internal/edge/network/relay"
	"dsec/internal/linux"
	"dsec/sandbox"
)

const (
	relayStarts   = 10 * time.Second
	relayRetry    = 200 * time.Millisecond
	relayStopTime = 5 * time.Second
)

// A relayProcess is the relay as this process knows it: found, or started, and started again when it dies.
type relayProcess struct {
	command []string
	uid     int
	slots   *Slots

	mu      sync.Mutex
	client  *relay.Client // nil: not known to live
	process *linux.Process
	closed  bool
	watch   sync.WaitGroup
}

func (p *relayProcess) socket() string { return filepath.Join(p.slots.dir, "relay.sock") }

// need makes sure that there is a relay.
func (p *relayProcess) need() error {
	_, err := p.get()
	return err
}

func (p *relayProcess) get() (*relay.Client, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.client != nil {
		select {
		case <-p.client.Gone():
			p.forgetLocked()
		default:
			return p.client, nil
		}
	}
	if p.closed {
		return nil, sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the edge is shutting down")
	}
	client, err := p.findLocked()
	if client == nil && err == nil {
		client, err = p.startLocked()
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "network_unavailable", "the relay of sandboxes' connections does not start: %v", err)
	}
	if err := p.adoptLocked(client); err != nil {
		client.Close()
		return nil, err
	}
	return client, nil
}

// find takes over the relay of an earlier process, if there is one: it carries connections that have to end with their policies, whether
// or not this process comes to need a relay.
func (p *relayProcess) find() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	client, err := p.findLocked()
	if client == nil || err != nil {
		return err
	}
	if err := p.adoptLocked(client); err != nil {
		client.Close()
		return err
	}
	return nil
}

// adoptLocked tells a relay all policies, and watches it.
func (p *relayProcess) adoptLocked(client *relay.Client) error {
	process, err := linux.OpenProcess(client.PID)
	if err != nil {
		return err
	}
	linked := p.slots.linkedPolicies()
	numbers := make([]uint32, len(linked))
	for i, l := range linked {
		numbers[i] = l.number
	}
	if err := client.Keep(numbers); err != nil { // that it answers says besides that the process is still the one it was
		process.Close()
		return err
	}
	for _, l := range linked {
		if err := client.Set(l.number, l.addresses, l.policy); err != nil {
			process.Close()
			return err
		}
	}
	p.client, p.process = client, process
	p.watch.Go(func() {
		if _, err := process.Wait(); err != nil {
			return // closed
		}
		p.ended(client)
	})
	return nil
}

// ended starts the relay again after its death: its connections are lost, later ones are not.
func (p *relayProcess) ended(client *relay.Client) {
	client.Close()
	p.mu.Lock()
	closed := p.closed
	if p.client == client {
		p.forgetLocked()
	}
	p.mu.Unlock()
	if closed {
		return
	}
	p.slots.log.Error("the relay of sandboxes' connections has died; starting it again")
	for wait := relayRetry; ; wait = min(2*wait, 2*time.Second) {
		if err := p.need(); err == nil || sandbox.ReasonOf(err) == "shutting_down" {
			return
		}
		time.Sleep(wait)
	}
}

// forgetLocked gives up a relay that does not answer, or has ended. It is killed, so that none of its connections outlive what it
// was told last.
func (p *relayProcess) forgetLocked() {
	if p.process != nil {
		_ = p.process.Kill()
		p.process = nil // its descriptor is closed by the runtime; the watcher may still wait for it
	}
	p.client = nil
}

// findLocked connects to a relay that is there, if there is one. One that does not answer, or not in the words of this edge, is killed:
// its connections end with it, and its sockets are free for the next.
func (p *relayProcess) findLocked() (*relay.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), relayStarts)
	defer cancel()
	client, err := relay.Dial(ctx, p.socket())
	if err != nil {
		return nil, nil // nobody listens
	}
	if err = client.Hello(); err == nil {
		return client, nil
	}
	client.Close()
	p.slots.log.Error("the relay of sandboxes' connections does not answer; it is killed", "pid", client.PID, "error", err)
	process, err := linux.OpenProcess(client.PID)
	if err != nil {
		return nil, nil // it has ended
	}
	defer process.Close()
	return nil, endProcess(process)
}

// endProcess kills a process and waits until it has ended.
func endProcess(p *linux.Process) error {
	if err := p.Kill(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		_, _ = p.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-time.After(relayStopTime):
		return fmt.Errorf("process %d does not end", p.Pid)
	}
}

func (p *relayProcess) startLocked() (*relay.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), relayStarts)
	defer cancel()
	var first error
	for {
		err := p.start(ctx)
		if err == nil {
			return relay.Dial(ctx, p.socket())
		}
		if first == nil {
			first = err
		}
		wait(ctx, relayRetry) // another may be on its way out
		if ctx.Err() != nil {
			return nil, first
		}
	}
}

// start starts one and waits until it serves.
func (p *relayProcess) start(ctx context.Context) error {
	s := p.slots
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	config := relay.Config{Router: s.routerPath(), Socket: p.socket(), Root: s.emptyDir(), UID: p.uid, Range: s.ranged.prefixes()}
	args := append(p.command[1:len(p.command):len(p.command)], config.Args()...)
	cmd := exec.Command(p.command[0], args...)
	cmd.Dir, cmd.ExtraFiles, cmd.Env = "/", []*os.File{write}, []string{"GOMAXPROCS=2"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives this process
	err = cmd.Start()
	write.Close()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { read.Close() })
	defer stop()
	line, err := bufio.NewReader(read).ReadString('\n')
	if err == nil && line == "\n" {
		return cmd.Process.Release() // adoptLocked waits for it
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if line = strings.TrimSpace(line); line != "" {
		return errors.New(line)
	}
	return fmt.Errorf("it ended before it served: %w", err)
}

// set tells the relay a policy. fresh: nobody has used the link yet.
func (p *relayProcess) set(x *slot, policy Policy, fresh bool) error {
	if len(policy.Open) == 0 {
		p.mu.Lock()
		idle := p.client == nil
		p.mu.Unlock()
		if idle {
			return nil // nothing to close
		}
	}
	client, err := p.get()
	if err == nil && fresh {
		err = client.Begin(x.link, p.slots.ranged.addresses(x.link), policy)
	} else if err == nil {
		err = client.Set(x.link, p.slots.ranged.addresses(x.link), policy)
	}
	if err != nil {
		p.kill()
	}
	return err
}

// drop ends what a link has of connections. A relay that does not is killed: its connections end with it.
func (p *relayProcess) drop(link uint32) {
	p.mu.Lock()
	client := p.client
	p.mu.Unlock()
	if client == nil {
		return
	}
	if err := client.Drop(link); err != nil {
		p.kill()
	}
}

func (p *relayProcess) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.client != nil {
		p.client.Close()
	}
	p.forgetLocked()
}

func (p *relayProcess) refused(link uint32) (Refusals, error) {
	p.mu.Lock()
	client := p.client
	p.mu.Unlock()
	if client == nil {
		return Refusals{}, nil
	}
	return client.Refused(link)
}

// detach leaves the relay to the next process.
func (p *relayProcess) detach() {
	p.mu.Lock()
	p.closed = true
	if p.client != nil {
		p.client.Close()
	}
	if p.process != nil {
		p.process.Close()
	}
	p.mu.Unlock()
	p.watch.Wait()
}

// stop ends the relay, also one that an earlier process has started.
func (p *relayProcess) stop(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	client, process := p.client, p.process
	var err error
	if client == nil {
		client, err = p.findLocked()
		if client != nil && err == nil {
			process, err = linux.OpenProcess(client.PID)
		}
	}
	p.mu.Unlock()
	defer p.watch.Wait()
	if client == nil || process == nil { // there is none
		_ = os.Remove(p.socket())
		return err
	}
	_ = client.Stop()
	client.Close()
	ended := make(chan struct{})
	go func() {
		_, _ = process.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(relayStopTime):
		_ = process.Kill()
		<-ended
	}
	process.Close()
	return nil
}

// reopen undoes stop.
func (p *relayProcess) reopen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed, p.client, p.process = false, nil, nil
}

// A linkedPolicy is what the relay has to know of one link.
type linkedPolicy struct {
	number    uint32
	addresses []netip.Addr
	policy    Policy
}

func (s *Slots) linkedPolicies() (all []linkedPolicy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.owned {
		if x.link != 0 && len(x.policy.Open) > 0 {
			all = append(all, linkedPolicy{x.link, s.ranged.addresses(x.link), x.policy})
		}
	}
	return all
}
