package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"dsec/client"
)

var portForwardCommand = command{
	name: "port-forward", group: groupInside, args: "SANDBOX [[ADDRESS:]LOCAL:]REMOTE...",
	summary: "make ports inside a sandbox reachable here",
	details: `Listens here, on 127.0.0.1 unless an ADDRESS is given, and passes each connection to the port REMOTE on the sandbox's loopback, until
Ctrl-C. What listens is printed. LOCAL is the same as REMOTE if it is left out, and any free port if it is 0 or empty. What cannot
be passed is said, and the rest goes on.

  dsec port-forward s4k2 8000
  dsec port-forward s4k2 5000:80 :5432
  dsec port-forward s4k2 0.0.0.0:8080:80`,
	setup: setupPortForward,
}

// A forward is one port here and one inside.
type forward struct {
	address string // host:port here
	remote  int
}

// forwarded is what `dsec port-forward --json` prints of each.
type forwarded struct {
	Local  string `json:"local"`
	Remote int    `json:"remote"`
}

func setupPortForward(f *flagSet) action {
	contextName := contextFlag(f)
	var asJSON bool
	jsonFlag(f, &asJSON, `print {"local": "HOST:PORT", "remote": PORT} for each`)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 2, -1, "sandbox or port"); err != nil {
			return err
		}
		var all []forward
		for _, text := range args[1:] {
			fw, err := parseForward(text)
			if err != nil {
				return err
			}
			all = append(all, fw)
		}
		sb, err := c.dialSandbox(ctx, *contextName, args[0])
		if err != nil {
			return err
		}
		if _, err := sb.Get(ctx); err != nil { // before anything listens for it
			return err
		}
		return c.forward(ctx, sb, all, asJSON)
	}
}

// parseForward reads REMOTE, LOCAL:REMOTE or ADDRESS:LOCAL:REMOTE.
func parseForward(text string) (forward, error) {
	host, local, remote := "127.0.0.1", text, text
	if i := strings.LastIndexByte(text, ':'); i >= 0 {
		local, remote = text[:i], text[i+1:]
		if i := strings.LastIndexByte(local, ':'); i >= 0 {
			host, local = strings.Trim(local[:i], "[]"), local[i+1:]
		}
		if local == "" {
			local = "0"
		}
	}
	inside, err := parsePort(remote)
	if err != nil {
		return forward{}, err
	}
	if n, err := strconv.ParseUint(local, 10, 16); err != nil || host == "" {
		return forward{}, usagef("%q is not [[ADDRESS:]LOCAL:]REMOTE with ports from 0 or 1 to 65535", text)
	} else {
		local = strconv.FormatUint(n, 10)
	}
	return forward{net.JoinHostPort(host, local), inside}, nil
}

func parsePort(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, usagef("%q is no port; ports are 1 to 65535", clipText(s))
	}
	return int(n), nil
}

// forward listens for all, or for none.
func (c *console) forward(ctx context.Context, sb *client.Sandbox, all []forward, asJSON bool) error {
	var listeners []net.Listener
	closeAll := func() {
		for _, l := range listeners {
			l.Close()
		}
	}
	defer closeAll()
	for _, fw := range all {
		l, err := net.Listen("tcp", fw.address)
		if err != nil {
			return fmt.Errorf("listening for port %d: %w", fw.remote, err)
		}
		listeners = append(listeners, l)
	}
	stop := context.AfterFunc(ctx, closeAll)
	defer stop()
	g := new(errgroup.Group)
	for i, l := range listeners {
		if err := c.printForwarded(l.Addr().String(), all[i].remote, asJSON); err != nil {
			return err
		}
		g.Go(func() error { return c.acceptAll(ctx, l, sb.Port(all[i].remote)) })
	}
	err := g.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx) // Ctrl-C: nobody need say so
	}
	return err
}

func (c *console) printForwarded(local string, remote int, asJSON bool) error {
	if asJSON {
		return c.printJSON(forwarded{local, remote})
	}
	return c.print("Forwarding from %s -> %d\n", local, remote)
}

// acceptAll passes each connection on, until l is closed; it waits for those that are open.
func (c *console) acceptAll(ctx context.Context, l net.Listener, port *client.Port) error {
	var open sync.WaitGroup
	defer open.Wait()
	for {
		here, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			c.say("accepting a connection for port %d: %s", port.Number, err)
			if err := c.pause(ctx, killDelay); err != nil {
				return nil
			}
			continue
		}
		open.Go(func() {
			if err := passConnection(ctx, here.(*net.TCPConn), port); err != nil && ctx.Err() == nil {
				c.say("%s: %s", here.LocalAddr(), userMessage(err))
			}
		})
	}
}

// passConnection passes bytes both ways until both sides have ended; each direction ends by itself. One that breaks is reset, so
// that it does not look like an end.
func passConnection(ctx context.Context, here *net.TCPConn, port *client.Port) error {
	defer here.Close()
	there, err := port.Dial(ctx)
	if err != nil {
		_ = here.SetLinger(0) // as a port does that nobody listens on
		return err
	}
	defer there.Close()
	stop := context.AfterFunc(ctx, func() { here.Close(); there.Close() })
	defer stop()
	g := new(errgroup.Group)
	g.Go(func() error { return passOneWay(there, here, here) })
	g.Go(func() error { return passOneWay(here, there, here) })
	return g.Wait()
}

// halfCloser is a connection that can end in one direction.
type halfCloser interface {
	io.ReadWriteCloser
	CloseWrite() error
}

func passOneWay(to, from halfCloser, here *net.TCPConn) error {
	_, err := io.Copy(to, from)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil {
		_ = here.SetLinger(0)
		to.Close()
		from.Close()
		if errors.Is(err, net.ErrClosed) || isReset(err) {
			return nil // the other direction, or whoever was connected, has said so
		}
	}
	return err
}
