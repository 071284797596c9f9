package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/linux"

	"github.com/cilium/ebpf"
)

// benchNetwork measures what a network costs at create, at a change of rules, and for packets, connections and bytes, against
// docker's default bridge and against a plain veth to the same servers.
func benchNetwork(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	o, err := s.startOutside(ctx)
	if err != nil {
		return err
	}
	n := &networkBench{p: p, o: o, r: r}
	return s.runParts(ctx, part{"slot", n.slots}, part{"swap", n.swaps}, part{"traffic", n.traffic}, part{"cycle", n.cycles})
}

type networkBench struct {
	p *platform
	o *outside
	r *report
}

// create makes a sandbox that may reach the servers.
func (n *networkBench) create(ctx context.Context) (*dsecv1.Sandbox, error) {
	spec := n.p.spec()
	spec.NetworkRules = map[string]bool{n.o.prefix: true}
	return n.p.client.Create(ctx, spec)
}

func (n *networkBench) createID(ctx context.Context) (string, error) {
	sb, err := n.create(ctx)
	return sb.GetId(), err
}

// slots measures the network step of creates with a link, against those without.
func (n *networkBench) slots(ctx context.Context) error {
	took := func(create func(context.Context) (*dsecv1.Sandbox, error)) (samples, error) {
		var out samples
		for range firstOps {
			sb, err := create(ctx)
			if err != nil {
				return nil, err
			}
			out = append(out, sb.GetStepSeconds()["network"]*1000)
			if err := n.p.destroy(ctx, sb.GetId()); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	plain := func(ctx context.Context) (*dsecv1.Sandbox, error) { return n.p.client.Create(ctx, n.p.spec()) }
	if _, err := took(n.create); err != nil { // router, relay and pool are made when they are needed first
		return err
	}
	var with, without samples
	for range n.p.s.rounds {
		a, err := took(n.create)
		if err != nil {
			return err
		}
		b, err := took(plain)
		if err != nil {
			return err
		}
		with, without = append(with, a...), append(without, b...)
	}
	n.r.add(figure{Name: "slot_p50", Value: with.median(), Unit: "ms", Against: "loopback alone", Baseline: without.median(), Others: without.spread(),
		Samples: len(with), Spread: with.spread(), Target: "<= 0.5 ms"}, true)
	return nil
}

// swaps measures SetNetwork as a client sees it: authenticated, journaled, applied by filter and relay. The rules of the baseline are
// those that are in force already.
func (n *networkBench) swaps(ctx context.Context) error {
	sb, err := n.create(ctx)
	if err != nil {
		return err
	}
	set := func(i int) error {
		_, err := n.p.client.Sandbox(sb.GetId()).SetNetwork(ctx, map[string]bool{n.o.prefix: true, fmt.Sprintf("10.0.0.%d:443", i%2): true})
		return err
	}
	get := func(context.Context) error { _, err := n.p.client.Sandbox(sb.GetId()).Network(ctx); return err }
	var all, reads samples
	for range n.p.s.rounds {
		i := 0
		took, err := oneByOne(ctx, serialOps, func(context.Context) error { i++; return set(i) })
		if err != nil {
			return err
		}
		all = append(all, took...)
		if took, err = oneByOne(ctx, serialOps, get); err != nil {
			return err
		}
		reads = append(reads, took...)
	}
	n.r.add(figure{Name: "swap_p50", Value: all.median(), Unit: "ms", Against: "GetNetwork", Baseline: reads.median(), Others: reads.spread(),
		Samples: len(all), Spread: all.spread(), Target: "<= 1 ms"}, true)
	return n.p.destroy(ctx, sb.GetId())
}

// trafficProgram says how long packets and connections take, and bytes; it runs in the sandbox and beside it.
const trafficProgram = `
import json, socket, sys, time
host, size = sys.argv[1], int(sys.argv[2])
def each(n, f):
    out = []
    for _ in range(n):
        t = time.perf_counter(); f(); out.append((time.perf_counter() - t) * 1000)
    return out
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect((host, 7001)); u.settimeout(10)
def datagram(): u.send(b"x"); u.recv(10)
t = socket.create_connection((host, 7000)); t.setsockopt(6, 1, 1)
def packet(): t.send(b"x"); t.recv(10)
def connection():
    with socket.create_connection((host, 7000)) as c: c.send(b"x"); c.recv(10)
for f in (datagram, packet, connection): each(50, f)
found = {"Datagram": each(500, datagram), "Packet": each(500, packet), "Connection": each(300, connection)}
b, n = bytearray(1 << 20), 0
s = socket.create_connection((host, 8080)); t = time.perf_counter()
while n < size:
    n += s.recv_into(b)
found["Down"] = [n / 1e6 / (time.perf_counter() - t)]
s = socket.create_connection((host, 8081)); t = time.perf_counter(); n = 0
while n < size:
    n += s.send(b)
s.shutdown(1); s.recv(1)
found["Up"] = [n / 1e6 / (time.perf_counter() - t)]
print(json.dumps(found))
`

// runTimes is BPF_STATS_RUN_TIME: the kernel takes the time of every program's runs while somebody wants it.
const runTimes = 0

type trafficRound struct{ Datagram, Packet, Connection, Down, Up samples }

const trafficBytes = 1 << 30

// traffic measures the relayed path against a veth that leads to the servers without anything between.
func (n *networkBench) traffic(ctx context.Context) error {
	sb, err := n.create(ctx)
	if err != nil {
		return err
	}
	stats, err := ebpf.EnableStats(runTimes)
	if err != nil {
		return err
	}
	defer stats.Close()
	before, err := filterStats()
	if err != nil {
		return err
	}
	argv := []string{"/usr/bin/python3", "-c", trafficProgram, n.o.address, strconv.Itoa(trafficBytes)}
	var ours, plain []trafficRound
	for range n.p.s.rounds {
		res, err := n.p.client.Sandbox(sb.GetId()).Run(ctx, &dsecv1.Command{Argv: argv, TimeoutSeconds: 300})
		if err != nil {
			return err
		}
		var one trafficRound
		if err := json.Unmarshal(res.GetStdout().GetData(), &one); err != nil {
			return fmt.Errorf("%w: %s", err, res.GetStderr().GetData())
		}
		ours = append(ours, one)
		out, err := n.o.beside(ctx, argv...)
		if err != nil {
			return err
		}
		var other trafficRound
		if err := json.Unmarshal(out, &other); err != nil {
			return err
		}
		plain = append(plain, other)
	}
	after, err := filterStats()
	if err != nil {
		return err
	}
	n.addTraffic(ours, plain, after.since(before))
	return n.p.destroy(ctx, sb.GetId())
}

func (n *networkBench) addTraffic(ours, plain []trafficRound, filter map[string]float64) {
	for _, f := range []struct {
		name, unit string
		of         func(trafficRound) samples
	}{
		{"datagram_p50", "ms", func(t trafficRound) samples { return t.Datagram }},
		{"packet_p50", "ms", func(t trafficRound) samples { return t.Packet }},
		{"connection_p50", "ms", func(t trafficRound) samples { return t.Connection }},
		{"down", "MB/s", func(t trafficRound) samples { return t.Down }},
		{"up", "MB/s", func(t trafficRound) samples { return t.Up }},
	} {
		var a, b samples
		for i := range ours {
			a, b = append(a, f.of(ours[i])...), append(b, f.of(plain[i])...)
		}
		out := figure{Name: f.name, Value: a.median(), Unit: f.unit, Against: "a plain veth", Baseline: b.median(), Samples: len(a), Spread: a.spread(), Others: b.spread()}
		if f.name == "packet_p50" {
			out.Parts, out.PartUnit = filter, "ns a packet in the filter"
		}
		n.r.add(out, f.unit == "ms")
	}
}

// cycles measures create, exec and destroy by 8 clients, with a network, against docker with its default bridge.
func (n *networkBench) cycles(ctx context.Context) error {
	ours := side{"dsec", n.createID, n.p.exec, n.p.destroy, firstOps, serialOps}
	alone := side{"loopback alone", n.p.create, n.p.exec, n.p.destroy, firstOps, serialOps}
	if err := (&api{p: n.p, sides: []side{ours, alone}, r: n.r}).cyclesTo(ctx, "cycle_rate_8_cost", ""); err != nil {
		return err
	}
	sides := []side{ours}
	if n.p.s.docker {
		d, err := n.p.s.startBridgedDocker(ctx)
		if err != nil {
			return err
		}
		sides = append(sides, side{"docker CLI", d.createCLI, d.execCLI, d.destroyCLI, slowOps, slowOps},
			side{"docker API", d.createAPI, d.execAPI, d.destroyAPI, slowOps, slowOps})
	}
	a := &api{p: n.p, sides: sides, r: n.r}
	return a.cyclesTo(ctx, "cycle_rate_8", ">= 150/s, >= 12x docker")
}

// filterStats are those of the packet filter's programs, by name.
func filterStats() (filterCounts, error) {
	all := make(filterCounts)
	var id ebpf.ProgramID
	for {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		id = next
		prog, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // it went
		}
		info, err := prog.Info()
		stats, bad := prog.Stats()
		prog.Close()
		if err == nil && bad == nil && (info.Name == "from_sandbox" || info.Name == "to_sandbox") {
			c := all[info.Name]
			all[info.Name] = [2]float64{c[0] + float64(stats.Runtime), c[1] + float64(stats.RunCount)}
		}
	}
}

type filterCounts map[string][2]float64 // ns, and how often

func (f filterCounts) since(before filterCounts) map[string]float64 {
	out := make(map[string]float64)
	for name, c := range f {
		if runs := c[1] - before[name][1]; runs > 0 {
			out[name] = (c[0] - before[name][0]) / runs
		}
	}
	return out
}

// An outside is a namespace with servers, joined to the host by a veth, and one beside the host that is joined to it likewise.
type outside struct {
	name, address, prefix string
}

func (s *session) startOutside(ctx context.Context) (*outside, error) {
	word := strings.TrimPrefix(filepath.Base(s.runDir), "dsec-bench-")
	word = word[max(0, len(word)-6):]
	o := &outside{name: "dsec-b" + word, address: "10.213.87.2", prefix: "10.213.87.0/24"}
	plain := o.name + "p"
	s.later(func() error {
		for _, ns := range []string{o.name, plain} {
			_ = ip(context.WithoutCancel(ctx), "netns", "del", ns) // the links go with them
		}
		return nil
	})
	for _, line := range []string{
		"netns add " + o.name, "netns add " + plain,
		"link add b" + word + " type veth peer name eth0 netns " + o.name,
		"-n " + plain + " link add eth0 type veth peer name eth1 netns " + o.name,
		"addr add 10.213.87.1/24 dev b" + word, "link set b" + word + " up",
		"-n " + o.name + " addr add 10.213.87.2/24 dev eth0", "-n " + o.name + " link set eth0 up", "-n " + o.name + " link set lo up",
		"-n " + o.name + " addr add 10.213.88.1/24 dev eth1", "-n " + o.name + " link set eth1 up",
		"-n " + plain + " addr add 10.213.88.2/24 dev eth0", "-n " + plain + " link set eth0 up",
		"-n " + plain + " route add 10.213.87.2/32 via 10.213.88.1",
	} {
		if err := ip(ctx, strings.Fields(line)...); err != nil {
			return nil, err
		}
	}
	return o, o.serve(s)
}

func ip(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// beside runs a program beside the host, where nothing is between it and the servers.
func (o *outside) beside(ctx context.Context, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", o.name + "p"}, argv...)...)
	var failed bytes.Buffer
	cmd.Stderr = &failed
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", argv[0], err, failed.Bytes())
	}
	return out, nil
}

// serve starts an echo of bytes (7000) and of datagrams (7001), a source (8080) and a sink (8081).
func (o *outside) serve(s *session) error {
	var listeners []net.Listener
	var datagrams net.PacketConn
	err := linux.InNetns(filepath.Join("/run/netns", o.name), func() (err error) {
		for _, port := range []string{"7000", "8080", "8081"} {
			l, err := net.Listen("tcp", net.JoinHostPort(o.address, port))
			if err != nil {
				return err
			}
			listeners = append(listeners, l)
		}
		datagrams, err = net.ListenPacket("udp", net.JoinHostPort(o.address, "7001"))
		return err
	})
	if err != nil {
		return err
	}
	zeros := make([]byte, 1<<20)
	handlers := []func(net.Conn){
		func(c net.Conn) { _, _ = io.Copy(c, c) },
		func(c net.Conn) {
			for sent := 0; sent < trafficBytes; sent += len(zeros) {
				if _, err := c.Write(zeros); err != nil {
					return
				}
			}
		},
		func(c net.Conn) { _, _ = io.Copy(io.Discard, c); _, _ = c.Write([]byte("x")) },
	}
	for i, l := range listeners {
		s.later(l.Close)
		go accept(l, handlers[i])
	}
	s.later(datagrams.Close)
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := datagrams.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			} else if err == nil {
				_, _ = datagrams.WriteTo(b[:n], from)
			}
		}
	}()
	return nil
}

func accept(l net.Listener, handle func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(5 * time.Minute))
			handle(c)
		}()
	}
}
