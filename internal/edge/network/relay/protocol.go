package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"dsec/internal/edge/network/allow"
)

// Version of the protocol between edge and relay.
const Version = 3

// Operations of a request.
const (
	opHello   = "hello"
	opSet     = "set"
	opDrop    = "drop"
	opKeep    = "keep"
	opRefused = "refused"
	opStop    = "stop"
)

// A request is one line of JSON on the relay's socket, answered by one unless it is quiet.
type request struct {
	Op        string       `json:"op"`
	Quiet     bool         `json:"quiet,omitempty"`
	Slot      uint32       `json:"slot,omitempty"`
	Slots     []uint32     `json:"slots,omitempty"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Policy    allow.Policy `json:"policy,omitzero"`
}

type answer struct {
	Error   string         `json:"error,omitempty"`
	Version int            `json:"version,omitempty"`
	Refused allow.Refusals `json:"refused,omitzero"`
}

// callWithin is how long the relay may take to answer.
const callWithin = 10 * time.Second

// maxAnswer bounds one answer. The relay has to do with the outside, so that the edge trusts it no more than it must.
const maxAnswer = 1 << 20

// A Client is the edge's end of a relay's socket.
type Client struct {
	PID int // of the relay

	mu   sync.Mutex
	conn net.Conn
	from io.LimitedReader
	dec  *json.Decoder
	gone chan struct{}
	once sync.Once
}

func newClient(conn net.Conn, pid int) *Client {
	c := &Client{PID: pid, conn: conn, from: io.LimitedReader{R: conn}, gone: make(chan struct{})}
	c.dec = json.NewDecoder(&c.from)
	return c
}

// Hello says whether it answers, in the words of this edge.
func (c *Client) Hello() error {
	a, err := c.do(request{Op: opHello})
	if err == nil && a.Version != Version {
		err = fmt.Errorf("the relay speaks version %d, this edge %d", a.Version, Version)
	}
	return err
}

// Gone is closed when a call has failed because the relay does not answer.
func (c *Client) Gone() <-chan struct{} { return c.gone }

// Close leaves the relay as it is.
func (c *Client) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.conn.Close()
}

func (c *Client) call(r request) (a answer, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() {
		if err != nil { // what comes later would be the answer to another question
			c.once.Do(func() { close(c.gone) })
			c.conn.Close()
			err = fmt.Errorf("call the relay: %w", err)
		}
	}()
	if err := c.conn.SetDeadline(time.Now().Add(callWithin)); err != nil {
		return a, err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return a, err
	}
	if _, err := c.conn.Write(append(b, '\n')); err != nil || r.Quiet {
		return a, err
	}
	c.from.N = maxAnswer
	return a, c.dec.Decode(&a)
}

func (c *Client) do(r request) (answer, error) {
	a, err := c.call(r)
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return a, err
}

// Set makes p the policy of a slot. Connections that p does not allow have ended when it returns.
func (c *Client) Set(slot uint32, addresses []netip.Addr, p allow.Policy) error {
	_, err := c.do(request{Op: opSet, Slot: slot, Addresses: addresses, Policy: p})
	return err
}

// Begin is Set for a slot that has no connections yet. It waits for nobody: on a busy node a turn of another process takes longer
// than all else that a sandbox's network needs.
func (c *Client) Begin(slot uint32, addresses []netip.Addr, p allow.Policy) error {
	_, err := c.do(request{Op: opSet, Slot: slot, Addresses: addresses, Policy: p, Quiet: true})
	return err
}

// Drop ends all connections of a slot and forgets it. It waits for nobody, either: what comes later is done later.
func (c *Client) Drop(slot uint32) error {
	_, err := c.do(request{Op: opDrop, Slot: slot, Quiet: true})
	return err
}

// Refused is what the relay refused to a slot.
func (c *Client) Refused(slot uint32) (allow.Refusals, error) {
	a, err := c.do(request{Op: opRefused, Slot: slot})
	return a.Refused, err
}

// Keep drops all slots but these.
func (c *Client) Keep(slots []uint32) error {
	_, err := c.do(request{Op: opKeep, Slots: slots})
	return err
}

// Stop ends the relay, with all connections.
func (c *Client) Stop() error {
	_, err := c.do(request{Op: opStop})
	return err
}

// control answers edges until stop is called for or ctx ends.
func (r *Relay) control(ctx context.Context, l net.Listener, stop func()) {
	go func() {
		<-ctx.Done()
		l.Close()
	}()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go r.serveEdge(conn, stop)
	}
}

func (r *Relay) serveEdge(conn net.Conn, stop func()) {
	defer conn.Close()
	dec, enc := json.NewDecoder(conn), json.NewEncoder(conn)
	for {
		var q request
		if err := dec.Decode(&q); err != nil {
			return // io.EOF: the edge went away
		}
		var a answer
		switch q.Op {
		case opHello:
			a.Version = Version
		case opSet:
			r.set(q.Slot, q.Addresses, q.Policy)
		case opDrop:
			r.drop(q.Slot)
		case opKeep:
			r.keep(q.Slots)
		case opRefused:
			a.Refused = r.refused(q.Slot)
		case opStop:
			_ = enc.Encode(a)
			stop()
			return
		default:
			a.Error = "unknown operation"
		}
		if q.Quiet {
			continue
		}
		if err := enc.Encode(a); err != nil {
			return
		}
	}
}
