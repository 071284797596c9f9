package edge

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/internal/inflight"
	"dsec/sandbox"
)

// called is the context of a call over gRPC with such a grant.
func (w *world) called(project, role string) context.Context {
	return metadata.AppendToOutgoingContext(w.Context(), grant.MetadataKey, w.grant(project, role))
}

func tooMany(t *testing.T, err error) {
	t.Helper()
	if e := sandbox.AsError(grpcerr.FromStatus(err)); e == nil || e.Class != sandbox.ResourceExhausted || e.Reason != inflight.Reason {
		t.Errorf("%v", err)
	}
}

func TestByteStreamsOfAProjectAreBounded(t *testing.T) {
	const most = 3
	w := newByteWorld(t, func(o *Options) { o.Requests = inflight.Limits{Streams: most} })
	w.run("c", "cat", 0)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for range most {
		resp, err := http.DefaultClient.Do(w.request("GET", "/commands/c/stdout?follow=1", "").WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
	}
	for _, c := range [][2]string{
		{"GET", "/commands/c/stdout?follow=1"}, {"PUT", "/files?path=/f"}, {"PUT", "/commands/c/stdin"}, {"GET", "/archive?path=/"}, {"GET", "/ports/80/http/"},
	} {
		resp, body := w.do(w.request(c[0], c[1], "x"))
		if resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "1" || !strings.Contains(body, `"reason":"too_many_requests"`) {
			t.Errorf("%v: %s %s", c, resp.Status, body)
		}
	}
	req := w.request("GET", "/commands/c/stdout", "")
	req.Header.Set(grant.Header, w.grant("other", grant.RoleUser))
	if resp, body := w.do(req); resp.StatusCode != 404 { // it is not refused for what another project has
		t.Errorf("another project: %s %s", resp.Status, body)
	}
	leave()
	eventually(t, "its places are free again", func() bool {
		resp, _ := w.do(w.request("PUT", "/files?path=/f", "x"))
		return resp.StatusCode == 200
	})
}

func TestCallsOfAProjectAreBounded(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Requests = inflight.Limits{Calls: 2, Streams: 2, Bytes: 64 << 10} })
	defer w.close()
	id, c := w.create(), serve(t, w)
	ctx, leave := context.WithCancel(w.called("default", grant.RoleUser))
	defer leave()
	waiting := make(chan error, 2)
	for _, name := range []string{"a", "b"} {
		go func() {
			_, err := c.Exec(ctx, &dsecv1.ExecRequest{SandboxId: string(id), CommandId: name, Command: &dsecv1.Command{Shell: "wait"}, WaitSeconds: 600})
			waiting <- err
		}()
	}
	eventually(t, "no call more is taken", func() bool {
		_, err := c.GetSandbox(w.called("default", grant.RoleUser), &edgev1.GetSandboxRequest{Id: string(id)})
		return sandbox.ReasonOf(grpcerr.FromStatus(err)) == inflight.Reason
	})
	if _, err := c.GetStatus(w.called("", grant.RoleWatcher), &edgev1.GetStatusRequest{}); err != nil {
		t.Errorf("the control plane's own: %v", err)
	}
	if _, err := c.ListSandboxes(w.called("other", grant.RoleUser), &edgev1.ListSandboxesRequest{}); err != nil {
		t.Errorf("another project: %v", err)
	}
	if _, err := c.KillCommand(w.called("default", grant.RoleUser), &dsecv1.KillCommandRequest{SandboxId: string(id), CommandId: "a"}); err != nil {
		t.Errorf("what ends something: %v", err)
	}
	for range 2 {
		s, err := c.WatchSandboxes(ctx, &dsecv1.WatchSandboxesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	s, err := c.WatchSandboxes(ctx, &dsecv1.WatchSandboxesRequest{})
	if err == nil {
		_, err = s.Recv()
	}
	tooMany(t, err)
	leave()
	for range 2 {
		<-waiting
	}
	big := &dsecv1.ExecRequest{SandboxId: string(id), CommandId: "big", Command: &dsecv1.Command{Shell: strings.Repeat("x", 65<<10)}}
	eventually(t, "its places are free again", func() bool {
		_, err = c.GetSandbox(w.called("default", grant.RoleUser), &edgev1.GetSandboxRequest{Id: string(id)})
		return err == nil
	})
	_, err = c.Exec(w.called("default", grant.RoleUser), big)
	tooMany(t, err)
}
