package sandbox

import (
	"fmt"
	"time"
)

// A State is where a sandbox actually is. What is wanted of it is a separate, simpler thing: to live, or to be gone
// (Sandbox.Desired); delete only changes what is wanted, and so is accepted in every state.
type State uint8

const (
	Creating State = iota + 1 // its steps are being set up
	Ready                     // aether answers
	Stopping                  // its steps are being torn down
	Stopped                   // terminal: ended by request or by a lifetime, nothing is left
	Failed                    // terminal: ended by a fault, nothing is left
)

var stateNames = map[State]string{Creating: "creating", Ready: "ready", Stopping: "stopping", Stopped: "stopped", Failed: "failed"}

func (s State) String() string {
	if n, ok := stateNames[s]; ok {
		return n
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Terminal reports whether nothing of the sandbox is left on the host.
func (s State) Terminal() bool { return s == Stopped || s == Failed }

// An Event moves a sandbox from one state to another.
type Event uint8

const (
	EventReady   Event = iota + 1 // every step is done
	EventEnd                      // somebody wants it gone: delete, idle, lifetime
	EventFault                    // a step failed, a deadline passed, the guest died
	EventGone                     // every teardown is done and it was ended
	EventGoneBad                  // every teardown is done and it had failed
)

var eventNames = map[Event]string{EventReady: "ready", EventEnd: "end", EventFault: "fault", EventGone: "gone", EventGoneBad: "gone_bad"}

func (e Event) String() string {
	if n, ok := eventNames[e]; ok {
		return n
	}
	return fmt.Sprintf("Event(%d)", uint8(e))
}

// transitions is the whole life cycle. An end while stopping changes nothing: teardown is on its way.
var transitions = map[State]map[Event]State{
	Creating: {EventReady: Ready, EventEnd: Stopping, EventFault: Stopping},
	Ready:    {EventEnd: Stopping, EventFault: Stopping},
	Stopping: {EventEnd: Stopping, EventFault: Stopping, EventGone: Stopped, EventGoneBad: Failed},
	Stopped:  {EventEnd: Stopped, EventFault: Stopped},
	Failed:   {EventEnd: Failed, EventFault: Failed},
}

// Next is the state after e. An illegal move is an error that names both ends.
func (s State) Next(e Event) (State, error) {
	if n, ok := transitions[s][e]; ok {
		return n, nil
	}
	return s, fmt.Errorf("illegal transition: %s on %s", s, e)
}

// Deadlines of the transitional states. A create that is not ready by its own timeout fails; a teardown attempt that
// takes longer than StoppingDeadline is given up and tried again by the reconciler, for ever, with the reason shown.
const (
	DefaultCreateTimeout = 120 * time.Second
	MaxCreateTimeout     = time.Hour
	StoppingDeadline     = 30 * time.Second
)

// Codes of reasons why a sandbox is in its state.
const (
	ReasonDeleted      = "deleted"
	ReasonCanceled     = "create_canceled"
	ReasonIdle         = "idle_timeout"
	ReasonLifetime     = "lifetime"
	ReasonStartFailed  = "start_failed"
	ReasonStartTimeout = "start_timeout"
	ReasonProbeFailed  = "probe_failed" // ready_when did not succeed in time
	ReasonOOM          = "oom"
	ReasonGuestDied    = "guest_died"
	ReasonKilled       = "killed"       // its processes were killed from outside
	ReasonHostReset    = "host_reset"   // the machine restarted
	ReasonInterrupted  = "interrupted"  // the edge restarted while it was half made
	ReasonNodeStopped  = "node_stopped" // dsec was stopped in order
)

// Ended reports whether a reason is an ordinary end, after which the sandbox is Stopped rather than Failed.
func Ended(reason string) bool {
	switch reason {
	case ReasonDeleted, ReasonCanceled, ReasonIdle, ReasonLifetime, ReasonNodeStopped:
		return true
	}
	return false
}
