package edge

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// watchSilence is how long nothing may be sent to a watcher; then it is told that all is well.
const watchSilence = 15 * time.Second

// What may wait for a watcher that does not take it. Of a sandbox no more ends of commands than it remembers commands; of
// sandboxes more than a node has: those that ended meanwhile must not stay in memory for it.
const (
	maxWaitingCommands  = 1024
	maxWaitingSandboxes = 16 << 10
)

var errWatchBehind = sandbox.Errorf(sandbox.Unavailable, "watch_behind", "more has changed than is kept for a watcher that does not read; watch again")

// watchers are the callers that watch sandboxes. What changes is noted for each and sent by its own goroutine as fast as it
// takes it: of a sandbox that changes again before it was sent only the last state is sent. So a slow watcher costs memory for
// the sandboxes that it watches, and delays nobody.
type watchers struct {
	mu  sync.RWMutex
	all map[*watcher]struct{}
}

type watcher struct {
	match    func(*instance) bool
	commands bool

	mu    sync.Mutex
	dirty map[*instance]*news
	order []*instance   // of dirty, the longest waiting first
	wake  chan struct{} // holds one token if there is something
	lost  bool          // too much waited: it was dropped
}

// news is what a watcher has not been sent of one sandbox.
type news struct {
	state    bool
	commands []string // that have ended
}

func (s *watchers) add(w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = make(map[*watcher]struct{})
	}
	s.all[w] = struct{}{}
}

func (s *watchers) remove(w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, w)
}

// changed notes that in's state may have changed. It never waits for a watcher.
func (s *watchers) changed(in *instance) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for w := range s.all {
		w.note(in, func(n *news) { n.state = true })
	}
}

// ended notes the end of a command.
func (s *watchers) ended(in *instance, command string) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for w := range s.all {
		if w.commands {
			w.note(in, func(n *news) { n.ended(command) })
		}
	}
}

// ended drops the oldest, in bulk, where there are too many: they are forgotten by now.
func (n *news) ended(command string) {
	if len(n.commands) >= 2*maxWaitingCommands {
		n.commands = append(n.commands[:0], n.commands[len(n.commands)-maxWaitingCommands:]...)
	}
	n.commands = append(n.commands, command)
}

func (w *watcher) note(in *instance, add func(*news)) {
	if !w.match(in) {
		return
	}
	w.mu.Lock()
	n := w.dirty[in]
	if n == nil && len(w.dirty) >= maxWaitingSandboxes {
		w.lost = true
		clear(w.dirty)
		w.order = nil
	}
	if n == nil && !w.lost {
		n = new(news)
		w.dirty[in] = n
		w.order = append(w.order, in)
	}
	if n != nil && !w.lost {
		add(n)
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// next takes what has waited longest.
func (w *watcher) next() (*instance, *news) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.order) == 0 {
		w.order = nil
		return nil, nil
	}
	in := w.order[0]
	w.order[0] = nil
	w.order = w.order[1:]
	n := w.dirty[in]
	delete(w.dirty, in)
	return in, n
}

func (w *watcher) behind() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// watcherOf makes the watcher that a request asks for, of one project.
func watcherOf(req *dsecv1.WatchSandboxesRequest, project string) *watcher {
	labels := req.GetLabels()
	var ids map[sandbox.ID]bool
	if len(req.GetIds()) > 0 {
		ids = make(map[sandbox.ID]bool, len(req.GetIds()))
		for _, id := range req.GetIds() {
			ids[sandbox.ID(id)] = true
		}
	}
	return &watcher{
		commands: req.GetCommands(), dirty: make(map[*instance]*news), wake: make(chan struct{}, 1),
		match: func(in *instance) bool {
			return in.intent.Project == project && (ids == nil || ids[in.id]) && hasLabels(in, labels)
		},
	}
}

func hasLabels(in *instance, labels map[string]string) bool {
	for k, v := range labels {
		if have, ok := in.intent.Spec.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// WatchSandboxes sends changes until the caller leaves or the edge stops.
func (s *server) WatchSandboxes(req *dsecv1.WatchSandboxesRequest, out grpc.ServerStreamingServer[dsecv1.WatchSandboxesResponse]) error {
	ctx := out.Context()
	g, err := s.caller(ctx, grant.RoleUser)
	if err != nil {
		return s.wire(ctx, "WatchSandboxes", err)
	}
	w := watcherOf(req, g.Project)
	s.e.watchers.add(w) // before the present state is looked at, so that nothing falls between
	defer s.e.watchers.remove(w)
	for _, in := range s.e.index.all() {
		w.note(in, func(n *news) { n.state = true })
	}
	if req.GetCommandsSince() != nil {
		s.e.notePast(w, req.GetCommandsSince().AsTime())
	}
	return s.e.feed(ctx, w, out)
}

// notePast notes the commands that have ended since.
func (e *Edge) notePast(w *watcher, since time.Time) {
	for _, in := range e.index.all() {
		g := in.snapshot().guest
		if g == nil || !w.match(in) {
			continue
		}
		var ended []GuestCommand
		for _, c := range g.Commands() {
			if r := c.Result(); !r.Running && !r.EndedAt.Before(since) {
				ended = append(ended, c)
			}
		}
		slices.SortFunc(ended, func(a, b GuestCommand) int { return a.Result().EndedAt.Compare(b.Result().EndedAt) })
		for _, c := range ended {
			w.note(in, func(n *news) { n.ended(c.ID()) })
		}
	}
}

func (e *Edge) feed(ctx context.Context, w *watcher, out grpc.ServerStreamingServer[dsecv1.WatchSandboxesResponse]) error {
	synced := false
	for {
		in, n := w.next()
		for ; in != nil; in, n = w.next() {
			if err := e.tell(in, n, out); err != nil {
				return err
			}
		}
		if w.behind() {
			return grpcerr.ToStatus(errWatchBehind)
		}
		if !synced {
			synced = true
			if err := out.Send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}}); err != nil {
				return err
			}
		}
		quiet := time.NewTimer(watchSilence)
		select {
		case <-w.wake:
		case <-quiet.C:
			if err := out.Send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Alive{Alive: true}}); err != nil {
				return err
			}
		case <-ctx.Done():
			quiet.Stop()
			return grpcerr.ToStatus(ctx.Err())
		case <-e.ctx.Done():
			quiet.Stop()
			return grpcerr.ToStatus(errStopping)
		}
		quiet.Stop()
	}
}

// tell sends the news of one sandbox: the ends of commands before its state, so that its end is the last.
func (e *Edge) tell(in *instance, n *news, out grpc.ServerStreamingServer[dsecv1.WatchSandboxesResponse]) error {
	if g := in.snapshot().guest; g != nil {
		for _, id := range n.commands {
			c, ok := g.Command(id)
			if !ok { // forgotten meanwhile: there are newer ones
				continue
			}
			ev := &dsecv1.CommandEvent{SandboxId: string(in.id), Result: resultOf(c, -1)}
			if err := out.Send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Command{Command: ev}}); err != nil {
				return err
			}
		}
	}
	if !n.state {
		return nil
	}
	return out.Send(&dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Sandbox{Sandbox: e.viewOf(in)}})
}
