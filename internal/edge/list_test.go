package edge

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
)

// A roll is what callers know of sandboxes: those that were told of and that nobody has begun to end.
type roll struct {
	mu   sync.Mutex
	live map[string]bool
}

func (r *roll) told(ids ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range ids {
		if _, ended := r.live[id]; !ended {
			r.live[id] = true
		}
	}
}

func (r *roll) ends(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live[id] = false
}

func (r *roll) now() map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.live)
}

// pages lists everything, page by page, and checks that the pages are in order and without doubles.
func (w *world) pages(size int32, states ...dsecv1.State) (ids []string) {
	w.Helper()
	token := ""
	for {
		res, err := w.s.ListSandboxes(w.user(), &edgev1.ListSandboxesRequest{PageSize: size, PageToken: token, States: states})
		if err != nil {
			w.Error(err)
			return nil
		}
		for _, rec := range res.GetSandboxes() {
			ids = append(ids, rec.GetSandbox().GetId())
		}
		if token = res.GetNextPageToken(); token == "" {
			break
		}
	}
	if !slices.IsSorted(ids) || len(slices.Compact(slices.Clone(ids))) != len(ids) {
		w.Errorf("pages of %d overlap: %v", size, ids)
	}
	return ids
}

// While others are created and ended, what was told of once, by a list or the answer to its create, is in every list that begins
// after that, until somebody begins to end it: in whole lists and in pages of any size, while it is made, too.
func TestEveryListHasWhatWasListed(t *testing.T) {
	const makers, each = 8, 20
	w := newWorld(t, func(o *Options) { o.Parallel = 3 }) // so that many wait for their turn
	defer w.close()
	r := &roll{live: make(map[string]bool)}
	var done atomic.Bool
	var making, listing sync.WaitGroup
	for m := range makers {
		making.Go(func() {
			var mine []string
			for n := range each {
				c := w.spec()
				res, err := w.createAll(w.user(), c)
				if got := res[c.GetId()]; err != nil || got.GetFailure() != nil {
					t.Errorf("%v %v", got.GetFailure(), err)
					return
				}
				r.told(c.GetId())
				mine = append(mine, c.GetId())
				if n%3 == m%3 {
					last := mine[len(mine)/2]
					mine = slices.DeleteFunc(mine, func(id string) bool { return id == last })
					r.ends(last)
					if _, err := w.s.DeleteSandbox(w.user(), &edgev1.DeleteSandboxRequest{Id: last, Wait: n%2 == 0}); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	var lists atomic.Int64
	for _, size := range []int32{1, 7, 50, 1000} {
		listing.Go(func() {
			for last := false; !last; {
				last = done.Load() // one more when all is quiet
				before := r.now()
				got := w.pages(size)
				lists.Add(1)
				after := r.now()
				for id, live := range before {
					if live && after[id] && !slices.Contains(got, id) {
						t.Errorf("%s is not among the %d that pages of %d have", id, len(got), size)
					}
				}
				r.told(got...)
			}
		})
	}
	making.Wait()
	done.Store(true)
	listing.Wait()
	t.Log(fmt.Sprint(lists.Load(), " lists"))
}
