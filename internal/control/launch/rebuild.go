package launch

import (
	"context"
	"fmt"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/owner"
	"dsec/sandbox"
)

const (
	listPage = 1000
	listCall = 30 * time.Second
)

// listState is when an edge was last listed, and whether it should be again.
type listState struct {
	wanted bool
	last   time.Time
}

// EdgeUp says that an edge has appeared, at the start or again: it is asked what it has.
func (l *Launcher) EdgeUp(code sandbox.EdgeCode) {
	l.mu.Lock()
	s := l.lists[code]
	s.wanted = true
	l.lists[code] = s
	l.mu.Unlock()
	l.wake()
}

// EdgeStatus says what a status shows that was asked for at that time. If the number of sandboxes differs from what is
// known here, some have ended by themselves, and the edge is listed.
func (l *Launcher) EdgeStatus(code sandbox.EdgeCode, asked time.Time, sandboxes int64) {
	l.mu.Lock()
	l.overlay.Observe(code, asked)
	known := 0
	for _, o := range l.owners {
		known += o.OnEdge(code)
	}
	s := l.lists[code]
	// While sandboxes come and go the numbers nearly always differ, so large edges are listed less often.
	every := l.o.ListEvery * time.Duration(1+known/listPage)
	wake := int64(known) != sandboxes && l.o.Now().Sub(s.last) >= every
	s.wanted = s.wanted || wake
	l.lists[code] = s
	l.mu.Unlock()
	if wake {
		l.wake()
	}
}

func (l *Launcher) wake() {
	select {
	case l.kick <- struct{}{}:
	default: // it will look at everything that is wanted
	}
}

// Run lists edges when that is wanted, until ctx ends. After rebuildFor it lets creates begin, whoever is still away.
func (l *Launcher) Run(ctx context.Context) {
	patience := time.NewTimer(rebuildFor)
	defer patience.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-patience.C:
			l.giveUpOnMissing()
		case <-l.kick:
			l.listWanted(ctx)
		}
	}
}

func (l *Launcher) giveUpOnMissing() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.missing) > 0 {
		for code := range l.missing {
			l.o.Log.Warn("edge did not say what it has; creates begin without it", "edge", code)
		}
		clear(l.missing)
		close(l.rebuilt)
	}
}

func (l *Launcher) listWanted(ctx context.Context) {
	for {
		var next sandbox.EdgeCode
		l.mu.Lock()
		for code, s := range l.lists {
			if s.wanted {
				next = code
				l.lists[code] = listState{last: l.o.Now()}
				break
			}
		}
		l.mu.Unlock()
		if next == "" {
			return
		}
		if err := l.list(ctx, next); err != nil && ctx.Err() == nil {
			l.o.Log.Warn("listing an edge failed", "edge", next, "error", err) // its next status asks for it again
		}
	}
}

// list corrects the owners by what the edge has.
func (l *Launcher) list(ctx context.Context, code sandbox.EdgeCode) error {
	e, err := l.edge(code)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, listCall)
	defer cancel()
	listings := l.beginLists(code)
	defer l.dropLists(listings)
	records := make(map[string][]owner.Record)
	for token := ""; ; {
		signed, err := l.o.Grants.WatcherGrant(code)
		if err != nil {
			return err
		}
		res, err := e.ListSandboxes(ctx, signed, &edgev1.ListSandboxesRequest{AllProjects: true, PageSize: listPage, PageToken: token})
		if err != nil {
			return fmt.Errorf("list sandboxes: %w", err)
		}
		for _, r := range res.GetSandboxes() {
			id, err := sandbox.ParseID(r.GetSandbox().GetId())
			if err != nil {
				return fmt.Errorf("list sandboxes: %w", err)
			}
			project := r.GetSandbox().GetProject()
			records[rootOf(project)] = append(records[rootOf(project)], owner.Record{
				ID: id, Key: owner.Key{Project: project, Key: r.GetIdempotencyKey()}, Digest: r.GetSpecDigest(), HoldsQuota: r.GetHoldsQuota(),
			})
		}
		if token = res.GetNextPageToken(); token == "" {
			break
		}
	}
	l.endLists(code, listings, records)
	return nil
}

func (l *Launcher) beginLists(code sandbox.EdgeCode) map[string]*owner.Listing {
	l.mu.Lock()
	defer l.mu.Unlock()
	listings := make(map[string]*owner.Listing, len(l.owners))
	for root, o := range l.owners {
		listings[root] = o.BeginList(code)
	}
	return listings
}

func (l *Launcher) dropLists(listings map[string]*owner.Listing) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for root, listing := range listings {
		l.owners[root].DropList(listing)
	}
}

func (l *Launcher) endLists(code sandbox.EdgeCode, listings map[string]*owner.Listing, records map[string][]owner.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for root := range records {
		if listings[root] == nil { // first heard of in this list
			listings[root] = l.ownerLocked(root).BeginList(code)
		}
	}
	for root, listing := range listings {
		l.owners[root].EndList(listing, records[root])
	}
	if l.missing[code] {
		delete(l.missing, code)
		if len(l.missing) == 0 {
			close(l.rebuilt)
		}
	}
}
