package main

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/internal/image"
	"dsec/sandbox"
)

var inspectCommand = command{
	name: "inspect", group: groupSandboxes, args: "SANDBOX|KIND/NAME[:TAG]...",
	summary: "show all that is known of sandboxes and environments",
	details: `Prints a JSON array, or with --json one line for each. KIND is image, workspace or toolkit.

  dsec inspect s4k2
  dsec inspect image/python:3.12
  dsec inspect --json s4k2 | jq .reason`,
	setup: inspectEach("what to inspect", inspect),
}

// kindWords are what users call the kinds of environments.
var kindWords = map[string]string{
	"image": image.KindBase, "base": image.KindBase, "workspace": image.KindWorkspace, "toolkit": image.KindToolkit,
}

// inspectEach is the action of commands that print all that is known of what their arguments name.
func inspectEach[T any](what string, get func(ctx context.Context, cl *client.Client, name string) (T, error)) func(*flagSet) action {
	return func(f *flagSet) action {
		contextName := contextFlag(f)
		var asJSON bool
		jsonFlag(f, &asJSON, "print one line of JSON for each")
		return func(ctx context.Context, c *console, args []string) error {
			if err := wantArgs(args, 1, -1, what); err != nil {
				return err
			}
			cl, err := c.dial(*contextName)
			if err != nil {
				return err
			}
			found := make([]any, 0, len(args))
			for _, name := range args {
				m, err := get(ctx, cl, name)
				if err != nil {
					return err
				}
				found = append(found, m)
			}
			return c.printInspected(found, asJSON)
		}
	}
}

// inspect fetches what ref means.
func inspect(ctx context.Context, cl *client.Client, ref string) (any, error) {
	if word, name, ok := strings.Cut(ref, "/"); ok && kindWords[word] != "" {
		return cl.GetEnvironment(ctx, kindWords[word], name)
	}
	sb, err := resolve(ctx, cl, ref)
	if err != nil {
		return nil, err
	}
	return inspectSandbox(ctx, sb)
}

// inspectSandbox is the sandbox as the API gives it; where it lives, with its network.
func inspectSandbox(ctx context.Context, sb *client.Sandbox) (any, error) {
	state, err := sb.Get(ctx)
	if err != nil || state.GetState() != dsecv1.State_STATE_READY {
		return state, err
	}
	n, err := sb.Network(ctx)
	switch {
	case err == nil:
		return withNetwork{state, n}, nil
	case sandbox.ClassOf(err) == sandbox.FailedPrecondition, sandbox.ClassOf(err) == sandbox.NotFound, sandbox.ClassOf(err) == sandbox.Unsupported:
		return state, nil // it has ended meanwhile, or the platform is older
	}
	return nil, err
}

type withNetwork struct {
	sandbox *dsecv1.Sandbox
	network *dsecv1.NetworkStatus
}

// MarshalJSON adds the network to the sandbox's fields.
func (w withNetwork) MarshalJSON() ([]byte, error) {
	state, err := encode(w.sandbox)
	if err != nil {
		return nil, err
	}
	n, err := encode(w.network)
	if err != nil {
		return nil, err
	}
	return slices.Concat(state[:len(state)-1], []byte(`,"network":`), n, []byte("}")), nil
}

// printInspected prints lines of JSON, or for people an indented array.
func (c *console) printInspected(found []any, lines bool) error {
	var array []json.RawMessage
	for _, m := range found {
		line, err := encode(m)
		if err != nil {
			return err
		}
		if lines {
			if err := c.print("%s\n", line); err != nil {
				return err
			}
		}
		array = append(array, line)
	}
	if lines {
		return nil
	}
	raw, err := json.Marshal(array)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return err
	}
	return c.print("%s\n", out.Bytes())
}
