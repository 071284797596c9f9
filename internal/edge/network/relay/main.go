package relay

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"

	"dsec/internal/linux"
)

// Port of the relay's sockets on the loopback of the router: there the packet filter finds them.
const Port = 7

// ReadyFD is the descriptor of Config.Ready, which whoever starts the relay hands it.
const ReadyFD = 3

// Config of Main.
type Config struct {
	Router string // path of its network namespace
	Socket string // to be made
	Root   string // an empty directory
	UID    int
	Range  []netip.Prefix
	Ready  *os.File // is told by one byte that it serves, or why it does not
}

// Args are the arguments from which ParseArgs makes c again. Ready is descriptor 3.
func (c Config) Args() []string {
	args := []string{"--router", c.Router, "--socket", c.Socket, "--root", c.Root, "--uid", strconv.Itoa(c.UID)}
	for _, p := range c.Range {
		args = append(args, p.String())
	}
	return args
}

// ParseArgs reads what Args gave.
func ParseArgs(args []string) (Config, error) {
	c := Config{Ready: os.NewFile(ReadyFD, "ready")}
	f := flag.NewFlagSet("relay", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&c.Router, "router", "", "")
	f.StringVar(&c.Socket, "socket", "", "")
	f.StringVar(&c.Root, "root", "", "")
	f.IntVar(&c.UID, "uid", 0, "")
	if err := f.Parse(args); err != nil {
		return c, err
	}
	for _, s := range f.Args() {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return c, err
		}
		c.Range = append(c.Range, p)
	}
	if c.Router == "" || c.Socket == "" || c.Root == "" || c.UID <= 0 {
		return c, errors.New("the relay is started by the edge alone")
	}
	return c, nil
}

// files is how many descriptors a relay would have. A stream needs two, and four more while bytes move.
const (
	files         = 1 << 20
	filesOfStream = 6
)

// Main is the relay's process. It returns when an edge has said stop or ctx has ended.
func Main(ctx context.Context, c Config) error {
	err := run(ctx, c)
	if err != nil {
		fmt.Fprintf(c.Ready, "%v\n", err)
	}
	return err
}

func run(ctx context.Context, c Config) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	router, err := linux.EnterNetns(c.Router)
	if err != nil {
		return err
	}
	defer router.Close()
	routes, err := linux.OpenNetlink()
	if err != nil {
		return err
	}
	var listeners, datagrams []*os.File
	err = router.Do(func() (err error) {
		listeners, datagrams, err = openSockets()
		return err
	})
	if err != nil {
		return fmt.Errorf("making sockets in the router's namespace: %w", err)
	}
	if err := os.Remove(c.Socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	control, err := linux.ListenUnix(c.Socket)
	if err != nil {
		return err
	}
	have, err := linux.DropPrivileges(c.UID, c.Root, files)
	if err != nil {
		return err
	}
	r := New(Options{Router: router, Routes: routes, Range: c.Range, Streams: int64(have-min(have/2, 512)) / filesOfStream})
	for _, f := range listeners {
		if err := r.accept(ctx, f); err != nil {
			return err
		}
	}
	for _, f := range datagrams {
		if err := r.datagrams(ctx, f); err != nil {
			return err
		}
	}
	if _, err := c.Ready.Write([]byte("\n")); err != nil {
		return fmt.Errorf("the edge that started this relay is gone: %w", err)
	}
	c.Ready.Close()
	r.control(ctx, control, stop)
	return nil
}

// backlog of connections that wait to be accepted.
const backlog = 4096

func openSockets() (listeners, datagrams []*os.File, err error) {
	loopbacks := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	if linux.HasIPv6() {
		loopbacks = append(loopbacks, netip.IPv6Loopback())
	}
	for _, a := range loopbacks {
		l, err := linux.ListenRelay(netip.AddrPortFrom(a, Port), backlog)
		if err != nil {
			return nil, nil, err
		}
		d, err := linux.ListenRelayUDP(netip.AddrPortFrom(a, Port))
		if err != nil {
			return nil, nil, err
		}
		listeners, datagrams = append(listeners, l), append(datagrams, d)
	}
	return listeners, datagrams, nil
}

// Dial connects to the relay whose socket this is, whether it answers or not.
func Dial(ctx context.Context, socket string) (*Client, error) {
	conn, err := linux.DialUnix(ctx, socket)
	if err != nil {
		return nil, err
	}
	pid, err := linux.ListenerPID(conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return newClient(conn, pid), nil
}
