package control_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/control"
	"dsec/sandbox"
)

// watching reads a stream until an event of the wanted kind, and tells what came before.
type watching struct {
	t      testing.TB
	stream *connect.ServerStreamForClient[dsecv1.WatchSandboxesResponse]
}

func (p *platform) watch(ctx context.Context, req *dsecv1.WatchSandboxesRequest) *watching {
	s, err := p.sandboxes().WatchSandboxes(ctx, connect.NewRequest(req))
	ok(p.t, err)
	return &watching{p.t, s}
}

func (w *watching) until(done func(*dsecv1.WatchSandboxesResponse) bool) (ids []string) {
	w.t.Helper()
	for w.stream.Receive() {
		m := w.stream.Msg()
		if done(m) {
			slices.Sort(ids)
			return ids
		}
		if m.GetSandbox() != nil {
			ids = append(ids, m.GetSandbox().GetId())
		}
	}
	w.t.Fatalf("the stream ended: %v", w.stream.Err())
	return nil
}

func synced(m *dsecv1.WatchSandboxesResponse) bool { return m.GetSynced() }

func TestWatchMergesEdgesAndOutlivesThem(t *testing.T) {
	p := start(t, nil, "eaaaa", "ebbbb")
	p.publish("base", "base:latest", "")
	var all []string
	for range 12 { // on both, but for one time in 2000
		all = append(all, p.mustCreate().GetId())
	}
	slices.Sort(all)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := p.watch(ctx, &dsecv1.WatchSandboxesRequest{})
	if got := w.until(synced); !slices.Equal(got, all) {
		t.Errorf("%v, want %v", got, all)
	}
	some := p.watch(ctx, &dsecv1.WatchSandboxesRequest{Ids: append([]string{string(sandbox.NewID("ezzzz")), string(sandbox.NewID("eaaaa"))}, all[:3]...)})
	if got := some.until(synced); !slices.Equal(got, all[:3]) {
		t.Errorf("by id: %v, want %v", got, all[:3])
	}
	p.edges[0].Vanish()
	w.until(func(m *dsecv1.WatchSandboxesResponse) bool { return m.GetEdgeLost().GetNode() == "eaaaa" })
	w.until(func(m *dsecv1.WatchSandboxesResponse) bool { return m.GetAlive() }) // the stream stays
	p.edges[0].Appear(t)
	var there []string
	for _, id := range all {
		if strings.HasPrefix(id, "seaaaa") {
			there = append(there, id)
		}
	}
	seen := map[string]bool{}
	w.until(func(m *dsecv1.WatchSandboxesResponse) bool {
		if m.GetSynced() {
			t.Error("synced again")
		}
		seen[m.GetSandbox().GetId()] = true
		return !slices.ContainsFunc(there, func(id string) bool { return !seen[id] })
	})
}

func TestWatchRefuses(t *testing.T) {
	p := start(t, func(o *control.Options) {})
	for _, c := range []struct {
		req    *dsecv1.WatchSandboxesRequest
		reason string
	}{
		{&dsecv1.WatchSandboxesRequest{Ids: []string{"x"}}, "bad_id"},
		{&dsecv1.WatchSandboxesRequest{Ids: slices.Repeat([]string{string(sandbox.NewID("eaaaa"))}, 100_001)}, "too_many_ids"},
	} {
		s, err := p.sandboxes().WatchSandboxes(t.Context(), connect.NewRequest(c.req))
		ok(t, err)
		for s.Receive() {
		}
		if got := reason(s.Err()); got != c.reason {
			t.Errorf("%s, want %s", got, c.reason)
		}
	}
	none := p.watch(t.Context(), &dsecv1.WatchSandboxesRequest{Ids: []string{string(sandbox.NewID("ezzzz"))}})
	if got := none.until(synced); len(got) > 0 { // and the stream ends: nothing can come
		t.Errorf("%v", got)
	}
}
