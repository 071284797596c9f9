package main

import (
	"context"
	"errors"
)

// The server roles register here until up.go, edge.go and serve.go are in place.
var (
	upCommand    = placeholder("up", groupPlatform, "start the platform on this machine")
	downCommand  = placeholder("down", groupPlatform, "stop the platform on this machine")
	edgeCommand  = placeholder("edge", groupServers, "run a node agent")
	serveCommand = placeholder("serve", groupServers, "run a control plane")
)

func placeholder(name, group, summary string) command {
	return command{name: name, group: group, summary: summary, setup: func(*flagSet) action {
		return func(context.Context, *console, []string) error { return errors.New("this build has no server roles") }
	}}
}
