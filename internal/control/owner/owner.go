// Package owner admits the creates of one root project: idempotency keys, quota, cancellation. It is a state machine:
// events are method calls, effects are return values; it has no goroutine, no clock and no lock, so that a simulator can
// drive it, and its caller serialises.
//
//	            Admit ── Start                    Ready
//	(nothing) ─────────────────> starting ──────────────────> live ── Deleted, EndList ──> (nothing)
//	                                │ Abandon, Cancel, Deleted   │ Recall
//	                                v                            │
//	                             ending <────────────────────────┘
//	                                │ Ended (also from starting)
//	                                v
//	                            (nothing)
//
// What surprises:
//
//   - Quota is held while a sandbox is wanted (starting, live), not while it exists. One that is being torn down, however
//     long that takes, does not keep others from being created.
//   - A key stays taken while its create is rolled back (ending): another create with it would be answered by the edge with
//     the sandbox that is about to go. Admit says Wait.
//   - Nothing is durable. After a start the owner is rebuilt from lists of what the edges have (BeginList, EndList), and the
//     same events correct it while it runs: sandboxes end by themselves (idle, lifetime, fault).
package owner

import (
	"strconv"
	"time"

	"dsec/sandbox"
)

// A Key is an idempotency key. It is unique within a project; a zero Key means that there is none.
type Key struct{ Project, Key string }

// A Ticket names an admitted create.
type Ticket uint64

// A Request asks for admission. Digest tells a retry from another use of the key.
type Request struct {
	Key      Key
	Digest   string
	Deadline time.Time
}

// An Action is what Admit decided.
type Action uint8

// Actions.
const (
	Start Action = iota + 1 // create it: Placed, then Ready or Ended must follow
	Join                    // Ticket is creating it: wait for that
	Found                   // it exists: ID
	Wait                    // Ticket is being rolled back: wait for its end, then ask again
)

// A Verdict is the answer of Admit.
type Verdict struct {
	Action Action
	Ticket Ticket
	ID     sandbox.ID
}

type state uint8

const (
	starting state = iota + 1
	live
	ending
)

type entry struct {
	ticket Ticket
	state  state
	key    Key
	digest string
	id     sandbox.ID // "" until placed
	since  uint64     // when it became live, in the owner's own count of events
}

// Tombstones: a cancel may overtake the create that it is for.
const (
	tombstoneLife = 30 * time.Second
	maxTombstones = 100_000
)

// An Owner is the state of one root project.
type Owner struct {
	quota   int // sandboxes; 0: none
	wanted  int // entries that hold quota
	seq     uint64
	tickets Ticket

	byTicket map[Ticket]*entry
	byKey    map[Key]*entry
	byID     map[sandbox.ID]*entry
	byEdge   map[sandbox.EdgeCode]map[sandbox.ID]*entry
	tombs    map[Key]time.Time // until when
	listings map[*Listing]bool
}

// New makes an empty owner. quota is the most sandboxes that may be wanted at a time; 0 means no limit.
func New(quota int) *Owner {
	return &Owner{
		quota:    quota,
		byTicket: make(map[Ticket]*entry),
		byKey:    make(map[Key]*entry),
		byID:     make(map[sandbox.ID]*entry),
		byEdge:   make(map[sandbox.EdgeCode]map[sandbox.ID]*entry),
		tombs:    make(map[Key]time.Time),
		listings: make(map[*Listing]bool),
	}
}

// Wanted is the number of sandboxes that hold quota.
func (o *Owner) Wanted() int { return o.wanted }

// OnEdge is how many sandboxes are known to be on an edge, also those that start and end.
func (o *Owner) OnEdge(e sandbox.EdgeCode) int { return len(o.byEdge[e]) }

// Admit decides about a create. It fails with AlreadyExists (idempotency_key_reused), ResourceExhausted (quota_exceeded),
// Canceled (create_canceled) and DeadlineExceeded.
func (o *Owner) Admit(now time.Time, r Request) (Verdict, error) {
	if !now.Before(r.Deadline) {
		return Verdict{}, sandbox.Errorf(sandbox.DeadlineExceeded, "deadline_exceeded", "the create's deadline had passed before it was admitted")
	}
	if r.Key.Key != "" {
		if until, ok := o.tombs[r.Key]; ok && now.Before(until) {
			return Verdict{}, sandbox.Errorf(sandbox.Canceled, sandbox.ReasonCanceled, "this create was cancelled by its idempotency key before it arrived; use a new key")
		}
		if e := o.byKey[r.Key]; e != nil {
			return known(e, r)
		}
	}
	if o.quota > 0 && o.wanted >= o.quota {
		return Verdict{}, sandbox.Errorf(sandbox.ResourceExhausted, "quota_exceeded",
			"the project has %d sandboxes and its quota is %d; delete some, or ask for a higher quota", o.wanted, o.quota).
			WithFact("limit", strconv.Itoa(o.quota)).WithFact("used", strconv.Itoa(o.wanted))
	}
	o.tickets++
	e := &entry{ticket: o.tickets, state: starting, key: r.Key, digest: r.Digest}
	o.byTicket[e.ticket] = e
	if r.Key.Key != "" {
		o.byKey[r.Key] = e
	}
	o.wanted++
	return Verdict{Action: Start, Ticket: e.ticket}, nil
}

func known(e *entry, r Request) (Verdict, error) {
	switch {
	case e.state == ending:
		return Verdict{Action: Wait, Ticket: e.ticket}, nil
	case e.digest != r.Digest:
		err := sandbox.Errorf(sandbox.AlreadyExists, "idempotency_key_reused",
			"the idempotency key was used for a create with other parameters; use a new key for another sandbox")
		if e.id != "" {
			err = err.WithFact("sandbox_id", string(e.id))
		}
		return Verdict{}, err
	case e.state == starting:
		return Verdict{Action: Join, Ticket: e.ticket}, nil
	}
	return Verdict{Action: Found, ID: e.id}, nil
}

// Placed notes the id under which an edge is being asked to create it. After a refusal it may be placed again.
func (o *Owner) Placed(t Ticket, id sandbox.ID) {
	if e := o.byTicket[t]; e != nil {
		o.bind(e, id)
	}
}

// Ready reports that the sandbox is there. The id is that of the edge's answer: an edge that knew the key answers with
// the sandbox it has. Ready is false if it is no longer wanted; the caller rolls it back and then reports Ended.
func (o *Owner) Ready(t Ticket, id sandbox.ID) bool {
	e := o.byTicket[t]
	if e == nil || e.state != starting {
		return false
	}
	o.bind(e, id)
	e.state = live
	o.seq++
	e.since = o.seq
	delete(o.byTicket, t)
	return true
}

// bind makes id the entry's. If a list showed that sandbox before its create was answered, the two are one.
func (o *Owner) bind(e *entry, id sandbox.ID) {
	if e.id == id {
		return
	}
	o.unbind(e)
	if other := o.byID[id]; other != nil {
		o.remove(other)
	}
	e.id = id
	o.byID[id] = e
	on := o.byEdge[id.Edge()]
	if on == nil {
		on = make(map[sandbox.ID]*entry)
		o.byEdge[id.Edge()] = on
	}
	on[id] = e
}

func (o *Owner) unbind(e *entry) {
	if e.id == "" || o.byID[e.id] != e {
		return
	}
	delete(o.byID, e.id)
	if on := o.byEdge[e.id.Edge()]; on != nil {
		delete(on, e.id)
		if len(on) == 0 {
			delete(o.byEdge, e.id.Edge())
		}
	}
	e.id = ""
}

// Abandon says that nobody waits for the create any more, or that it is not known whether it worked: it is to be rolled
// back. It reports whether there was anything to abandon. Its quota is free at once.
func (o *Owner) Abandon(t Ticket) bool {
	e := o.byTicket[t]
	if e == nil || e.state != starting {
		return false
	}
	e.state = ending
	o.wanted--
	return true
}

// Recall takes a Ready back: the answer reached nobody. From then on it is as if it had been abandoned. It reports whether
// that sandbox was still wanted.
func (o *Owner) Recall(t Ticket, id sandbox.ID) bool {
	e := o.byID[id]
	if e == nil || t == 0 || e.ticket != t || e.state != live {
		return false
	}
	e.state = ending
	o.wanted--
	o.byTicket[t] = e
	return true
}

// Ended says that nothing is left of a create: it failed, or it is rolled back.
func (o *Owner) Ended(t Ticket) {
	if e := o.byTicket[t]; e != nil {
		o.remove(e)
	}
}

// Deleted says that the sandbox is no longer wanted: its edge has accepted a delete.
func (o *Owner) Deleted(id sandbox.ID) {
	for l := range o.listings {
		l.gone[id] = true
	}
	switch e := o.byID[id]; {
	case e == nil:
	case e.state == live:
		o.remove(e)
	case e.state == starting: // the create's own end is reported later
		e.state = ending
		o.wanted--
	}
}

// remove forgets an entry.
func (o *Owner) remove(e *entry) {
	if e.state != ending {
		o.wanted--
	}
	if e.id != "" {
		for l := range o.listings {
			l.gone[e.id] = true
		}
	}
	o.unbind(e)
	if o.byKey[e.key] == e {
		delete(o.byKey, e.key)
	}
	delete(o.byTicket, e.ticket)
}

// A Cancelled says what a cancel by key has found. At most one field is set.
type Cancelled struct {
	Ticket Ticket     // a create in flight, which is now abandoned
	ID     sandbox.ID // a sandbox that exists: delete it
}

// Cancel ends the create with that key, whether it is in flight, done, or still to come (within tombstoneLife).
func (o *Owner) Cancel(now time.Time, k Key) Cancelled {
	switch e := o.byKey[k]; {
	case e == nil:
		o.bury(now, k)
		return Cancelled{}
	case e.state == live:
		return Cancelled{ID: e.id}
	default:
		o.Abandon(e.ticket)
		return Cancelled{Ticket: e.ticket}
	}
}

func (o *Owner) bury(now time.Time, k Key) {
	if len(o.tombs) >= maxTombstones {
		for k, until := range o.tombs {
			if !now.Before(until) {
				delete(o.tombs, k)
			}
		}
	}
	if len(o.tombs) < maxTombstones {
		o.tombs[k] = now.Add(tombstoneLife)
	}
}
