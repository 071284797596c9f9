// Package resolve keeps what the names in network rules stand for.
//
// What surprises:
//
//   - A name is looked up again every Every for as long as a sandbox uses it, in goroutines of this package: no request's
//     context ends a look-up. Who waits for one waits beside it.
//   - An address that is no longer in the answer is kept for Keep: who balances by answers gives each time some of many.
//     While look-ups fail, what the last good one said stays, however long that is; Answer.Err says why.
//   - What names stood for is in a file, too, so that the next process begins with it: a restart while the name servers are
//     away closes nothing.
package resolve

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"dsec/sandbox"
)

// Bounds.
const (
	MaxAddresses = 64 // of one name
	MaxNames     = 10_000
	parallel     = 16
	retryFirst   = 2 * time.Second // after a failure; doubled until it is Every
	forgetAfter  = 5 * time.Minute // of names that nobody uses
)

// A Lookup asks for the addresses of a name. An error that says that there are none is a *net.DNSError with IsNotFound.
type Lookup func(ctx context.Context, name string) ([]netip.Addr, error)

// Options of Open. Zero values mean the defaults.
type Options struct {
	Lookup Lookup
	Path   string // of the file; "" = none
	// Changed is told whose names changed what they stand for, one call at a time, by a goroutine of the Resolver.
	Changed func(holders []sandbox.ID)
	Every   time.Duration // 30 s
	Keep    time.Duration // 5 min
	Log     *slog.Logger
}

// An Answer is what a name stands for now.
type Answer struct {
	Current []netip.Addr // sorted
	Kept    []netip.Addr // in answers until lately
	Err     error        // why the last look-up gave nothing new
	Known   bool         // it has been looked up at least once
}

// A Resolver is the cache. It is safe for concurrent use.
type Resolver struct {
	o Options

	saving sync.Mutex // held while the file is written; above mu

	mu      sync.Mutex
	names   map[string]*entry
	holders map[sandbox.ID][]string
	dirty   bool // the file is older than the names
	closed  bool // no look-up begins any more

	wanted  chan struct{} // something is due earlier than the loop thinks
	changed chan struct{} // holders are to be told
	tell    map[sandbox.ID]bool

	slots chan struct{}
	ctx   context.Context
	stop  context.CancelFunc
	wg    sync.WaitGroup
}

// An entry is one name. Guarded by Resolver.mu.
type entry struct {
	current []netip.Addr
	left    map[netip.Addr]time.Time // when it was last in an answer
	err     error
	known   bool
	asked   time.Time // of the last look-up that has ended
	due     time.Time
	fails   int
	users   int
	unused  time.Time // since when users is 0
	running chan struct{}
}

// Open begins, with what an earlier process left in the file.
func Open(o Options) *Resolver {
	if o.Every <= 0 {
		o.Every = 30 * time.Second
	}
	if o.Keep <= 0 {
		o.Keep = 5 * time.Minute
	}
	if o.Lookup == nil {
		o.Lookup = Node(nil)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &Resolver{
		o: o, names: make(map[string]*entry), holders: make(map[sandbox.ID][]string), tell: make(map[sandbox.ID]bool),
		wanted: make(chan struct{}, 1), changed: make(chan struct{}, 1), slots: make(chan struct{}, parallel),
	}
	r.load()
	r.ctx, r.stop = context.WithCancel(context.Background())
	r.wg.Go(r.run)
	r.wg.Go(r.runTelling)
	return r
}

// Close ends all look-ups, and writes the file.
func (r *Resolver) Close() {
	r.end()
	r.save()
}

// Remove is Close, and removes the file.
func (r *Resolver) Remove() {
	r.end()
	r.removeFile()
}

func (r *Resolver) end() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.stop()
	r.wg.Wait()
}

// Canonical is how a name is known here.
func Canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// Use makes names the ones that holder uses, in place of those that it used. They are looked up if that is due.
func (r *Resolver) Use(holder sandbox.ID, names []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.roomLocked(names) {
		return sandbox.Errorf(sandbox.ResourceExhausted, "too_many_network_names", "the network rules on this node have %d names, which is about the most; use prefixes, or fewer names", len(r.names))
	}
	r.useLocked(holder, names)
	return nil
}

// roomLocked reports whether there is room for names. Those that nobody uses any more make room.
func (r *Resolver) roomLocked(names []string) bool {
	wanted := make(map[string]bool, len(names))
	for _, name := range names {
		wanted[Canonical(name)] = true
	}
	need := 0
	for name := range wanted {
		if r.names[name] == nil {
			need++
		}
	}
	if need == 0 || len(r.names)+need <= MaxNames {
		return true
	}
	for name, e := range r.names {
		if e.users == 0 && e.running == nil && !wanted[name] {
			delete(r.names, name)
			r.dirty = true
		}
	}
	return len(r.names)+need <= MaxNames
}

func (r *Resolver) useLocked(holder sandbox.ID, names []string) {
	var mine []string
	for _, name := range names {
		mine = append(mine, Canonical(name))
	}
	slices.Sort(mine)
	mine = slices.Compact(mine)
	for _, name := range mine {
		e := r.entryLocked(name)
		e.users++
	}
	now := time.Now()
	for _, name := range r.holders[holder] {
		if e := r.names[name]; e != nil {
			if e.users--; e.users == 0 {
				e.unused = now
			}
		}
	}
	delete(r.holders, holder)
	if len(mine) > 0 {
		r.holders[holder] = mine
	}
	r.wakeLocked()
}

// Release ends what Use began.
func (r *Resolver) Release(holder sandbox.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.holders[holder]) > 0 {
		r.useLocked(holder, nil)
	}
}

func (r *Resolver) entryLocked(name string) *entry {
	e := r.names[name]
	if e == nil {
		e = &entry{left: make(map[netip.Addr]time.Time), unused: time.Now()}
		r.names[name] = e
	}
	return e
}

func (r *Resolver) wakeLocked() {
	select {
	case r.wanted <- struct{}{}:
	default:
	}
}

// Await returns when each of the names, which somebody uses, has been looked up lately, with whatever outcome, or ctx has ended.
// What they stand for is in the file then.
func (r *Resolver) Await(ctx context.Context, names []string) error {
	return r.awaitAll(ctx, names, retryFirst)
}

// AwaitFirst is Await, but where a look-up has failed lately, no other one is waited for.
func (r *Resolver) AwaitFirst(ctx context.Context, names []string) error {
	return r.awaitAll(ctx, names, r.o.Every)
}

func (r *Resolver) awaitAll(ctx context.Context, names []string, failed time.Duration) error {
	defer r.save()
	for _, name := range names {
		if err := r.await(ctx, Canonical(name), failed); err != nil {
			return err
		}
	}
	return nil
}

// await takes a failure for an answer that is no older than failed.
func (r *Resolver) await(ctx context.Context, name string, failed time.Duration) error {
	r.mu.Lock()
	e := r.entryLocked(name)
	fresh := e.known && time.Since(e.asked) < r.o.Every && (e.err == nil || time.Since(e.asked) < failed)
	if !fresh && e.running == nil {
		r.beginLocked(name, e)
	}
	running := e.running
	r.mu.Unlock()
	if fresh {
		return nil
	}
	select {
	case <-running:
		return nil
	case <-r.ctx.Done():
		return sandbox.Errorf(sandbox.Unavailable, "edge_stopping", "the node is stopping; try again")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Get is what a name stands for now. It asks nobody.
func (r *Resolver) Get(name string) Answer {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.names[Canonical(name)]
	if e == nil {
		return Answer{}
	}
	a := Answer{Current: slices.Clone(e.current), Err: e.err, Known: e.known}
	for addr := range e.left {
		a.Kept = append(a.Kept, addr)
	}
	slices.SortFunc(a.Kept, netip.Addr.Compare)
	return a
}

// beginLocked starts a look-up.
func (r *Resolver) beginLocked(name string, e *entry) {
	if r.closed {
		return
	}
	done := make(chan struct{})
	e.running = done
	r.wg.Go(func() {
		var found []netip.Addr
		err := r.ctx.Err()
		select {
		case r.slots <- struct{}{}:
			found, err = r.o.Lookup(r.ctx, name)
			<-r.slots
		case <-r.ctx.Done():
		}
		if r.ctx.Err() != nil { // the end of the resolver says nothing of the name
			return
		}
		if err == nil && len(found) == 0 {
			err = errors.New("it has no address")
		}
		r.learned(name, e, found, err, done)
	})
}

// learned enters the outcome of a look-up.
func (r *Resolver) learned(name string, e *entry, found []netip.Addr, err error, done chan struct{}) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	defer close(done)
	e.running, e.asked, e.known = nil, now, true
	if err != nil {
		if e.err == nil {
			r.o.Log.Warn("a name of network rules cannot be resolved", "name", name, "error", err)
		}
		e.err = err
		e.due = now.Add(min(retryFirst<<min(e.fails, 16), r.o.Every))
		e.fails++
	} else {
		e.err, e.fails, e.due = nil, 0, now.Add(r.o.Every)
		if e.take(canonical(found), now) {
			r.changedLocked(name)
		}
	}
	if e.expire(now, r.o.Keep) {
		r.changedLocked(name)
	}
	r.wakeLocked()
}

// canonical sorts addresses and cuts what is too many.
func canonical(found []netip.Addr) []netip.Addr {
	all := make([]netip.Addr, 0, len(found))
	for _, a := range found {
		all = append(all, a.Unmap().WithZone(""))
	}
	slices.SortFunc(all, netip.Addr.Compare)
	all = slices.Compact(all)
	return all[:min(len(all), MaxAddresses)]
}

// take makes found the current addresses and reports whether that changes anything.
func (e *entry) take(found []netip.Addr, now time.Time) (changed bool) {
	if slices.Equal(found, e.current) {
		return false
	}
	for _, a := range e.current {
		if !slices.Contains(found, a) && len(e.left) < MaxAddresses {
			e.left[a] = now
		}
	}
	for _, a := range found {
		delete(e.left, a)
	}
	e.current = found
	return true
}

// expire drops what left the answers long ago.
func (e *entry) expire(now time.Time, keep time.Duration) (changed bool) {
	for a, at := range e.left {
		if now.Sub(at) >= keep {
			delete(e.left, a)
			changed = true
		}
	}
	return changed
}

// changedLocked has the holders of a name told, and the file written.
func (r *Resolver) changedLocked(name string) {
	r.dirty = true
	for holder, names := range r.holders {
		if _, uses := slices.BinarySearch(names, name); uses {
			r.tell[holder] = true
		}
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// run looks up what is due.
func (r *Resolver) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(max(time.Until(r.beginDue(time.Now())), time.Millisecond))
		select {
		case <-timer.C:
		case <-r.wanted:
		case <-r.ctx.Done():
			return
		}
	}
}

// beginDue begins all look-ups that are due and returns when the next one is.
func (r *Resolver) beginDue(now time.Time) (next time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next = now.Add(time.Hour)
	for name, e := range r.names {
		switch {
		case e.running != nil:
		case e.users == 0:
			if now.Sub(e.unused) >= forgetAfter {
				delete(r.names, name)
				r.dirty = true
				continue
			}
			next = earlier(next, e.unused.Add(forgetAfter))
		case !e.due.After(now):
			r.beginLocked(name, e)
		default:
			next = earlier(next, e.due)
		}
	}
	return next
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// runTelling tells who uses names that changed. The file is written before: what a policy has been made of is then found again.
func (r *Resolver) runTelling() {
	for {
		select {
		case <-r.changed:
		case <-r.ctx.Done():
			return
		}
		r.save()
		r.mu.Lock()
		var holders []sandbox.ID
		for id := range r.tell {
			holders = append(holders, id)
		}
		clear(r.tell)
		r.mu.Unlock()
		if len(holders) > 0 && r.o.Changed != nil {
			r.o.Changed(holders)
		}
	}
}
