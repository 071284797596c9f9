package main

import (
	"context"
	"net"
	"strconv"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
)

var networkCommand = command{
	name: "network", group: groupNetwork,
	summary: "what a sandbox may reach: replace its rules, see what was refused",
	sub:     []command{networkSetCommand, networkInspectCommand},
}

var networkSetCommand = command{
	name: "set", group: groupNetwork, args: "SANDBOX RULE...|none",
	summary: "replace the network rules of a running sandbox",
	details: `RULE is as --network of ` + "`dsec run`" + ` has it: SERVICE, HOST:PORT or PREFIX[:PORT], with =false to deny it. What no rule allows is closed,
and open connections to it are reset. none closes all.

  dsec network set s4k2 pypi 10.1.0.0/16:443 10.1.2.0/24=false
  dsec network set s4k2 none`,
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		var asJSON bool
		jsonFlag(f, &asJSON, jsonHelp)
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 2, -1, "the sandbox and its rules"); err != nil {
				return err
			}
			rules, err := networkRules(args[1:])
			if err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			changed, err := sb.SetNetwork(ctx, rules)
			if err != nil {
				return err
			}
			if asJSON {
				return c.printJSON(changed)
			}
			return c.print("%s\n", changed.GetId())
		}
	},
}

var networkInspectCommand = command{
	name: "inspect", group: groupNetwork, args: "SANDBOX",
	summary: "show what a sandbox's rules mean now, and what was refused",
	details: "Names are shown with the addresses that they stand for.\n\n  dsec network inspect s4k2",
	setup: func(f *flagSet) action {
		contextName := contextFlag(f)
		var asJSON bool
		jsonFlag(f, &asJSON, jsonHelp)
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 1, 1, "the sandbox"); err != nil {
				return err
			}
			sb, err := c.dialSandbox(ctx, *contextName, args[0])
			if err != nil {
				return err
			}
			n, err := sb.Network(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				return c.printJSON(n)
			}
			return printNetwork(c, n)
		}
	},
}

func printNetwork(c *console, n *dsecv1.NetworkStatus) error {
	t := newTable("RULE", "ALLOWED", "ENDPOINTS", "ADDRESSES", "ERROR")
	for _, r := range n.GetRules() {
		t.row(r.GetRule(), strconv.FormatBool(r.GetAllowed()), endpointsText(r.GetEndpoints()), strings.Join(r.GetAddresses(), " "), r.GetError())
	}
	if err := t.print(c); err != nil {
		return err
	}
	if err := c.print("\n%d connections, %d packets refused\n", n.GetConnections(), n.GetRefusedPackets()); err != nil || len(n.GetRefused()) == 0 {
		return err
	}
	t = newTable("REFUSED", "PROTOCOL", "REASON", "PACKETS", "LAST")
	for _, r := range n.GetRefused() {
		to := r.GetDestination()
		if r.GetPort() != 0 {
			to = net.JoinHostPort(to, strconv.Itoa(int(r.GetPort())))
		}
		t.row(to, r.GetProtocol(), r.GetReason(), strconv.FormatInt(r.GetPackets(), 10), age(c.now(), r.GetLastAt()))
	}
	return t.print(c)
}

// networkRules parses RULE or RULE=true|false, or docker's none: a sandbox reaches nothing that no rule allows.
func networkRules(l []string) (map[string]bool, error) {
	if len(l) == 0 || len(l) == 1 && l[0] == "none" {
		return nil, nil
	}
	rules := make(map[string]bool, len(l))
	for _, s := range l {
		rule, value, ok := strings.Cut(s, "=")
		allowed, err := true, error(nil)
		if ok {
			allowed, err = strconv.ParseBool(value)
		}
		_, twice := rules[rule]
		switch {
		case err != nil:
			return nil, usagef("network rule %q must be true or false", clipText(s))
		case rule == "none":
			return nil, usagef("none contradicts the other network rules")
		case rule == "":
			return nil, usagef("network rule %q names nothing", clipText(s))
		case twice:
			return nil, usagef("network rule %q is given twice", clipText(rule))
		}
		rules[rule] = allowed
	}
	return rules, nil
}
