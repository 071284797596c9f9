package main

import (
	"context"

	"dsec/client"
	"dsec/internal/config"
)

// contextFlag adds --context to a command that talks to a platform.
func contextFlag(f *flagSet) *string {
	return f.String("context", "", "`NAME` of a context in the config file, instead of the current one")
}

// dial prepares a client of the platform that flags, environment and config file name. It does not connect yet.
func (c *console) dial(contextName string) (*client.Client, error) {
	target, err := config.Resolve(c.getenv, contextName)
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{
		URL: target.URL, Key: target.APIKey, Origin: target.Origin, UserAgent: "dsec/" + version,
		Notice: c.notice, Cleanup: c.cleanup, Sleep: c.sleep,
	})
}

// notice passes on what the client has to say, but not on a screen that a program inside draws.
func (c *console) notice(message string) {
	if !c.raw.on() {
		c.say("%s", message)
	}
}

// dialSandbox is dial and the sandbox that ref means.
func (c *console) dialSandbox(ctx context.Context, contextName, ref string) (*client.Sandbox, error) {
	cl, err := c.dial(contextName)
	if err != nil {
		return nil, err
	}
	return resolve(ctx, cl, ref)
}
