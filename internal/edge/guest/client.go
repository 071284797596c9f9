package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

const (
	requestTimeout = 30 * time.Second // for aether's answer to a request
	stallTimeout   = 60 * time.Second // without any progress of a transfer
	reconnectTime  = 10 * time.Second // then a sandbox that cannot be reached is lost
	refusals       = 5                // in a row: nobody listens any more
	firstBackoff   = 200 * time.Microsecond
	maxBackoff     = 50 * time.Millisecond

	shortLife     = time.Second           // a connection that lived less was not worth it
	firstRest     = 10 * time.Millisecond // after such a one, doubled with each in a row
	maxRest       = 3 * time.Second
	maxShort      = 12          // such in a row end the client: some 15 s
	quietAfterLog = time.Minute // broken connections are logged once in that time

	defaultKeep    = 1024
	keepUnreleased = 16 // more than wait for a lost answer at once; each costs aether memory at rest
)

// Options of a Client.
type Options struct {
	ID        sandbox.ID
	Dial      func(context.Context) (net.Conn, error)
	Key       []byte
	OutputDir string // where output is spooled; made on first need, emptied of what no command owns
	// OnChange is called, without any lock held, when the number of running commands changed or (activity) a caller did
	// something. May be nil.
	OnChange func(running int, activity bool)
	// OnEnd is called, without any lock held, when a command has ended and its result is there. May be nil.
	OnEnd        func(commandID string)
	Log          *slog.Logger
	KeepCommands int // finished commands that are remembered; 0 = 1024
}

// A Client speaks to one aether. What it knows of commands stays readable after Close.
type Client struct {
	o     Options
	spool *spool
	ctx   context.Context // ends with Close; for the reconnecting goroutine only
	stop  context.CancelFunc
	wg    sync.WaitGroup
	done  chan struct{}
	dials atomic.Int64 // connections to ports

	mu         sync.Mutex
	link       *link // nil while there is no connection
	linked     chan struct{}
	commands   map[string]*Command
	finished   []*Command // oldest first
	unreleased []*Command // oldest first
	running    int
	err        error // why done is closed
	closed     bool
}

// Connect waits until aether answers, or ctx ends. Commands that aether knows are attached: an edge that restarted goes on
// where the last one ended.
func Connect(ctx context.Context, o Options) (*Client, error) {
	if o.KeepCommands <= 0 {
		o.KeepCommands = defaultKeep
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	c := &Client{o: o, spool: newSpool(o.OutputDir), done: make(chan struct{}), linked: make(chan struct{}), commands: make(map[string]*Command)}
	c.ctx, c.stop = context.WithCancel(context.Background())
	l, known, err := c.dial(ctx, false)
	if err != nil {
		c.stop()
		return nil, err
	}
	c.adopt(known)
	c.resume(l, known)
	c.wg.Go(func() { c.supervise(l) })
	return c, nil
}

// dial connects and greets, again and again with a growing pause, until ctx ends. A last attempt's error is the cause.
func (c *Client) dial(ctx context.Context, again bool) (*link, []*aetherv1.CommandStatus, error) {
	pause := firstBackoff
	refused := 0
	for {
		l, known, err := c.greet(ctx)
		if err == nil {
			return l, known, nil
		}
		if errors.Is(err, wire.ErrProtocol) || errors.Is(err, errVersion) {
			return nil, nil, err
		}
		if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT) {
			refused++
		} else {
			refused = 0
		}
		if again && refused >= refusals {
			return nil, nil, err
		}
		select {
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("connect to aether: %w", errors.Join(ctx.Err(), err))
		case <-time.After(pause):
		}
		pause = min(2*pause, maxBackoff)
	}
}

// greet makes one connection and exchanges Hello.
func (c *Client) greet(ctx context.Context) (*link, []*aetherv1.CommandStatus, error) {
	nc, err := c.o.Dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	l := newLink(c, nc)
	known, err := l.hello(ctx)
	if err != nil {
		l.close()
		return nil, nil, err
	}
	return l, known, nil
}

// supervise waits for the end of each connection and makes the next one. An aether that greets and hangs up again costs no
// more than a few attempts: see shortLife.
func (c *Client) supervise(l *link) {
	var short, unlogged int
	var logged time.Time
	for {
		began := time.Now()
		select {
		case <-l.conn.Done():
		case <-c.ctx.Done():
		}
		l.close()
		err := l.conn.Err()
		c.mu.Lock()
		c.link = nil
		closed := c.closed
		c.mu.Unlock()
		l.lostAll()
		if closed {
			c.end(errClosed)
			return
		}
		if errors.Is(err, wire.ErrProtocol) {
			c.o.Log.Error("aether broke the protocol", "sandbox_id", c.o.ID, "error", err)
			c.end(violation("see the edge's log"))
			return
		}
		if unlogged++; time.Since(logged) >= quietAfterLog {
			c.o.Log.Info("connection to aether broke", "sandbox_id", c.o.ID, "error", err, "times", unlogged)
			logged, unlogged = time.Now(), 0
		}
		if short++; time.Since(began) >= shortLife {
			short = 0
		}
		if short >= maxShort {
			c.end(violation("it ends every connection at once"))
			return
		}
		if short > 0 {
			select {
			case <-time.After(min(firstRest<<(short-1), maxRest)):
			case <-c.ctx.Done():
			}
		}
		ctx, cancel := context.WithTimeout(c.ctx, reconnectTime)
		next, known, err := c.dial(ctx, true)
		cancel()
		if err != nil {
			c.endAfterDial(err)
			return
		}
		l = next
		c.resume(l, known)
	}
}

func (c *Client) endAfterDial(err error) {
	switch {
	case c.ctx.Err() != nil:
		c.end(errClosed)
	case errors.Is(err, wire.ErrProtocol):
		c.end(violation("at the greeting"))
	default:
		c.end(errGone.WithCause(err))
	}
}

// end closes Done. Unless it was closed by the edge, every running command counts as killed with its sandbox.
func (c *Client) end(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	commands := slices.Collect(maps.Values(c.commands))
	c.mu.Unlock()
	for _, m := range commands {
		m.abandon(err, err != errClosed)
	}
	close(c.done)
}

// adopt makes commands of what the last edge left running, before anything of them arrives.
func (c *Client) adopt(known []*aetherv1.CommandStatus) {
	names := make(map[string]bool)
	c.mu.Lock()
	for _, k := range known {
		names[k.CommandId] = true
		m := adoptedCommand(c, k)
		c.commands[m.id] = m
		c.running++
	}
	c.mu.Unlock()
	c.spool.keepOnly(names)
}

// resume goes on with every command on a new connection. One that aether no longer knows was lost.
func (c *Client) resume(l *link, known []*aetherv1.CommandStatus) {
	names := make(map[string]bool)
	for _, k := range known {
		names[k.CommandId] = true
	}
	c.mu.Lock()
	c.link = l
	close(c.linked)
	c.linked = make(chan struct{})
	var going []*Command
	for _, m := range c.commands {
		if !m.isDone() {
			going = append(going, m)
		}
	}
	c.unreleased = slices.DeleteFunc(c.unreleased, func(m *Command) bool { return m.isDone() })
	c.mu.Unlock()
	for _, m := range going {
		delete(names, m.id)
		m.resume(l)
	}
	for id := range names { // results that are here already
		l.releaseByID(id)
	}
	l.conn.Flush()
}

// current waits for a connection.
func (c *Client) current(ctx context.Context) (*link, error) {
	for {
		c.mu.Lock()
		l, linked, err := c.link, c.linked, c.err
		if c.closed && err == nil {
			err = errClosed
		}
		c.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if l != nil {
			return l, nil
		}
		select {
		case <-linked:
		case <-c.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Done is closed when aether is gone for good, or after Close. Err says which.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err is why Done is closed, as a *sandbox.Error with reason guest_died, guest_protocol or edge_stopping; nil before.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close disconnects and leaves aether and its commands running. Who waits for a running command gets Unavailable.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.stop()
	c.wg.Wait()
	return nil
}

// Archive moves output from memory to files, but for a little, and writes down for the next edge what there is: see Ended. It
// is for a sandbox that has ended and is still remembered: of these an edge may have ten thousand. Call it after Close.
func (c *Client) Archive() {
	c.mu.Lock()
	all := slices.Clone(c.finished) // oldest first
	for _, m := range c.commands {
		if !slices.Contains(c.finished, m) { // lost while it ran
			all = append(all, m)
		}
	}
	c.mu.Unlock()
	left := endedMemory
	if c.spool.node.memoryFull(2) {
		left = 0
	}
	var spill []*Command
	for _, m := range slices.Backward(all) {
		if n := m.inMemory(); n <= left {
			left -= n
		} else {
			spill = append(spill, m)
		}
	}
	for _, m := range slices.Backward(spill) {
		c.spool.archive(m)
	}
	c.recordEnded()
}

// ForgetCommand drops a command that has ended, with its output. One that runs is kept.
func (c *Client) ForgetCommand(id string) {
	c.mu.Lock()
	m := c.commands[id]
	i := slices.Index(c.finished, m)
	if m == nil || i < 0 {
		c.mu.Unlock()
		return
	}
	delete(c.commands, id)
	c.finished = slices.Delete(c.finished, i, i+1)
	if i := slices.Index(c.unreleased, m); i >= 0 {
		c.unreleased = slices.Delete(c.unreleased, i, i+1)
	}
	c.mu.Unlock()
	m.release()
	c.spool.forget(m)
}

// Forget drops all output; files of it are not made any more. Call it after Close.
func (c *Client) Forget() {
	c.spool.close()
	for _, m := range c.Commands() {
		c.spool.forget(m)
	}
	_ = os.Remove(c.spool.path(endedName)) // it may never have been written
}

// Running is how many commands run.
func (c *Client) Running() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running
}

// Command finds a command, running or remembered.
func (c *Client) Command(id string) (*Command, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, ok := c.commands[id]
	return m, ok
}

// Commands are all commands, in no order.
func (c *Client) Commands() []*Command {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.commands))
}

func (c *Client) changed(activity bool) {
	if c.o.OnChange != nil {
		c.o.OnChange(c.Running(), activity)
	}
}

// ended takes note of a finished command, forgets the oldest and lets aether forget.
func (c *Client) ended(m *Command) {
	c.mu.Lock()
	c.running--
	if c.commands[m.id] == m {
		c.finished = append(c.finished, m)
		c.unreleased = append(c.unreleased, m)
	}
	var forget, release *Command
	if len(c.finished) > c.o.KeepCommands {
		forget = c.finished[0]
		c.finished = c.finished[1:]
		delete(c.commands, forget.id)
	}
	if len(c.unreleased) > keepUnreleased {
		release = c.unreleased[0]
		c.unreleased = c.unreleased[1:]
	}
	c.mu.Unlock()
	if release != nil {
		release.release()
	}
	if forget != nil {
		c.spool.forget(forget)
	}
	c.spool.finished(m)
	c.changed(false)
	if c.o.OnEnd != nil {
		c.o.OnEnd(m.id)
	}
}

// remove forgets a command that could not be started.
func (c *Client) remove(m *Command) {
	c.mu.Lock()
	if c.commands[m.id] == m {
		delete(c.commands, m.id)
		c.running--
	}
	c.mu.Unlock()
	c.changed(false)
}
