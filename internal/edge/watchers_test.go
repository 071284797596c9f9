package edge

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/journal"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// watchStream is the caller's side of WatchSandboxes: what it got, in words.
type watchStream struct {
	grpc.ServerStream
	ctx   context.Context
	pause chan struct{} // closed when it begins to read; nil = at once

	mu  sync.Mutex
	got []string
}

// take is what was seen since the last take.
func (s *watchStream) take() []string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.got
	s.got = nil
	return got
}

func (s *watchStream) Context() context.Context { return s.ctx }
func (s *watchStream) Send(m *dsecv1.WatchSandboxesResponse) error {
	if s.pause != nil {
		<-s.pause
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e := m.GetEvent().(type) {
	case *dsecv1.WatchSandboxesResponse_Sandbox:
		s.got = append(s.got, e.Sandbox.GetId()+" "+e.Sandbox.GetState().String())
	case *dsecv1.WatchSandboxesResponse_Command:
		s.got = append(s.got, fmt.Sprintf("%s %s exit %d", e.Command.GetSandboxId(), e.Command.GetResult().GetCommandId(), e.Command.GetResult().GetExitCode()))
	default:
		s.got = append(s.got, fmt.Sprintf("%T", e)[len("*dsecv1.WatchSandboxesResponse_"):])
	}
	return nil
}

func (w *world) watch(ctx context.Context, req *dsecv1.WatchSandboxesRequest, pause chan struct{}) (s *watchStream, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	s = &watchStream{ctx: ctx, pause: pause}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := w.s.WatchSandboxes(req, s); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.Canceled {
			w.Errorf("watch: %v", err)
		}
	}()
	return s, func() { cancel(); <-done }
}

func (w *world) wantSeen(s *watchStream, want ...string) {
	w.Helper()
	if got := s.take(); fmt.Sprint(got) != fmt.Sprint(want) {
		w.Errorf("saw %q\nwant %q", got, want)
	}
}

func isStopping(seen string) bool { return strings.HasSuffix(seen, " STATE_STOPPING") }

func TestWatchSandboxes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		labelled := func(c *edgev1.CreateSandbox) { c.Spec.Labels = map[string]string{"job": "1"} }
		first, other := w.create(labelled), w.create()
		job := &dsecv1.WatchSandboxesRequest{Labels: map[string]string{"job": "1"}, Commands: true}
		s, end := w.watch(w.user(), job, nil)
		one, endOne := w.watch(w.user(), &dsecv1.WatchSandboxesRequest{Ids: []string{string(other)}}, nil)
		foreign, endForeign := w.watch(w.as("other", grant.RoleUser), &dsecv1.WatchSandboxesRequest{}, nil)
		a, b := string(first), string(other)
		w.wantSeen(s, a+" STATE_READY", "Synced")
		w.wantSeen(one, b+" STATE_READY", "Synced")
		w.wantSeen(foreign, "Synced")

		for _, id := range []sandbox.ID{first, other} {
			if _, err := w.exec(id, "exit 3", -1); err != nil {
				t.Fatal(err)
			}
		}
		if got := s.take(); len(got) != 1 || !strings.HasPrefix(got[0], a) || !strings.HasSuffix(got[0], "exit 3") {
			t.Errorf("saw %q", got)
		}
		second := string(w.create(labelled))
		if got := s.take(); len(got) == 0 || got[len(got)-1] != second+" STATE_READY" {
			t.Errorf("saw %q", got)
		}
		time.Sleep(watchSilence + time.Second)
		w.wantSeen(s, "Alive")
		w.delete(first, true)
		// STOPPING may have been over before it could be told; neither is told twice.
		if got := s.take(); fmt.Sprint(slices.DeleteFunc(got, isStopping)) != fmt.Sprint([]string{a + " STATE_STOPPED"}) {
			t.Errorf("saw %q", got)
		}
		for _, f := range []func(){end, endOne, endForeign} {
			f()
		}
		if got := foreign.take(); strings.Join(got, "") != "Alive" || len(w.e.watchers.all) != 0 {
			t.Errorf("a foreign project saw %q, %d watchers are left", got, len(w.e.watchers.all))
		}
		w.close()
	})
}

// A watcher that does not read costs its sandboxes' last states and nobody's time.
func TestSlowWatcherSeesTheLastState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		pause := make(chan struct{})
		s, end := w.watch(w.user(), &dsecv1.WatchSandboxesRequest{}, pause)
		synctest.Wait() // it waits in its first message
		var ids []string
		for range 20 {
			id := w.create()
			w.delete(id, true)
			ids = append(ids, string(id)+" STATE_STOPPED")
		}
		synctest.Wait()
		close(pause)
		w.wantSeen(s, append([]string{"Synced"}, ids...)...)
		end()
		w.close()
	})
}

// Who was cut is told of the commands that ended meanwhile, and of no older ones.
func TestWatchTellsOfPastEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		run := func(name string) {
			if _, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), CommandId: name, Command: &dsecv1.Command{Shell: "true"}, WaitSeconds: -1}); err != nil {
				t.Fatal(err)
			}
		}
		run("old")
		time.Sleep(time.Minute)
		cut := time.Now()
		run("b")
		time.Sleep(time.Second)
		run("a")
		synctest.Wait() // its end has been noted: a watch that begins meanwhile may be told of it twice
		s, end := w.watch(w.user(), &dsecv1.WatchSandboxesRequest{Commands: true, CommandsSince: timestamppb.New(cut)}, nil)
		w.wantSeen(s, string(id)+" b exit 0", string(id)+" a exit 0", string(id)+" STATE_READY", "Synced")
		end()
		w.close()
	})
}

// What waits for a watcher that never reads is bounded.
func TestWatcherThatNeverReads(t *testing.T) {
	w := watcherOf(&dsecv1.WatchSandboxesRequest{Commands: true}, "p")
	in := &instance{intent: &journal.Intent{Project: "p"}}
	var all watchers
	all.add(w)
	for i := range 10 * maxWaitingCommands {
		all.ended(in, fmt.Sprint(i))
	}
	_, n := w.next()
	if got := len(n.commands); got < maxWaitingCommands || got > 2*maxWaitingCommands || n.commands[got-1] != fmt.Sprint(10*maxWaitingCommands-1) {
		t.Errorf("%d ends of commands wait", got)
	}
	for range 2 * maxWaitingSandboxes {
		all.changed(&instance{intent: &journal.Intent{Project: "p"}})
	}
	if len(w.dirty) != 0 || len(w.order) != 0 {
		t.Errorf("%d sandboxes wait", len(w.dirty))
	}
	err := (&Edge{ctx: context.Background()}).feed(context.Background(), w, nil)
	if sandbox.ReasonOf(grpcerr.FromStatus(err)) != "watch_behind" {
		t.Error(err)
	}
}
