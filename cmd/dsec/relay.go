package main

import (
	"context"
	"net/netip"
)

var relayCommand = command{
	name: "relay", group: groupServers,
	args:    "PREFIX...",
	summary: "carry connections of sandboxes to the outside; the edge starts one",
	details: "It gives up its rights, serves until an edge says that it shall end, and outlives the edge that started it. PREFIX... is where\n" +
		"sandboxes have their addresses.",
	setup: setupRelay,
}

// relayOptions are the flags of `dsec relay`.
type relayOptions struct {
	router, socket, root string
	uid                  int
	prefixes             []netip.Prefix
}

func setupRelay(f *flagSet) action {
	var o relayOptions
	f.StringVar(&o.router, "router", "", "`path` of the router's network namespace")
	f.StringVar(&o.socket, "socket", "", "`path` of the socket at which it hears the edge")
	f.StringVar(&o.root, "root", "", "`path` of an empty directory, which becomes its root")
	f.IntVar(&o.uid, "uid", 0, "`number` of the user that it becomes")
	return func(ctx context.Context, _ *console, args []string) error {
		for _, s := range args {
			p, err := netip.ParsePrefix(s)
			if err != nil {
				return usagef("%q is not a prefix of addresses", s)
			}
			o.prefixes = append(o.prefixes, p)
		}
		if o.router == "" || o.socket == "" || o.root == "" || o.uid <= 0 {
			return usagef("the edge starts the relay, with --router, --socket, --root and --uid")
		}
		return runRelay(ctx, &o)
	}
}
