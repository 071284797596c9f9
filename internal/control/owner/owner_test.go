package owner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"dsec/sandbox"
)

var (
	t0  = time.Unix(1000, 0)
	end = t0.Add(time.Hour)
)

func req(key, digest string) Request {
	r := Request{Digest: digest, Deadline: end}
	if key != "" {
		r.Key = Key{"p", key}
	}
	return r
}

func admit(t *testing.T, o *Owner, r Request, want Action) Verdict {
	t.Helper()
	v, err := o.Admit(t0, r)
	if err != nil || v.Action != want {
		t.Fatalf("got %+v, %v; want action %d", v, err, want)
	}
	return v
}

func refused(t *testing.T, o *Owner, now time.Time, r Request, reason string) {
	t.Helper()
	_, err := o.Admit(now, r)
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Reason != reason {
		t.Fatalf("got %v; want %s", err, reason)
	}
}

func wanted(t *testing.T, o *Owner, n int) {
	t.Helper()
	if o.Wanted() != n {
		t.Fatalf("%d sandboxes hold quota; want %d", o.Wanted(), n)
	}
}

const edge = sandbox.EdgeCode("eaaaa")

func TestIdempotencyKey(t *testing.T) {
	o := New(0)
	v := admit(t, o, req("k", "d"), Start)
	if j := admit(t, o, req("k", "d"), Join); j.Ticket != v.Ticket {
		t.Fatalf("joined %d", j.Ticket)
	}
	refused(t, o, t0, req("k", "other"), "idempotency_key_reused")
	other := req("k", "other")
	other.Key.Project = "q" // another project's key
	admit(t, o, other, Start)
	admit(t, o, req("", "d"), Start) // no key: always a new one
	admit(t, o, req("", "d"), Start)

	id := sandbox.NewID(edge)
	o.Placed(v.Ticket, id)
	if !o.Ready(v.Ticket, id) {
		t.Fatal("not wanted")
	}
	if f := admit(t, o, req("k", "d"), Found); f.ID != id {
		t.Fatalf("found %s", f.ID)
	}
	refused(t, o, t0, req("k", "other"), "idempotency_key_reused")
	o.Deleted(id)
	admit(t, o, req("k", "other"), Start) // the key is free with its sandbox
}

func TestFailedCreateFreesKeyAndQuota(t *testing.T) {
	o := New(1)
	v := admit(t, o, req("k", "d"), Start)
	refused(t, o, t0, req("", "d"), "quota_exceeded")
	o.Placed(v.Ticket, sandbox.NewID(edge))
	o.Ended(v.Ticket)
	o.Ended(v.Ticket) // twice is harmless
	wanted(t, o, 0)
	admit(t, o, req("k", "other"), Start)
}

func TestAbandonedCreateFreesQuotaAtOnceAndKeyAtItsEnd(t *testing.T) {
	o := New(1)
	v := admit(t, o, req("k", "d"), Start)
	if !o.Abandon(v.Ticket) || o.Abandon(v.Ticket) {
		t.Fatal("abandon must work once")
	}
	wanted(t, o, 0)
	if w := admit(t, o, req("k", "d"), Wait); w.Ticket != v.Ticket {
		t.Fatalf("wait for %d", w.Ticket)
	}
	if o.Ready(v.Ticket, sandbox.NewID(edge)) {
		t.Fatal("a result after the end was accepted")
	}
	o.Ended(v.Ticket)
	admit(t, o, req("k", "d"), Start)
	wanted(t, o, 1)
}

func TestAnswerThatReachedNobody(t *testing.T) {
	o := New(0)
	v := admit(t, o, req("k", "d"), Start)
	id := sandbox.NewID(edge)
	o.Ready(v.Ticket, id)
	if o.Recall(v.Ticket+1, id) || !o.Recall(v.Ticket, id) || o.Recall(v.Ticket, id) {
		t.Fatal("recall must work once, for its own create")
	}
	wanted(t, o, 0)
	admit(t, o, req("k", "d"), Wait)
	o.Ended(v.Ticket)
	admit(t, o, req("k", "d"), Start)
}

func TestCancelByKey(t *testing.T) {
	o := New(0)
	k := Key{"p", "k"}
	v := admit(t, o, req("k", "d"), Start)
	if c := o.Cancel(t0, k); c != (Cancelled{Ticket: v.Ticket}) {
		t.Fatalf("got %+v", c)
	}
	if c := o.Cancel(t0, k); c != (Cancelled{Ticket: v.Ticket}) { // again, while it is rolled back
		t.Fatalf("got %+v", c)
	}
	wanted(t, o, 0)
	o.Ended(v.Ticket)

	v = admit(t, o, req("k", "d"), Start)
	id := sandbox.NewID(edge)
	o.Ready(v.Ticket, id)
	if c := o.Cancel(t0, k); c != (Cancelled{ID: id}) {
		t.Fatalf("got %+v", c)
	}
	o.Deleted(id)

	// A cancel that overtakes its create.
	if c := o.Cancel(t0, k); c != (Cancelled{}) {
		t.Fatalf("got %+v", c)
	}
	refused(t, o, t0.Add(tombstoneLife-1), req("k", "d"), "create_canceled")
	if _, err := o.Admit(t0.Add(tombstoneLife), req("k", "d")); err != nil {
		t.Fatal(err)
	}
}

func TestTombstonesAreBounded(t *testing.T) {
	o := New(0)
	for i := range maxTombstones + 10 {
		o.Cancel(t0, Key{"p", fmt.Sprint(i)})
	}
	if len(o.tombs) > maxTombstones {
		t.Fatalf("%d", len(o.tombs))
	}
	o.Cancel(t0.Add(time.Hour), Key{"p", "late"})
	if len(o.tombs) != 1 {
		t.Fatalf("%d after all have expired", len(o.tombs))
	}
}

func TestDeadline(t *testing.T) {
	o := New(0)
	refused(t, o, end, req("", "d"), "deadline_exceeded")
	wanted(t, o, 0)
}

func TestDeleteOfASandboxInCreation(t *testing.T) {
	o := New(0)
	v := admit(t, o, req("k", "d"), Start)
	id := sandbox.NewID(edge)
	o.Placed(v.Ticket, id)
	o.Deleted(id)
	wanted(t, o, 0)
	admit(t, o, req("k", "d"), Wait)
	o.Ended(v.Ticket)
	wanted(t, o, 0)
}

func TestRebuild(t *testing.T) {
	o := New(0)
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	o.EndList(o.BeginList(edge), []Record{
		{ID: a, Key: Key{"p", "k"}, Digest: "d", HoldsQuota: true},
		{ID: b, Key: Key{"p", "gone"}, Digest: "d"},
		{ID: sandbox.NewID("ebbbb"), HoldsQuota: true}, // an edge speaks for itself alone
	})
	wanted(t, o, 1)
	if f := admit(t, o, req("k", "d"), Found); f.ID != a {
		t.Fatalf("found %s", f.ID)
	}
	admit(t, o, req("gone", "d"), Start)
}

func TestListsAgainstEventsInBetween(t *testing.T) {
	o := New(0)
	old, fresh, deleted, inFlight := sandbox.NewID(edge), sandbox.NewID(edge), sandbox.NewID(edge), sandbox.NewID(edge)
	o.EndList(o.BeginList(edge), []Record{{ID: old, HoldsQuota: true}, {ID: deleted, HoldsQuota: true}})
	wanted(t, o, 2)

	l := o.BeginList(edge)
	v := admit(t, o, req("", "d"), Start)
	o.Ready(v.Ticket, fresh) // after the list was read
	o.Deleted(deleted)       // after the list was read
	f := admit(t, o, req("", "d"), Start)
	o.Placed(f.Ticket, inFlight)
	wanted(t, o, 3)
	o.EndList(l, []Record{{ID: deleted, HoldsQuota: true}, {ID: inFlight, HoldsQuota: true}}) // old has ended by itself
	wanted(t, o, 2)
	if o.byID[fresh] == nil || o.byID[old] != nil || o.byID[deleted] != nil {
		t.Fatal("the list was believed where events were newer, or not believed where it was")
	}
	o.Ready(f.Ticket, inFlight)
	wanted(t, o, 2)
	if n := o.OnEdge(edge); n != 2 {
		t.Fatalf("%d on the edge", n)
	}
}

func TestAnswerWithAnotherSandbox(t *testing.T) {
	o := New(0)
	v := admit(t, o, req("k", "d"), Start)
	known := sandbox.NewID(edge)
	o.Placed(v.Ticket, sandbox.NewID(edge))
	o.EndList(o.BeginList(edge), []Record{{ID: known, Key: Key{"p", "k"}, Digest: "d", HoldsQuota: true}})
	wanted(t, o, 2)
	if !o.Ready(v.Ticket, known) { // the edge knew the key
		t.Fatal("not wanted")
	}
	wanted(t, o, 1)
	if f := admit(t, o, req("k", "d"), Found); f.ID != known {
		t.Fatalf("found %s", f.ID)
	}
}

// check compares the owner's indexes and its counter with what they must be.
func check(t *testing.T, o *Owner, quota int) {
	t.Helper()
	all := map[*entry]bool{}
	for ticket, e := range o.byTicket {
		if e.ticket != ticket || e.state == live {
			t.Fatalf("ticket %d has %+v", ticket, e)
		}
		all[e] = true
	}
	onEdges := 0
	for id, e := range o.byID {
		if e.id != id || o.byEdge[id.Edge()][id] != e {
			t.Fatalf("%s has %+v", id, e)
		}
		all[e] = true
	}
	for _, on := range o.byEdge {
		onEdges += len(on)
	}
	if onEdges != len(o.byID) {
		t.Fatalf("%d by edge, %d by id", onEdges, len(o.byID))
	}
	n := 0
	for e := range all {
		if e.state != ending {
			n++
		}
	}
	for k, e := range o.byKey {
		if e.key != k || !all[e] {
			t.Fatalf("key %v has a forgotten entry %+v", k, e)
		}
	}
	if n != o.wanted || (quota > 0 && n > quota) {
		t.Fatalf("%d hold quota, counted %d, quota %d", n, o.wanted, quota)
	}
}

// Any sequence of events keeps the counters right and the quota, and when everything has ended nothing is remembered.
func TestRandomEvents(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		quota := 5 + r.IntN(10)
		o := New(quota)
		var tickets []Ticket
		var ids []sandbox.ID
		var listing *Listing
		for range 300 {
			switch r.IntN(9) {
			case 0, 1, 2:
				v, err := o.Admit(t0, req([]string{"", "a", "b", "c"}[r.IntN(4)], []string{"d", "e"}[r.IntN(2)]))
				if err == nil && v.Action == Start {
					tickets = append(tickets, v.Ticket)
				}
			case 3:
				if len(tickets) > 0 {
					id := sandbox.NewID(edge)
					ids = append(ids, id)
					o.Placed(tickets[r.IntN(len(tickets))], id)
				}
			case 4:
				if len(tickets) > 0 {
					id := sandbox.NewID(edge)
					if ids = append(ids, id); r.IntN(3) == 0 {
						id = ids[r.IntN(len(ids))]
					}
					ticket := tickets[r.IntN(len(tickets))]
					if e := o.byID[id]; e != nil && e.state != live && e.ticket != ticket {
						continue // an edge never answers two creates in flight with one sandbox
					}
					o.Ready(ticket, id)
				}
			case 5:
				if len(tickets) > 0 {
					o.Abandon(tickets[r.IntN(len(tickets))])
				}
			case 6:
				if len(tickets) > 0 {
					o.Ended(tickets[r.IntN(len(tickets))])
				}
			case 7:
				if len(ids) > 0 && r.IntN(2) == 0 {
					o.Deleted(ids[r.IntN(len(ids))])
				} else {
					o.Cancel(t0.Add(-time.Hour), Key{"p", []string{"a", "b", "c"}[r.IntN(3)]})
				}
			case 8:
				if len(ids) > 0 && len(tickets) > 0 && r.IntN(3) == 0 {
					id := ids[r.IntN(len(ids))]
					if e := o.byID[id]; e != nil {
						o.Recall(e.ticket, id)
					}
				}
				if listing == nil {
					listing = o.BeginList(edge)
					continue
				}
				var records []Record
				for id, e := range o.byID { // a list shows some of what there is, and no more than the quota
					if r.IntN(3) > 0 {
						records = append(records, Record{ID: id, Key: e.key, HoldsQuota: r.IntN(4) > 0})
					}
				}
				o.EndList(listing, records)
				listing = nil
			}
			check(t, o, quota)
		}
		for _, ticket := range tickets {
			o.Abandon(ticket)
			o.Ended(ticket)
		}
		o.EndList(o.BeginList(edge), nil)
		check(t, o, quota)
		if len(o.byTicket)+len(o.byKey)+len(o.byID)+len(o.byEdge)+o.wanted != 0 {
			t.Fatalf("seed %d: something is remembered: %+v", seed, o)
		}
	}
}
