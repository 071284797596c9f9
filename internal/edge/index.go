package edge

import (
	"maps"
	"slices"
	"sync"

	"dsec/sandbox"
)

// index finds instances by id and by idempotency key. Keys are free again when their sandbox was ended by somebody or
// never became ready: a retry then makes a new one.
type index struct {
	mu          sync.RWMutex
	byID        map[sandbox.ID]*instance
	byKey       map[keyRef]*instance
	epochs      map[string]int64 // project -> the newest epoch of its owner that was seen
	terminal    []*instance      // oldest first; those that were forgotten since are skipped
	maxTerminal int
	most        int  // instances that there were at a time
	closed      bool // nothing is added any more
}

// manyInstances are so many that it matters what is kept of them.
const manyInstances = 256

type keyRef struct{ project, key string }

func newIndex(maxTerminal int) index {
	return index{
		byID: make(map[sandbox.ID]*instance), byKey: make(map[keyRef]*instance), epochs: make(map[string]int64), maxTerminal: maxTerminal,
	}
}

// lookup finds a sandbox for a caller of that project. Unknown and foreign ids get the same answer.
func (x *index) lookup(id sandbox.ID, project string) (*instance, error) {
	x.mu.RLock()
	in := x.byID[id]
	x.mu.RUnlock()
	if in == nil || in.intent.Project != project {
		return nil, errNotFound(string(id))
	}
	return in, nil
}

func errNotFound(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "there is no sandbox %s; it may have ended and been forgotten", clip(id))
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

// add enters in, or finds the instance that answers the same create: by key, or by id for a retry without one. found
// then is that one, with the caller counted as one more that waits for it, and in is not entered.
func (x *index) add(in *instance) (found *instance, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, errStoppingFull()
	}
	project, epoch := in.intent.Project, in.intent.OwnerEpoch
	if epoch < x.epochs[project] {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "stale_owner", "another apiserver owns project %q by now; try again", project)
	}
	if same := x.byID[in.id]; same != nil {
		if same.intent.Project == project && same.intent.Key == in.intent.Key && same.intent.Digest == in.intent.Digest {
			same.join(false)
			return same, nil
		}
		return nil, sandbox.Errorf(sandbox.AlreadyExists, "id_taken", "sandbox id %s is taken; try again", in.id)
	}
	if in.intent.Key != "" {
		if other := x.byKey[keyRef{project, in.intent.Key}]; other != nil {
			same := other.intent.Digest == in.intent.Digest
			if same && other.join(true) {
				return other, nil
			}
			if !same && other.holdsKey() {
				return nil, sandbox.Errorf(sandbox.AlreadyExists, "idempotency_key_reused",
					"the idempotency key was used for a create with other parameters; use a new key for a new sandbox").WithFact("sandbox_id", string(other.id))
			}
		}
	}
	x.enterLocked(in)
	return nil, nil
}

// enterLocked enters an instance without question.
func (x *index) enterLocked(in *instance) {
	x.byID[in.id] = in
	x.most = max(x.most, len(x.byID))
	if in.intent.Key != "" {
		x.byKey[keyRef{in.intent.Project, in.intent.Key}] = in
	}
	x.epochs[in.intent.Project] = max(x.epochs[in.intent.Project], in.intent.OwnerEpoch)
}

// remove drops in and its key, if the key is still its. drained: there were many, and hardly one is left.
func (x *index) remove(in *instance) (drained bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.byID[in.id] == in {
		delete(x.byID, in.id)
	}
	if drained = x.most >= manyInstances && len(x.byID) <= x.most/16; drained {
		x.most = len(x.byID)
		x.byID, x.byKey = maps.Collect(maps.All(x.byID)), maps.Collect(maps.All(x.byKey)) // a map never shrinks by itself
	}
	if ref := (keyRef{in.intent.Project, in.intent.Key}); x.byKey[ref] == in {
		delete(x.byKey, ref)
	}
	return drained
}

// ended queues a terminal instance and returns those that are too many, the oldest.
func (x *index) ended(in *instance) (surplus []*instance) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.terminal = append(x.terminal, in)
	n := 0
	for n < len(x.terminal) && (x.byID[x.terminal[n].id] != x.terminal[n] || len(x.terminal)-n > x.maxTerminal) {
		if old := x.terminal[n]; x.byID[old.id] == old {
			surplus = append(surplus, old)
		}
		n++
	}
	x.terminal = slices.Delete(x.terminal, 0, n)
	return surplus
}

// close refuses every add from now on: all then is complete.
func (x *index) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
}

// all is every instance, in no order.
func (x *index) all() []*instance {
	x.mu.RLock()
	defer x.mu.RUnlock()
	out := make([]*instance, 0, len(x.byID))
	for _, in := range x.byID {
		out = append(out, in)
	}
	return out
}
