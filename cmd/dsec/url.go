package main

import (
	"context"
	"time"
)

var urlCommand = command{
	name: "url", group: groupInside, args: "SANDBOX PORT",
	summary: "make a URL by which a browser reaches a port inside",
	details: `Whoever has the URL reaches the port without a key, until it expires or the sandbox ends.

  dsec url s4k2 8000
  dsec url --expires 7d s4k2 8000`,
	setup: setupURL,
}

func setupURL(f *flagSet) action {
	contextName := contextFlag(f)
	var expires period
	f.Var(&expires, "expires", "after this `DURATION`, at most 7d (default 1h)")
	var asJSON bool
	jsonFlag(f, &asJSON, jsonHelp+`: {"url": ..., "expiresAt": ...}`)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 2, 2, "sandbox or port"); err != nil {
			return err
		}
		port, err := parsePort(args[1])
		if err != nil {
			return err
		}
		sb, err := c.dialSandbox(ctx, *contextName, args[0])
		if err != nil {
			return err
		}
		made, err := sb.Port(port).URL(ctx, time.Duration(expires))
		if err != nil {
			return err
		}
		if asJSON {
			return c.printJSON(made)
		}
		return c.print("%s\n", made.GetUrl())
	}
}
