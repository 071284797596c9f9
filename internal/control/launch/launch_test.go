package launch

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/iam"
	"dsec/internal/control/placement"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

const code = sandbox.EdgeCode("eaaaa")

// node is an edge without any wire. Hooks are called without its lock.
type node struct {
	mu      sync.Mutex
	live    map[string]bool
	deletes int
	strict  bool   // a delete of nothing fails
	has     string // what it knows under the key "k", of which it has said nothing
	create  func(context.Context, *edgev1.CreateSandbox) error
	remove  func() error
	list    error
	records []*edgev1.Record
}

func (n *node) Create(ctx context.Context, r *edgev1.CreateSandbox) (*edgev1.CreateResult, bool, error) {
	if n.create != nil {
		if err := n.create(ctx, r); err != nil {
			return &edgev1.CreateResult{Id: r.GetId(), Failure: grpcerr.ToFailure(err)}, true, nil
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.has != "" && r.GetIdempotencyKey() == "k" {
		return &edgev1.CreateResult{Id: r.GetId(), Sandbox: &dsecv1.Sandbox{Id: n.has}}, true, nil
	}
	n.live[r.GetId()] = true
	return &edgev1.CreateResult{Id: r.GetId(), Sandbox: &dsecv1.Sandbox{Id: r.GetId()}}, true, nil
}

func (n *node) GetSandbox(_ context.Context, _ string, r *edgev1.GetSandboxRequest) (*dsecv1.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.live[r.GetId()] {
		return nil, sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "none")
	}
	return &dsecv1.Sandbox{Id: r.GetId()}, nil
}

func (n *node) ListSandboxes(context.Context, string, *edgev1.ListSandboxesRequest) (*edgev1.ListSandboxesResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &edgev1.ListSandboxesResponse{Sandboxes: n.records}, n.list
}

func (n *node) DeleteSandbox(_ context.Context, _ string, r *edgev1.DeleteSandboxRequest) (*dsecv1.Sandbox, error) {
	if n.remove != nil {
		if err := n.remove(); err != nil {
			return nil, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.deletes++
	if n.strict && !n.live[r.GetId()] {
		return nil, sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "none")
	}
	delete(n.live, r.GetId())
	return &dsecv1.Sandbox{Id: r.GetId()}, nil
}

func (n *node) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.live)
}

type grants struct{}

func (grants) Grant(iam.Identity, sandbox.EdgeCode) (string, error) { return "g", nil }
func (grants) WatcherGrant(sandbox.EdgeCode) (string, error)        { return "w", nil }

func setup(t *testing.T, n *node, quota int) *Launcher {
	t.Helper()
	n.live = map[string]bool{}
	l := New(Options{
		Quota: quota, Edges: map[sandbox.EdgeCode]Edge{code: n}, Grants: grants{}, Now: time.Now, Log: slog.New(slog.DiscardHandler),
		Rand: rand.New(rand.NewPCG(1, 2)), ListEvery: time.Hour,
		Nodes: func() []placement.Edge {
			return []placement.Edge{{Code: code, Healthy: true, Accepting: true, Backends: []string{"container"}}}
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { l.Run(ctx); close(done) }()
	t.Cleanup(func() {
		cancel()
		<-done
		short, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		_ = l.Close(short) // a test's edge may refuse deletes
	})
	return l
}

func ask(key string) Request {
	return Request{Caller: iam.Identity{Principal: "a", Project: "default"}, Key: key, Digest: "d", Spec: &dsecv1.SandboxSpec{Backend: "container"}, Timeout: time.Minute}
}

func create(t *testing.T, l *Launcher, key string) (*dsecv1.Sandbox, Release) {
	t.Helper()
	sb, release, err := l.Create(t.Context(), ask(key))
	if err != nil {
		t.Fatal(err)
	}
	return sb, release
}

func (l *Launcher) wanted() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ownerLocked("default").Wanted()
}

// settled waits for everything that flights have left to do.
func settled(l *Launcher) { l.running.Wait() }

func TestAnswerThatReachedNobodyIsTakenBack(t *testing.T) {
	n := &node{}
	l := setup(t, n, 1)
	l.EdgeUp(code)
	_, release := create(t, l, "k")
	release(false)
	settled(l)
	if n.count() != 0 || l.wanted() != 0 || len(l.flights)+len(l.answered) != 0 {
		t.Fatalf("%d live, %d wanted, %v %v", n.count(), l.wanted(), l.flights, l.answered)
	}
	_, release = create(t, l, "k") // key and quota are free
	release(true)
	settled(l)
	if n.count() != 1 || l.wanted() != 1 || len(l.flights)+len(l.answered) != 0 {
		t.Fatalf("%d live, %d wanted, %v %v", n.count(), l.wanted(), l.flights, l.answered)
	}
}

// The first answer went nowhere, but a retry had joined before that was known.
func TestOneDeliveryIsEnough(t *testing.T) {
	for _, order := range [][2]bool{{false, true}, {true, false}} {
		n := &node{}
		l := setup(t, n, 0)
		l.EdgeUp(code)
		a, first := create(t, l, "k")
		b, second := create(t, l, "k")
		if a.GetId() != b.GetId() {
			t.Fatal("two sandboxes for one key")
		}
		first(order[0])
		second(order[1])
		settled(l)
		if n.count() != 1 || n.deletes != 0 || len(l.answered) != 0 {
			t.Fatalf("%v: %d live, %d deletes", order, n.count(), n.deletes)
		}
	}
}

func TestRollBackIsTriedUntilItWorks(t *testing.T) {
	n := &node{}
	l := setup(t, n, 0)
	l.EdgeUp(code)
	_, release := create(t, l, "k")
	tries := 0
	n.remove = func() error {
		if tries++; tries < 3 {
			return sandbox.Errorf(sandbox.Unavailable, "edge_unavailable", "away")
		}
		return nil
	}
	release(false)
	// A create with the same key waits for the end of it, and then makes another.
	sb, second := create(t, l, "k")
	second(true)
	if tries != 3 || n.count() != 1 || !n.live[sb.GetId()] {
		t.Fatalf("%d tries, %v live, answer %s", tries, n.live, sb.GetId())
	}
}

func TestManyCallersOfOneKey(t *testing.T) {
	n := &node{}
	l := setup(t, n, 0)
	l.EdgeUp(code)
	var mu sync.Mutex
	ids := map[string]int{}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			sb, release, err := l.Create(t.Context(), ask("k"))
			if err != nil {
				t.Error(err)
				return
			}
			release(true)
			mu.Lock()
			defer mu.Unlock()
			ids[sb.GetId()]++
		})
	}
	wg.Wait()
	if len(ids) != 1 || n.count() != 1 {
		t.Fatalf("%v, %d live", ids, n.count())
	}
}

// Callers that come and go at random, with answers lost at random: what lives in the end is what somebody was given.
func TestCallersComeAndGo(t *testing.T) {
	n := &node{create: func(ctx context.Context, _ *edgev1.CreateSandbox) error {
		if rand.IntN(5) == 0 {
			return sandbox.Errorf(sandbox.Internal, "x", "it happens")
		}
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		return nil
	}}
	l := setup(t, n, 0)
	l.EdgeUp(code)
	var mu sync.Mutex
	given := map[string]bool{}
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			patient := i%20 == 0 // so that some are given one, however slow this machine is
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(4000))*time.Microsecond)
			defer cancel()
			if patient {
				ctx = t.Context()
			}
			sb, release, err := l.Create(ctx, ask([]string{"", "a", "b", "c"}[i%4]))
			if err != nil {
				return
			}
			delivered := patient || rand.IntN(2) == 0
			if delivered {
				mu.Lock()
				given[sb.GetId()] = true
				mu.Unlock()
			}
			release(delivered)
		})
	}
	wg.Wait()
	settled(l)
	if len(given) == 0 {
		t.Error("nobody was given anything: the test shows nothing")
	}
	for id := range given {
		if !n.live[id] {
			t.Errorf("%s was given and is gone", id)
		}
	}
	if len(n.live) != len(given) || l.wanted() != len(given) || len(l.flights)+len(l.answered) != 0 {
		t.Errorf("%d live, %d given, %d wanted, %d in flight", len(n.live), len(given), l.wanted(), len(l.flights))
	}
}

func TestCreatesWaitUntilTheEdgesWereAsked(t *testing.T) {
	n := &node{}
	l := setup(t, n, 0)
	id := sandbox.NewID(code)
	n.live[string(id)] = true
	n.records = []*edgev1.Record{{Sandbox: &dsecv1.Sandbox{Id: string(id), Project: "default"}, IdempotencyKey: "k", SpecDigest: "d", HoldsQuota: true}}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, _, err := l.Create(ctx, ask("k")); sandbox.ClassOf(err) != sandbox.DeadlineExceeded {
		t.Fatalf("got %v", err)
	}
	l.EdgeUp(code)
	if sb, _ := create(t, l, "k"); sb.GetId() != string(id) {
		t.Fatalf("%s instead of the %s of before the start", sb.GetId(), id)
	}
}

func TestFoundSandboxThatIsForgotten(t *testing.T) {
	n := &node{}
	l := setup(t, n, 1)
	l.EdgeUp(code)
	old, release := create(t, l, "k")
	release(true)
	n.mu.Lock()
	delete(n.live, old.GetId()) // it ended by itself, and the edge has forgotten it
	n.mu.Unlock()
	if sb, _ := create(t, l, "k"); sb.GetId() == old.GetId() {
		t.Fatal("a forgotten sandbox was given out")
	}
}

func TestAnEdgeThatStaysAwayDoesNotHoldCreatesForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{list: sandbox.Errorf(sandbox.Unavailable, "edge_unavailable", "away")}
		l := setup(t, n, 0)
		l.EdgeUp(code)
		began := time.Now()
		_, release := create(t, l, "k")
		release(true)
		if d := time.Since(began); d < rebuildFor || d > rebuildFor+time.Second {
			t.Errorf("creates began after %v", d)
		}
	})
}

// After a start, an edge that was away for too long to be asked still knows its keys. Its answer is a sandbox that somebody has
// been given, whatever becomes of the caller that asked again.
func TestWhatAnEdgeHadIsNeverTakenBack(t *testing.T) {
	id := string(sandbox.NewID(code))
	known := func(t *testing.T) (*node, *Launcher) {
		n := &node{has: id}
		l := setup(t, n, 0)
		n.live[id] = true
		l.EdgeUp(code) // its list shows nothing: it is the later appearance that would
		return n, l
	}
	t.Run("the answer is lost", func(t *testing.T) {
		n, l := known(t)
		sb, release := create(t, l, "k")
		release(false)
		settled(l)
		if sb.GetId() != id || !n.live[id] || l.wanted() != 1 || len(l.flights)+len(l.answered) != 0 {
			t.Errorf("%s was given; %v live, %d wanted", sb.GetId(), n.live, l.wanted())
		}
		// From then on it is known.
		if again, _ := create(t, l, "k"); again.GetId() != id || n.count() != 1 {
			t.Errorf("%s, %v live", again.GetId(), n.live)
		}
	})
	// held makes the create arrive before its caller does what it does.
	held := func(n *node) (arrived, release chan struct{}) {
		arrived, release = make(chan struct{}), make(chan struct{})
		n.create = func(context.Context, *edgev1.CreateSandbox) error { close(arrived); <-release; return nil }
		return arrived, release
	}
	t.Run("the caller leaves before", func(t *testing.T) {
		n, l := known(t)
		arrived, release := held(n)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-arrived; cancel() }()
		_, _, err := l.Create(ctx, ask("k"))
		close(release)
		settled(l)
		if sandbox.ClassOf(err) != sandbox.Canceled || !n.live[id] || l.wanted() != 0 || len(l.flights)+len(l.answered) != 0 {
			t.Errorf("%v; %v live, %d wanted", err, n.live, l.wanted())
		}
	})
	t.Run("the key is cancelled before", func(t *testing.T) { // that means this sandbox
		n, l := known(t)
		arrived, release := held(n)
		failed := make(chan error)
		go func() { _, _, err := l.Create(t.Context(), ask("k")); failed <- err }()
		<-arrived
		if _, err := l.DeleteByKey(t.Context(), ask("k").Caller, "k", false); err != nil {
			t.Fatal(err)
		}
		close(release)
		err := <-failed
		settled(l)
		if sandbox.ReasonOf(err) != sandbox.ReasonCanceled || n.count() != 0 || l.wanted() != 0 {
			t.Errorf("%v; %v live, %d wanted", err, n.live, l.wanted())
		}
	})
}

// A sandbox that ended by itself and is forgotten is deleted by its key without an error, and its quota is free.
func TestDeleteByKeyOfWhatIsForgotten(t *testing.T) {
	n := &node{strict: true}
	l := setup(t, n, 1)
	l.EdgeUp(code)
	old, release := create(t, l, "k")
	release(true)
	n.mu.Lock()
	delete(n.live, old.GetId())
	n.mu.Unlock()
	if sb, err := l.DeleteByKey(t.Context(), ask("k").Caller, "k", true); sb != nil || err != nil {
		t.Fatalf("%v, %v", sb, err)
	}
	if l.wanted() != 0 {
		t.Error("it holds quota")
	}
}
