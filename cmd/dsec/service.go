package main

import (
	"context"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

var serviceCommand = command{
	name: "service", group: groupNetwork,
	summary: "what network rules may name: hosts and ports under one word",
	details: `The whole platform has the same services; administrators change them. A sandbox keeps what a service stood for when its rules were set.

  dsec service add mirror mirror.example.org:443 10.1.0.0/16:8000-8010
  dsec run --network mirror debian-python:12 python3 -m pip ...`,
	sub: []command{serviceAddCommand, serviceLsCommand, serviceInspectCommand, serviceRmCommand},
}

var serviceAddCommand = command{
	name: "add", group: groupNetwork, args: "NAME [HOST:PORT...]",
	summary: "define a service",
	details: `HOST is a name, which each node resolves and refreshes, an address, or a prefix such as 10.0.0.0/8, which needs no port. PORT may
be a range and end with /udp. --port belongs to the --hosts right before it.

  dsec service add pypi pypi.org:443 files.pythonhosted.org:443
  dsec service add pypi --host pypi.org --host files.pythonhosted.org --port 443
  dsec service add both --host a.example.org --port 443,8000-8010 --host ns.example.org --port 53/udp`,
	setup: setupServiceAdd,
}

func setupServiceAdd(f *flagSet) action {
	contextName := contextFlag(f)
	var hosts hostFlags
	f.Var(hostFlag{&hosts}, "host", "`HOST`: a name, an address or a prefix; may be repeated")
	f.Var(portFlag{&hosts}, "port", "`PORT`s of the hosts right before: P, A-B, or several with commas, all may end with /udp; may be repeated")
	description := f.String("description", "", "`TEXT` for people")
	replace := f.Bool("replace", false, "in place of a service of this name")
	var asJSON bool
	jsonFlag(f, &asJSON, jsonHelp)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 1, -1, "the name"); err != nil {
			return err
		}
		rules, err := hosts.rules()
		if err != nil {
			return err
		}
		s := &dsecv1.ServiceDefinition{Name: args[0], Description: *description}
		for _, rule := range append(args[1:], rules...) {
			endpoints, err := sandbox.ParseNetworkRule(rule)
			if err != nil {
				return err
			}
			for _, e := range endpoints {
				s.Endpoints = append(s.Endpoints, &dsecv1.NetworkEndpoint{Host: e.Host, Port: uint32(e.FirstPort), LastPort: uint32(e.LastPort), Protocol: e.Protocol})
			}
		}
		if len(s.Endpoints) == 0 {
			return usagef("a service needs at least one HOST:PORT")
		}
		cl, err := c.dial(*contextName)
		if err != nil {
			return err
		}
		put := cl.AddService
		if *replace {
			put = cl.PutService
		}
		made, err := put(ctx, s)
		if err != nil {
			return err
		}
		if asJSON {
			return c.printJSON(made)
		}
		return c.print("%s  %s\n", printable(made.GetName()), endpointsText(made.GetEndpoints()))
	}
}

// hostFlags are --host and --port in their order: ports belong to the hosts right before them.
type hostFlags struct {
	groups []hostGroup
	err    error
}

type hostGroup struct{ hosts, ports []string }

type (
	hostFlag struct{ *hostFlags }
	portFlag struct{ *hostFlags }
)

func (hostFlags) String() string { return "" }

func (h hostFlag) Set(s string) error {
	if n := len(h.groups); n == 0 || len(h.groups[n-1].ports) > 0 {
		h.groups = append(h.groups, hostGroup{})
	}
	g := &h.groups[len(h.groups)-1]
	g.hosts = append(g.hosts, s)
	return nil
}

func (p portFlag) Set(s string) error {
	if len(p.groups) == 0 {
		p.err = usagef("--port %s stands before the --host that it belongs to", s)
		return nil
	}
	ports, protocol, ok := strings.Cut(s, "/")
	if ok {
		protocol = "/" + protocol
	}
	g := &p.groups[len(p.groups)-1]
	for port := range strings.SplitSeq(ports, ",") {
		g.ports = append(g.ports, port+protocol)
	}
	return nil
}

// rules are what the flags say, as network rules.
func (h *hostFlags) rules() ([]string, error) {
	var rules []string
	for _, g := range h.groups {
		for _, host := range g.hosts {
			if len(g.ports) == 0 {
				rules = append(rules, host) // a prefix does without; for a name the parser says that it needs one
			}
			if strings.ContainsRune(host, ':') && len(g.ports) > 0 {
				host = "[" + host + "]"
			}
			for _, port := range g.ports {
				rules = append(rules, host+":"+port)
			}
		}
	}
	return rules, h.err
}

func endpointsText(list []*dsecv1.NetworkEndpoint) string {
	var all []string
	for _, p := range list {
		e := sandbox.NetworkEndpoint{Host: p.GetHost(), FirstPort: int(p.GetPort()), LastPort: int(p.GetLastPort()), Protocol: p.GetProtocol()}
		all = append(all, printable(e.String()))
	}
	return strings.Join(all, " ")
}

var serviceLsCommand = command{
	name: "ls", group: groupNetwork, summary: "list services",
	details: "With --json each is one line of JSON, as the API gives it.\n\n  dsec service ls -q",
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		quiet := f.Bool("quiet", false, "print names only")
		f.letter("q", "quiet")
		var asJSON bool
		jsonFlag(f, &asJSON, "print one line of JSON for each")
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 0, 0, ""); err != nil {
				return err
			}
			cl, err := c.dial(*contextName)
			if err != nil {
				return err
			}
			all, err := client.Collect(cl.ListServices(ctx))
			if err != nil {
				return err
			}
			t := newTable("NAME", "ENDPOINTS", "CHANGED", "BY", "DESCRIPTION")
			for _, s := range all {
				switch {
				case asJSON:
					err = c.printJSON(s)
				case *quiet:
					err = c.print("%s\n", printable(s.GetName()))
				}
				if err != nil {
					return err
				}
				t.row(s.GetName(), endpointsText(s.GetEndpoints()), age(c.now(), s.GetChangedAt()), s.GetChangedBy(), s.GetDescription())
			}
			if asJSON || *quiet {
				return nil
			}
			return t.print(c)
		}
	},
}

var serviceInspectCommand = command{
	name: "inspect", group: groupNetwork, args: "NAME...",
	summary: "show all that is known of services",
	details: "Prints a JSON array, or with --json one line for each.",
	setup: inspectEach("the name", func(ctx context.Context, cl *client.Client, name string) (*dsecv1.ServiceDefinition, error) {
		return cl.GetService(ctx, name)
	}),
}

var serviceRmCommand = command{
	name: "rm", group: groupNetwork, args: "NAME...",
	summary: "remove services",
	details: "Sandboxes whose rules name one go on as they are. The names of those removed are printed.",
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		var asJSON bool
		jsonFlag(f, &asJSON, jsonHelp+`: {"name": ...} for each`)
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 1, -1, "the name"); err != nil {
				return err
			}
			cl, err := c.dial(*contextName)
			if err != nil {
				return err
			}
			return c.eachOf(ctx, args, "name", asJSON, func(name string) error { return cl.RemoveService(ctx, name) })
		}
	},
}
