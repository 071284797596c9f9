package main

import (
	"context"
	"runtime"
	"time"
)

// version is set by the build: -ldflags "-X main.version=…".
var version = "0.1.0-dev"

// askLimit bounds questions that are not worth waiting for.
const askLimit = 3 * time.Second

var versionCommand = command{
	name: "version", group: groupDiagnosis,
	summary: "show the versions of dsec and of the platform",
	details: `Exits with 0 also when no platform answers.

  dsec version --json | jq -r .client.version`,
	setup: setupVersion,
}

// versions is what `dsec version --json` prints.
type versions struct {
	Client struct {
		Version string `json:"version"`
		Go      string `json:"go"`
		OS      string `json:"os"`
		Arch    string `json:"arch"`
	} `json:"client"`
	Server *serverVersion `json:"server"` // null if none answers
	Reason string         `json:"reason,omitempty"`
}

type serverVersion struct {
	Version string `json:"version"`
	URL     string `json:"url"`
}

func setupVersion(f *flagSet) action {
	contextName := contextFlag(f)
	var asJSON bool
	jsonFlag(f, &asJSON, jsonHelp)
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		var v versions
		v.Client.Version, v.Client.Go, v.Client.OS, v.Client.Arch = version, runtime.Version(), runtime.GOOS, runtime.GOARCH
		var err error
		if v.Server, err = c.serverVersion(ctx, *contextName); err != nil {
			v.Reason = userMessage(err)
		}
		if asJSON {
			return c.printJSON(v)
		}
		server := "none: " + v.Reason
		if v.Server != nil {
			server = v.Server.Version + " at " + v.Server.URL
		}
		return c.print("Client: %s (%s, %s/%s)\nServer: %s\n", version, v.Client.Go, v.Client.OS, v.Client.Arch, printable(server))
	}
}

func (c *console) serverVersion(ctx context.Context, contextName string) (*serverVersion, error) {
	cl, err := c.dial(contextName)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	info, err := cl.Info(ctx)
	if err != nil {
		return nil, err
	}
	return &serverVersion{Version: info.GetVersion(), URL: cl.URL()}, nil
}
