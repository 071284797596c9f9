package owner

import "dsec/sandbox"

// A Record is what an edge says about one sandbox.
type Record struct {
	ID         sandbox.ID
	Key        Key
	Digest     string
	HoldsQuota bool // it is wanted
}

// A Listing is a list of an edge's sandboxes that is being read, page by page, while events go on.
type Listing struct {
	edge sandbox.EdgeCode
	seq  uint64
	gone map[sandbox.ID]bool // ended since it began: the list may still show them
}

// BeginList must be called before the first page is asked for, and EndList or DropList after the last.
func (o *Owner) BeginList(edge sandbox.EdgeCode) *Listing {
	l := &Listing{edge: edge, seq: o.seq, gone: make(map[sandbox.ID]bool)}
	o.listings[l] = true
	return l
}

// DropList forgets a listing that failed. After EndList it does nothing.
func (o *Owner) DropList(l *Listing) { delete(o.listings, l) }

// EndList corrects the owner by a complete list: what was live before it began and is not in it, or no longer wanted, has
// ended; what is wanted and unknown is live. Creates in flight are left to their own results.
func (o *Owner) EndList(l *Listing, records []Record) {
	delete(o.listings, l)
	wanted := make(map[sandbox.ID]bool, len(records))
	for _, r := range records {
		if r.HoldsQuota && r.ID.Edge() == l.edge && !l.gone[r.ID] {
			wanted[r.ID] = true
		}
	}
	for id, e := range o.byEdge[l.edge] {
		if e.state == live && e.since <= l.seq && !wanted[id] {
			o.remove(e)
		}
	}
	for _, r := range records {
		if wanted[r.ID] && o.byID[r.ID] == nil {
			o.adopt(r)
		}
	}
}

func (o *Owner) adopt(r Record) {
	e := &entry{state: live, digest: r.Digest, since: o.seq}
	o.wanted++
	o.bind(e, r.ID)
	if r.Key.Key != "" && o.byKey[r.Key] == nil {
		e.key = r.Key
		o.byKey[r.Key] = e
	}
}
