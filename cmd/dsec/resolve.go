package main

import (
	"context"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

var (
	endedStates = []dsecv1.State{dsecv1.State_STATE_STOPPED, dsecv1.State_STATE_FAILED}
	allStates   = append([]dsecv1.State{dsecv1.State_STATE_CREATING, dsecv1.State_STATE_READY, dsecv1.State_STATE_STOPPING}, endedStates...)
)

// resolve finds the sandbox that ref means: a whole id is taken as it is; otherwise ref is the name of one sandbox or the
// beginning of one id. Live sandboxes come before ended ones.
func resolve(ctx context.Context, cl *client.Client, ref string) (*client.Sandbox, error) {
	id, parseErr := sandbox.ParseID(ref)
	if parseErr == nil {
		return cl.Sandbox(string(id)), nil
	}
	if ref == "" {
		return nil, usagef("the sandbox is empty")
	}
	for _, states := range [][]dsecv1.State{nil, allStates} {
		all, err := client.Collect(cl.List(ctx, nil, states...))
		if err != nil {
			return nil, err
		}
		found, err := match(all, ref)
		if err != nil {
			return nil, err
		}
		if found != "" {
			return cl.Sandbox(found), nil
		}
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "there is no sandbox %q, neither as a name nor as the beginning of an id; `dsec ps` lists them", clipText(ref))
}

// match is the one sandbox that ref names, "" if there is none. A name wins over the beginning of an id.
func match(all []*dsecv1.Sandbox, ref string) (string, error) {
	for _, fits := range []func(*dsecv1.Sandbox) bool{
		func(s *dsecv1.Sandbox) bool { return s.GetSpec().GetName() == ref },
		func(s *dsecv1.Sandbox) bool { return strings.HasPrefix(s.GetId(), ref) },
	} {
		found := ""
		for _, s := range all {
			switch {
			case !fits(s):
			case found != "":
				return "", sandbox.Errorf(sandbox.InvalidArgument, "ambiguous_sandbox", "%q means more than one sandbox, for example %s and %s; write more of the id", clipText(ref), found, s.GetId())
			default:
				found = s.GetId()
			}
		}
		if found != "" {
			return found, nil
		}
	}
	return "", nil
}

var stateWords = map[dsecv1.State]string{
	dsecv1.State_STATE_CREATING: "creating", dsecv1.State_STATE_READY: "ready", dsecv1.State_STATE_STOPPING: "stopping",
	dsecv1.State_STATE_STOPPED: "stopped", dsecv1.State_STATE_FAILED: "failed",
}

// stateText is the state with its reason: "failed (oom)".
func stateText(s *dsecv1.Sandbox) string {
	word := stateWords[s.GetState()]
	if word == "" {
		word = "unknown"
	}
	if code := s.GetReason().GetCode(); code != "" && s.GetState() != dsecv1.State_STATE_READY {
		word += " (" + code + ")"
	}
	return word
}
